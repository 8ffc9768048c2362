"""What lies beyond the position of a partition is counted as it will be once it is read."""

from __future__ import annotations

import random

import pytest

from marq.core import reading, unread
from marq.core.partition import Partition
from marq.protocol.headers import H_DEDUP, H_ORIGIN
from tests.unit.core_helpers import TwoLogs

Counts = dict[str, tuple[int, int, int]]


def count(logs: TwoLogs, upto: int | None = None) -> None:
    """The second reader counts up to an offset (default: the end of the log)."""
    partition, stop = logs.partition, logs.end if upto is None else upto
    start = max(partition.position, partition.unread.stop)
    assert partition.count_unread(start, stop, [r for r in logs.sent if start <= r.offset < stop])


def counted(partition: Partition) -> Counts:
    """All messages that are known: read and unread."""
    found = {queue: list(one.as_tuple()) for queue, one in partition.counts.items()}
    for queue, numbers in partition.unread_counts().items():
        total = found.setdefault(queue, [0, 0, 0])
        for i, number in enumerate(numbers):
            total[i] += number
    return {queue: (total, flying, waiting) for queue, (total, flying, waiting) in found.items() if total}


def reread(logs: TwoLogs) -> Counts:
    """What a partition counts that has room for everything."""
    other = logs.blank()
    logs.catch_up(other, logs.end, logs.marked_end)
    return {queue: one.as_tuple() for queue, one in other.counts.items() if one.total}


def test_what_was_not_read_is_counted() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(3, "a")
    logs.read()
    logs.send_many(5, "a")
    logs.send_many(2, "b")
    count(logs)
    assert counted(logs.partition) == {"a": (8, 0, 0), "b": (2, 0, 0)}
    logs.read(logs.partition.position + 4)
    assert counted(logs.partition) == {"a": (8, 0, 0), "b": (2, 0, 0)}
    assert logs.partition.unread.queues["a"].count == 1
    logs.read()
    assert counted(logs.partition) == {"a": (8, 0, 0), "b": (2, 0, 0)}
    assert not logs.partition.unread.queues


def test_a_chunk_behind_a_gap_is_not_counted() -> None:
    logs = TwoLogs()
    logs.send_many(5)
    assert not logs.partition.count_unread(3, 5, logs.sent[3:])
    assert counted(logs.partition) == {}


def test_the_oldest_is_that_of_what_is_left() -> None:
    logs = TwoLogs()
    stamps = []
    for _ in range(4):
        stamps.append(logs.now_ms)
        logs.send_many(2)
        logs.now_ms += 3_600_000
    count(logs)
    for read, stamp in enumerate(stamps):
        logs.read(2 * read)
        assert logs.partition.unread.queues["q"].oldest_ms == stamp
    assert not logs.read(8) or not logs.partition.unread.queues


def test_runs_are_bounded_however_long_messages_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "RUNS_MAX", 100)
    logs = TwoLogs()
    for _ in range(5_000):
        logs.send()
        logs.now_ms += 10_000
    count(logs)
    one = logs.partition.unread.queues["q"]
    assert one.count == 5_000 and len(one.runs) <= 100
    logs.read(4_000)
    first = logs.sent[4_000].timestamp
    assert 0 <= first - one.oldest_ms <= 5_000 * 10_000 // 25
    logs.read()
    assert counted(logs.partition) == {"q": (5_000, 0, 0)}


def test_more_queues_than_are_told_apart_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "QUEUES_MAX", 3)
    logs = TwoLogs()
    for queue in "abcd":
        logs.send(queue)
    count(logs)
    assert logs.partition.unread.overflowed
    logs.read()
    assert not logs.partition.unread.overflowed and len(counted(logs.partition)) == 4


def test_delays_of_unread_messages_end() -> None:
    logs = TwoLogs()
    logs.own()
    logs.wait(1_000)
    logs.send(delay_ms=10_000)
    logs.send()
    count(logs)
    assert counted(logs.partition) == {"q": (2, 0, 1)}
    logs.wait(12_000)
    assert counted(logs.partition) == {"q": (2, 0, 0)} == reread(logs)


def test_a_purge_ends_what_was_not_read() -> None:
    logs = TwoLogs()
    logs.own()
    logs.send_many(5, "a")
    logs.send_many(5, "b")
    count(logs)
    logs.purge("a")
    assert counted(logs.partition) == {"b": (5, 0, 0)}
    logs.send_many(2, "a")
    count(logs)
    logs.purge("b", before=7)
    count(logs)
    assert counted(logs.partition) == {"a": (2, 0, 0), "b": (3, 0, 0)} == reread(logs)


