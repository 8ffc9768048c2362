"""Queues for single jobs: made, deleted, made again and forgotten, while all workers do so at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from marq.errors import UnknownQueueError

if TYPE_CHECKING:
    from tests.worksim.clients import Clients
    from tests.worksim.worker import Worker

#: Queues of this kind at a time.
JOBS = 3
#: Seconds until all workers know of a change.
KNOWN_S = 30.0


class Jobs:
    """What is confirmed of them."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._names = [f"job-{number}" for number in range(JOBS)]
        self._confirmed: dict[str, int | None] = {}  # queue -> its visibility timeout; None: it is deleted
        self._count = JOBS
        self._busy: set[str] = set()

    async def change(self) -> None:
        """Make or delete one. If nobody says what came of it, another one takes its place."""
        clients, world = self._clients, self._clients.world
        place = clients.random.randrange(JOBS)
        queue = self._names[place]
        if queue in self._busy:
            return
        self._busy.add(queue)
        expected = self._confirmed.pop(queue, None)  # not known for as long as a change is on its way
        answered = False
        try:
            if expected is None:
                timeout_ms = clients.random.randrange(1_000, 1_000_000)
                values = {"visibility_timeout_ms": timeout_ms}
                _, is_new = await clients.call(lambda worker: worker.operations.create_queue(queue, values))
                world.count("jobs made" if is_new else "jobs found")
                self._confirmed[queue] = timeout_ms
            else:
                await self._is_in_force(queue, expected)
                await clients.call(lambda worker: worker.operations.delete_queue(queue))
                world.count("jobs deleted")
                self._confirmed[queue] = None
            answered = True
            world.tell("%s: %s", queue, self._confirmed[queue])
        finally:
            self._busy.discard(queue)
            if not answered:
                self._names[place] = f"job-{self._count}"
                self._count += 1

    async def _is_in_force(self, queue: str, expected: int) -> None:
        """Check that a worker knows a queue with the settings that were confirmed, soon."""
        clients, found = self._clients, None
        until = clients.world.loop.now + KNOWN_S
        while clients.world.loop.now < until:
            try:
                found = await clients.call(lambda worker: _timeout_of(worker, queue))
            except UnknownQueueError:
                found = None
            if found == expected:
                return
            await asyncio.sleep(0.5)
        clients.world.violated("queues", f"{queue} was made with {expected}, which was confirmed, and has {found}")

    def look(self) -> None:
        """Check all, when the faults are over."""
        for queue, expected in self._confirmed.items():
            for worker in self._clients.world.up():
                record = worker.catalog.records.get(queue)
                found = record.settings.visibility_timeout_ms if record is not None and record.active else None
                if found != expected:
                    self._clients.world.violated(
                        "queues", f"{worker.process.name}: {queue} has {found}, not {expected}"
                    )


async def _timeout_of(worker: Worker, queue: str) -> int:
    return int(worker.operations.get_queue(queue).settings["visibility_timeout_ms"])
