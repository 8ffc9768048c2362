"""A message that is sent twice within five minutes is delivered once, even with a crash in between."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marq.core import dedup
from marq.core.dedup import BACK_MS, KEEP_MORE_MS, SLACK_MS, STEP_MS, WINDOW_MS, Recent
from tests.unit.core_helpers import TwoLogs, picture

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def send(logs: TwoLogs, name: bytes, queue: str = "q", **options: Any) -> int:
    offset = logs.send(queue, headers=[("marq-dedup", name)], **options)
    logs.read()
    return offset


def owned() -> TwoLogs:
    logs = TwoLogs()
    logs.own()
    return logs


def test_a_second_sending_is_a_double_which_the_owner_ends() -> None:
    logs = owned()
    send(logs, b"1"), send(logs, b"1"), send(logs, b"2")
    assert logs.states([0, 1, 2]) == ["ready", "duplicate", "ready"]
    assert logs.partition.due(lambda queue: None).purged == [1]  # type: ignore[arg-type, return-value]
    logs.finish("purged", 1)
    assert logs.partition.counters["duplicates"] == 1


def test_it_counts_when_the_first_one_is_done_too() -> None:
    logs = owned()
    send(logs, b"1")
    logs.ack(logs.start(0))
    send(logs, b"1")
    assert logs.state(1) == "duplicate"


def test_another_queue_has_its_own_ids() -> None:
    logs = owned()
    send(logs, b"1", "q"), send(logs, b"1", "p")
    assert logs.state(1) == "ready"


@pytest.mark.parametrize("later_ms, state", [(WINDOW_MS - 1, "duplicate"), (WINDOW_MS, "ready")])
def test_the_window_begins_with_the_first(later_ms: int, state: str) -> None:
    logs = owned()
    send(logs, b"1")
    logs.now_ms += 1_000
    send(logs, b"1")
    logs.now_ms += later_ms - 1_000
    send(logs, b"1")
    assert logs.states([1, 2]) == ["duplicate", state]


def test_a_record_that_is_poison_takes_no_id() -> None:
    logs = owned()
    logs.send(headers=[("marq-dedup", b"1"), ("marq-delay-ms", b"soon")])
    send(logs, b"1")
    assert logs.states([0, 1]) == ["poison", "ready"]


def test_a_duplicate_survives_a_crash_before_it_was_ended() -> None:
    logs = owned()
    send(logs, b"1"), send(logs, b"1")
    logs.persist()
    logs.crash()
    assert logs.states([0, 1]) == ["ready", "duplicate"]


def pass_time(logs: TwoLogs, ms: int, *, dedup_ids: bool) -> None:
    """The queue log goes on for so long, with messages every five seconds."""
    for i in range(ms // STEP_MS):
        logs.now_ms += STEP_MS
        if dedup_ids:
            send(logs, b"%d/%d" % (logs.end, i))
        else:
            logs.send()
            logs.read()


def test_rows_go_when_all_their_ids_are_over() -> None:
    logs = owned()
    send(logs, b"1")
    logs.persist()
    first = [key for key in _named(logs) if "/dedup/" in key]
    pass_time(logs, WINDOW_MS + KEEP_MORE_MS, dedup_ids=True)
    logs.persist()
    assert first
    assert not {*first} & {*_named(logs)}


def test_ids_go_when_only_messages_without_one_come() -> None:
    logs = owned()
    send(logs, b"1")
    logs.persist()
    pass_time(logs, WINDOW_MS + SLACK_MS + 2 * STEP_MS, dedup_ids=False)
    logs.persist()
    assert not len(logs.partition.recent)
    assert not [key for key in _named(logs) if "/dedup/" in key]


def test_ids_stay_when_a_message_without_one_is_stamped_far_ahead() -> None:
    logs = owned()
    send(logs, b"1")
    for ahead_ms in (DAY_MS, 0, DAY_MS, DAY_MS + 1, 0):
        logs.now_ms += 1_000
        logs.now_ms += ahead_ms
        logs.send()
        logs.read()
        logs.now_ms -= ahead_ms
        logs.persist()
    assert logs.state(send(logs, b"1")) == "duplicate"


# ---------------------------------------------------------------------- wrong clocks


def stamped(logs: TwoLogs, by_ms: int, name: bytes) -> int:
    """Send with a broker's clock that is off by so much, and right again at once."""
    logs.now_ms += by_ms
    offset = send(logs, name)
    logs.now_ms -= by_ms
    return offset