def test_what_another_owner_delivered_may_end_before_it_is_read() -> None:
    logs = TwoLogs()
    logs.own("first")
    logs.send_many(6)
    logs.read()
    first = logs.start(0, 1, 2)
    second = logs.start(4)
    logs.partition = logs.blank()
    logs.catch_up(logs.partition, 0, logs.marked_end)
    logs.own("next")
    count(logs)
    assert counted(logs.partition) == {"q": (6, 4, 0)}
    logs.ack(first, 1, 2)
    assert counted(logs.partition) == {"q": (4, 2, 0)}
    logs.release(second, delay_ms=60_000)
    assert counted(logs.partition) == {"q": (4, 1, 1)} == reread(logs)
    for upto in range(1, 7):
        logs.read(upto)
        assert counted(logs.partition) == {"q": (4, 1, 1)}


def test_second_sendings_do_not_count() -> None:
    logs = TwoLogs()
    logs.own()
    for _ in range(2):
        logs.send(headers=[(H_DEDUP, b"one")])
    logs.read()
    for name in (b"one", b"two", b"two", b"three"):
        logs.send(headers=[(H_DEDUP, name)])
    logs.send(headers=[(H_ORIGIN, b"1:7")])
    logs.send(headers=[(H_ORIGIN, b"1:7")])
    count(logs)
    assert counted(logs.partition) == {"q": (4, 0, 0)} == reread(logs)


def test_more_ids_than_are_remembered_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "IDS_MAX", 2)
    logs = TwoLogs()
    for name in (b"one", b"two", b"three"):
        logs.send(headers=[(H_DEDUP, name)])
    count(logs)
    assert logs.partition.unread.at_most


@pytest.mark.parametrize("seed", range(60))
def test_at_any_time_unread_messages_count_as_they_will_once_they_are_read(seed: int) -> None:
    chance, logs = random.Random(seed), TwoLogs()
    logs.own()
    logs.wait(1_000)
    topic = chance.random() < 0.1
    if topic:
        logs = TwoLogs(queue_id="topic")
        logs.own()
        logs.wait(1_000)
    started = []
    for _ in range(120):
        what = chance.randrange(12)
        if what < 4:
            queue = chance.choice(["a", "b", "c", None, b"\xff"])
            headers = []
            if chance.random() < 0.2:
                headers.append((H_DEDUP, chance.choice([b"1", b"2", b"3"])))
            if chance.random() < 0.05:
                headers.append(("marq-delay-ms", b"soon"))  # poison
            delay_ms = chance.choice([None, None, 20_000])
            for _ in range(chance.randrange(1, 6)):
                logs.send(queue, delay_ms=delay_ms, headers=headers)
        elif what == 4:
            logs.hole()
        elif what == 5 and logs.partition.position < logs.end:
            logs.read(chance.randrange(logs.partition.position, logs.end + 1))
        elif what == 6:
            logs.wait(chance.choice([2_000, 7_000]))
        elif what == 7 and not topic:
            logs.purge(chance.choice("abc"), chance.randrange(logs.end + 1))
        elif what == 8:
            taken = logs.take(3, "topic" if topic else chance.choice("abc"))
            if taken:
                started.append(logs.start(*taken))
                logs.partition.reserved.clear()
        elif what == 9 and started:
            delivery = started.pop(chance.randrange(len(started)))
            chance.choice([logs.ack, logs.release])(delivery)
        elif what == 10 and chance.random() < 0.5:
            # another worker takes over, from some place
            other = logs.blank()
            logs.catch_up(other, chance.randrange(logs.end + 1), logs.marked_end)
            logs.partition = other
            logs.own("next")
        partition = logs.partition
        if chance.random() < 0.4:
            start = max(partition.position, partition.unread.stop)
            count(logs, chance.randrange(start, logs.end + 1))
        if chance.random() < 0.5:
            count(logs)
            assert counted(partition) == reread(logs)


def test_the_sizes_that_end_the_plain_path_are_poison_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PLAIN_MAX_BYTES", 10)
    monkeypatch.setattr(reading, "MESSAGE_MAX_BYTES", 100)
    logs = TwoLogs()
    logs.send(value=b"x" * 50)
    logs.send(value=b"x" * 200)
    count(logs)
    assert counted(logs.partition) == {"q": (1, 0, 0), "": (1, 0, 0)} == reread(logs)
