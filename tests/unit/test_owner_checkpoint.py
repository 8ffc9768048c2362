"""The steps of a checkpoint, its fence, and ticks."""

from __future__ import annotations

from typing import Any

import pytest

from marq.core import checkpoints, markers, rows
from marq.core.checkpoint_cycle import Retire, WriteManifest, WriteRows
from marq.core.markers import Own, Tick
from marq.core.owner import Phase
from marq.core.policies import Limits
from marq.core.ticker import TICK_MAX_MS, TICK_MIN_MS
from marq.errors import InternalError
from tests.unit.core_helpers import Worker


def serving(count: int = 3, **options: Any) -> Worker:
    options.setdefault("limits", Limits(window_offsets=0))
    worker = Worker(**options).serve()
    worker.send(count)
    return worker


def kinds(steps: list[Any]) -> list[str]:
    return [type(step).__name__ for step in steps]


# ---------------------------------------------------------------------- the steps


def test_a_checkpoint_is_rows_then_manifest_then_fence_then_retirement() -> None:
    worker = serving()

    assert kinds(worker.checkpoint()) == ["WriteRows", "WriteManifest", "Retire"]


def test_the_manifest_is_not_written_before_the_rows_are_acknowledged() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    step = worker.owner.step(worker.clock_ms)
    waiting = worker.owner.step(worker.clock_ms)

    worker.owner.written(worker.clock_ms)

    assert isinstance(step, WriteRows)
    assert waiting is None
    assert isinstance(worker.owner.step(worker.clock_ms), WriteManifest)


def test_the_fence_is_not_appended_before_the_manifest_is_acknowledged() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    worker.step()
    step = worker.owner.step(worker.clock_ms)
    before = list(worker.appends)

    worker.owner.written(worker.clock_ms)

    assert isinstance(step, WriteManifest)
    assert before == []
    assert worker.appends == [Tick(f"{worker.owner.nonce}/1")]


def test_nothing_is_retired_before_the_fence_is_folded() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    worker.step()
    worker.step()
    appended = worker.append()
    before = worker.step()

    worker.confirm(*appended)

    assert before is None
    assert isinstance(worker.step(), Retire)


def test_a_tick_without_the_fences_name_is_no_fence() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    worker.step()
    worker.step()
    worker.lose()
    worker.broker.append(markers.encode([Tick(), Tick("another/1")], "x", 1))

    worker.read_markers()

    assert worker.step() is None


def test_nothing_is_retired_after_a_foreign_own_marker_before_the_fence() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    worker.step()
    worker.step()
    worker.broker.append(markers.encode([Own("other", "other/1")]))
    worker.append()

    worker.read_markers()

    assert worker.owner.phase is Phase.LOST
    assert worker.step() is None


def until_nothing_happens(worker: Worker) -> None:
    """Only time passes: ticks that the owner wants, and the steps that they make possible."""
    for _ in range(200):
        worker.clock_ms += 100
        worker.broker.now_ms += 100
        worker.owner.tick(worker.clock_ms)
        if worker.flush():
            worker.step()


def test_what_one_checkpoint_left_is_written_though_nothing_happens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PERSIST_BYTES", 1)
    monkeypatch.setattr(checkpoints, "SEGMENT_MESSAGES", 10)
    worker = serving(55)

    until_nothing_happens(worker)

    assert worker.owner.partition.persisted == 55


def test_a_partition_in_which_nothing_happens_is_written_when_memory_is_short() -> None:
    worker = serving(55, limits=Limits())
    until_nothing_happens(worker)
    assert worker.owner.partition.persisted == 0, "it need not be written yet"

    worker.owner.hurry_checkpoint()
    until_nothing_happens(worker)

    assert worker.owner.partition.persisted == 55


def test_a_partition_that_is_written_ticks_no_more_when_memory_is_short() -> None:
    worker = serving(55)
    until_nothing_happens(worker)
    before = len(worker.broker.log)

    worker.owner.hurry_checkpoint()
    until_nothing_happens(worker)

    assert len(worker.broker.log) == before


def test_a_lost_fence_is_appended_again() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    worker.step()
    worker.step()
    seq, (fence,) = worker.lose()
    worker.owner.failed(seq)

    worker.wait(1_100)

    assert any(fence in markers.decode(record.value).markers for record in worker.broker.log)
    assert isinstance(worker.step(), Retire)


def test_positions_are_retired_as_the_manifest_has_them() -> None:
    worker = serving()
    worker.receive(1)

    *_, manifest_step, retire = worker.checkpoint()

    manifest = rows.decode_manifest(manifest_step.value)
    assert (retire.position, retire.markers_position) == (manifest.position, manifest.markers_position)