def test_an_id_that_was_accepted_far_ahead_swallows_no_message_later() -> None:
    logs = owned()
    stamped(logs, DAY_MS, b"1")
    logs.now_ms += 1_800_000
    assert logs.state(send(logs, b"1")) == "ready"


@pytest.mark.parametrize("back_ms, state", [(BACK_MS, "duplicate"), (BACK_MS + 1, "ready")])
def test_a_clock_that_is_put_back_a_little_makes_no_second_message_of_one(back_ms: int, state: str) -> None:
    logs = owned()
    send(logs, b"1")
    assert logs.state(stamped(logs, -back_ms, b"1")) == state


@pytest.mark.parametrize("by_ms", [DAY_MS, -DAY_MS])
def test_one_wrong_stamp_makes_no_id_forgotten_and_none_stay(by_ms: int) -> None:
    logs = owned()
    send(logs, b"1")
    logs.now_ms += 1_000
    stamped(logs, by_ms, b"wrong")
    logs.now_ms += 1_000
    second = send(logs, b"1")
    pass_time(logs, 2 * (WINDOW_MS + KEEP_MORE_MS), dedup_ids=True)
    assert logs.state(second) == "duplicate"
    assert len(logs.partition.recent) <= (WINDOW_MS + KEEP_MORE_MS) // STEP_MS + 1


def test_the_same_id_with_a_wrong_stamp_in_between_is_known_by_both() -> None:
    logs = owned()
    first = send(logs, b"1")
    wrong = stamped(logs, DAY_MS, b"1")
    logs.now_ms += 1_000
    assert logs.states([first, wrong, send(logs, b"1")]) == ["ready", "ready", "duplicate"]


def test_an_hour_off_for_a_minute_makes_no_id_forgotten() -> None:
    logs = owned()
    before = send(logs, b"before")
    for i in range(60):
        logs.now_ms += 1_000
        stamped(logs, HOUR_MS, b"%d" % i)
    assert logs.states([before, send(logs, b"before")]) == ["ready", "duplicate"]
    pass_time(logs, 2 * (WINDOW_MS + KEEP_MORE_MS), dedup_ids=True)
    assert len(logs.partition.recent) <= (WINDOW_MS + KEEP_MORE_MS) // STEP_MS + 1


@pytest.mark.parametrize("stamps", ["all the same", "at random"])
def test_a_topic_whose_stamps_mean_nothing_has_a_bound_all_the_same(
    stamps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "IDS_MAX", 500)
    random, recent = Random(5), Recent()
    for i in range(3_000):
        recent.is_duplicate(b"%016d" % i, i, 0 if stamps == "all the same" else random.randrange(1 << 40))
    assert len(recent) <= 500


def test_a_row_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "ROW_IDS", 10)
    logs = owned()
    for i in range(25):
        send(logs, b"%d" % i)
    logs.persist()
    assert len([key for key in _named(logs) if "/dedup/" in key]) == 3


def _named(logs: TwoLogs) -> list[str]:
    from marq.core import rows

    return list(rows.decode_manifest(logs.manifest).rows)


SMALL_MS = {
    "WINDOW_MS": 1_000, "KEEP_MORE_MS": 200, "BACK_MS": 200, "STEP_MS": 400, "ROW_IDS": 2, "TRIM": 1,
    "SLACK_MS": 1 << 40,
}.items()  # fmt: skip

events = st.lists(
    st.tuples(st.sampled_from(["send", "send", "send", "checkpoint", "crash", "ack", "end"]), st.integers(0, 1 << 12)),
    min_size=10,
    max_size=50,
)


