"""Checkpoint and restore."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from marq.core import checkpoints, restoring, rows
from marq.core.checkpoints import SEGMENT_BYTES, SEGMENT_MESSAGES, TICKS_MAX, Checkpoint
from marq.core.partition import Partition
from marq.errors import RowError
from tests.unit.core_helpers import LEASE_MS, TwoLogs, picture


def served(count: int = 0) -> TwoLogs:
    logs = TwoLogs()
    logs.own()
    logs.send_many(count)
    logs.read()
    return logs


def manifest_of(checkpoint: Checkpoint | None) -> rows.Manifest:
    assert checkpoint is not None
    return rows.decode_manifest(checkpoint.manifest)


def tables_of(checkpoint: Checkpoint | None) -> list[str]:
    assert checkpoint is not None
    return [key.split("/")[2] for key, _ in checkpoint.rows]


# ---------------------------------------------------------------------- every state survives


def in_ready(logs: TwoLogs) -> None:
    logs.send()
    logs.read()


def in_delay(logs: TwoLogs) -> None:
    logs.send(delay_ms=60_000)
    logs.read()


def in_time_to_live(logs: TwoLogs) -> None:
    logs.send(ttl_ms=60_000)
    logs.read()


def in_flight(logs: TwoLogs) -> None:
    in_ready(logs)
    logs.start(0)


def in_flight_extended(logs: TwoLogs) -> None:
    in_ready(logs)
    logs.extend(logs.start(0), lease_ms=99_000)


def in_flight_over(logs: TwoLogs) -> None:
    in_ready(logs)
    logs.start(0, lease_ms=1_000)
    logs.wait(1_000)


def in_wait_after_release(logs: TwoLogs) -> None:
    in_ready(logs)
    logs.release(logs.start(0), delay_ms=60_000)


def in_uncounted_release(logs: TwoLogs) -> None:
    in_ready(logs)
    logs.release(logs.start(0), counted=False)


def in_done(logs: TwoLogs) -> None:
    in_ready(logs)
    logs.ack(logs.start(0))


def in_poison(logs: TwoLogs) -> None:
    logs.send(None)
    logs.send(headers=[("marq-ttl-ms", b"5"), ("marq-delay-ms", b"soon")])
    logs.read()


def in_duplicate(logs: TwoLogs) -> None:
    logs.send("d", headers=[("marq-origin", b"0:7")])
    logs.send("d", headers=[("marq-origin", b"0:7")])
    logs.read()


def in_started_unread(logs: TwoLogs) -> None:
    logs.send()
    logs.start(0)


def in_done_unread(logs: TwoLogs) -> None:
    logs.send()
    logs.ack(logs.start(0))


def in_purge_unread(logs: TwoLogs) -> None:
    logs.send()
    logs.start(0)
    logs.purge("q")


def in_hole(logs: TwoLogs) -> None:
    logs.hole(3)
    logs.send()
    logs.read()


STATES = [
    in_ready, in_delay, in_time_to_live, in_flight, in_flight_extended, in_flight_over, in_wait_after_release,
    in_uncounted_release, in_done, in_poison, in_duplicate, in_started_unread, in_done_unread, in_purge_unread, in_hole,
]  # fmt: skip


@pytest.mark.parametrize("window", [0, 1, 100], ids=lambda window: f"window={window}")
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_a_message_is_after_recovery_what_it_was(reach: Any, window: int) -> None:
    logs = served()
    reach(logs)
    logs.checkpoint(window=window)

    restored = logs.recovered()
    logs.catch_up(restored, logs.partition.position, logs.marked_end)

    assert picture(restored) == picture(logs.partition)


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_what_happens_after_recovery_is_what_would_have_happened(reach: Any) -> None:
    logs = served()
    reach(logs)
    logs.checkpoint(window=0)
    restored = logs.recovered()
    logs.catch_up(restored, logs.partition.position, logs.marked_end)
    since = logs.marked_end

    logs.read()
    logs.wait(30_000)
    logs.start(0, 1)
    logs.wait(120_000)
    logs.catch_up(restored, logs.partition.position, logs.marked_end)

    assert logs.marked_end > since
    assert picture(restored) == picture(logs.partition)


def test_a_purge_of_what_was_not_read_leaves_no_state_behind_in_the_rows() -> None:
    """The delivery of a purged message would otherwise be found again, and its late ack would count a segment down."""
    logs = served(3)
    late = logs.send("purged")
    delivery = logs.start(late)
    logs.persist()
    logs.purge("purged")
    logs.send_many(3)
    logs.read()
    logs.persist()

    logs.crash()

    assert late not in logs.partition.deliveries
    assert logs.ack(delivery) == []
    logs.finish("purged", 0, 1, 2)
    logs.persist()
    logs.crash()
    assert logs.take_all() == [4, 5, 6]


def test_the_clock_survives() -> None:
    logs = served()
    logs.wait(12_345)
    logs.persist()

    logs.crash()

    assert logs.partition.clock_ms == 12_345


def test_counters_survive() -> None:
    logs = served(1)
    logs.ack(logs.start(0))
    logs.persist()

    assert logs.recovered().counters["acked"] == 1


def test_what_is_read_again_below_the_manifest_is_done_only_if_it_was() -> None:
    logs = served(6)
    logs.ack(logs.start(1, 4))
    manifest = manifest_of(logs.checkpoint(window=100))

    logs.crash()

    assert (manifest.position, manifest.done) == (0, [1, 2, 4, 5])
    assert logs.take_all() == [0, 2, 3, 5]


def test_deliveries_are_in_order_after_recovery() -> None:
    logs = served(20)
    logs.checkpoint(window=10)

    logs.crash()

    assert logs.take_all() == list(range(20))


# ---------------------------------------------------------------------- what is written


def test_what_began_and_ended_between_two_checkpoints_touches_no_table() -> None:
    logs = served(1_000)
    logs.ack(logs.start(*range(1_000)))

    checkpoint = logs.persist()

    assert tables_of(checkpoint) == []
    assert manifest_of(checkpoint).position == 1_000


def test_nothing_is_written_when_nothing_happened() -> None:
    logs = served(1)
    logs.persist()

    assert logs.persist() is None


def test_time_alone_is_worth_no_checkpoint_for_a_while() -> None:
    logs = served(1)
    logs.persist()

    logs.wait(5_000)
    soon = logs.persist()
    for _ in range(TICKS_MAX):
        logs.wait(1)

    assert soon is None
    assert logs.persist() is not None


def test_messages_within_the_window_are_not_written() -> None:
    logs = served(10)

    checkpoint = logs.checkpoint(window=4)

    assert manifest_of(checkpoint).position == 6
    assert len(rows.decode_messages(checkpoint.rows[0][1]).messages) == 6  # type: ignore[union-attr]


def test_messages_that_were_read_long_ago_are_written() -> None:
    logs = served(3)
    logs.checkpoint(persist_after_ms=10_000, now_ms=0)
    logs.send_many(3)
    logs.read()

    early = logs.checkpoint(persist_after_ms=10_000, now_ms=9_999)
    late = logs.checkpoint(persist_after_ms=10_000, now_ms=10_000)

    assert manifest_of(early).position == 0
    assert manifest_of(late).position == 3


def test_the_position_is_that_of_the_first_message_not_in_the_table() -> None:
    logs = served(10)
    logs.ack(logs.start(0, 1, 2, 5))

    assert manifest_of(logs.checkpoint(window=100)).position == 3


def test_a_payload_is_written_once() -> None:
    logs = served(10)
    logs.persist()
    logs.start(0, 1)

    assert tables_of(logs.persist()) == ["pages"]


def test_rows_are_never_changed_in_place() -> None:
    logs = served(3)
    written: dict[str, bytes] = {}
    for step in range(6):
        logs.start(step % 3, lease_ms=1_000)
        logs.wait(1_000)
        checkpoint = logs.persist()
        assert checkpoint is not None
        for key, value in checkpoint.rows:
            assert key not in written
            written[key] = value


def test_what_a_new_manifest_does_not_name_is_obsolete() -> None:
    logs = served(3)
    logs.persist()
    logs.finish("purged", 0, 1, 2)

    checkpoint = logs.persist()

    assert manifest_of(checkpoint).rows == {}
    assert checkpoint is not None and checkpoint.obsolete == ["0/0/index/1", "0/0/messages/1", "0/0/pages/2"]


def test_nothing_obsolete_is_named() -> None:
    logs = served(5_000)
    for step in range(10):
        logs.finish("purged", *range(step * 400, step * 400 + 400))
        checkpoint = logs.persist()
        assert not set(manifest_of(checkpoint).rows) & set(checkpoint.obsolete)  # type: ignore[union-attr]


def test_segments_are_cut_by_number_and_by_bytes() -> None:
    logs = served(SEGMENT_MESSAGES + 1)
    by_number = logs.persist()
    for _ in range(4):
        logs.send(value=b"x" * (SEGMENT_BYTES // 3))
    logs.read()
    by_bytes = logs.persist()

    assert tables_of(by_number).count("messages") == 2
    assert tables_of(by_bytes).count("messages") == 2


def test_a_large_message_is_a_row_of_its_own() -> None:
    logs = served(1)
    logs.send(value=b"x" * 2 * SEGMENT_BYTES)
    logs.send()
    logs.read()

    assert tables_of(logs.persist()).count("messages") == 3


def test_headers_count_when_segments_are_cut() -> None:
    logs = served()
    for _ in range(4):
        logs.send(headers=[("attribute", b"x" * (SEGMENT_BYTES // 3))])
    logs.read()

    assert tables_of(logs.persist()).count("messages") == 2


@pytest.mark.parametrize("offset", [1_023, 1_024, 2_047])
def test_a_delivery_across_blocks_is_restored_whole(offset: int) -> None:
    logs = served(3_000)
    flying = range(offset, offset + 3)
    logs.start(*flying)
    logs.persist()

    logs.crash()

    assert logs.states(flying) == ["in flight"] * 3
    logs.wait(LEASE_MS)
    assert sorted(logs.take_all()) == list(range(3_000))


def test_a_hold_above_the_position_is_written_and_found_again() -> None:
    """The markers are ahead of the queue log."""
    logs = served(2)
    logs.send_many(2_000)
    logs.start(1_500, 1_501)
    logs.persist()

    logs.crash()
    logs.read()

    assert logs.states([1_499, 1_500, 1_501]) == ["ready", "in flight", "in flight"]


# ---------------------------------------------------------------------- what does not fit


def test_a_missing_row_is_an_error() -> None:
    logs = served(3)
    logs.persist()
    logs.table.clear()

    with pytest.raises(RowError, match="missing"):
        logs.recovered()


@pytest.mark.parametrize("kind", ["index", "pages", "markers"])
def test_a_row_of_another_write_is_an_error(kind: str) -> None:
    logs = served(6)
    logs.start(5)
    logs.checkpoint(window=3)
    (key,) = [key for key in logs.table if kind in key]
    logs.table[key] += b"\x00"

    with pytest.raises(RowError, match=f"{key} does not have the checksum"):
        logs.recovered()


def test_a_payload_of_another_write_is_an_error_when_it_is_read() -> None:
    logs = served(3)
    logs.persist()
    (key,) = [key for key in logs.table if "messages" in key]
    logs.table[key] += b"\x00"
    logs.partition = logs.recovered()

    with pytest.raises(RowError, match=f"{key} does not have the checksum"):
        logs.take(1)
    assert logs.states(range(3)) == ["ready"] * 3


def test_recovery_reads_no_payloads() -> None:
    logs = served(3)
    logs.persist()
    read: list[str] = []

    def load(key: str) -> bytes:
        read.append(key)
        return logs.load(key)

    Partition.restore(0, rows.decode_manifest(logs.manifest), load)

    assert sorted(rows.kind_of(key) for key in read) == ["index", "pages"]


def test_no_slice_of_a_restore_takes_up_more_than_some_segments_or_one_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "SEGMENT_MESSAGES", 10)
    monkeypatch.setattr(restoring, "SLICE_SEGMENTS", 2)
    logs = served(100)
    for _ in range(100):
        logs.send(delay_ms=3_600_000, ttl_ms=7_200_000)
    logs.read()
    logs.persist()
    work: Counter[str] = Counter()

    class Noted(Partition):
        def _restored_segment(self, *args: Any) -> Any:
            work["segments"] += 1
            return super()._restored_segment(*args)

        def _park_restored(self, *args: Any) -> None:
            work["parked"] += 1
            super()._park_restored(*args)

        def _delay_until(self, *args: Any) -> None:
            work["delays"] += 1
            super()._delay_until(*args)

    most: Counter[str] = Counter()
    steps = Noted.restoring(0, rows.decode_manifest(logs.manifest), logs.load)
    for _ in steps:
        most |= work
        work.clear()
    most |= work

    assert most == {"segments": 2, "parked": 2, "delays": 10}


def test_a_payload_that_is_not_there_is_missed_at_once_if_it_is_known_what_is() -> None:
    logs = served(3)
    manifest = manifest_of(logs.persist())
    (key,) = [key for key in logs.table if "messages" in key]

    with pytest.raises(RowError, match=f"{key} is named by a page"):
        Partition.restore(0, manifest, logs.load, present={*logs.table} - {key})


def test_a_manifest_of_a_later_version_is_an_error() -> None:
    logs = served(3)
    manifest = manifest_of(logs.persist())

    with pytest.raises(RowError, match="version 3"):
        rows.decode_manifest(rows.encode_manifest(msgspec.structs.replace(manifest, v=3)))


# ---------------------------------------------------------------------- what version 0.1 wrote


def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "golden/partition-0.1.json").read_text())
    del found["state"]["max_timestamp_ms"], found["state"]["delays"]
    return found


def timeless(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("max_timestamp_ms", "delays")}


def golden_logs() -> TwoLogs:
    """As version 0.1 left them: the rows in the table, nothing read behind them."""
    logs, told = TwoLogs(), golden()
    logs.table = {key: b64decode(value) for key, value in told["rows"].items()}
    logs.manifest = b64decode(told["manifest"])
    logs.partition = logs.recovered()
    return logs


def comparable(partition: Partition) -> dict[str, Any]:
    found = picture(partition)
    found["unfinished"] = {
        o: [queue, b64encode(value or b"").decode(), timestamp]
        for o, (queue, value, timestamp) in found["unfinished"].items()
    }
    found["doubles"] = sorted(found.pop("duplicates"))
    found["holds"] = found.pop("deliveries")  # by the words of 0.1
    found["copied"] = dict.fromkeys(found.pop("origins"))  # which had them in the manifest
    # 0.1 had one time for all, which went by any record; the broker's time is not known before there are ticks
    del found["broker_ms"], found["told_ms"], found["tick_ms"], found["elapsed"]
    assert set(found.pop("delays")) == {30, 31}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def test_the_state_that_version_0_1_wrote_is_read() -> None:
    assert comparable(golden_logs().partition) == timeless(golden()["state"])


def test_the_state_that_version_0_1_wrote_is_written_anew_by_the_next_checkpoint() -> None:
    logs = golden_logs()
    old = set(logs.table)

    checkpoint = logs.persist()

    assert checkpoint is not None
    assert comparable(logs.recovered()) == timeless(golden()["state"])
    assert set(checkpoint.obsolete) == {key for key in old if "/markers/" in key}


def test_rows_of_version_0_1_that_miss_a_payload_are_an_error() -> None:
    told = golden()
    manifest = rows.decode_manifest(b64decode(told["manifest"]))
    table = {key: b64decode(value) for key, value in told["rows"].items()}
    manifest.rows = {key: checksum for key, checksum in manifest.rows.items() if "messages" not in key}

    with pytest.raises(RowError, match="unfinished messages, the messages rows hold 0"):
        Partition.restore(0, manifest, table.__getitem__)