def test_the_manifest_is_of_the_instant_of_its_rows() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    worker.step()
    position = worker.owner.partition.position
    worker.send(5)
    worker.receive(1)

    step = worker.step()

    assert rows.decode_manifest(step.value).position == position


def test_rows_that_are_named_no_more_are_retired_and_the_rest_stays_readable() -> None:
    worker = serving(3)
    worker.checkpoint()
    (handout,) = worker.receive(3)
    worker.owner.acked(handout.offsets[:2], handout.receipt)
    worker.flush()
    worker.checkpoint()

    other = Worker(worker.broker, name="w2", queue_log=worker.queue_log, table=worker.table).serve()
    other.wait(31_000)

    assert [h.offsets for h in other.receive()] == [[2]]
    assert len([key for key in worker.table if "pages" in key]) == 1


def test_manifests_of_former_epochs_are_retired() -> None:
    first = serving(3)
    first.checkpoint()
    second = Worker(first.broker, name="w2", queue_log=first.queue_log, table=first.table).serve()

    second.checkpoint()

    assert [key for key in second.table if key.count("/") == 1] == [f"0/{second.owner.epoch}"]


def test_a_crash_after_any_step_loses_nothing() -> None:
    for steps in range(4):
        worker = serving(3)
        worker.checkpoint()
        worker.receive(1)
        worker.send(2)
        worker.clock_ms += 2_000
        for _ in range(steps):
            worker.step()
            worker.flush()

        other = Worker(worker.broker, name="w2", queue_log=worker.queue_log, table=worker.table).serve()
        other.wait(31_000)

        assert [h.offsets for h in other.receive()] == [[0, 1, 2, 3, 4]], f"crash after step {steps}"


def test_there_is_no_checkpoint_before_its_time_nor_without_a_change() -> None:
    worker = serving(limits=Limits(checkpoint_ms=2_000, window_offsets=0))
    early = worker.owner.step(worker.clock_ms + 1_999)
    worker.checkpoint()
    worker.clock_ms += 10_000

    assert early is None
    assert worker.owner.step(worker.clock_ms) is None


def test_when_memory_is_short_a_checkpoint_comes_at_once_with_all_payloads() -> None:
    worker = serving(3, limits=Limits(window_offsets=100_000))
    worker.owner.hurry_checkpoint()

    step = worker.step()

    assert isinstance(step, WriteRows)
    assert worker.owner.partition.shed(1 << 30) > 0


def test_when_memory_is_short_what_one_checkpoint_may_not_write_is_written_by_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "SEGMENT_MESSAGES", 2)
    monkeypatch.setattr(checkpoints, "WORK_MESSAGES", 4)
    worker = serving(10, limits=Limits(window_offsets=100_000, checkpoint_ms=2_000))
    worker.owner.hurry_checkpoint()

    worker.clock_ms -= 2_000
    for _ in range(3):
        worker.checkpoint()
        worker.clock_ms -= 2_000  # at once

    assert worker.owner.partition.persisted == 10
    assert not worker.owner.checkpoints._hurried


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_step_that_is_not_acknowledged_in_time_stops_the_worker(steps: int) -> None:
    worker = serving(limits=Limits(window_offsets=0, step_timeout_ms=30_000))
    worker.clock_ms += 2_000
    for _ in range(steps - 1):
        worker.step()
    if steps < 3:
        worker.owner.step(worker.clock_ms)  # its writes are never acknowledged
    before = worker.owner.step(worker.clock_ms + 30_000)

    with pytest.raises(InternalError, match="not acknowledged within 30000 ms"):
        worker.owner.step(worker.clock_ms + 30_001)
    assert before is None


def test_the_time_that_kafka_was_away_is_not_part_of_a_steps_time_out() -> None:
    worker = serving(limits=Limits(window_offsets=0, step_timeout_ms=30_000))
    worker.clock_ms += 2_000
    assert worker.owner.step(worker.clock_ms) is not None  # its writes are not acknowledged

    worker.clock_ms += 100_000
    worker.wait(29_000)
    assert worker.owner.step(worker.clock_ms) is None

    worker.wait(2_000)
    with pytest.raises(InternalError, match="not acknowledged"):
        worker.owner.step(worker.clock_ms)


def test_a_lost_owner_writes_nothing_more() -> None:
    worker = serving()
    worker.clock_ms += 2_000
    worker.step()
    worker.broker.append(markers.encode([Own("other", "other/1")]))
    worker.read_markers()

    worker.owner.written(worker.clock_ms)

    assert worker.owner.step(worker.clock_ms) is None
    assert worker.appends == []


