"""Reading the queue log: contiguity, holes, records that are no messages, topic mode, copies of dead letters."""

from __future__ import annotations

import pytest

from marq.core import dedup, state
from marq.core.partition import Partition
from marq.core.policies import QUEUE_NAME_MAX
from marq.core.reading import BAD_NAME, COPY_ROOM_BYTES, Undecodable
from marq.core.rows import Record
from marq.core.state import HEADER_OVERHEAD_BYTES, MESSAGE_OVERHEAD_BYTES
from marq.protocol.limits import MESSAGE_MAX_BYTES
from tests.unit.core_helpers import DEFAULTS, EPOCH_MS, TwoLogs, picture


def records(*offsets: int) -> list[Record]:
    return [Record(o, EPOCH_MS, b"q", b"x") for o in offsets]


def served(**options: object) -> TwoLogs:
    logs = TwoLogs(**options)  # type: ignore[arg-type]
    logs.own()
    return logs


# ---------------------------------------------------------------------- contiguous reads


def test_a_chunk_that_begins_beyond_what_was_read_is_refused_and_changes_nothing() -> None:
    partition = Partition(0)
    partition.ingest(0, 3, records(0, 1, 2))
    before = picture(partition)

    assert not partition.ingest(4, 6, records(4, 5))
    assert picture(partition) == before


def test_a_chunk_that_was_read_before_changes_nothing() -> None:
    partition = Partition(0)
    partition.ingest(0, 3, records(0, 1, 2))
    before = picture(partition)

    assert partition.ingest(0, 3, records(0, 1, 2))
    assert picture(partition) == before


def test_of_a_chunk_that_overlaps_only_the_new_part_is_read() -> None:
    logs = served()
    logs.partition.ingest(0, 3, records(0, 1, 2))

    logs.partition.ingest(1, 5, records(1, 2, 3, 4))

    assert logs.partition.position == 5
    assert logs.take_all() == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- holes


def test_offsets_that_the_log_does_not_hold_are_done() -> None:
    logs = served()
    first, missing, last = logs.send(), logs.hole(3), logs.send()

    logs.read()

    assert logs.states(missing) == ["done"] * 3
    assert logs.take_all() == [first, last]


def test_a_hole_at_the_end_of_a_chunk_moves_the_position() -> None:
    logs = served()
    logs.send()
    logs.hole(2)

    logs.read()

    assert logs.partition.position == 3


def test_a_start_of_a_hole_that_was_not_read_yet_comes_to_nothing() -> None:
    logs = served()
    message, (missing,) = logs.send(), logs.hole()
    logs.start(message, missing)

    logs.read()

    assert logs.states([message, missing]) == ["in flight", "done"]
    assert missing not in logs.partition.deliveries


def test_a_start_of_a_hole_has_no_effect() -> None:
    logs = served()
    (missing,) = logs.hole()
    logs.read()

    assert logs.start(missing).offsets == []


def test_a_log_that_begins_at_ten_million_is_read_from_there() -> None:
    logs = served(queue_id="events", first=10_000_000)
    offsets = [logs.send(None), logs.send(b"key")]

    logs.read()
    logs.persist()

    assert logs.take(queue="events") == offsets


def test_a_hole_of_a_billion_offsets_costs_nothing() -> None:
    logs = served()
    before = logs.send()
    logs.hole(1_000_000_000)
    after = logs.send()

    logs.read()
    logs.persist()
    logs.crash()

    assert logs.take_all() == [before, after]


# ---------------------------------------------------------------------- what is no message


