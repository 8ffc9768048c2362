"""Faults: when they happen, and how they end."""

from __future__ import annotations

import asyncio
import itertools
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from marq.core.rows import decode_manifest, encode_manifest
from tests.worksim.clock import Process

if TYPE_CHECKING:
    from tests.worksim.kafka import Log
    from tests.worksim.store import Rows
    from tests.worksim.worker import Worker
    from tests.worksim.world import World

#: What may happen, and how often, beside each other.
WEIGHTS = {
    "kill": 3.0,
    "end": 2.0,
    "stand": 3.0,
    "stand long": 1.0,
    "no leader": 2.0,
    "no leaders": 0.5,
    "stall": 1.5,
    "broker clock": 1.0,
    "worker clock": 0.5,
    "damage": 1.0,
    "damaged markers": 0.3,
    "foreign": 1.0,
    "network": 1.0,
    "clients": 1.0,
    "store": 0.7,
    "stall rows": 0.5,
    "power": 0.7,
    "rot": 0.5,
    "full disk": 0.3,
    "other cluster": 0.3,
    "strangers": 1.0,
    "compaction": 1.0,
}


class Theme(NamedTuple):
    """A kind of run, in which some things go wrong more often than others, so that rare paths are met."""

    weights: dict[str, float]  # of its faults, beside each other
    seconds: float = 0.0  # of the run; 0: as others
    pause: float = 1.0  # by which what faults and clients do is slower
    slow: float = 0.0  # seconds by which each request to Kafka takes longer, at random
    late_clients: bool = False  # they extend their leases at the last moment
    refused: float = 0.0  # of batches, for ever: `Odds.refused`
    deletes: bool = False  # each checkpoint deletes old records; else one in 30 s, and a part of the workers keeps some
    stands: float = 0.0  # how often a worker stands still once it has read the tables
    large: float = 0.03  # of messages: Kafka may find them, or their copies, too large
    jobs: bool = False  # clients make and delete queues all the time, and deleted ones are forgotten after a second
    careful: bool = False  # Kafka and network are well, and receivers finish what they get: no attempt may be burned


THEMES = {
    "mixed": Theme(WEIGHTS),
    # rows of checkpoints are not confirmed in time, and their owner stays
    "rows": Theme(
        {"stall rows": 6.0, "no leader": 1.0, "stand": 1.0, "stand long": 1.0, "end": 1.0, "compaction": 1.0},
        seconds=90.0,
    ),
    # partitions leave workers that could not send their markers
    "outboxes": Theme(
        {"stall markers": 6.0, "end": 3.0, "stand long": 2.0, "kill": 1.0, "strangers": 1.0}, seconds=60.0
    ),
    # what a receiver says comes when its lease ends
    "late": Theme({"stall markers": 0.5, "stand": 2.0, "worker clock": 0.5}, slow=0.15, late_clients=True),
    # partitions change hands all the time, which takes long
    "moves": Theme({"end": 6.0, "kill": 2.0}, seconds=60.0, slow=0.05, stands=0.5, deletes=True),
    # Kafka refuses batches for ever
    "refused": Theme(
        {"stall": 2.0, "stall markers": 1.0, "kill": 1.0, "end": 1.0, "damage": 1.0}, refused=0.1, large=0.3
    ),
    # the store of a worker loses rows, has no room, or can't be read
    "disks": Theme(
        {
            "power": 3.0,
            "rot": 3.0,
            "store": 2.0,
            "full disk": 1.0,
            "other cluster": 1.0,
            "kill": 1.0,
            "end": 1.0,
            "compaction": 1.0,
        }
    ),
    # what brokers have on their disks rots
    "bits": Theme({"bits": 6.0, "end": 1.0, "kill": 1.0, "damage": 0.5}),
    # somebody repeats what workers say to each other, and makes it up
    "strangers": Theme({"strangers": 6.0, "network": 1.0, "kill": 1.0, "end": 1.0}),
    # the clocks of brokers step, and workers change
    "clocks": Theme({"broker clock": 6.0, "end": 0.5, "stand": 0.5}),
    # queues are made, deleted, made again and forgotten
    "jobs": Theme({"kill": 1.0, "end": 1.0, "stand": 1.0}, seconds=60.0, slow=0.3, jobs=True),
    # as in a deploy
    "restarts": Theme({"end": 1.0}, careful=True),
    # all is well
    "calm": Theme({}),
    # little happens, for long
    "long": Theme(WEIGHTS, seconds=900.0, pause=20.0),
    # hours in which next to nothing happens: what grows, ends or is forgotten by the clock alone
    "hours": Theme(WEIGHTS, seconds=3 * 3_600.0, pause=300.0),
}
#: Themes of one kind of fault each.
ALONE = ("rows", "outboxes", "late", "moves", "refused", "disks", "bits", "strangers")
#: The themes of runs, as often as they are drawn.
DRAWN_THEMES = (*("mixed",) * 9, *ALONE, "long", "long", "hours")
#: Records of others in the markers topic: no JSON, and one that says without a seal that it is of a later version.
NO_MARKERS = (b"\xffno marker", b'{"v":99}')