# ---------------------------------------------------------------------- ticks


def ticks(worker: Worker, ms: int, every_ms: int = 10) -> int:
    """How many ticks the owner wants in ``ms``, asked all the time; they are folded as they come."""
    count = 0
    for _ in range(ms // every_ms):
        worker.clock_ms += every_ms
        worker.broker.now_ms += every_ms
        count += worker.owner.tick(worker.clock_ms)
        worker.flush()
    return count


def idle(**options: Any) -> Worker:
    """A worker with nothing to do and everything written."""
    worker = Worker(**options).serve()
    worker.wait(500)  # broker time is told
    worker.checkpoint()
    worker.checkpoint()
    return worker


def test_an_idle_partition_is_silent() -> None:
    assert ticks(idle(), 60_000) == 0


def test_while_a_lease_is_pending_there_is_a_tick_a_second() -> None:
    worker = idle(limits=Limits(checkpoint_ms=1 << 40))
    worker.send(1)
    worker.receive(1, lease_ms=60_000)

    assert 9 <= ticks(worker, 10_000) <= 11


def test_when_a_deadline_is_due_there_is_a_tick_at_once() -> None:
    worker = idle(limits=Limits(checkpoint_ms=1 << 40))
    worker.send(1)
    worker.receive(1, lease_ms=1_550)
    ticks(worker, 1_500)
    before = worker.owner.partition.is_leased(0)

    ticks(worker, 250)

    assert before
    assert not worker.owner.partition.is_leased(0)


def test_there_are_at_most_ten_ticks_a_second_whatever_is_due() -> None:
    worker = idle(limits=Limits(checkpoint_ms=1 << 40))
    worker.send(200)
    for i in range(200):
        worker.receive(1, lease_ms=1_000 + 10 * i)

    assert ticks(worker, 2_000) <= 2_000 // TICK_MIN_MS + 1


@pytest.mark.parametrize("lease_ms", [1_000, 43_200_000])
def test_what_is_acked_is_nothing_to_tick_for(lease_ms: int) -> None:
    worker = idle(limits=Limits(checkpoint_ms=1 << 40, window_offsets=0))
    worker.send(1)
    (handout,) = worker.receive(1, lease_ms=lease_ms)
    worker.owner.acked(handout.offsets, handout.receipt)
    worker.flush()
    worker.owner.checkpoints._next_ms = 0
    worker.checkpoint()
    worker.checkpoint()

    assert ticks(worker, 20_000) == 0


def test_an_unwritten_checkpoint_is_ticked_for() -> None:
    worker = idle(limits=Limits(checkpoint_ms=2_000, window_offsets=0))
    worker.send(1)

    assert ticks(worker, TICK_MAX_MS * 2) >= 1


def test_while_a_tick_is_not_folded_there_is_one_a_second() -> None:
    worker = idle(limits=Limits(checkpoint_ms=1 << 40))
    worker.send(1)
    worker.receive(1, lease_ms=1_000)
    worker.clock_ms += 5_000

    wanted = [worker.owner.tick(worker.clock_ms + ms) for ms in range(0, 2_000, 10)]

    assert sum(wanted) == 2


def test_a_checkpoint_that_was_put_off_begins_later_or_when_memory_gets_short() -> None:
    worker = Worker().serve()
    worker.send()
    now = worker.clock_ms + worker.owner.limits.checkpoint_ms
    assert worker.owner.wants_checkpoint(now)
    worker.owner.put_off_checkpoint(now + 50)
    assert not worker.owner.wants_checkpoint(now + 49)
    assert worker.owner.wants_checkpoint(now + 50)
    worker.owner.put_off_checkpoint(now + 10)
    assert not worker.owner.wants_checkpoint(now + 49), "it is not brought forward"
    worker.owner.hurry_checkpoint()
    assert worker.owner.wants_checkpoint(now)


def test_an_urgent_checkpoint_that_waits_for_its_turn_appends_no_ticks() -> None:
    worker = serving(limits=Limits(checkpoint_ms=1 << 40))
    until_nothing_happens(worker)
    now = worker.clock_ms + 1_000
    worker.send()
    worker.owner.hurry_checkpoint()
    assert worker.owner.tick(now), "a step begins when a marker arrives"
    worker.owner.put_off_checkpoint(now + 60_000)
    worker.owner.hurry_checkpoint()  # memory is still short
    worker.flush()

    wanted = [worker.owner.tick(now + ms) for ms in range(200, 60_000, 100)]

    assert not any(wanted)
    assert worker.owner.wants_checkpoint(now + 60_000)
