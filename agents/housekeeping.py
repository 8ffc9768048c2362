"""Background work on the queues of the catalog: purges, automatic creation, messages for unknown queues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from mode import Service

from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.purges import Purges
from app.settings import Settings
from marq.core.policies import name_problem
from marq.errors import MarqError

#: Seconds between rounds.
INTERVAL_S = 0.1
#: Rounds between two looks for purges that can be finished.
SLOW_EVERY = 10
#: Rounds between two looks at the queues of all partitions, if the catalog has changed meanwhile.
ALL_EVERY = 10
#: Rounds after which all queues of a partition in which something happens are looked at, and not the named ones alone:
#: which are forgotten when they are too many.
REREAD_EVERY = 100
#: Queues that are written to the catalog at once.
MADE_AT_ONCE = 200
#: Rounds between two removals of queues that were deleted long ago.
FORGET_EVERY = 6_000


class Housekeeping(Service):
    """Runs as long as the worker."""

    def __init__(self, ownership: Ownership, settings: Settings, purges: Purges, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ownership = ownership
        self._catalog = ownership.catalog
        self._settings = settings
        self._purges = purges
        self._catalog_seen = -1
        self._rounds = 0

    @Service.task
    async def _run(self) -> None:
        count = 0
        while not self.should_stop:
            await asyncio.sleep(INTERVAL_S)
            count += 1
            try:
                self._purges.look()
                await self._name_queues()
                if count % SLOW_EVERY == 0:
                    await self._purges.finish()
                    if 0 in self._ownership.owned:
                        await self._catalog.repeat_overwritten()
                if count % FORGET_EVERY == 0 and 0 in self._ownership.owned:
                    await self._catalog.forget_deleted()
            except MarqError as exc:
                self.log.warning("%s", exc)

    # ------------------------------------------------------------------ queues that messages create

    def _to_look_at(self) -> list[OwnedPartition]:
        """The partitions in which a queue may be new: something happened there, or the catalog has changed."""
        ownership = self._ownership
        self._rounds += 1
        if self._catalog.changes != self._catalog_seen and self._rounds % ALL_EVERY == 0:
            self._catalog_seen = self._catalog.changes
            ownership.stirred.update(dict.fromkeys(ownership.owned))
        stirred, ownership.stirred = ownership.stirred, {}
        return [owned for number in stirred if (owned := ownership.owned.get(number)) is not None]

    def _queues_to_look_at(self, owned: OwnedPartition) -> Iterable[str]:
        """Those that records have named since they were found in the catalog. Seldom all: there may be very many."""
        partition = owned.owner.partition
        seen = owned.queues_seen
        if seen is not None and seen[0] == self._catalog.changes and self._rounds - seen[1] < REREAD_EVERY:
            return partition.named
        owned.queues_seen = (self._catalog.changes, self._rounds)
        return {**partition.named, **dict.fromkeys(partition.queues())}

    async def _name_queues(self) -> None:
        """Create the queues of messages that any Kafka producer wrote, or quarantine messages whose queue can't be."""
        catalog, settings = self._catalog, self._settings
        if settings.queue_id is not None:
            return
        unknown: dict[str, list[OwnedPartition]] = {}
        for owned in self._to_look_at():
            if owned.serving:
                partition = owned.owner.partition
                for queue in list(self._queues_to_look_at(owned)):
                    record = catalog.records.get(queue)
                    if record is not None and record.state == "deleting":
                        continue
                    listed = record.active if record is not None else queue in catalog.auto
                    if not listed and (settings.auto_create or not catalog.exists(queue)):
                        unknown.setdefault(queue, []).append(owned)
                    else:
                        partition.named.pop(queue, None)
        if not unknown:
            return
        # until they are known: Kafka may not take what creates them
        stirred = self._ownership.stirred
        stirred.update((owned.number, None) for where in unknown.values() for owned in where)
        if not settings.auto_create:
            await catalog.catch_up()
        to_make = []
        for queue, where in unknown.items():
            reason = name_problem(queue)
            if reason is None and not settings.auto_create and not catalog.exists(queue):
                reason = f"there is no queue {queue!r}"
            if reason is not None:
                for owned in where:
                    if owned.serving:
                        owned.owner.partition.named.pop(queue, None)
                        owned.owner.partition.quarantine(queue, reason)
                        self._ownership.due.touch(owned.number)
            elif settings.auto_create and any(h.serving and _had_any(h, queue) for h in where):
                to_make.append(queue)
        for i in range(0, len(to_make), MADE_AT_ONCE):
            await asyncio.gather(*(catalog.make(queue) for queue in to_make[i : i + MADE_AT_ONCE]))


def _had_any(owned: OwnedPartition, queue: str) -> bool:
    """Whether a message of `queue` was read and not purged, whatever became of it, or is ready."""
    partition = owned.owner.partition
    return queue in partition.named or partition.has_any(queue)