def _is_manifest(row: tuple[bytes, bytes]) -> bool:
    return row[0].count(b"/") == 1


def _further(row: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """A manifest of a version that does not say of which world it is."""
    number, _ = row[0].split(b"/")
    manifest = decode_manifest(row[1])
    manifest.epoch, manifest.own, manifest.world = manifest.epoch + 5, manifest.own + 5, None
    manifest.position, manifest.markers_position = manifest.position + 5, manifest.markers_position + 5
    return b"%s/%d" % (number, manifest.epoch), encode_manifest(manifest)


class Faults:
    """Chooses faults, with odds that differ from run to run."""

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random  # of the fault that happens now
        self._random = random
        #: The faults of this run: number and name.
        self.happened: dict[int, str] = {}
        self.client_loss = 0.0
        self.store_odds = 0.0
        self.foreign = 0
        self.full_until: dict[int, float] = {}  # disks, by the slots of their workers
        self.theme = THEMES[world.shape.theme]
        self.ambush = random.choice((0.0, 0.01, 0.05)) if world.cut.ambushes else 0.0
        self.weights = {name: weight * random.choice((0, 1, 1, 4)) for name, weight in self.theme.weights.items()}
        self.pause_s = random.choice((0.5, 3.0, 10.0)) * self.theme.pause

    async def live(self) -> None:
        """Go wrong, until the end."""
        names = [name for name, weight in self.weights.items() if weight]
        for number in itertools.count() if names else ():
            r = self.world.entropy.of("fault", number)
            await asyncio.sleep(r.expovariate(1 / self.pause_s))
            name = r.choices(names, [self.weights[n] for n in names])[0]
            if number in self.world.cut.faults:
                continue
            self.random, self.happened[number] = r, name
            self.world.count(f"fault: {name}")
            getattr(self, "_" + name.replace(" ", "_"))()

    async def heal(self) -> None:
        """All that can be mended is."""
        world = self.world
        self.client_loss = 0.0
        world.net.replays = 0.0
        for worker in world.workers:
            if worker is not None:
                worker.process.clock_s = 0.0
                worker.process.go_on()
        await asyncio.sleep(1.0)
        for slot, worker in enumerate(world.workers):
            if worker is None:
                world.start(slot)

    def store_fails(self, worker: Worker) -> bool:
        return self.store_odds > 0 and self._random.random() < self.store_odds

    # -- workers

    def started(self, number: int) -> None:
        """A start is in the log, and its owner does not know yet: the worst of moments."""
        if self.world.healing or not self.world.shape.faults or self._random.random() >= self.ambush:
            return
        self.random = self._random
        owner = next((w for w in self.world.up() if number in w.ownership.owned), None)
        if owner is None or owner.process.state != Process.RUNS:
            return
        what = "leave" if self.theme.careful else self.random.choice(("stand", "kill", "leave"))
        self.world.count(f"ambush: {what}")
        if what == "stand":
            seconds = self.random.choice((0.4, 1.5, 5.0))
            self.world.tell("%s stands still for %s s", owner.process.name, seconds)
            owner.process.stand()
            self.world.kafka.later(seconds, owner.process.go_on)
        elif what == "kill":
            self.world.kafka.later(0.0, self._kill_it, owner)
        else:
            self._end_it(owner)

    def has_read(self, process: Process) -> None:
        """A worker has read tables, and is about to claim their partition."""
        if self.world.healing or not self.theme.stands or process.state != Process.RUNS:
            return
        if self._random.random() < self.theme.stands:
            self.world.count("ambush: has read")
            process.stand()
            self.world.kafka.later(self._random.choice((0.4, 1.5, 2.0)), process.go_on)

    def _one(self) -> Worker | None:
        up = [w for w in self.world.workers if w is not None and w.process.state == Process.RUNS]
        return self.random.choice(up) if up else None

    def _again(self, slot: int) -> None:
        world = self.world
        if self.random.random() < 0.2:
            world.disks[slot].clear()
            world.tell("the disk of w%s is new", slot)

        def start() -> None:
            if world.workers[slot] is None:
                world.start(slot)

        world.kafka.later(self.random.choice((0.1, 1.0, 15.0)), start)

    def _kill(self) -> None:
        worker = self._one()
        if worker is not None:
            self._kill_it(worker)

    def _kill_it(self, worker: Worker) -> None:
        if worker.process.state != Process.DEAD:
            self.world.kill(worker)
            self._again(worker.slot)

    def _end(self) -> None:
        worker = self._one()
        if worker is not None:
            self._end_it(worker)

    def _end_it(self, worker: Worker) -> None:
        if worker.is_up and not worker.ends:
            self.world.tell("%s is told to end", worker.process.name)
            worker.ends = True
            worker.process.spawn(worker.guarded(worker.end()))

    def ended(self, worker: Worker) -> None:
        """The process ended because it was told to."""
        self._again(worker.slot)

    def _stand(self, seconds: float = 0.0) -> None:
        worker = self._one()
        if worker is not None:
            seconds = seconds or self.random.choice((0.05, 0.4, 1.5, 5.0))
            self.world.tell("%s stands still for %s s", worker.process.name, seconds)
            worker.process.stand()
            self.world.kafka.later(seconds, worker.process.go_on)

    def _stand_long(self) -> None:
        self._stand(self.random.choice((11.0, 20.0, 45.0)))

    def _worker_clock(self) -> None:
        worker = self._one()
        if worker is not None:
            worker.process.clock_s = self.random.choice((-3_600.0, -5.0, 5.0, 3_600.0))

    # -- Kafka

    def _any_log(self) -> Log:
        topics = self.world.topics
        topic = self.random.choice((topics.queue, topics.markers, *topics.changelogs.values()))
        return self.world.kafka.log(topic, self.random.randrange(topics.partitions))

    def _no_leader(self) -> None:
        log, seconds = self._any_log(), self.random.choice((0.3, 2.0, 8.0))
        self.world.tell("%s has no leader for %s s", log, seconds)
        log.away_until = self.world.loop.now + seconds

    def _no_leaders(self) -> None:
        seconds = self.random.choice((0.3, 2.0, 8.0))
        self.world.tell("Kafka is away for %s s", seconds)
        for log in list(self.world.kafka.logs.values()):
            log.away_until = self.world.loop.now + seconds

    def _stall(self) -> None:
        log, seconds = self._any_log(), self.random.choice((2.0, 8.0, 25.0, 45.0))
        self.world.tell("%s is below its minimum of replicas for %s s", log, seconds)
        log.stalled_until = self.world.loop.now + seconds

    def _stall_markers(self) -> None:
        log = self.world.kafka.log(self.world.topics.markers, self.random.randrange(self.world.topics.partitions))
        seconds = self.random.choice((2.0, 8.0, 20.0, 45.0))
        self.world.tell("%s is below its minimum of replicas for %s s", log, seconds)
        log.stalled_until = self.world.loop.now + seconds

    def _stall_rows(self) -> None:
        """Rows are not confirmed for longer than the producer waits."""
        topics, number, seconds = self.world.topics, self.random.randrange(self.world.topics.partitions), 40.0
        for topic in topics.changelogs.values():
            log = self.world.kafka.log(topic, number)
            self.world.tell("%s is below its minimum of replicas for %s s", log, seconds)
            log.stalled_until = self.world.loop.now + seconds

    def _broker_clock(self) -> None:
        log, step_ms = self._any_log(), self.random.choice((-3_600_000, -4_000, -300, 300, 4_000, 3_600_000))
        self.world.tell("the clock of %s steps by %s ms", log, step_ms)
        log.clock_ms += step_ms
        if self.random.random() < 0.5:
            self.world.kafka.later(self.random.choice((0.5, 5.0)), self._step_back, log, step_ms)

    def _step_back(self, log: Log, step_ms: int) -> None:
        if not self.world.healing:
            log.clock_ms -= step_ms

    def _damage(self) -> None:
        log = self.world.kafka.log(self.world.topics.queue, self.random.randrange(self.world.topics.partitions))
        self.world.tell("%s @%s can't be decoded", log, log.damage())

    def _bits(self) -> None:
        """No replica has some records of a log whole, until one that has them is back."""
        topics, r = self.world.topics, self.random
        log = self.world.kafka.log(r.choice((topics.queue, topics.markers)), r.randrange(topics.partitions))
        start = r.randint(max(log.start, log.end - 200), log.end)
        stop = min(start + r.choice((1, 20)), log.end)
        if start < stop:
            self.world.tell("%s [%s, %s) can't be read", log, start, stop)
            log.rotten.add(start, stop)
            self.world.kafka.later(r.choice((1.0, 5.0, 20.0)), log.rotten.discard, start, stop)

    def _damaged_markers(self) -> None:
        log = self.world.kafka.log(self.world.topics.markers, self.random.randrange(self.world.topics.partitions))
        log.append([(None, self.random.choice(NO_MARKERS), ())])

    def _foreign(self) -> None:
        """Some other producer writes to the queue topic."""
        world, r = self.world, self.random
        log = world.kafka.log(world.topics.queue, r.randrange(world.topics.partitions))
        self.foreign += 1
        key = r.choice((b"plain", b"new-%d" % r.randrange(3), None, b"\xff"))
        headers = r.choice(((), (("marq-delay-ms", b"700"),), (("marq-delay-ms", b"soon"),), (("x", b"1"),)))
        if not log.is_away:
            log.append([(key, b"foreign-%d" % self.foreign, headers)])
            if key is not None and key.startswith(b"new"):
                world.clients.add_queue(key.decode())

    def _compaction(self) -> None:
        topics = self.world.topics
        self.world.kafka.log(
            self.random.choice(list(topics.changelogs.values())), self.random.randrange(topics.partitions)
        ).compact()

    # -- the rest

    def _network(self) -> None:
        net, r = self.world.net, self.random
        net.loss = r.choice((0.0, 0.1, 0.6))
        net.jitter_s = r.choice((0.001, 0.05, 0.8))

    def _clients(self) -> None:
        self.client_loss = self.random.choice((0.0, 0.05, 0.3))

    def _strangers(self) -> None:
        """Requests of workers come again, or from somebody without the secret."""
        self.world.net.replays = self.random.choice((0.0, 0.05, 0.3))

    # -- disks

    def _disk(self) -> tuple[int, list[Rows]]:
        slot = self.random.randrange(len(self.world.disks))
        return slot, [rows for table in self.world.disks[slot].values() for rows in table.values() if rows]

    def _power(self) -> None:
        """A machine loses its last writes: each store those behind some moment, as RocksDB promises."""
        slot, stores = self._disk()
        self.world.tell("the power of w%s fails", slot)
        worker = self.world.workers[slot]
        if worker is not None:
            self._kill_it(worker)
        for rows in stores:
            rows.lose_last(self.random.choice((0, 1, 3, 1_000)))

    def _rot(self) -> None:
        """A row of a store can't be read any more."""
        slot, stores = self._disk()
        if stores:
            rows = self.random.choice(stores)
            rows.rotten.add(self.random.choice(sorted(rows)))
            self.world.tell("the store of w%s has a damaged row", slot)

    def _other_cluster(self) -> None:
        """A machine is used with another Kafka, where its partitions have come further, and then with this one."""
        slot, stores = self._disk()
        self.world.tell("the stores of w%s are of another Kafka", slot)
        worker = self.world.workers[slot]
        if worker is not None:
            self._kill_it(worker)
        for rows in stores:
            rows.comes_from("another", dict(map(_further, filter(_is_manifest, rows.items()))))

    def _full_disk(self) -> None:
        slot = self.random.randrange(len(self.world.disks))
        self.world.tell("the disk of w%s is full", slot)
        self.full_until[slot] = self.world.loop.now + self.random.choice((0.2, 2.0, 10.0))

    def is_full(self, slot: int) -> bool:
        return not self.world.healing and self.full_until.get(slot, 0.0) > self.world.loop.now

    def _store(self) -> None:
        self.store_odds = self.random.choice((0.02, 0.3))
        self.world.kafka.later(self.random.choice((0.5, 3.0)), self._store_is_well)

    def _store_is_well(self) -> None:
        self.store_odds = 0.0
