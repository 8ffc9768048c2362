"""One worker: what the application does around the core's Owner, with every step a separate event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from marq.core import markers as m
from marq.core.checkpoint_cycle import Retire, WriteManifest, WriteRows
from marq.core.owner import Owner, Phase
from marq.core.rows import Record, table_of
from marq.core.starts import Pending
from marq.errors import RowError, StepTimeoutError
from tests.simulation.logs import Lane, Sent, Table, edges_of

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

OF_THE_STAY = ("marq-delay-ms", "marq-ttl-ms", "marq-origin", "marq-dedup")
"""Headers that a dead letter's copy does not have."""

TABLES = ("messages", "markers", "progress")
RECOVERIES_MAX = 12
"""So many readings of the tables in a row may fail; half-way the local store is wiped."""


class Worker:
    """A process that may own the partition. It dies and restarts; ``number`` stays."""

    def __init__(self, sim: Simulator, number: int) -> None:
        self.sim = sim
        self.number = number
        self.alive = True
        self.paused = False
        self.assigned = False  # as far as it has heard
        self.incarnation = 0
        self.tables = {name: Table(sim.changelogs[name]) for name in TABLES}
        self.acks: deque[Callable[[], None]] = deque()
        self.lanes: dict[str, Lane] = {}
        self.owner: Owner | None = None
        self.stage = "idle"
        self.seen = (-1, 0)  # where the queue log was last seen to end, and when
        self._forget()

    def _forget(self) -> None:
        self.owner = None
        self.stage = "idle"
        self.to_read: list[str] = []
        self.recoveries = 0
        self.own_offset = -1
        self.queue_next = self.markers_next = 0  # fetch positions
        self.seq = 0
        self.pendings: list[Pending] = []
        self.in_hand: set[int] = set()  # deliveries that were on their way to a receiver before this event
        self._unsent: list[m.Marker] = []
        self.copying: set[int] = set()  # dead letters and poison whose copy is on its way
        self.unwritten = 0

    @property
    def serving(self) -> bool:
        return self.owner is not None and self.owner.phase is Phase.SERVING

    # ------------------------------------------------------------------ life

    def crash(self) -> None:
        """The process is gone: a part of the records on their way lands later, in the order of each lane."""
        sim = self.sim
        sim.note("w%d crashes", self.number)
        self.alive = self.paused = self.assigned = False
        for lane in self.lanes.values():
            lane.alive = False
            for _ in range(sim.below(len(lane.sent) + 1)):
                lane.sent.pop()
        self.lanes = {}
        self.acks.clear()
        self.seen = (-1, 0)
        self.incarnation += 1
        self._forget()

    def restart(self) -> None:
        sim = self.sim
        sim.note("w%d starts", self.number)
        self.alive = True
        if sim.chance(0.3):
            self.refill()

    def hears(self, assigned: bool) -> None:
        """A rebalance has happened. The worker may keep its state and serve: the log decides who owns the partition."""
        self.assigned = assigned
        if assigned or self.owner is None:
            return
        if self.serving and self.sim.chance(0.4):
            self.leave()
        elif self.stage != "owner" or self.sim.chance(0.5):
            self.drop()

    def leave(self) -> None:
        """Let go of the partition in good order."""
        owner, sim = self.owner, self.sim
        assert owner is not None
        sim.note("w%d leaves", self.number)
        sim.count("left")
        self.say_last(owner)

    def say_last(self, owner: Owner) -> None:
        """Append the last markers for a partition that this worker no longer serves, and forget it."""
        in_hand = {*self.in_hand, *owner.starts.pending}
        last = self.of_receivers() + owner.leave()
        if last:
            self.send("markers", Sent(m.encode(last, f"r{self.number}"), "leave"))
        self.sim.checks.leaves(self.lanes.get("markers"), owner.epoch, in_hand, self.copying)
        self.drop()

    def drop(self) -> None:
        self._forget()

    # ------------------------------------------------------------------ sending

    @property
    def appends(self) -> list[m.Marker]:
        """Markers of the owner that are not sent yet."""
        if self.owner is not None:
            self._unsent += self.owner.take_appends()
        return self._unsent

    def of_receivers(self) -> list[m.Marker]:
        """Those of them that are written even when the owner no longer serves: the markers of receivers."""
        return [marker for marker in self._unsent if not m.is_owners(marker)]

    def send(self, topic: str, sent: Sent) -> None:
        lane = self.lanes.get(topic)
        if lane is None:
            lane = self.lanes[topic] = Lane(topic, self.number)
            self.sim.lanes.append(lane)
        lane.sent.append(sent)

    def flush(self) -> None:
        """Append one record of the owner's markers."""
        owner = self.owner
        assert owner is not None
        appends = self.appends
        size = len(appends) if self.sim.chance(0.7) else 1 + self.sim.below(len(appends))
        batch = appends[:size]
        del appends[:size]
        self.seq += 1
        seq = self.seq
        owner.sent(seq, batch)

        def confirmed(offset: int, timestamp_ms: int) -> None:
            if self.owner is owner:
                owner.acknowledged(seq, offset, timestamp_ms, batch, self.sim.now_ms)
                self.collect()

        def failed() -> None:
            if self.owner is owner:
                owner.failed(seq)

        value = m.encode(batch, owner.nonce, seq)
        self.send("markers", Sent(value, f"#{seq}", confirmed=confirmed, failed=failed))

    def forward(self, marker: m.Marker) -> None:
        """Append a receiver's marker without owning the partition."""
        self.send("markers", Sent(m.encode([marker], f"r{self.number}"), "forwarded"))

    # ------------------------------------------------------------------ claim and recover

    def claim(self) -> None:
        """Append an own marker; the tables are read once it is acknowledged."""
        sim = self.sim
        self._forget()
        sim.nonces += 1
        owner = self.owner = sim.make_owner(self, f"w{self.number}.{sim.nonces}")
        self.stage = "claiming"

        def confirmed(offset: int, timestamp_ms: int) -> None:
            if self.owner is owner and self.stage == "claiming":
                self.own_offset = offset
                self.read_tables_from_now()

        def failed() -> None:
            if self.owner is owner and self.stage == "claiming":
                self.drop()

        sim.note("w%d claims as %s", self.number, owner.nonce)
        value = m.encode([owner.claim()], owner.nonce, 0)
        self.send("markers", Sent(value, "own", confirmed=confirmed, failed=failed))

    def read_tables_from_now(self) -> None:
        self.stage = "reading"
        self.to_read = list(TABLES)
        self.sim.random.shuffle(self.to_read)

    def read_table(self) -> None:
        """Read one table to its end; after the last, restore."""
        sim = self.sim
        self.tables[self.to_read.pop()].catch_up()
        if self.to_read:
            return
        owner = self.owner
        assert owner is not None
        keys = [*self.tables["messages"].content, *self.tables["markers"].content]
        manifests = dict(self.tables["progress"].content)
        sim.count("recoveries")
        try:
            edges = edges_of(sim.queue, sim.markers, manifests.values(), sim.limits.queue_id)
            owner.restore(manifests, keys, self.load, edges, self.own_offset)
        except RowError as exc:
            sim.count("recoveries repeated")
            sim.note("w%d can't restore: %s", self.number, exc)
            self.recoveries += 1
            if self.recoveries == RECOVERIES_MAX // 2:
                self.refill()
            elif self.recoveries > RECOVERIES_MAX:
                sim.violated("G1 recovery", f"w{self.number} can't recover: {exc}")
            self.read_tables_from_now()
            return
        if owner.phase is Phase.LOST:
            sim.note("w%d: a later owner was faster", self.number)
            sim.count("overtaken")
            self.drop()
            return
        self.stage = "owner"
        self.queue_next = owner.partition.position
        self.markers_next = owner.partition.markers_position
        sim.note("w%d restored at queue %d, markers %d", self.number, self.queue_next, self.markers_next)
        sim.checks.partition(owner.partition, f"w{self.number} restored")

    def load(self, key: str) -> bytes:
        value = self.tables[table_of(key)].content.get(key)
        if value is None or (self.stage == "owner" and self.sim.chance(self.sim.odds.rot * 0.1)):
            raise RowError(f"no row {key!r}")
        return value

    def rot(self) -> None:
        """A row of the local store is damaged or gone; the changelog has it still."""
        table = self.tables[self.sim.pick(("messages", "messages", "markers"))]
        if table.content:
            key = self.sim.pick(list(table.content))
            self.sim.note("w%d: its row %s rots", self.number, key)
            if self.sim.chance(0.5):
                table.content[key] = b"rotten"
            else:
                del table.content[key]

    def refill(self) -> None:
        """The local store is filled again from the changelogs."""
        for table in self.tables.values():
            table.wipe()

    # ------------------------------------------------------------------ reading

    def seek(self) -> None:
        """Read on from what the core has."""
        if self.stage == "owner" and self.owner is not None:
            self.queue_next = self.owner.partition.position
            self.markers_next = self.owner.partition.markers_position

    def fetch_queue(self, limit: int) -> None:
        sim, owner = self.sim, self.owner
        assert owner is not None
        if owner.passes_deleted:
            return
        start = self.queue_next
        if start < sim.queue.start:
            sim.count("out of range")
            owner.begins_later(sim.queue.start, sim.markers.end, sim.now_ms)
            self.deleted()
            return
        stop, records = sim.queue.read(start, limit)
        end, since_ms = self.seen
        self.seen = (sim.queue.end, sim.now_ms)
        if stop == start:
            return
        self.queue_next = stop
        if sim.chance(sim.odds.dropped_chunk):
            sim.note("w%d loses queue chunk [%d, %d)", self.number, start, stop)
            return
        known_ms = since_ms if 0 <= end <= start else None
        if known_ms is not None and start <= owner.partition.position:
            arrivals = sim.arrivals.setdefault(owner.nonce, {})
            for record in records:
                if record.offset >= owner.partition.position:
                    arrivals[record.offset] = sim.now_ms - known_ms
        if not owner.ingest(start, stop, records, sim.now_ms, known_ms):
            sim.count("seeks")
            self.queue_next = owner.partition.position
        elif sim.chance(sim.odds.seek_back):
            self.queue_next = max(sim.queue.start, stop - sim.below(12))

    def look_again(self) -> None:
        """Read what was unreadable once more, in part or with what is around it."""
        sim, owner = self.sim, self.owner
        assert owner is not None
        missed = owner.partition.missed.ranges()
        i = 2 * sim.below(len(missed) // 2)
        if owner.lacks(sim.queue.start):
            sim.count("unreadable, and deleted")
            owner.begins_later(sim.queue.start, sim.markers.end, sim.now_ms)
            self.deleted()
            return
        start = max(sim.queue.start, missed[i] - sim.below(2))
        _, records = sim.queue.read(start, 1 << 30)
        stop = min(missed[i + 1] + sim.below(2), owner.partition.position)
        sim.note("w%d looks at [%d, %d) again", self.number, start, stop)
        before = owner.partition.unreadable_ranges()
        owner.read_again(start, stop, [record for record in records if record.offset < stop])
        sim.count("read again", owner.partition.unreadable_ranges() != before)
        self.collect()

    def fetch_markers(self, limit: int) -> None:
        sim, owner = self.sim, self.owner
        assert owner is not None
        start = self.markers_next
        if start < sim.markers.start:
            self.out_of_range("markers")
            return
        stop, records = sim.markers.read(start, limit)
        if stop == start:
            return
        self.markers_next = stop
        if sim.chance(sim.odds.dropped_chunk):
            sim.note("w%d loses markers chunk [%d, %d)", self.number, start, stop)
            return
        was = owner.phase
        if not owner.read_markers(start, stop, records, sim.now_ms):
            sim.count("seeks")
            self.markers_next = owner.partition.markers_position
            return
        if was is not owner.phase:
            sim.note("w%d: %s (epoch %d)", self.number, owner.phase.value, owner.epoch)
        if sim.chance(sim.odds.seek_back):
            self.markers_next = max(sim.markers.start, stop - sim.below(12))
        self.deleted()

    def deleted(self) -> None:
        """Note what the owner gave up to go on at the start of the queue log, and read on from there."""
        owner = self.owner
        assert owner is not None
        self.queue_next = max(self.queue_next, owner.partition.position)
        if losses := owner.take_losses():
            self.sim.checks.losses(owner.partition, losses)
        self.collect()

    def out_of_range(self, topic: str) -> None:
        """The next record was deleted: another owner has gone on, so recover again."""
        self.sim.note("w%d: position in %s was deleted", self.number, topic)
        self.sim.count("out of range")
        self.drop()

    # ------------------------------------------------------------------ serving

    def collect(self) -> None:
        """Take the effects of the core: deliveries, dead letters, poison, or the end of serving."""
        owner, sim = self.owner, self.sim
        assert owner is not None
        if owner.phase is Phase.LOST:
            sim.count("owners lost")
            self.say_last(owner)
            return
        sim.checks.serves(self)
        effects = owner.take_effects()
        if effects is not None:
            self._unsent += effects.appends
            for handout in effects.handouts:
                try:
                    records = {offset: owner.partition.record(offset) for offset in handout.offsets}
                except RowError:
                    owner.release(handout.offsets, handout.receipt, counted=False)
                    continue
                sim.checks.handout(self, handout, records)
                sim.receivers.take(handout)
            for offset in effects.dead:
                self.copy(offset)
            if effects.poison:
                poison = [offset for offset, _ in effects.poison if offset in owner.partition.messages]
                self.copying.update(poison)
                self.send("poison", Sent(poison, "poison", confirmed=self._ends(poison, "poison"), failed=None))
        if owner.phase is Phase.FAILED:
            if not isinstance(owner.error, RowError):
                assert owner.error is not None
                raise owner.error  # of our own: no fault that the simulator makes
            sim.note("w%d can't read: %s", self.number, owner.reason)
            sim.count("owners failed")
            sim.checks.partition(owner.partition, f"w{self.number} failed")
            self.say_last(owner)
            self.refill()

    def copy(self, offset: int) -> None:
        """Append the copy of a dead letter; when that is confirmed, end the message."""
        owner, sim = self.owner, self.sim
        assert owner is not None
        if offset not in owner.partition.messages:
            return  # finished in the meantime
        self.copying.add(offset)
        try:
            record = owner.partition.record(offset)
        except RowError:
            return
        queue = owner.partition.queue_of(offset)
        headers = [h for h in record.headers if h[0] not in OF_THE_STAY]
        headers.append(("marq-origin", b"%d:%d" % (sim.number, offset)))
        copy = Record(
            -1, -1, sim.settings[queue or ""].dead_letters_of(queue or "").encode(), record.value, tuple(headers)
        )
        topic = "queue" if sim.queue_id is None else "dead letters"
        sim.note("w%d copies dead letter %d", self.number, offset)
        self.send(topic, Sent(copy, f"copy of {offset}", confirmed=self._ends([offset], "dead"), failed=None))

    def _ends(self, offsets: list[int], outcome: m.Outcome) -> Callable[[int, int], None]:
        owner = self.owner

        def confirmed(offset: int, timestamp_ms: int) -> None:
            if owner is not None and self.owner is owner:
                self.copying.difference_update(offsets)
                owner.ended_as(outcome, offsets)

        return confirmed

    def acquire(self) -> None:
        sim, owner = self.sim, self.owner
        assert owner is not None
        queues = sim.some_queues()
        limit = 1 + sim.below(sim.odds.batch)
        before = sim.checks.before_acquire(owner, queues)
        shared_fate = sim.chance(0.3)
        batch = 0 if shared_fate or sim.chance(0.6) else 1
        pending = owner.acquire(
            queues,
            limit,
            "receiver",
            sim.now_ms,
            lease_ms=sim.lease_ms(),
            shared_fate=shared_fate,
            batch=batch,
            name="r",
        )
        sim.checks.acquired(owner, queues, pending, limit, before, shared_fate, batch)
        if pending is None:
            if owner.phase is Phase.FAILED:
                self.collect()
            return
        sim.note("w%d reserves %s as %d/%d", self.number, pending.offsets, owner.epoch, pending.delivery)
        self.pendings.append(pending)

    def receiver_goes(self) -> None:
        pending = self.pendings.pop(self.sim.below(len(self.pendings)))
        pending.cancel()

    def work(self) -> None:
        owner = self.owner
        assert owner is not None
        ttl_queues = self.sim.ttl_queues if self.sim.chance(0.5) else ()
        rests = self.rests(bool(ttl_queues))
        woken, unsent = dict(owner.partition.woken), len(owner._agenda.appends)
        due = owner.work(self.sim.now_ms, ttl_queues)
        if rests:
            busy = (due is not None and any(due)) or owner.partition.woken != woken
            self.sim.checks.rests(self, busy or len(owner._agenda.appends) != unsent, "work")
        self.collect()

    def tick(self) -> None:
        owner = self.owner
        assert owner is not None
        ttl_queues = [queue for queue in owner.partition.queues() if queue in self.sim.ttl_queues]
        rests = self.rests(bool(ttl_queues))
        ticked = owner.tick(self.sim.now_ms, ttl_queues)
        if rests:
            self.sim.checks.rests(self, ticked, "a tick")

    def rests(self, has_ttl: bool) -> bool:
        """Whether the owner says that it need not be asked now. What it says of later must not change by waiting."""
        owner, now = self.owner, self.sim.now_ms
        assert owner is not None
        next_ms = owner.next_ms(now, has_ttl)
        if not owner.serving or (next_ms is not None and next_ms <= now):
            return False
        until = now + 10_000 if next_ms is None else next_ms
        for later in {now + 1, (now + until) // 2, until - 1} - {now}:
            again = owner.next_ms(later, has_ttl)
            self.sim.checks.rests(self, again != next_ms, f"another time after {later - now} ms")
        self.sim.count("rests")
        return True

    def purge(self) -> None:
        owner = self.owner
        assert owner is not None
        queue = self.sim.some_queues()[0]
        self.sim.note("w%d purges %s below %d", self.number, queue, self.sim.queue.end)
        self.sim.purges[queue] = self.sim.queue.end
        owner.purge(queue, self.sim.queue.end)

    def shed(self) -> None:
        owner, sim = self.owner, self.sim
        assert owner is not None
        before = owner.partition.bytes
        wanted = sim.some_queues()[:1] if sim.chance(0.5) else []
        freed = owner.partition.shed(sim.below(4_000), wanted)
        assert owner.partition.bytes == before - freed
        sim.count("messages shed", freed > 0)

    # ------------------------------------------------------------------ checkpoints

    def step(self) -> None:
        """Write what the owner's checkpoint needs next, in the event context of a marker."""
        sim, owner = self.sim, self.owner
        assert owner is not None
        try:
            step = owner.step(sim.now_ms)
        except StepTimeoutError as exc:
            sim.note("w%d stops: %s", self.number, exc)
            sim.count("steps timed out")
            self.crash()
            return
        if owner.phase is Phase.FAILED:
            self.collect()
            return
        if isinstance(step, WriteRows):
            sim.note("w%d writes rows %s", self.number, [key for key, _ in step.rows])
            self.unwritten = len(step.rows)
            for key, value in step.rows:
                self.write(table_of(key), key, value, self.landed)
        elif isinstance(step, WriteManifest):
            sim.note("w%d writes manifest %s", self.number, step.key)
            self.unwritten = 1
            self.write("progress", step.key, step.value, self.landed)
        elif isinstance(step, Retire):
            self.retire(step)

    def landed(self, offset: int, timestamp_ms: int) -> None:
        self.unwritten -= 1
        if self.unwritten == 0 and self.owner is not None:
            self.owner.written(self.sim.now_ms)

    def write(self, table: str, key: str, value: bytes | None, confirmed: Any = None) -> None:
        content = self.tables[table].content
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
        if confirmed is not None:
            owner = self.owner
            inner = confirmed

            def confirmed(offset: int, timestamp_ms: int) -> None:
                if self.owner is owner:
                    inner(offset, timestamp_ms)

        self.send(f"{table} table", Sent(value, key, key=key, confirmed=confirmed))

    def retire(self, step: Retire) -> None:
        sim = self.sim
        sim.note("w%d retires %s %s below %s", self.number, step.rows, step.manifests, step[2:])
        sim.count("checkpoints")
        for key in step.rows:
            self.write(table_of(key), key, None)
        for key in step.manifests:
            self.write("progress", key, None)
        sim.deletions.append((step.position, step.markers_position))