@pytest.mark.parametrize(
    ("key", "headers", "reason"),
    [
        (None, [], "no queue: the key is null"),
        (b"", [], "no queue: the key is no queue id"),
        (b"\xff\xfe", [], "no queue: the key is no queue id"),
        (b"n" * (QUEUE_NAME_MAX + 1), [], "no queue: the key is no queue id"),
        (b"q", [("marq-delay-ms", b"soon")], "header marq-delay-ms is not a number of milliseconds"),
        (b"q", [("marq-delay-ms", b"-5")], "header marq-delay-ms is not a number of milliseconds"),
        (b"q", [("marq-delay-ms", b"1_000")], "header marq-delay-ms is not a number of milliseconds"),
        (b"q", [("marq-delay-ms", None)], "header marq-delay-ms is not a number of milliseconds"),
        (b"q", [("marq-ttl-ms", b"")], "header marq-ttl-ms is not a number of milliseconds"),
        (b"q", [("marq-ttl-ms", b"9" * 5_000)], "header marq-ttl-ms is not a number of milliseconds"),
        (b"q", [("marq-delay-ms", b"31622400001")], "header marq-delay-ms is more than 31622400000 milliseconds"),
        (b"q", [("marq-ttl-ms", b"31622400001")], "header marq-ttl-ms is more than 31622400000 milliseconds"),
        (b"q", [("any", b"x"), (BAD_NAME + "x", b"x")], "the name of a header is not UTF-8"),
    ],
)
def test_a_record_that_is_no_message_is_poison(
    key: bytes | None, headers: list[tuple[str, bytes]], reason: str
) -> None:
    logs = served()
    record = logs.send(key, headers=headers)
    logs.read()

    assert logs.state(record) == "poison"
    assert logs.take() == []
    assert logs.partition.due(lambda queue: DEFAULTS).poison == [(record, reason)]


def test_poison_is_listed_once_until_its_end_failed() -> None:
    logs = served()
    record = logs.send(None)
    logs.read()
    logs.partition.due(lambda queue: DEFAULTS)

    again = logs.partition.due(lambda queue: DEFAULTS).poison
    logs.partition.put_back([record])

    assert again == []
    assert [o for o, _ in logs.partition.due(lambda queue: DEFAULTS).poison] == [record]


def test_poison_among_messages_holds_none_of_them_up() -> None:
    logs = served()
    offsets = [logs.send("q"), logs.send(None), logs.send("q"), logs.send(b"\xff"), logs.send("q")]

    logs.read()

    assert logs.take_all() == [offsets[0], offsets[2], offsets[4]]


@pytest.mark.parametrize("origin", [b"", b"0", b":", b"a:b", b"0:-1", b"0:" + b"9" * 5_000, b"\xff:1", None])
def test_a_malformed_origin_is_a_header_like_any_other(origin: bytes | None) -> None:
    logs = served()
    message = logs.send(headers=[("marq-origin", origin)])

    logs.read()

    assert logs.take() == [message]


def test_a_message_without_a_value_is_a_message() -> None:
    logs = served()
    message = logs.send(value=None)

    logs.read()

    assert logs.take() == [message]
    assert logs.partition.bytes == MESSAGE_OVERHEAD_BYTES


def test_headers_count_as_payload() -> None:
    logs = served()
    message = logs.send(headers=[("attribute", b"v" * 991), ("null", None)])
    logs.read()
    before = logs.partition.bytes

    logs.ack(logs.start(message))

    assert before == MESSAGE_OVERHEAD_BYTES + 1 + 1_000 + 4 + 2 * HEADER_OVERHEAD_BYTES
    assert logs.partition.bytes == 0


MAX = MESSAGE_MAX_BYTES
ONE = HEADER_OVERHEAD_BYTES + 2  # a header of one character and one byte


