"""Purges. The catalog has the intent: for each partition, the offset below which all messages of the queue end.

The owner of each partition appends its marker; once all have, the owner of partition 0 takes the intent out of the
catalog. The request for a purge is answered when it is in force: all workers know it, and all markers are folded.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from app.cluster.peers import Peers, peer_call
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.engine.queue_records import QueueRecord
from marq.errors import MarqError

log = logging.getLogger(__name__)

#: Seconds to wait for a purge to be in force at a worker. Owners that are late carry it out as soon as they can.
IN_FORCE_S = 3.0
#: Seconds between checks.
CHECK_S = 0.002


class PurgeHere(msgspec.Struct):
    """A queue, and the version of the record that wants it purged."""

    queue: str
    version: int


class Purges:
    """Carries out purges."""

    def __init__(self, ownership: Ownership, peers: Peers) -> None:
        self._ownership = ownership
        self._catalog = ownership.catalog
        self._peers = peers
        # partition, epoch, change -> offset of its marker once that is in the log; -1: nothing to append
        self._purged: dict[tuple[int, int, str], int | None] = {}
        peers.register(self)

    # ------------------------------------------------------------------ who asks

    async def purge(self, queue: str, delete: bool = False) -> None:
        """Purge everything that is in a queue now, and with `delete` the queue as well.

        Returns when the purge is in force, or when a worker does not answer: then the owners do it as soon as they can.
        """
        topics = self._ownership.topics
        ends = await self._ownership.log_ends.of(topics.queue, topics.partitions)
        record = await self._catalog.purge(queue, ends, delete=delete)
        answers = await self._peers.everywhere(self.purge_here, PurgeHere(queue, record.version))
        for url, answer in answers.items():
            if isinstance(answer, MarqError):
                log.info("The purge of %r is not in force at %s yet: %s", queue, url, answer)

    @peer_call("purge")
    async def purge_here(self, asked: PurgeHere) -> bool:
        """Purge the partitions of this worker. Returns True once that is folded and this worker knows the intent."""
        deadline = time.monotonic() + IN_FORCE_S
        while not self._is_in_force(asked):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(CHECK_S)
        return True

    def _is_in_force(self, asked: PurgeHere) -> bool:
        record = self._catalog.records.get(asked.queue)
        if record is None or record.version < asked.version:
            return False
        if not record.purge:
            return True  # it is over
        done = True
        for owned in list(self._ownership.owned.values()):
            if owned.serving and owned.number < len(record.purge):
                self._purge_in(owned, asked.queue, record)
                offset = self._purged.get((owned.number, owned.owner.epoch, record.by))
                done = done and offset is not None and owned.owner.partition.markers_position > offset
        return done

    # ------------------------------------------------------------------ the owners

    def look(self) -> None:
        """Append the purge markers of the partitions that this worker owns."""
        catalog = self._catalog
        if not catalog.purging:
            self._purged.clear()
            return
        for owned in list(self._ownership.owned.values()):
            if owned.serving:
                for queue, record in list(catalog.purging.items()):
                    self._purge_in(owned, queue, record)

    def _purge_in(self, owned: OwnedPartition, queue: str, record: QueueRecord) -> None:
        key = (owned.number, owned.owner.epoch, record.by)
        if key in self._purged or owned.number >= len(record.purge):
            return
        before = record.purge[owned.number]
        if before <= 0:
            self._purged[key] = -1
            return
        self._purged[key] = None
        owned.owner.purge(queue, before)
        appended = owned.outbox.put_confirmed(owned.owner.take_appends())
        appended.add_done_callback(lambda done: self._on_appended(key, done))

    def _on_appended(self, key: tuple[int, int, str], done: asyncio.Future[int]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._purged.pop(key, None)  # once more
        else:
            self._purged[key] = done.result()

    @peer_call("purged")
    async def purged_here(self, changes: list[str]) -> dict[str, list[int]]:
        """The partitions here in which the purges of these changes are done."""
        owned = self._ownership.owned
        wanted = set(changes)
        found: dict[str, list[int]] = {}
        for (number, epoch, by), offset in self._purged.items():
            one = owned.get(number)
            if offset is not None and by in wanted and one is not None and one.serving and one.owner.epoch == epoch:
                found.setdefault(by, []).append(number)
        return found

    async def finish(self) -> None:
        """Remove intents from the catalog that all owners have carried out. The owner of partition 0 calls this."""
        catalog, ownership = self._catalog, self._ownership
        if not catalog.purging or 0 not in ownership.owned or not ownership.owned[0].serving:
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
