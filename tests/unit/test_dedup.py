"""A message that is sent twice within five minutes is delivered once, whatever happens in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marq.core import dedup
from marq.core.dedup import SLACK_MS, WINDOW_MS, Recent
from tests.unit.core_helpers import TwoLogs, picture


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
    assert logs.states([0, 1, 2]) == ["ready", "double", "ready"]
    assert logs.partition.due(lambda queue: None).purged == [1]  # type: ignore[arg-type, return-value]
    logs.finish("purged", 1)
    assert logs.partition.counters["duplicates"] == 1


def test_it_counts_when_the_first_one_is_done_too() -> None:
    logs = owned()
    send(logs, b"1")
    logs.ack(logs.start(0))
    send(logs, b"1")
    assert logs.state(1) == "double"


def test_another_queue_has_its_own_ids() -> None:
    logs = owned()
    send(logs, b"1", "q"), send(logs, b"1", "p")
    assert logs.state(1) == "ready"


@pytest.mark.parametrize("later_ms, state", [(WINDOW_MS - 1, "double"), (WINDOW_MS, "ready")])
def test_the_window_begins_with_the_first(later_ms: int, state: str) -> None:
    logs = owned()
    send(logs, b"1")
    logs.now_ms += 1_000
    send(logs, b"1")
    logs.now_ms += later_ms - 1_000
    send(logs, b"1")
    assert logs.states([1, 2]) == ["double", state]


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
    assert logs.states([0, 1]) == ["ready", "double"]


def test_rows_go_when_all_their_ids_are_over() -> None:
    logs = owned()
    send(logs, b"1")
    logs.persist()
    assert [key for key in _named(logs) if "/dedup/" in key]
    logs.now_ms += WINDOW_MS
    send(logs, b"2")
    logs.persist()
    assert len([key for key in _named(logs) if "/dedup/" in key]) == 1


def test_ids_go_when_only_messages_without_one_come() -> None:
    logs = owned()
    send(logs, b"1")
    logs.persist()
    logs.now_ms += WINDOW_MS + SLACK_MS
    logs.send()
    logs.read()
    logs.persist()
    assert not len(logs.partition.recent)
    assert not [key for key in _named(logs) if "/dedup/" in key]


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


events = st.lists(
    st.tuples(st.sampled_from(["send", "send", "send", "checkpoint", "crash", "ack", "end"]), st.integers(0, 1 << 12)),
    min_size=10,
    max_size=50,
)


@settings(deadline=None)
@given(events)
def test_whatever_is_read_again_is_decided_as_before(script: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WINDOW_MS", 1_000), ("ROW_IDS", 2), ("TRIM", 1), ("SLACK_MS", 1 << 40)):
            patch.setattr(dedup, name, value)
        logs = owned()
        for what, number in script:
            logs.now_ms += number % 7 * 100 - (300 if number % 11 == 0 else 0)
            if what == "send":
                send(logs, b"%d" % (number % 4))
            elif what == "checkpoint":
                logs.checkpoint(window=number % 6)
            elif what == "crash":
                logs.crash()
            elif logs.end and logs.state(number % logs.end) == "double":
                logs.finish("purged", number % logs.end)
            elif logs.end and what == "ack" and logs.state(number % logs.end) == "ready":
                logs.ack(logs.start(number % logs.end))
            fresh = logs.blank()
            logs.catch_up(fresh, logs.partition.position, logs.marked_end)
            assert picture(logs.partition)["doubles"] == picture(fresh)["doubles"]
            assert logs.partition.recent.entries() == fresh.recent.entries()


def test_a_million_ids_are_forgotten_as_they_come() -> None:
    recent = Recent()
    for i in range(200_000):
        assert not recent.is_duplicate(b"%016d" % i, i, i * 10)
        if i % 1_000 == 0:
            for digests, _, _ in recent.unwritten(i):
                recent.written(str(i), 0, len(digests))
            recent.rows(i, i * 10)
    assert len(recent) == WINDOW_MS // 10
    assert len(recent._digests) < 2 * WINDOW_MS // 10 + 8_000


def test_a_few_ids_a_checkpoint_make_few_rows_and_are_written_a_few_times() -> None:
    recent, written = Recent(), 0
    for i in range(5_000):
        recent.is_duplicate(b"%016d" % i, i, i)
        for digests, offsets, _ in recent.unwritten(i + 1):
            recent.written(f"{i}", 0, len(digests))
            written += len(offsets)
        assert len(recent.rows(i + 1, i)) <= 14

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
    assert logs.states([first, second]) == ["ready", "double"]


def test_a_fold_that_writes_no_rows_keeps_no_more_than_what_is_remembered() -> None:
    logs = owned()
    for turn in range(12):
        for i in range(1000):
            logs.send(headers=[("marq-dedup", b"%d/%d" % (turn, i))])
        logs.now_ms += WINDOW_MS + 1
        logs.read()
        logs.ack(logs.start(*logs.partition.messages))
        logs.partition.forget_hints()
    assert len(logs.partition.recent._digests) < 6_000