@pytest.mark.parametrize(
    ("key", "size", "headers", "valid"),
    [
        (b"q", MAX - 1, [], True),
        (b"q", MAX, [], False),
        (b"q", MAX - 1 - ONE, [("h", b"v")], True),
        (b"q", MAX - ONE, [("h", b"v")], False),
        (b"q", 0, [("h", b"v")] * ((MAX - 1) // ONE), True),
        (b"q", 0, [("h", b"v")] * ((MAX - 1) // ONE + 1), False),
        (b"q", MAX - 1 - ONE - 1, [("ü", b"v")], True),
        (b"q", MAX - ONE - 1, [("ü", b"v")], False),
        # room for what a copy says of itself
        (b"q", MAX, [("marq-origin", b"1:2"), ("marq-dead-reason", b"r" * 1_000)], True),
        (b"q", MAX, [("marq-origin", b"1:2"), ("marq-dead-reason", b"r" * COPY_ROOM_BYTES)], False),
    ],
)
def test_all_of_a_record_counts_for_its_size(
    key: bytes, size: int, headers: list[tuple[str, bytes]], valid: bool
) -> None:
    logs = served()
    message = logs.send(key, b"x" * size, headers=headers)
    logs.read()

    assert logs.state(message) == ("ready" if valid else "poison")


def test_the_key_counts_in_topic_mode_too() -> None:
    logs = TwoLogs(queue_id="all")
    logs.own()
    small, large = logs.send(b"k" * (MAX - 1), b""), logs.send(b"k" * MAX, b"x")
    logs.read()

    assert (logs.state(small), logs.state(large)) == ("ready", "poison")


@pytest.mark.parametrize("queue_id", [None, "all"])
def test_what_could_not_be_decoded_is_poison_with_its_reason(queue_id: str | None) -> None:
    logs = TwoLogs(queue_id=queue_id)
    logs.own()
    first = logs.send("q")
    logs.sent += [Undecodable(1, -1, b"\0raw", "can't be decoded: reason"), Undecodable(2, -1, None, "as before")]  # type: ignore[list-item]
    logs.end = 3
    last = logs.send("q")
    logs.read()

    assert logs.partition.due(lambda queue: DEFAULTS).poison == [(1, "can't be decoded: reason"), (2, "as before")]
    assert logs.partition.record(1).value == b"\0raw"
    assert logs.take_all(queue_id or "q") == [first, last]


# ---------------------------------------------------------------------- topic mode


def test_in_topic_mode_all_records_are_of_one_queue_whatever_their_keys() -> None:
    logs = served(queue_id="events")
    offsets = [logs.send(key) for key in (None, b"", b"\xff", b"a", b"b" * 1_000)]

    logs.read()

    assert logs.take(queue="events") == offsets


def test_in_topic_mode_an_origin_header_is_the_users_own() -> None:
    logs = served(queue_id="events")
    offsets = [logs.send(None, headers=[("marq-origin", b"0:5")]) for _ in range(2)]

    logs.read()

    assert logs.take(queue="events") == offsets


def test_in_topic_mode_a_restart_finds_the_same_queue() -> None:
    logs = served(queue_id="events")
    offsets = [logs.send(key) for key in (None, b"a")]
    logs.read()
    logs.persist()

    logs.crash()

    assert logs.take(queue="events") == offsets


# ---------------------------------------------------------------------- copies of dead letters


def copy_of(logs: TwoLogs, origin: int, partition: int = 0) -> int:
    return logs.send("q.dead", headers=[("marq-origin", b"%d:%d" % (partition, origin))])


def test_of_two_copies_of_one_dead_letter_the_second_is_purged() -> None:
    logs = served()
    message = logs.send()
    first, second = copy_of(logs, message), copy_of(logs, message)

    logs.read()

    assert logs.states([first, second]) == ["ready", "duplicate"]
    assert logs.partition.due(lambda queue: DEFAULTS).purged == [second]
    assert logs.take(queue="q.dead") == [first]


def test_a_double_is_gone_for_good_once_its_end_is_folded() -> None:
    logs = served()
    logs.send()
    copy_of(logs, 0)
    duplicate = copy_of(logs, 0)
    logs.read()
    logs.partition.due(lambda queue: DEFAULTS)

    logs.finish("purged", duplicate)
    logs.partition.unreserve([duplicate])

    assert logs.state(duplicate) == "done"
    assert logs.partition.due(lambda queue: DEFAULTS).purged == []


def test_a_double_in_a_purged_queue_is_gone_for_good() -> None:
    logs = served()
    logs.send()
    copy_of(logs, 0)
    duplicate = copy_of(logs, 0)
    logs.purge("q.dead")

    logs.read()

    assert logs.state(duplicate) == "done"
    assert logs.partition.due(lambda queue: DEFAULTS).purged == []


def test_copies_of_different_messages_are_no_duplicates() -> None:
    logs = served()
    copies = [copy_of(logs, 0), copy_of(logs, 1), copy_of(logs, 0, partition=1), copy_of(logs, 0, partition=2)]

    logs.read()

    assert logs.take(queue="q.dead") == copies


def test_a_second_copy_of_a_message_of_another_partition_is_known_also_after_a_restart() -> None:
    logs = served()
    first, second = copy_of(logs, 0, partition=1), copy_of(logs, 0, partition=1)
    logs.read()
    logs.persist()

    logs.crash()
    third = copy_of(logs, 0, partition=1)
    logs.read()

    assert logs.states([first, second, third]) == ["ready", "duplicate", "duplicate"]


def test_a_second_copy_is_known_when_the_first_was_finished_before_it_was_read() -> None:
    logs = served()
    logs.send()
    first, second = copy_of(logs, 0), copy_of(logs, 0)
    logs.ack(logs.start(first))

    logs.read()

    assert logs.states([first, second]) == ["done", "duplicate"]


def test_a_second_copy_is_known_after_a_restart() -> None:
    logs = served()
    logs.send()
    first = copy_of(logs, 0)
    logs.read()
    logs.ack(logs.start(first))
    logs.persist()

    logs.crash()
    second = copy_of(logs, 0)
    logs.read()

    assert logs.state(second) == "duplicate"


def test_origins_are_forgotten_in_the_time_of_the_queue_log() -> None:
    """Whatever time passed in the other log, and however often the log was read: two readers decide alike."""
    logs = served()
    first = copy_of(logs, 0)
    logs.read()
    logs.wait(dedup.ORIGIN_WINDOW_MS - 1)
    logs.persist()
    second = copy_of(logs, 0)
    logs.now_ms += 1
    third = copy_of(logs, 0)
    logs.read()

    assert logs.states([first, second, third]) == ["ready", "duplicate", "ready"]


def test_what_is_read_again_after_a_crash_meets_the_origins_of_before() -> None:
    """The first copy is below the position that is read on from, and what made it forgotten is above."""
    logs = served()
    copy_of(logs, 0)
    logs.read()
    logs.persist()
    second = copy_of(logs, 0)
    logs.now_ms += dedup.ORIGIN_WINDOW_MS
    copy_of(logs, 1)
    logs.read()
    assert logs.state(second) == "duplicate"
    logs.checkpoint()

    logs.crash()

    assert logs.state(second) == "duplicate"


def test_no_more_than_so_many_origins_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "ORIGINS_MAX", 100)
    monkeypatch.setattr(dedup, "TRIM", 10)
    logs = TwoLogs()
    logs.own()
    for origin in range(1_000):
        copy_of(logs, origin)
        logs.read()
        logs.persist()

    second, late = copy_of(logs, 900), copy_of(logs, 899)
    logs.read()

    assert logs.states([second, late]) == ["duplicate", "ready"]
    assert len(logs.partition.origins) == 100
    assert len(logs.partition.origins._digests) < 200


def test_where_the_copy_of_a_message_is_is_known_after_a_restart() -> None:
    logs = served()
    first = copy_of(logs, 0)
    logs.read()
    logs.persist()

    logs.crash()

    assert logs.partition.copy_of(0) == first
    assert logs.partition.copy_of(1) is None


# ---------------------------------------------------------------------- names of queues


def test_a_queue_is_named_though_its_messages_are_done_before_anybody_asks() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send(queue="a")
    logs.send(queue="b", delay_ms=1_000)
    logs.read()
    logs.ack(logs.start(*logs.take(queue="a")))

    assert not list(logs.partition.queues())
    assert list(logs.partition.named) == ["a", "b"]


def test_what_is_no_message_names_no_queue() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send(queue="a", headers=[("marq-ttl-ms", b"soon")])
    logs.send(queue=None)
    logs.read()

    assert not logs.partition.named


@pytest.mark.parametrize(("before", "named"), [(1, True), (2, False)])
def test_a_queue_whose_messages_are_purged_is_not_named(before: int, named: bool) -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(1, "other")
    logs.send_many(1, "q")
    logs.read()

    logs.purge("q", before)

    assert ("q" in logs.partition.named) is named


def test_a_queue_purged_ahead_is_not_named_by_what_is_read_later() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(2, "q")
    logs.purge("q", 2)
    logs.read()
    assert not logs.partition.named

    logs.send(queue="q")
    logs.read()
    assert list(logs.partition.named) == ["q"]


def test_names_that_nobody_asks_for_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "NAMED_MAX", 10)
    logs = TwoLogs()
    logs.own()
    for i in range(100):
        logs.send(queue=f"q{i}")
        logs.read()

    assert len(logs.partition.named) <= 10
