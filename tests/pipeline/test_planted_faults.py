"""Faults in what a real worker wrote: the audit names each, with partition, offset and kind, and nothing else.

A worker serves a standard and a FIFO queue. Its logs and tables are copied into the partitions of another installation,
as they are or with one change each, and audited together.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner

from marq.core import rows
from marq.core.markers import End, Keepalive, Release, Start, Tick
from marq.core.ranges import offsets_in
from pipeline.audit import audit, command
from pipeline.auditor import Auditor
from pipeline.options import Job
from pipeline.verdict import FAULTS as KINDS
from pipeline.verdict import Verdict, as_json
from tests.integration.cluster import until
from tests.pipeline.lab import ROOT, Installation
from tests.pipeline.planting_lab import IN_FLIGHT, LOST, Copy, keep_times, original, write
from tests.pipeline.tables_lab import read, run_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AS_A_USER = ("--json", "-", "--faults", "1000")
LEASE_S = 600
ORDERS = 30
#: The FIFO queue's messages follow those of the standard queue.
FIRST, SECOND = ORDERS, ORDERS + 1
#: Offsets that are not done in the end.
UNFINISHED = {*range(11, ORDERS), ORDERS + 2, ORDERS + 3}

Expected = list[tuple[int, str]]
"""Offset and kind of each fault."""


def a_worker_at_work(here: Installation) -> Copy:
    """A worker delivers, gets back, delivers again, extends, and writes its tables."""
    from marq.client import Service

    with here.cluster(handlers="", checkpoint_ms=200, persist_after_ms=100) as cluster:
        worker = cluster.start()
        with Service(worker.url) as service:
            orders = service.queue("orders")
            for i in range(ORDERS):
                orders.send(b"%d" % i, ttl=86_400)
            taken: list[Any] = []
            while len(taken) < 20:
                taken += orders.receive_many(20 - len(taken), timeout=10, visibility_timeout=LEASE_S)
            orders.ack_many(taken[:10])
            taken[10].release()
            taken[11].extend(2 * LEASE_S)
            again, *_ = orders.receive_many(4, timeout=10, visibility_timeout=LEASE_S)
            assert again.attempt == 2
            ordered = service.queue("ordered")
            ordered.create(fifo=True)
            for i in range(4):
                ordered.send(b"%d" % i, group="g", deduplication_id=f"{i}")
            for _ in range(2):
                ordered.ack_many(ordered.receive_many(1, timeout=10, visibility_timeout=LEASE_S))
            again.ack()

        def kept() -> bool:
            found = read(here, f"{here.settings.name}-progress-changelog", 0)
            manifests = [rows.decode_manifest(record.value) for record in found if record.value]
            return any(m.position == ORDERS + 4 and m.rows for m in manifests)

        until(kept, "a manifest of everything")
        worker.stop()
    return original(here)


# ------------------------------------------------------------------ faults in the logs


def nothing(was: Copy) -> Expected:
    return []


def a_message_is_lost_that_was_delivered(was: Copy) -> Expected:
    was.without_tables().queue[12:14] = [LOST, LOST]
    return [(12, "record gone"), (13, "record gone")]


def a_message_is_lost_that_only_the_tables_know(was: Copy) -> Expected:
    was.queue[26:28] = [LOST, LOST]
    return [(26, "record gone"), (27, "record gone")]


def the_end_of_the_log_is_lost_and_tables_know(was: Copy) -> Expected:
    """As with a broker that was elected without being in sync."""
    del was.queue[FIRST:]
    return [(-1, "manifest"), (FIRST, "record gone"), (SECOND, "record gone")]


def the_end_of_the_log_is_written_anew(was: Copy) -> Expected:
    """Others have the offsets of messages that the tables know."""
    for record in was.queue[FIRST - 2 :]:
        assert record is not None
        was.queue[record.offset] = record._replace(value=b"another one", timestamp=record.timestamp + 3_600_000)
    anew = range(FIRST - 2, ORDERS + 4)
    return sorted([(o, "rewritten") for o in anew] + [(o, "tables") for o in anew if o in UNFINISHED])


def the_end_of_the_log_is_lost_and_only_markers_know(was: Copy) -> Expected:
    """Two that were acknowledged. Nobody has ever handed out what came after them."""
    del was.without_tables().queue[FIRST:]
    return [(FIRST, "record gone"), (SECOND, "record gone")]


def the_end_of_the_log_is_lost_with_messages_in_flight(was: Copy) -> Expected:
    del was.without_tables().queue[IN_FLIGHT:]
    starts = [m for _, batch in was.batches() for m in batch.markers if isinstance(m, Start)]
    delivered = {o for start in starts for o in offsets_in(start.offsets)}
    return [(o, "record gone") for o in sorted(delivered) if o >= IN_FLIGHT]


def a_start_is_lost(was: Copy) -> Expected:
    """It is that of the first message of the FIFO queue, which was acknowledged."""

    def without(start: Start) -> Tick | None:
        return Tick() if start.offsets == [FIRST, FIRST + 1] else None

    was.without_tables().swap(Start, without)
    return [(FIRST, "no start"), (SECOND, "order")]


def an_ack_names_a_delivery_that_never_was(was: Copy) -> Expected:
    was.without_tables().append(End(0, [25, 26], "acked", 99))
    return [(25, "no start")]


def an_extension_and_a_release_name_one(was: Copy) -> Expected:
    was.without_tables().append(Keepalive(0, 98, [25, 26], 1_000), Release(0, 99, [12, 13]))
    return [(12, "no start"), (25, "no start")]


def a_message_is_handed_out_again_after_its_end(was: Copy) -> Expected:
    was.without_tables().append(Start(_own(was), 99, [3, 4], 1_000, "r", 2))
    was.append(End(_own(was), [3, 4], "acked", 99))
    return [(3, "delivered after its end")]


def a_message_is_handed_out_to_two(was: Copy) -> Expected:
    was.without_tables().append(Start(_own(was), 99, [15, 16], 1_000, "r", 2))
    return [(15, "two leases")]


def two_messages_of_a_group_are_swapped(was: Copy) -> Expected:
    other = {FIRST: SECOND, SECOND: FIRST}

    def swapped(marker: Any) -> Any:
        if isinstance(marker, Start | End) and len(marker.offsets) == 2 and marker.offsets[0] in other:
            offset = other[marker.offsets[0]]
            return msgspec.structs.replace(marker, offsets=[offset, offset + 1])
        return marker

    was.without_tables()
    for offset, batch in list(was.batches()):
        was.put(offset, list(map(swapped, batch.markers)))
    return [(SECOND, "order")]


def a_message_overtakes_one_that_is_never_delivered(was: Copy) -> Expected:
    def last(start: Start) -> Start | None:
        return msgspec.structs.replace(start, offsets=[FIRST + 3, FIRST + 4]) if start.offsets[0] == SECOND else None

    def its_end(end: End) -> End | None:
        return msgspec.structs.replace(end, offsets=[FIRST + 3, FIRST + 4]) if end.offsets[0] == SECOND else None

    was.without_tables().swap(Start, last)
    was.swap(End, its_end)
    return [(FIRST + 3, "order")]


def an_attempt_is_miscounted(was: Copy) -> Expected:
    was.without_tables().swap(Start, lambda s: msgspec.structs.replace(s, receives=3) if s.receives == 2 else None)
    return [(10, "attempts")]


def a_former_owner_delivers(was: Copy) -> Expected:
    own = _own(was)
    at_ms, _ = was.without_tables().markers[-1]
    value = was.markers[own][1]
    was.markers.append((at_ms, value))
    was.append(Start(own, 99, [25, 26], 1_000, "r"))
    was.append(End(own, [25, 26], "acked", 99))
    return [(25, "owner")]


def a_message_expires_early(was: Copy) -> Expected:
    was.without_tables().append(End(_own(was), [25, 26], "expired"))
    return [(25, "expired early")]


def records_of_markers_are_lost(was: Copy) -> Expected:
    """Two ticks at the end."""
    was.without_tables().append(Tick())
    was.append(Tick())
    was.append(Tick())
    was.markers[-3:-1] = [(0, LOST), (0, LOST)]
    return [(-1, "markers gone")]


def a_record_of_markers_is_of_a_later_version(was: Copy) -> Expected:
    unsealed = b'{"v":2,"markers":[{"type":"pause","for_ms":5}]'  # workers ignore it, and so does the audit
    was.without_tables().markers.append((was.markers[-1][0], unsealed + b"}"))
    seal = b"0" * 24  # jobs don't know the secret
    was.markers.append((was.markers[-1][0], b'%b,"seal":"%b"}' % (unsealed, seal)))
    return [(-1, "newer version")]


# ------------------------------------------------------------------ faults in the tables


def a_payload_is_changed(was: Copy) -> Expected:
    def changed(row: rows.MessagesRow) -> rows.MessagesRow:
        row.messages = [
            (offset, at_ms, key, b"something else" if offset == IN_FLIGHT else value, headers)
            for offset, at_ms, key, value, headers in row.messages
        ]
        return row

    was.change_row("messages", changed)
    return [(IN_FLIGHT, "tables")]


def a_row_is_damaged(was: Copy) -> Expected:
    key = next(key for key in was.rows if rows.kind_of(key) == "messages")
    was.rows[key] = was.rows[key][:-1] + b"?"
    return [(-1, "tables")]


def a_row_is_missing(was: Copy) -> Expected:
    del was.rows[next(key for key in was.rows if rows.kind_of(key) == "index")]
    return [(-1, "tables")]


def the_attempts_of_a_message_are_changed(was: Copy) -> Expected:
    def changed(page: Any) -> Any:
        state = page[2][0]  # deliveries: epoch, delivery, receives, deadline, leased, receiver, offsets
        offsets[:] = [o for i in range(0, len(state[6]), 2) for o in range(state[6][i], state[6][i + 1])]
        state[2] += 1
        return page

    offsets: list[int] = []
    was.change_row("pages", changed)
    return [(offset, "tables") for offset in offsets]


def a_segment_is_another_partitions(was: Copy) -> Expected:
    """Messages of other offsets in a row that has the right name and checksum."""

    def other(row: rows.MessagesRow) -> rows.MessagesRow:
        found[:] = [message[0] for message in row.messages]
        row.messages = [(o + 1_000, *rest) for o, *rest in row.messages]
        return row

    found: list[int] = []
    was.change_row("messages", other)
    return [(offset, "tables") for offset in found if offset in UNFINISHED]


def a_row_lies_in_another_partition(was: Copy) -> Expected:
    was.strays.append(("messages", "77/0/messages/1", next(iter(was.rows.values()))))
    return [(-1, "misplaced")]


def a_manifest_lies_in_another_partition(was: Copy) -> Expected:
    assert was.manifest is not None
    was.strays.append(("progress", "77/0", rows.encode_manifest(was.manifest)))
    return [(-1, "misplaced")]


def a_manifest_is_of_a_later_version(was: Copy) -> Expected:
    """The one before it is still there, so a recovery would not start from nothing, and would not start."""
    assert was.manifest is not None
    newer = msgspec.structs.replace(was.manifest, v=rows.MANIFEST_VERSION + 1, epoch=was.manifest.epoch + 1)
    was.strays.append(("progress", f"@/{newer.epoch}", rows.encode_manifest(newer)))
    return [(-1, "newer version")]


def a_row_is_of_a_later_version(was: Copy) -> Expected:
    was.change_row("pages", lambda page: [rows.VERSION + 1, *page[1:]])
    return [(-1, "newer version")]


def a_manifest_is_ahead_of_the_logs(was: Copy) -> Expected:
    assert was.manifest is not None
    was.manifest.position = 1_000
    return [(-1, "manifest")]


def the_manifest_takes_a_message_for_done(was: Copy) -> Expected:
    def changed(page: Any) -> Any:
        segment = page[1][-1]  # epoch, number, checksum, checksum of the index, done
        done = int.from_bytes(segment[4], "little") | 1 << last.count - 1
        segment[4] = done.to_bytes((last.count + 7) // 8, "little")
        return page

    index = [rows.decode_index(value) for key, value in was.rows.items() if rows.kind_of(key) == "index"]
    last = max(index, key=lambda row: row.first)
    was.change_row("pages", changed)
    return [(last.offsets()[-1], "tables")]


def records_are_deleted_unread(was: Copy) -> Expected:
    assert was.manifest is not None
    was.manifest.position, was.manifest.rows = 3, {}
    was.trim = 7
    return [(-1, "deleted unread")]


# ------------------------------------------------------------------ faults in the core


def the_core_ends_a_message_more(was: Copy) -> Expected:
    """See `Mistaken`."""
    starts = (m for _, batch in was.without_tables().batches() for m in batch.markers if isinstance(m, Start))
    delivery = next(m.delivery for m in starts if m.offsets[0] <= 15 and m.offsets[-1] > 16)
    was.append(End(_own(was), [15, 16], "acked", delivery))
    return [(16, "fold"), (16, "lost")]


def the_core_overlooks_an_extension(was: Copy) -> Expected:
    was.without_tables()
    return [(11, "fold"), (11, "fold")]  # what the marker does, and how the message is held at the end


class Mistaken(Auditor):
    """In the partitions of these two faults, the fold of the core has a mistake."""

    def start_at(self, queue_start: int, markers_start: int, queue_id: str | None) -> None:
        super().start_at(queue_start, markers_start, queue_id)
        core: Any = self.partition
        plant = [*PLANTED, nothing][self.number]
        if plant is the_core_ends_a_message_more:
            end = core._end
            core._end = lambda m: end(msgspec.structs.replace(m, offsets=[15, 17]) if m.offsets == [15, 16] else m)
        elif plant is the_core_overlooks_an_extension:
            change = core._change
            core._change = lambda m: [] if isinstance(m, Keepalive) else change(m)


def _own(was: Copy) -> int:
    """The offset of the last own marker: the epoch."""
    return max(offset for offset, batch in was.batches() if type(batch.markers[0]).__name__ == "Own")


PLANTED: list[Callable[[Copy], Expected]] = [
    nothing,
    a_message_is_lost_that_was_delivered,
    a_message_is_lost_that_only_the_tables_know,
    the_end_of_the_log_is_lost_and_tables_know,
    the_end_of_the_log_is_written_anew,
    the_end_of_the_log_is_lost_and_only_markers_know,
    the_end_of_the_log_is_lost_with_messages_in_flight,
    a_start_is_lost,
    an_ack_names_a_delivery_that_never_was,
    an_extension_and_a_release_name_one,
    a_message_is_handed_out_again_after_its_end,
    a_message_is_handed_out_to_two,
    two_messages_of_a_group_are_swapped,
    a_message_overtakes_one_that_is_never_delivered,
    an_attempt_is_miscounted,
    a_former_owner_delivers,
    a_message_expires_early,
    records_of_markers_are_lost,
    a_record_of_markers_is_of_a_later_version,
    a_payload_is_changed,
    a_row_is_damaged,
    a_row_is_missing,
    the_attempts_of_a_message_are_changed,
    a_segment_is_another_partitions,
    a_row_lies_in_another_partition,
    a_manifest_lies_in_another_partition,
    a_manifest_is_of_a_later_version,
    a_row_is_of_a_later_version,
    a_manifest_is_ahead_of_the_logs,
    the_manifest_takes_a_message_for_done,
    records_are_deleted_unread,
    the_core_ends_a_message_more,
    the_core_overlooks_an_extension,
]

#: Faults of the audit's own fold.
IN_THE_CORE = (the_core_ends_a_message_more, the_core_overlooks_an_extension)


@pytest.fixture(scope="module")
def worked(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Installation, Copy]:
    here = Installation(kafka, tmp_path_factory.mktemp("worker"), partitions=1)
    return here, a_worker_at_work(here)


def copied(worked: tuple[Installation, Copy], folder: Path, copies: list[Copy], partitions: int) -> Installation:
    """Another installation, with a copy in each partition."""
    here, _ = worked
    there = Installation(f"{here.settings.kafka}".removeprefix("kafka://"), folder, partitions=partitions)
    keep_times(there)
    for record in read(here, here.settings.queues_topic, 0):
        there.write(there.settings.queues_topic, 0, [(record.key, record.value)])
    write(there, copies)
    return there


#: What the archive alone can't tell: its two logs may end at different times.
NOT_OFFLINE = (
    *IN_THE_CORE,
    the_end_of_the_log_is_lost_and_only_markers_know,
    the_end_of_the_log_is_lost_with_messages_in_flight,
)


class Planted(NamedTuple):
    """An installation with a fault in each of its partitions, and its audit."""

    there: Installation
    expected: list[Expected]
    in_logs: set[int]  # partitions whose fault is in the logs
    verdict: Verdict


@pytest.fixture(scope="module")
def planted(
    spark: SparkSession, worked: tuple[Installation, Copy], tmp_path_factory: pytest.TempPathFactory
) -> Planted:
    copies = [copy.deepcopy(worked[1]) for _ in PLANTED]
    expected = [plant(copied) for plant, copied in zip(PLANTED, copies, strict=True)]
    there = copied(worked, tmp_path_factory.mktemp("copies"), copies, len(PLANTED) + 1)
    in_logs = {n for n, copy in enumerate(copies) if copy.manifest is None and PLANTED[n] not in NOT_OFFLINE}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.audit.Auditor", Mistaken)
        return Planted(there, expected, in_logs, audit(spark, there.job))


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found_and_named_and_nothing_else(
    planted: Planted, plant: Callable[[Copy], Expected]
) -> None:
    number = PLANTED.index(plant)
    faults = [fault for fault in planted.verdict.faults if fault.partition == number]
    assert [(fault.offset, fault.kind) for fault in faults] == planted.expected[number], [*map(str, faults)]


def test_a_user_sees_each_with_its_partition_and_offset_and_status_1(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "session", lambda job, name: nullcontext())
    monkeypatch.setattr("pipeline.audit.audit", lambda *_, **__: planted.verdict)
    done = CliRunner().invoke(command, AS_A_USER, env=planted.there.environment)
    assert done.exit_code == 1, done.output
    all_are_named(planted.expected, done.stdout, done.stderr)


@pytest.mark.slow
def test_a_user_sees_them_in_a_process_of_its_own(planted: Planted) -> None:
    """But those of the core, which only make mistakes here."""
    done = planted.there.run_job("audit", *AS_A_USER)
    assert done.returncode == 1, done.stderr
    real = [faults if PLANTED[n] not in IN_THE_CORE else [] for n, faults in enumerate(planted.expected)]
    all_are_named(real, done.stdout, done.stderr)


def all_are_named(planted: list[Expected], as_json: str, as_text: str) -> None:
    expected = sorted((number, *fault) for number, faults in enumerate(planted) for fault in faults)
    faults = json.loads(as_json)["faults"]
    assert sorted((fault["partition"], fault["offset"], fault["kind"]) for fault in faults) == expected
    for number, offset, kind in expected:
        place = f"{number}:{offset}" if offset >= 0 else f"partition {number}"
        assert re.search(rf"^  {place} \S+ {kind}: ", as_text, re.MULTILINE), (place, kind)


def lost_in_flight(was: Copy) -> Expected:
    """Kafka has lost the ends of both logs."""
    del was.queue[IN_FLIGHT:], was.markers[-2:]
    return [*((o, "record gone") for o in range(IN_FLIGHT, ORDERS + 4)), (-1, "markers gone")]


def written_anew(was: Copy) -> Expected:
    """And has others there."""
    the_end_of_the_log_is_written_anew(was)
    at_ms, value = was.markers[-1]
    was.markers[-1] = at_ms + 1, value
    return [*((o, "rewritten") for o in range(FIRST - 2, ORDERS + 4)), (-1, "rewritten")]


def test_what_was_archived_and_is_not_in_kafka_any_more_or_is_another_record(
    spark: SparkSession, worked: tuple[Installation, Copy], tmp_path: Path
) -> None:
    plants = [nothing, lost_in_flight, written_anew, nothing]
    was = copy.deepcopy(worked[1]).without_tables()
    before = copied(worked, tmp_path, [was] * len(plants), len(plants) + 1)
    run_archive(spark, before.job)
    copies = [copy.deepcopy(was) for _ in plants]
    expected = [plant(copied) for plant, copied in zip(plants, copies, strict=True)]
    after = copied(worked, tmp_path, copies, len(plants) + 1)
    verdict = audit(spark, after.job, archive=True)
    for number, faults in enumerate(expected):
        found = [fault for fault in verdict.faults if fault.partition == number]
        assert sorted((fault.offset, fault.kind) for fault in found) == sorted(faults), [*map(str, found)]
    assert verdict.fault_count == len(verdict.faults)


@pytest.mark.slow
def test_the_archive_alone_tells_all_faults_of_the_logs(planted: Planted, spark: SparkSession) -> None:
    """Also the order of groups: it has the queues."""
    run_archive(spark, planted.there.job)
    verdict = audit(spark, planted.there.job, archive=True, offline=True)
    assert verdict.ordered and as_json(verdict)["ordered"]
    for number in sorted(planted.in_logs):
        faults = [fault for fault in verdict.faults if fault.partition == number]
        assert [(fault.offset, fault.kind) for fault in faults] == planted.expected[number], [*map(str, faults)]


def test_every_kind_is_in_the_documents() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text()
    table = text.partition("| kind | meaning | what to do |")[2].partition("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == list(KINDS)
