"""What the queues of the catalog want done in the partitions: purges, queues that messages make, messages of no queue.

A purge is an intent in the catalog, with the offset of each partition below which everything is to go. The owner of
each partition appends its marker; once all have, the owner of partition 0 takes the intent out of the catalog.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mode import Service

from app.cluster.peers import Peers, peer_call
from app.engine.catalog import QueueRecord
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.settings import Settings
from marq.core.policies import name_problem
from marq.errors import MarqError

#: Seconds between rounds.
INTERVAL_S = 0.1
#: Every how many rounds to look at what may take longer.
SLOW_EVERY = 10
#: Queues that are written to the catalog at once.
MADE_AT_ONCE = 200
#: Every how many rounds to forget queues that were deleted long ago.
FORGET_EVERY = 6_000


class Housekeeping(Service):
    """Runs as long as the worker."""

    def __init__(self, ownership: Ownership, settings: Settings, peers: Peers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ownership = ownership
        self._catalog = ownership.catalog
        self._settings = settings
        self._peers = peers
        self._purged: dict[tuple[int, int, str], bool] = {}  # partition, epoch, change -> whether its marker is folded
        peers.register(self)

    @Service.task
    async def _run(self) -> None:
        count = 0
        while not self.should_stop:
            await asyncio.sleep(INTERVAL_S)
            count += 1
            try:
                self._purge()
                await self._name_queues()
                if count % SLOW_EVERY == 0:
                    await self._finish_purges()
                    if 0 in self._ownership.held:
                        await self._catalog.repeat_overwritten()
                if count % FORGET_EVERY == 0 and 0 in self._ownership.held:
                    await self._catalog.forget_deleted()
            except MarqError as exc:
                self.log.warning("%s", exc)

    # ------------------------------------------------------------------ purges

    def _purge(self) -> None:
        """Append the purge markers of the partitions that this worker owns."""
        catalog = self._catalog
        if not catalog.purging:
            self._purged.clear()
            return
        for held in self._ownership.held.values():
            if held.serving:
                for queue, record in catalog.purging.items():
                    self._purge_in(held, queue, record)

    def _purge_in(self, held: OwnedPartition, queue: str, record: QueueRecord) -> None:
        key = (held.number, held.owner.epoch, record.by)
        if key in self._purged or held.number >= len(record.purge):
            return
        before = record.purge[held.number]
        if before <= 0:
            self._purged[key] = True
            return
        self._purged[key] = False
        held.owner.purge(queue, before)
        folded = held.outbox.put_confirmed(held.owner.take_appends())
        folded.add_done_callback(lambda done: self._on_appended(key, done))

    def _on_appended(self, key: tuple[int, int, str], done: asyncio.Future[int]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._purged.pop(key, None)  # once more
        else:
            self._purged[key] = True

    @peer_call("purged")
    async def purged_here(self, changes: list[str]) -> dict[str, list[int]]:
        """Which partitions here are purged of what the changes want purged."""
        held = self._ownership.held
        wanted = set(changes)
        found: dict[str, list[int]] = {}
        for (number, epoch, by), done in self._purged.items():
            one = held.get(number)
            if done and by in wanted and one is not None and one.serving and one.owner.epoch == epoch:
                found.setdefault(by, []).append(number)
        return found

    async def _finish_purges(self) -> None:
        catalog, ownership = self._catalog, self._ownership
        if not catalog.purging or 0 not in ownership.held or not ownership.held[0].serving:
            return
        intents = {record.by: queue for queue, record in catalog.purging.items()}
        done: dict[str, set[int]] = {}
        for answer in (await self._peers.everywhere(self.purged_here, list(intents))).values():
            if not isinstance(answer, MarqError):
                for by, numbers in answer.items():
                    done.setdefault(by, set()).update(numbers)
        for by, queue in intents.items():
            if len(done.get(by, ())) == ownership.topics.partitions:
                await catalog.purged(queue, by)

    # ------------------------------------------------------------------ queues that messages make

    async def _name_queues(self) -> None:
        """Create the queues of messages that any Kafka producer wrote. If that is off, quarantine the messages."""
        catalog, settings = self._catalog, self._settings
        if settings.queue_id is not None:
            return
        unknown: dict[str, list[OwnedPartition]] = {}
        for held in self._ownership.held.values():
            if held.serving:
                partition = held.owner.partition
                for queue in {**partition.named, **dict.fromkeys(partition.queues())}:
                    record = catalog.records.get(queue)
                    if record is not None and record.state == "deleting":
                        continue
                    listed = record.active if record is not None else queue in catalog.auto
                    if not listed and (settings.auto_create or not catalog.exists(queue)):
                        unknown.setdefault(queue, []).append(held)
                    else:
                        partition.named.pop(queue, None)
        if not unknown:
            return
        if not settings.auto_create:
            await catalog.catch_up()
        to_make = []
        for queue, where in unknown.items():
            reason = name_problem(queue)
            if reason is None and not settings.auto_create and not catalog.exists(queue):
                reason = f"there is no queue {queue!r}"
            if reason is not None:
                for held in where:
                    if held.serving:
                        held.owner.partition.named.pop(queue, None)
                        held.owner.partition.quarantine(queue, reason)
            elif settings.auto_create and any(h.serving and _had_any(h, queue) for h in where):
                to_make.append(queue)
        for i in range(0, len(to_make), MADE_AT_ONCE):
            await asyncio.gather(*(catalog.make(queue) for queue in to_make[i : i + MADE_AT_ONCE]))


def _had_any(held: OwnedPartition, queue: str) -> bool:
    """Whether a message of `queue` was read and not purged, whatever became of it, or is ready."""
    partition = held.owner.partition
    return queue in partition.named or partition.has_any(queue)
