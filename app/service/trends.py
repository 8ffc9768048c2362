"""Rates and counts of the cluster and of each queue, now and in the last 15 minutes.

Every worker samples itself, and keeps a bounded history in memory. The worker that is asked adds up the histories of
all. With many queues or messages, samples are taken less often, so that they take no more than `COUNTING_SHARE` and
`AGING_SHARE` of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from operator import add
from typing import Any

import msgspec
from mode import Service

from app.cluster.peers import MemberTrouble, Peers, peer_call
from app.engine.ownership import Ownership
from app.engine.second_looks import unreadable_in
from app.engine.stalls import Stall
from app.service.census import Census, Uncounted
from app.service.descriptions import LossView
from app.service.histories import FLOWS, POINTS, STEP_S, History, Point, Series, merged, summed
from app.service.watches import Receivers
from marq.errors import MarqError

#: Queues with a history: those in which something happened.
QUEUES_MAX = 10_000
#: Seconds for which counts of queues are reused while somebody looks at them.
COUNTED_S = 2.0
#: Shares of its time that a worker may spend on counting, if there are many queues, and on finding the oldest messages,
#: which takes a look at each message in memory.
COUNTING_SHARE = 0.015
AGING_SHARE = 0.01
#: Queues that are examined before other work gets its turn.
TURN_QUEUES = 250
#: Seconds for which the answers of all workers are reused, for any number of requests.
GATHERED_S = 2.0
_OTHER_ENDS = ("expired", "purged", "poison", "moved")


class QueueNow(msgspec.Struct, array_like=True):
    """A queue at one moment. Rates are messages a second; `oldest_ms` is -1 without messages."""

    ready: int = 0
    delayed: int = 0
    in_flight: int = 0
    dead: int = 0  # topic mode: in a topic of the user's
    oldest_ms: int = -1
    sent_rate: float = 0.0
    done_rate: float = 0.0

    @property
    def unfinished(self) -> int:
        return self.ready + self.delayed + self.in_flight

    def add(self, other: QueueNow) -> None:
        """Add the counts of another worker."""
        self.ready += other.ready
        self.delayed += other.delayed
        self.in_flight += other.in_flight
        self.dead += other.dead
        self.oldest_ms = max(self.oldest_ms, other.oldest_ms)
        self.sent_rate += other.sent_rate
        self.done_rate += other.done_rate


class WorkerNow(msgspec.Struct):
    """The present state of one worker, for the pages of the cockpit."""

    worker: str
    ready: bool
    rebalancing: bool
    partitions: list[int]
    waiting_receives: int
    memory_bytes: int
    counted: int  # how often its messages were counted
    queues: dict[str, QueueNow]
    without_receiver: dict[str, int]
    unserved: dict[int, str]
    stalled: dict[int, Stall]
    unreadable: dict[int, int]  # partition -> offsets that no replica has whole
    breakers: list[str]  # queues whose circuit breaker is open
    history: list[Point]
    topics: list[str] = []  # what is wrong with their partitions
    uncounted: dict[int, int] = {}  # partition -> milliseconds for which messages there were not counted
    lost: dict[int, list[LossView]] = {}  # partition -> what it has lost within a day


class SeriesWanted(msgspec.Struct):
    """The histories of some queues."""

    queues: list[str]


class Cluster(msgspec.Struct):
    """All workers together."""

    at_s: float  # monotonic
    names: list[str]  # of all queues, in order
    workers: dict[str, WorkerNow]  # by address
    missing: list[str]
    unseen: set[int]  # partitions of those
    troubles: list[MemberTrouble]
    queues: dict[str, QueueNow]
    first: int  # step
    history: list[Point | None]  # None: not all partitions were counted
    unknown: dict[int, int] = {}  # partition that is not counted, or not to its end -> since when, in ms of this clock
    shown: dict[Any, Any] = {}  # what pages made of it; kept for as long as it stays true


class Trends(Service):
    """Samples this worker, and merges the samples of all workers."""

    def __init__(
        self,
        ownership: Ownership,
        census: Census,
        receivers: Receivers,
        peers: Peers,
        waiting_receives: Callable[[], int],
        memory_bytes: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._ownership = ownership
        self._census = census
        self._receivers = receivers
        self._peers = peers
        self._waiting_receives = waiting_receives
        self._memory_bytes = memory_bytes
        self._points: list[Point] = []
        self._seen: dict[int, tuple[object, dict[str, int]]] = {}  # partition -> its owner, counters when last looked
        self._read = 0
        self._histories: dict[str, History] = {}  # the one with the latest change last
        self._now: dict[str, QueueNow] = {}
        self._counted_s = -1e9  # monotonic
        self._counted = 0
        self._uncounted = Uncounted({}, [], [])  # at that time
        self._unknown: dict[int, int] = {}  # partitions that no worker has counted -> since when, in ms of this clock
        self._counting_s = 0.0  # that the last counting took
        self._ages: dict[str, int] = {}
        self._aged_s = -1e9  # monotonic
        self._aging_s = 0.0  # that looking for the oldest messages took
        self._counting = asyncio.Lock()
        self._gathering = asyncio.Lock()
        self._cluster: Cluster | None = None
        self._left: dict[str, list[Point]] = {}  # histories that workers told, which may be gone meanwhile
        peers.register(self)

    # ------------------------------------------------------------------ this worker

    @Service.task
    async def _sample(self) -> None:
        while not self.should_stop:
            await asyncio.sleep(STEP_S - time.time() % STEP_S)
            try:
                await self.sample(int(time.time()) // STEP_S - 1)
            except MarqError as exc:  # a row that can't be read: its partition is about to be let go of
                self.log.warning("This worker could not be sampled: %s", exc)

    async def sample(self, step: int) -> None:
        """Add a point for the step that is over."""
        await self._count(STEP_S - 0.5, step)
        takes_dead_letters = self._ownership.catalog.takes_dead_letters
        now, flows = [one for queue, one in self._now.items() if not takes_dead_letters(queue)], self._flows()
        # a timer may end a moment before its time: then a step comes again, and its points would be added up
        while self._points and self._points[-1].step >= step:
            flows = tuple(map(add, self._points.pop().flows, flows))
        self._points.append(
            Point(
                step,
                flows,
                sum(one.unfinished for one in now),
                sum(one.in_flight for one in now),
                max((one.oldest_ms for one in now), default=-1),
                len(self._uncounted.served) - len(self._uncounted.since_ms),
            )
        )
        del self._points[:-POINTS]

    def _flows(self) -> tuple[int, int, int, int, int, int]:
        """The events since the last call, without those that a partition had counted before it came here."""
        intake = self._ownership.intake
        sent, self._read = intake.total - self._read, intake.total
        found = dict.fromkeys(FLOWS, 0)
        seen: dict[int, tuple[object, dict[str, int]]] = {}
        for number, owned in self._ownership.owned.items():
            if not owned.serving:
                continue
            counters = dict(owned.owner.partition.counters)
            owner, before = self._seen.get(number, (None, {}))
            seen[number] = owned.owner, counters
            if owner is not owned.owner:
                continue
            for name, count in counters.items():
                name = "other_ends" if name in _OTHER_ENDS else name
                if name in found:
                    found[name] += count
            for name, count in before.items():
                name = "other_ends" if name in _OTHER_ENDS else name
                if name in found:
                    found[name] -= count
        self._seen = seen
        found["sent"] = sent
        return tuple(max(0, found[name]) for name in FLOWS)  # type: ignore[return-value]

    async def _count(self, kept_s: float, step: int) -> None:
        """Count the messages of queues, unless that was done a moment ago."""
        async with self._counting:
            if time.monotonic() - self._counted_s < max(kept_s, self._counting_s / COUNTING_SHARE):
                return
            ages = await self._ages_now(kept_s)
            self._uncounted = await self._census.uncounted_here([])
            began_s = time.thread_time()
            counts, sent = self._census.counts(), self._ownership.intake.take()
            now: dict[str, QueueNow] = {}
            for number, queue in enumerate(counts.keys() | sent.keys() | self._now.keys(), 1):
                if not number % TURN_QUEUES:
                    await asyncio.sleep(0)
                states, came = counts.get(queue), sent.get(queue, 0)
                one = QueueNow()
                if states is not None:
                    one.ready, one.delayed, one.in_flight = states["ready"], states["delayed"], states["in_flight"]
                    one.dead, one.oldest_ms = states.get("dead", 0), ages.get(queue, -1) if one.unfinished else -1
                self._note(step, queue, came, one, self._now.get(queue))
                if one.unfinished or one.dead or one.sent_rate or one.done_rate:
                    now[queue] = one
            self._now = now
            self._counting_s = time.thread_time() - began_s
            self._counted_s = time.monotonic()
            self._counted += 1

    async def _ages_now(self, kept_s: float) -> dict[str, int]:
        """The age of the oldest message of each queue: found now, or computed from the last time."""
        passed_s = time.monotonic() - self._aged_s
        if passed_s < max(kept_s, self._aging_s / AGING_SHARE):
            return {queue: age_ms + round(passed_s * 1000) for queue, age_ms in self._ages.items()}
        began_s = time.thread_time()
        self._ages = await self._census.ages()
        # the time of other work in between counts too: a busy worker does this less often
        self._aging_s = time.thread_time() - began_s
        self._aged_s = time.monotonic()
        return self._ages

    def _note(self, step: int, queue: str, sent: int, now: QueueNow, before: QueueNow | None) -> None:
        history = self._histories.get(queue)
        stood = before.unfinished if before is not None else 0
        if history is None:
            if not sent and now.unfinished == stood:
                return
            history = History(step - 1, stood)
            if len(self._histories) >= QUEUES_MAX:
                del self._histories[next(iter(self._histories))]
            self._histories[queue] = history
        elif sent or now.unfinished != stood:
            self._histories[queue] = self._histories.pop(queue)  # the latest one
        history.note(step, sent, now.unfinished, now.in_flight)
        now.sent_rate, now.done_rate = history.rates()

    @peer_call("now")
    async def now_here(self, _: None) -> WorkerNow:
        """The present state of this worker."""
        ownership = self._ownership
        await self._count(COUNTED_S, int(time.time()) // STEP_S)
        owned = ownership.owned
        return WorkerNow(
            worker=ownership.worker_name,
            ready=ownership.ready,
            rebalancing=self._peers.rebalancing,
            partitions=sorted(number for number, one in owned.items() if one.serving),
            waiting_receives=self._waiting_receives(),
            memory_bytes=self._memory_bytes(),
            counted=self._counted,
            queues=self._now,
            without_receiver=self._receivers.without,
            unserved={n: reason for n, reason in ownership.unserved.items() if n not in owned},
            stalled=ownership.stalls.now(),
            unreadable=unreadable_in(owned),
            breakers=sorted(q for q, b in ownership.breakers.states().items() if b.state != "closed"),
            history=self._points,
            topics=ownership.topic_lines,
            uncounted=self._uncounted.since_ms,
            lost={n: losses for n, one in owned.items() if (losses := LossView.recent(one.owner.partition))},
        )

    @peer_call("series")
    async def series_here(self, wanted: SeriesWanted) -> dict[str, Series]:
        """The histories of some queues in this worker."""
        found: dict[str, Series] = {}
        for queue in wanted.queues:
            history = self._histories.get(queue)
            if history is not None:
                found[queue] = history.series()
            elif queue in self._now:
                now = self._now[queue]
                step = int(time.time()) // STEP_S
                found[queue] = Series(step, [0], [now.unfinished], [now.in_flight])
        return found

    # ------------------------------------------------------------------ all workers

    async def cluster(self) -> Cluster:
        """The present state of all workers, at most a moment old."""
        async with self._gathering:
            if self._cluster is None or time.monotonic() - self._cluster.at_s > GATHERED_S:
                self._cluster = await self._gather(self._cluster)
            return self._cluster

    async def _gather(self, before: Cluster | None) -> Cluster:
        answers = await self._peers.everywhere(self.now_here, None)
        workers = {url: told for url, told in answers.items() if not isinstance(told, MarqError)}
        names = self._ownership.catalog.names()
        last = int(time.time()) // STEP_S - 1
        self._left |= {url: told.history for url, told in workers.items()}
        self._left = {url: h for url, h in self._left.items() if h and h[-1].step > last - POINTS}
        first, history = merged(self._left.values(), last, self._ownership.topics.partitions)
        peers = self._peers
        now = Cluster(
            time.monotonic(),
            names,
            workers,
            missing=peers.missing(answers),
            unseen=peers.unseen(answers),
            troubles=peers.troubles(),
            queues={},
            first=first,
            history=history,
        )
        now.unknown = self._unknown = self._not_counted(workers.values())
        if before is not None and _counts_of(before) == _counts_of(now):
            now.queues = before.queues
            if before.names == names:
                now.shown = before.shown
            return now
        for told in workers.values():
            for queue, one in told.queues.items():
                total = now.queues.get(queue)
                if total is None:
                    total = now.queues[queue] = QueueNow()
                total.add(one)
            await asyncio.sleep(0)
        return now

    def others(self, cluster: Cluster) -> list[str]:
        """URLs at which people find other workers that answer."""
        return [self._peers.shown(url) for url in cluster.workers if url != self._peers.url]

    def _not_counted(self, workers: Iterable[WorkerNow]) -> dict[int, int]:
        """The partitions of which messages are in no figure, and since when."""
        now, since, served = time.time_ns() // 1_000_000, dict[int, int](), set[int]()
        for told in workers:
            served.update(told.partitions)
            since |= {number: now - ms for number, ms in told.uncounted.items()}
        since |= {number: now for number in range(self._ownership.topics.partitions) if number not in served}
        return {number: min(ms, self._unknown.get(number, ms)) for number, ms in since.items()}

    async def series(self, queues: list[str]) -> dict[str, Series]:
        """The histories of some queues, added up over all workers. All have the same length."""
        cluster = await self.cluster()
        answers = await self._peers.everywhere(self.series_here, SeriesWanted(queues))
        told = {url: answer for url, answer in answers.items() if not isinstance(answer, MarqError)}
        # what a worker had of a queue that does not answer any more, or is gone, nobody can tell
        lost = max((history[-1].step for url, history in self._left.items() if url not in told), default=-1)
        known = {step for step, point in enumerate(cluster.history, cluster.first) if point is not None and step > lost}
        last = cluster.first + len(cluster.history) - 1
        return {queue: summed([one[queue] for one in told.values() if queue in one], last, known) for queue in queues}


def _counts_of(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """The counts of workers that it was made of, to see if there are newer ones."""
    return {url: (told.worker, told.counted) for url, told in cluster.workers.items()}
