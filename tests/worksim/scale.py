"""``python -m tests.worksim.scale``: a large installation on virtual time, and what its workers say to each other.

Counts calls between workers, not time: what a call or a message costs is measured on real ones (`docs/scale.md`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from marq.errors import MarqError
from marq.protocol.messages import Entry
from tests.worksim.group import Group
from tests.worksim.worker import Worker
from tests.worksim.world import Shape, World

#: Seconds before a measurement of traffic: so long it takes until all wait.
SETTLE_S = 3.0
QUEUES = 10
#: Messages a second in the installation.
RATES = (50, 500)
#: Receives a second in the installation that find nothing and do not wait.
POLLS = 200


class Measured(NamedTuple):
    """What workers said to each other in a while."""

    what: str
    seconds: float
    workers: int
    receives: int
    calls: Counter[str]

    @property
    def each(self) -> float:
        """Calls for a receive."""
        return self.calls.total() / max(1, self.receives)

    def __str__(self) -> str:
        a_second = {name: count / self.seconds for name, count in self.calls.most_common(6)}
        return (
            f"{self.what}: {self.calls.total() / self.seconds / self.workers:.1f} calls/s a worker, "
            f"{self.each:.2f} a receive (all workers, a second: "
            f"{', '.join(f'{name} {rate:.1f}' for name, rate in a_second.items())})"
        )


class Large(World):
    """An installation without faults, as large as one likes."""

    def __init__(
        self,
        seed: int,
        workers: int,
        partitions: int,
        receivers: int,
        seconds: float = 20.0,
        rates: tuple[int, ...] = RATES,
        say: Callable[[object], None] = lambda line: None,
    ) -> None:
        super().__init__(seed, Shape(workers, partitions, 0, seconds, faults=False))
        self.receivers = receivers
        self.rates = rates
        self.say = say
        self.received = 0
        self.anywhere = False  # receivers choose a worker for each receive
        self.measured: dict[str, Measured] = {}
        for truth in self.truths:  # they cost more than all workers
            truth.queue.on_append = truth.markers.on_append = lambda record: None

    async def _run(self) -> None:
        self.group = Group(self.kafka, self.shape.partitions)
        for slot in range(self.shape.workers):
            self.start(slot)
        await self._served("start", self.shape.workers)
        await self._measure("idle")
        await self._short_polls()
        for self.anywhere in (False, True):
            await self._traffic("anywhere" if self.anywhere else "sticky")
        slot = self.shape.workers - 1
        worker = self.workers[slot]
        assert worker is not None
        self.kill(worker)
        await self._served("a worker is killed", self.shape.workers - 1)
        self.start(slot)
        await self._served("a worker joins", self.shape.workers)

    # -- what is measured

    async def _measure(self, what: str) -> None:
        before, received = Counter(self.calls), self.received
        await asyncio.sleep(self.shape.seconds)
        self._note(what, before, received)

    def _note(self, what: str, before: Counter[str], received: int) -> None:
        found = Measured(what, self.shape.seconds, self.shape.workers, self.received - received, self.calls - before)
        self.measured[what] = found
        self.say(found)

    async def _short_polls(self) -> None:
        """Receives that find nothing and do not wait."""
        before, received, until = Counter(self.calls), self.received, self.loop.now + self.shape.seconds
        polls = []
        while self.loop.now < until and self.violation is None:
            polls.append(asyncio.ensure_future(self._receive("plain", 0, self.random.choice(self.up()))))
            await asyncio.sleep(1 / POLLS)
        await asyncio.gather(*polls)
        self._note("empty short polls", before, received)

    async def _traffic(self, who: str) -> None:
        """Receivers that wait, and messages for them."""
        stop = asyncio.Event()
        takers = [asyncio.ensure_future(self._taker(number, stop)) for number in range(self.receivers)]
        await asyncio.sleep(SETTLE_S)
        await self._measure(f"{who}: {self.receivers} wait")
        for rate in self.rates:
            sender = asyncio.ensure_future(self._sender(rate))
            await asyncio.sleep(SETTLE_S)
            await self._measure(f"{who}: {rate} messages/s")
            sender.cancel()
        stop.set()
        await asyncio.gather(*takers)

    async def _served(self, what: str, workers: int) -> None:
        """Wait until all partitions are served, evenly by all workers."""
        began, real, before = self.loop.now, time.monotonic(), Counter(self.calls)
        had = {n: w for w in self.up() for n, owned in w.ownership.owned.items() if owned.serving}
        while self.violation is None:
            await asyncio.sleep(0.1)
            served = {n: w for w in self.up() for n, owned in w.ownership.owned.items() if owned.serving}
            counts = Counter(worker.url for worker in served.values()).values()
            if len(served) == self.shape.partitions and len(counts) == workers and max(counts) - min(counts) <= 1:
                break
        self._raise_first()
        moved = sum(served[n] is not worker for n, worker in had.items())
        self.say(
            f"{what}: all served after {self.loop.now - began:.1f} s, {min(counts)} to {max(counts)} partitions each; "
            f"{moved} of those still served moved; {(self.calls - before).total()} calls "
            f"({time.monotonic() - real:.0f} s of real time)"
        )

    # -- clients

    async def _taker(self, number: int, stop: asyncio.Event) -> None:
        while not stop.is_set() and self.violation is None:
            up = self.up()
            worker = self.random.choice(up) if self.anywhere else up[number % len(up)]
            await self._receive(f"queue{number // len(up) % QUEUES}", 20_000, worker)

    async def _receive(self, queue: str, wait_ms: int, worker: Worker) -> None:
        operations, spawn = worker.operations, worker.process.spawn
        self.received += 1
        try:
            found = await spawn(
                operations.receive(queue, gone=lambda: False, limit=10, wait_ms=wait_ms, lease_ms=30_000)
            )
            if found:
                await spawn(operations.ack([one.receipt for one in found]))
        except MarqError as exc:
            self.count(f"receiver: {exc}")

    async def _sender(self, rate: int) -> None:
        while True:
            worker = self.random.choice(self.up())
            queue = f"queue{self.random.randrange(QUEUES)}"
            worker.process.spawn(worker.operations.send(queue, [Entry(b"x" * 100)]))
            await asyncio.sleep(1 / rate)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.worksim.scale", description=__doc__)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--receivers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    Large(
        args.seed,
        args.workers,
        args.partitions,
        args.receivers,
        args.seconds,
        say=lambda line: print(line, flush=True),
    ).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