@settings(deadline=None)
@given(events)
def test_whatever_is_read_again_is_decided_as_before(script: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_MS:
            patch.setattr(dedup, name, value)
        logs = owned()
        for what, number in script:
            logs.now_ms += number % 7 * 100 - (300 if number % 11 == 0 else 0)
            wrong_ms = (number % 3 - 1) * 50_000 if number % 5 == 0 else 0
            if what == "send":
                stamped(logs, wrong_ms, b"%d" % (number % 4))
            elif what == "checkpoint":
                logs.checkpoint(window=number % 6)
            elif what == "crash":
                logs.crash()
            elif logs.end and logs.state(number % logs.end) == "duplicate":
                logs.finish("purged", number % logs.end)
            elif logs.end and what == "ack" and logs.state(number % logs.end) == "ready":
                logs.ack(logs.start(number % logs.end))
            fresh = logs.blank()
            logs.catch_up(fresh, logs.partition.position, logs.marked_end)
            assert picture(logs.partition)["duplicates"] == picture(fresh)["duplicates"]
            assert logs.partition.recent.entries() == fresh.recent.entries()


def test_a_million_ids_are_forgotten_as_they_come() -> None:
    recent = Recent()
    for i in range(200_000):
        assert not recent.is_duplicate(b"%016d" % i, i, i * 10)
        if i % 1_000 == 0:
            for digests, _, _ in recent.unwritten(i):
                recent.written(str(i), 0, len(digests))
            recent.rows(i)
    assert len(recent) == (WINDOW_MS + KEEP_MORE_MS) // 10
    assert len(recent._digests) < 2 * (WINDOW_MS + KEEP_MORE_MS) // 10 + 8_000


def test_a_few_ids_a_checkpoint_make_few_rows_and_are_written_a_few_times() -> None:
    recent, written = Recent(), 0
    for i in range(5_000):
        recent.is_duplicate(b"%016d" % i, i, i)
        for digests, offsets, _ in recent.unwritten(i + 1):
            recent.written(f"{i}", 0, len(digests))
            written += len(offsets)
        assert len(recent.rows(i + 1)) <= 14

    assert written < 15 * 5_000
    again = Recent()
    for i in range(5_000):
        again.is_duplicate(b"%016d" % i, i, i)
    assert recent.entries() == again.entries()


def test_an_id_is_not_forgotten_by_the_clock_of_the_markers_while_the_reader_is_behind() -> None:
    logs = owned()
    first = logs.send(headers=[("marq-dedup", b"1")])
    second = logs.send(headers=[("marq-dedup", b"1")])
    logs.now_ms += WINDOW_MS + 2 * SLACK_MS
    logs.own()
    logs.read(second)
    logs.persist()
    logs.read()
    assert logs.states([first, second]) == ["ready", "duplicate"]


def test_a_fold_that_writes_no_rows_keeps_no_more_than_what_is_remembered() -> None:
    logs = owned()
    for turn in range(120):
        for i in range(100):
            logs.send(headers=[("marq-dedup", b"%d/%d" % (turn, i))])
        for _ in range(8):
            logs.now_ms += STEP_MS
            logs.send(headers=[("marq-dedup", b"%d" % logs.now_ms)])
        logs.read()
        logs.ack(logs.start(*logs.partition.messages))
        logs.partition.forget_hints()
    assert len(logs.partition.recent._digests) < 6_000


def test_an_id_that_keeps_those_behind_it_does_so_for_one_who_begins_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first id, of a clock that ran ahead, is forgotten late. Whoever starts with the second must not be early."""
    monkeypatch.setattr(dedup, "KEEP_MORE_MS", 1_000)
    monkeypatch.setattr(dedup, "STEP_MS", 2_000)
    monkeypatch.setattr(dedup, "BACK_MS", 1_000)
    stamps = [20_000, 1_000, 1_100, 40_000, 40_100, 20_100, 60_000, 20_200, 1_200]
    live = Recent(window_ms=3_000)
    for offset, stamp in enumerate(stamps):
        assert not live.is_duplicate(b"%016d" % offset, offset, stamp)
    for digests, offsets, times in live.unwritten(len(stamps)):
        live.written("row", 1, len(digests))
        kept = (digests, offsets, times)
    assert live.rows(len(stamps)) and live.entries()[0][1] == 1

    again = Recent(window_ms=3_000)
    again.restore("row", 1, *kept)
    again.skip(live.skipped())

    assert again.entries() == live.entries()


def test_no_row_is_written_of_ids_that_are_all_forgotten_before_the_first_checkpoint() -> None:
    logs = owned()
    send(logs, b"1")
    pass_time(logs, WINDOW_MS + SLACK_MS + 2 * STEP_MS, dedup_ids=False)
    assert not logs.partition.recent.entries()

    checkpoint = logs.checkpoint(window=0)

    assert checkpoint is not None
    assert not [key for key, _ in checkpoint.rows if "/dedup/" in key], "nothing would ever delete it"
