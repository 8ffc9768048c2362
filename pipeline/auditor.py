"""The audit of one partition: the core's fold, the reference fold, and what a recovery would make of the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from marq.core import rows
from marq.core.digest import STATES, Digest, digest_of, entries
from marq.core.history import Envelope, Histories
from marq.core.markers import Batch
from marq.core.partition import Partition
from marq.core.ranges import RangeSet, count
from marq.core.recovery import Deleted as DeletedQueue
from marq.core.recovery import LastRead
from marq.core.restoring import newest_read_ms
from marq.core.state import NEVER_MS
from marq.errors import NewerRowError, RowError
from pipeline import walker
from pipeline.fingerprints import Tables, fingerprints, without_payloads
from pipeline.reference import Fault, ReferenceFold

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns of an auditor's results: faults, one row of the kind `SUMMARY` with a `Summary` in `data`, and, if the queue
#: log has offsets without a record, one of the kind `ABSENT` with these as ranges.
FOUND = "partition int, kind string, offset long, queue string, what string, data binary"
SUMMARY = "summary"
ABSENT = "absent"

#: Totals that the worker counts too, and that do not depend on which log was read first.
COUNTERS = ("acked", "dead", "expired", "poison", "moved")


class Plan(walker.Plan):
    """What the auditor of a partition needs to know."""

    archived: int  # end of the markers that were read from the archive
    tables: bool  # whether the tables were read
    manifest: bytes | None
    live: dict[str, Any] | None  # the answer of the worker, if one was asked
    faults_max: int
    queue_end: int | None = None  # where the queue topic ends, read after the end of the markers; None: not known
    accept_loss: bool = False  # what was given up is no fault
    fifo: dict[str, int] = msgspec.field(default_factory=dict)  # FIFO queues -> since when they are read in order


class Deleted(msgspec.Struct):
    """Records that were deleted before any manifest covered them."""

    log: str  # queue, markers
    start: int
    stop: int
    unfinished: int  # messages not known to be done; of markers: messages whose progress is not known
    given_up: bool  # by a repair, or in topic mode by a worker


class Summary(msgspec.Struct):
    """The result for one partition."""

    partition: int
    queue: tuple[int, int]  # offsets of the queue topic that were walked (next line: of the markers topic)
    markers: tuple[int, int]
    first: int | None  # first message whose whole history is seen; None: there is none
    since_ms: int | None  # messages sent since then are audited, if earlier records are gone
    sent: dict[str, int]  # by queue; "": no queue
    done: dict[str, dict[str, int]]  # queue -> outcome -> messages
    held: dict[str, dict[str, int]]  # queue -> state -> messages
    deliveries: int
    redeliveries: int
    notes: dict[str, int]
    faults: int
    digest: str
    manifest: list[int] | None  # epoch and positions of the newest manifest
    recovered: int | None  # unfinished messages that the tables have, below the manifest's position
    compared: int  # how many of these had their payload compared with the log
    live: str | None  # comparison with the worker: agrees, differs
    whole: bool  # both logs reach back to their beginning
    deleted: list[Deleted]


class Auditor(walker.Walker):
    """Walks one partition and collects its faults."""

    def __init__(self, number: int, plan: bytes) -> None:
        super().__init__(number)
        self.told = msgspec.msgpack.decode(plan, type=Plan)
        self.reference: ReferenceFold
        self.recovered: Partition | None = None
        self._unread: Partition | None = None  # folds only markers, if the queue log begins beyond the newest manifest
        self._rows: dict[str, bytes] = {}
        self._stored: dict[int, int | None] = {}  # unfinished messages of the tables -> fingerprint
        self._compared = 0
        self._recovered_count: int | None = None
        self._last_read = LastRead(0, NEVER_MS)
        self._since_ms: int | None = None
        self._faults: list[Fault] = []
        self._fault_count = 0
        self._deleted: list[Deleted] = []
        self._summary: Summary | None = None

    # -- before the logs

    def row(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = value

    def begin(self) -> None:
        told = self.told
        self.start_at(told.queue_start, told.markers_start, told.queue_id)
        self.reference = ReferenceFold(
            first=told.queue_start,
            own=-1,
            queue_of=Histories(queue_id=told.queue_id).queue_of,
            report=self._fault,
            compacted=told.queue_id is not None,
            fifo=told.fifo,
        )
        for key in self._rows:
            if not key.startswith(f"{self.number}/"):
                self._wrong("misplaced", f"row {key} is in partition {self.number} of its changelog")
        if told.manifest is not None:
            self._recover(rows.decode_manifest(told.manifest))
        elif told.tables and (told.markers_start or (told.queue_start and told.queue_id is None)):
            if told.markers_start:
                self._deleted_unread("queue", 0, told.queue_start, told.queue_start, "and there is no manifest")
                self._deleted_unread("markers", 0, told.markers_start, 0, "and there is no manifest")
            else:
                self._unread = Partition(self.number)
        self._rows.clear()

    def _recover(self, manifest: rows.Manifest) -> None:
        told = self.told
        self._last_read = LastRead(
            manifest.position, newest_read_ms(manifest, told.queue_id), tuple(manifest.unreadable)
        )
        for loss in manifest.lost:
            self._deleted.append(Deleted(loss.log, loss.start, loss.stop, loss.unfinished, given_up=True))
            if not told.accept_loss:
                what = f"{_named(self._deleted[-1])} were deleted unread, and given up"
                self._wrong("given up", what)
        if told.markers_start > manifest.markers_position:
            of = f"of the newest manifest (epoch {manifest.epoch})"
            unknown = told.queue_start - manifest.position
            unknown -= count(RangeSet(manifest.done).within(manifest.position, told.queue_start))
            place = f"beyond the position {manifest.position} {of}"
            self._deleted_unread("queue", manifest.position, told.queue_start, unknown, place)
            place = f"beyond the position {manifest.markers_position} {of}"
            self._deleted_unread("markers", manifest.markers_position, told.markers_start, 0, place)
            return
        for name, position, stop in (
            ("queue", manifest.position, told.queue_stop),
            ("markers", manifest.markers_position, told.markers_stop),
        ):
            if position > stop:
                self._wrong(
                    "manifest",
                    f"the newest manifest (epoch {manifest.epoch}) is at {position} of the {name} log, which ends at "
                    f"{stop}",
                )
                return
        try:
            less = without_payloads(self.number, manifest, self._rows)
            self.recovered = self._restored(less)
            if told.queue_start > min([manifest.position, *manifest.unreadable]):
                self._unread = self._restored(less)
        except NewerRowError as error:
            self._wrong("newer version", str(error))
            return
        except RowError as error:
            self._wrong("tables", str(error))
            return
        prints = fingerprints(value for key, value in less.rows.items() if rows.kind_of(key) == "messages")
        self._stored = {entry.offset: prints.get(entry.offset) for entry in entries(self.recovered)}
        for offset in self._stored.keys() - prints.keys():
            self._note(Fault("tables", offset, None, "the segment that has to hold its payload does not"))
        self._recovered_count = len(self._stored)

    def _restored(self, less: Tables) -> Partition:
        return Partition.restore(self.number, less.manifest, less.rows.__getitem__, queue_id=self.told.queue_id)

    def _deleted_unread(self, log: str, start: int, stop: int, unfinished: int, place: str) -> None:
        if stop > start:
            self._deleted.append(Deleted(log, start, stop, unfinished, given_up=False))
            what = f"{_named(self._deleted[-1])} were deleted unread: the log begins at {stop}, {place}"
            self._wrong("deleted unread", what)

    @property
    def _is_whole(self) -> bool:
        """Whether the logs reach back to the beginning. A topic that is not ours may begin anywhere."""
        told = self.told
        return not told.markers_start and (not told.queue_start or told.queue_id is not None)

    # -- the logs

    def on_passed(self, envelopes: Sequence[Envelope], prints: Sequence[int | None]) -> None:
        if envelopes:
            self._check_times(envelopes)
            self._recover_read(envelopes, prints)

    def on_read(self, envelopes: Sequence[Envelope], prints: Sequence[int | None]) -> None:
        if self.reference.first != self.first:
            assert self.first is not None
            self.reference.forget_below(self.first)
        if self._since_ms is None and not self._is_whole:
            self._since_ms = envelopes[0].timestamp
        self.reference.read(envelopes)
        self._check_times(envelopes)
        self._recover_read(envelopes, prints)

    def _check_times(self, envelopes: Sequence[Envelope]) -> None:
        """Check that what the newest manifest counts as read is not newer than all that was read."""
        read = self._last_read
        position = read.position
        if envelopes[0].offset < position and max(e.timestamp for e in envelopes) > read.newest_ms:
            for envelope in envelopes:
                if read.is_newer(envelope.offset, envelope.timestamp):
                    what = f"is newer than all that were read up to {position}, the position of the newest manifest"
                    self._note(Fault("rewritten", envelope.offset, None, what))

    def on_absent(self, start: int, stop: int) -> None:
        self.reference.gone(start, stop)

    def on_doubled(self, log: str, offset: int) -> None:
        if log == "queue":
            self._fault(Fault("doubled", offset, None, "the archive has its record more than once"))
        else:
            self._wrong("doubled", f"the archive has record {offset} of the markers log more than once")

    def on_newer(self, offset: int, what: str) -> None:
        self._wrong("newer version", f"record {offset} of the markers log: {what}")

    def on_markers_absent(self, start: int, stop: int) -> None:
        # only workers write there, without transactions: no offset is without a record
        split = min(max(start, self.told.archived), stop)
        for begin, end, where in ((start, split, "archive"), (split, stop, "topic")):
            if begin < end:
                self._wrong("markers gone", f"records {begin} to {end - 1} of the markers log are not in the {where}")

    def before_fold(self, offset: int, timestamp_ms: int, batch: Batch | None) -> None:
        if self.reference.own < self.told.markers_start:
            self.reference.own = self.partition.own  # its own marker there is no longer in the log

    def on_fold(self, offset: int, timestamp_ms: int, batch: Batch | None, effects: list[list[int]]) -> None:
        mine = self.reference.fold(offset, timestamp_ms, batch)
        if effects != mine:
            for one, other in zip(effects, mine, strict=True):
                for message in set(one) ^ set(other):
                    taken = "takes effect in the fold, and must not" if message in one else "must take effect"
                    self._fault(Fault("fold", message, None, f"a marker of record {offset} {taken}"))
        recovered = self.recovered
        for partition in (recovered, self._unread):
            if partition is not None and offset >= partition.markers_position:
                partition.fold(offset, timestamp_ms, batch.markers if batch is not None else ())

    def _recover_read(self, envelopes: Sequence[Envelope], prints: Sequence[int | None]) -> None:
        recovered = self.recovered
        if recovered is None:
            return
        if self._stored:
            for envelope, mine in zip(envelopes, prints, strict=True):
                if envelope.offset in self._stored:
                    self._compare(envelope, mine, self._stored.pop(envelope.offset))
        position = recovered.position
        if envelopes[-1].offset >= position:
            if envelopes[0].offset < position:
                envelopes = [envelope for envelope in envelopes if envelope.offset >= position]
            recovered.ingest(position, envelopes[-1].offset + 1, envelopes)
            recovered.forget_hints()

    def _compare(self, envelope: Envelope, mine: int | None, stored: int | None) -> None:
        if mine is None or stored is None:
            return
        self._compared += 1
        if mine != stored:
            self._fault(
                Fault("tables", envelope.offset, None, "the messages table has another payload, key or headers")
            )

    # -- the verdict

    def end(self) -> None:
        told = self.told
        if self.first is None:
            self.partition.ingest(self.partition.position, told.queue_stop, [])
            self.reference.forget_below(told.queue_stop)
            self._since_ms = self._whole_ms
        self.stop_at(told.queue_stop, told.markers_stop)
        self._check_unread()
        if any(not deleted.given_up for deleted in self._deleted):
            self.recovered = None  # no worker recovers from these tables before a repair
        stored = self.recovered
        if stored is not None:
            stored.ingest(stored.position, told.queue_stop, [])
            stored.skip_markers(told.markers_stop)
        self._check_end()
        self._check_states()
        self.reference.check_order_at_end(self.partition.duplicates.__contains__)
        held = digest_of(entries(self.partition))
        if stored is not None:
            self._check_recovered(stored)
        live = None
        if told.live is not None:
            live = self._check_live(held if self._is_whole or stored is None else digest_of(entries(stored)))
        self._summarize(held, live)

    def _check_unread(self) -> None:
        """Check that all messages that were deleted before a manifest covered them are done."""
        told, unread = self.told, self._unread
        if unread is None:
            return
        manifest = rows.decode_manifest(told.manifest) if told.manifest is not None else None
        for loss in DeletedQueue(told.queue_start, told.markers_stop).losses_of(unread):
            if manifest is None:
                place = "and there is no manifest"
            else:
                of = f"of the newest manifest (epoch {manifest.epoch})"
                read = loss.start < manifest.position
                place = f"and they are unreadable {of}" if read else f"beyond the position {loss.start} {of}"
            self._deleted_unread("queue", loss.start, loss.stop, loss.unfinished, place)

    def _check_end(self) -> None:
        """Check that the queue topic has all that markers name: an owner has read what it hands out."""
        end = self.told.queue_end
        if end is None:
            return
        states, early = self.reference.states, self.reference.early
        for offset in sorted(o for o in {*states, *early} if o >= end):
            became = "was delivered" if offset in states else f"is {early[offset]}"
            # not `_fault`: it is so whether or not any history is seen whole
            self._note(Fault("record gone", offset, None, f"{became}, but the queue topic ends at {end}"))

    def _check_states(self) -> None:
        """Check that every message read is done, or held by the core as the markers say."""
        partition, states = self.partition, self.reference.states
        for offset in self.reference.open:
            if offset not in partition.messages:
                self._fault(Fault("lost", offset, None, "is not done by any marker, but the fold does not hold it"))
                continue
            delivered, state = partition.deliveries.get(offset), states.get(offset)
            found = delivered.as_tuple() if delivered is not None else None
            if found != (None if state is None else tuple(state[:5])):
                self._fault(Fault("fold", offset, None, f"is held as {found}, the markers say {state}"))
        if len(partition.messages) > len(self.reference.open):
            for offset in partition.messages.keys() - self.reference.open.keys():
                self._fault(Fault("fold", offset, None, "is held, though a marker has ended it"))

    def _check_recovered(self, stored: Partition) -> None:
        """Check that a worker that recovered now, from the newest manifest and what follows, would match the logs."""
        first = self.first if self.first is not None else self.told.queue_stop
        known = {entry.offset: entry for entry in entries(stored) if entry.offset >= first}
        after = "after a recovery from the newest manifest"
        for entry in entries(self.partition):
            other = known.pop(entry.offset, None)
            if other is None:
                what = f"is {entry.state}, but lost {after}: the tables lack it"
                self._fault(Fault("tables", entry.offset, entry.queue, what))
            elif other != entry:
                what = f"is {entry.state} with {entry.receives} receives, {after} {other.state} with {other.receives}"
                self._fault(Fault("tables", entry.offset, entry.queue, what))
        gone = self.reference.absent
        for entry in known.values():
            if entry.offset in gone and self.reference.compacted:
                continue  # the tables outlive the records of a topic that is not ours
            if entry.offset in gone:
                what = f"is {entry.state} {after}, but the queue topic no longer has its record"
                self._fault(Fault("record gone", entry.offset, entry.queue, what))
            else:
                self._fault(Fault("tables", entry.offset, entry.queue, f"is done, but {entry.state} again {after}"))

    def _check_live(self, mine: Digest) -> str:
        live = self.told.live
        assert live is not None
        before = self._fault_count
        if live["digest"] != mine.digest:
            queues = {*mine.queues, *live["queues"]}
            none = dict.fromkeys(STATES, 0)
            differ = [q for q in sorted(queues) if mine.queues.get(q, none) != live["queues"].get(q, none)]
            for queue in differ:
                what = (
                    f"the worker holds {live['queues'].get(queue, none)}, the logs say {mine.queues.get(queue, none)}"
                )
                self._fault(Fault("worker", -1, queue, what))
            if not differ:
                self._wrong("worker", "the worker's digest differs, with equal counts: other messages, or attempts")
        if self._is_whole and not self.reference.notes["purges"]:
            for name in COUNTERS:
                theirs, ours = live["counters"].get(name, 0), self.partition.counters[name]
                if theirs != ours:
                    self._wrong("worker", f"the worker has counted {theirs} {name} messages, the logs say {ours}")
        return "agrees" if self._fault_count == before else "differs"

    def _summarize(self, held: Digest, live: str | None) -> None:
        told, reference, counters = self.told, self.reference, self.partition.counters
        done: dict[str, dict[str, int]] = {}
        for (queue, outcome), amount in reference.done.items():
            done.setdefault(queue or "", {})[outcome] = amount
        sent: Counter[str] = Counter()
        for name, amount in reference.sent.items():
            sent[name or ""] += amount
        manifest = None if told.manifest is None else rows.decode_manifest(told.manifest)
        total = sum(sent.values()) - sum(reference.done.values()) - len(reference.open)
        if total:
            self._wrong("lost", f"{total} messages are neither done nor held")
        self._summary = Summary(
            partition=self.number,
            queue=(told.queue_start, told.queue_stop),
            markers=(told.markers_start, told.markers_stop),
            first=self.first,
            since_ms=self._since_ms,
            sent=dict(sent),
            done=done,
            held={queue: {str(state): n for state, n in states.items()} for queue, states in held.queues.items()},
            deliveries=counters["delivered"],
            redeliveries=counters["redelivered"],
            notes={name: amount for name, amount in reference.notes.items() if amount},
            faults=self._fault_count,
            digest=held.digest,
            manifest=None if manifest is None else [manifest.epoch, manifest.position, manifest.markers_position],
            recovered=self._recovered_count,
            compared=self._compared,
            live=live,
            whole=not told.queue_start and not told.markers_start,
            deleted=self._deleted,
        )

    # -- what was found

    def _wrong(self, kind: str, what: str) -> None:
        self._fault(Fault(kind, -1, None, what))

    def _fault(self, fault: Fault) -> None:
        if self.first is None and fault.offset >= 0:
            return  # a message whose history is not seen whole
        self._note(fault)

    def _note(self, fault: Fault) -> None:
        self._fault_count += 1
        if self._fault_count <= self.told.faults_max:
            self._faults.append(fault)

    def results(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        found: list[tuple[Any, ...]] = [(self.number, f.kind, f.offset, f.queue, f.what, None) for f in self._faults]
        self._faults.clear()
        if self._summary is not None:
            found.append((self.number, SUMMARY, -1, None, None, msgspec.msgpack.encode(self._summary)))
            self._summary = None
            if self.reference.absent and not self.reference.compacted:
                ranges = msgspec.msgpack.encode(self.reference.absent.ranges())
                found.append((self.number, ABSENT, -1, None, None, ranges))
        if found:
            names = ("partition", "kind", "offset", "queue", "what", "data")
            types = (pa.int32(), pa.string(), pa.int64(), pa.string(), pa.string(), pa.binary())
            columns = [pa.array(list(c), t) for c, t in zip(zip(*found, strict=True), types, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=list(names))


def _named(deleted: Deleted) -> str:
    unsure = f", {deleted.unfinished:,} not known to be done" if deleted.log == "queue" else ""
    amount = deleted.stop - deleted.start
    return f"offsets {deleted.start} to {deleted.stop - 1} of the {deleted.log} topic ({amount:,} records{unsure})"
