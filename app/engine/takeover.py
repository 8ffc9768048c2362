"""Takes one partition over, from assigned to served, independently of all others:

    read the changelogs ─► claim (own marker) ─► read the rest ─► restore ─► read both logs up to the claim ─► serve

The old owner serves until it reads the claim, and nobody serves between the claim and the last step. So everything
that may take long is done before the claim. After it, only the rest of the changelogs is read.

A failed step is tried again, with growing pauses, for ever. Meanwhile the partition is *unserved*, with a reason, and
nothing else of this worker waits for it. The time without progress is limited; the whole time is not, because it grows
with the size of the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Generator
from functools import partial
from typing import NamedTuple, Protocol

from aiokafka.errors import KafkaError
from mode.utils.logging import CompositeLogger

from app.engine.breakers import Breakers
from app.engine.catalog import Catalog
from app.engine.changelogs import Changelogs
from app.engine.due_times import DueTimes
from app.engine.outbox import Outbox, Writer
from app.kafka.topics import Topics
from app.settings import Settings
from app.streaming.raw_table import SegmentTable
from marq.core.dedup import ORIGINS
from marq.core.markers import Marker
from marq.core.owner import Owner, Phase
from marq.core.policies import Limits
from marq.core.recovery import last_read, newest
from marq.core.rows import table_of
from marq.core.versions import VERSIONS
from marq.core.world import World
from marq.errors import (
    DeletedError,
    MarqError,
    NewerRowError,
    RewrittenError,
    RowError,
    UnavailableError,
    UnreadableError,
)
from marq.text import reason_of

#: Seconds that Kafka may take to confirm an own marker before the claim is tried again, with a new nonce.
CLAIM_TIMEOUT_S = 10.0
#: Seconds between attempts, doubled up to the maximum.
AGAIN_S = 0.2
AGAIN_MAX_S = 30.0
#: Failed recoveries before the local store is wiped, and further ones before an error is logged.
ATTEMPTS = 3
#: Seconds of a restore before the event loop may do other work. A million parked messages take some hundred
#: milliseconds in all. A thread would be no better: a store is read under the lock that Python code runs under.
SLICE_S = 0.005


class _Claim(NamedTuple):
    """An own marker that is durable, at ``own_offset``; -1: Kafka does not tell the offset."""

    owner: Owner
    outbox: Outbox
    own_offset: int


class Partitions(Protocol):
    """What a take-over needs of the ownership."""

    settings: Settings
    catalog: Catalog
    worker_name: str
    tables: dict[str, SegmentTable]
    breakers: Breakers
    gone: dict[int, str]
    changelogs: Changelogs
    due: DueTimes

    @property
    def topics(self) -> Topics:
        """The topics in use."""

    @property
    def log(self) -> CompositeLogger:
        """The log of the worker."""

    @property
    def in_group(self) -> bool:
        """False once the consumer group has given this worker up."""

    def outbox(self, partition: int) -> Outbox:
        """The outbox for markers of a partition."""

    def enter(self, number: int, owner: Owner, outbox: Outbox) -> None:
        """The state of a partition is restored: read both logs from there on."""

    def is_unserved(self, number: int, reason: str) -> None:
        """A partition can't be served at present."""

    def stop_at_newer(self, error: NewerRowError) -> None:
        """Stop the worker: a later version has owned a partition, and this one can't."""

    def on_appended(
        self, number: int, owner: Owner, seq: int, offset: int, timestamp_ms: int, markers: list[Marker]
    ) -> None:
        """A record of an owner is in the log."""


class TakeOver:
    """Takes one partition over. `run()` ends when its state is restored and its logs are being read."""

    def __init__(self, ownership: Partitions, number: int) -> None:
        self.ownership = ownership
        self.number = number
        self.row_errors = 0

    async def run(self, delay_s: float = 0.0) -> None:
        """Claim and restore, again and again until both succeed."""
        await asyncio.sleep(delay_s)
        claim: _Claim | None = None
        pause_s = AGAIN_S
        while True:
            reason = ""
            try:
                if claim is None:
                    if self.number in self.ownership.gone:
                        raise UnavailableError(self.ownership.gone[self.number])
                    await self._read_tables()
                    claim = await self._claim()
                await self._restore(claim)
                if claim.owner.phase is not Phase.LOST:
                    self.ownership.enter(self.number, claim.owner, claim.outbox)
                    return
                claim = None  # a later owner has been faster
            except NewerRowError as exc:
                # what wiping mends is damage; another worker, of that version, is to have the partition
                reason = f"partition {self.number}: {exc}"
                ownership = self.ownership
                ownership.is_unserved(self.number, reason)
                ownership.stop_at_newer(NewerRowError(reason))
                return
            except RowError as exc:
                self.row_errors += 1
                reason = str(exc)
                if self.row_errors >= ATTEMPTS and not isinstance(exc, DeletedError | RewrittenError | UnreadableError):
                    self._wipe()
                if self.row_errors < 2 * ATTEMPTS:
                    self.ownership.log.warning(
                        "Recovery of partition %s, attempt %s: %s", self.number, self.row_errors, exc
                    )
                    await asyncio.sleep(AGAIN_S)
                    continue
            except (KafkaError, TimeoutError, MarqError) as exc:
                reason = reason_of(exc)
            except Exception as exc:
                self.ownership.log.exception("Partition %s can't be taken over", self.number)
                reason = repr(exc)
            if reason:
                self.ownership.is_unserved(self.number, f"{reason}; trying again")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MAX_S)

    async def _claim(self) -> _Claim:
        """Append an own marker and wait until it is durable. Tables may only be read after that."""
        ownership, number, settings = self.ownership, self.number, self.ownership.settings
        if not ownership.in_group:
            # another worker may have the partition by now: the two would take it from each other again and again
            raise UnavailableError("this worker has lost touch with its group")
        owner = Owner(
            number,
            ownership.worker_name,
            uuid.uuid4().hex,
            limits=Limits(
                checkpoint_ms=settings.checkpoint_ms,
                window_offsets=settings.window_offsets,
                persist_after_ms=settings.persist_after_ms,
                step_timeout_ms=settings.step_timeout_ms,
                queue_id=settings.queue_id,
                partitions=ownership.topics.partitions,
                pass_deleted=settings.queue_id is not None and settings.deleted_unread == "continue",
                origin_keys=ownership.catalog.keys_for(ORIGINS),
                version_keys=ownership.catalog.keys_for(VERSIONS),
            ),
            settings_of=ownership.catalog.settings_of,
            breaker_of=ownership.breakers.of,
            touch=partial(ownership.due.touch, number),
        )
        outbox = ownership.outbox(number)
        outbox.drop_owners()  # an earlier claim that was not even sent
        outbox.writer = self._writer(owner)
        claimed = outbox.put_confirmed([owner.claim()])
        try:
            # not `wait_for`: in Python 3.11 it loses a cancellation that comes as the answer does, and a partition that
            # has left would be taken over
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                return _Claim(owner, outbox, await claimed)
        except TimeoutError:
            raise TimeoutError(
                f"Kafka has not confirmed within {CLAIM_TIMEOUT_S:.0f} s that this worker takes partition {number}"
            ) from None

    def _writer(self, owner: Owner) -> Writer:
        ownership, number = self.ownership, self.number

        def took(seq: int, offset: int, timestamp_ms: int, markers: list[Marker]) -> None:
            ownership.on_appended(number, owner, seq, offset, timestamp_ms, markers)

        return Writer(owner.nonce, owner.sent, took, owner.failed)

    async def _read_tables(self) -> World:
        """Bring the local store up to the end that its changelogs have now. Returns the world of the logs."""
        ownership, number, topics = self.ownership, self.number, self.ownership.topics
        identity = await ownership.changelogs.identity(topics)
        foreign = False
        for name, table in ownership.tables.items():
            foreign |= await table.open(number, identity.of_store(topics, topics.changelogs[name]))
            await asyncio.sleep(0)
        if foreign:
            ownership.log.warning(
                "Partition %s: its local store is of another Kafka, of topics that were deleted since, or of an "
                "earlier version: it is deleted, and filled again from the changelogs of this Kafka (cluster %s)",
                number,
                identity.cluster,
            )
        await ownership.changelogs.read_rest(ownership.tables.values(), number)
        return identity.world(topics)

    async def _restore(self, claim: _Claim) -> None:
        """Take the state of the newest manifest from the local store."""
        ownership, number, now = self.ownership, self.number, time.monotonic
        began_s = now()
        world = await self._read_tables()
        manifests: dict[str, bytes] = {}
        keys: list[str] = []
        await _in_slices(self._read_keys(manifests, keys))
        manifest = newest(manifests.values(), world)
        read = None if manifest is None else last_read(manifest, ownership.settings.queue_id)
        edges = (await ownership.changelogs.edges(ownership.topics, number, read))._replace(world=world)
        read_s = now()
        await _in_slices(claim.owner.restoring(manifests, keys, self._loader(), edges, claim.own_offset))
        ownership.log.debug(
            "Partition %s: tables read in %.2f s, restored in %.2f s", number, read_s - began_s, now() - read_s
        )

    def _read_keys(self, manifests: dict[str, bytes], keys: list[str]) -> Generator[None, None, None]:
        """Add all manifests of the partition, and the keys of all its rows."""
        tables, number, prefix = self.ownership.tables, self.number, f"{self.number}/".encode()
        for key, value in tables["progress"].rows_of(number):
            if key.startswith(prefix):
                manifests[key.decode()] = value
            yield
        for name in ("messages", "markers"):
            for key in tables[name].keys_of(number):
                if key.startswith(prefix):
                    keys.append(key.decode())
                yield

    def _loader(self) -> Callable[[str], bytes]:
        tables, number = self.ownership.tables, self.number

        def load(key: str) -> bytes:
            value = tables[table_of(key)].read(number, key.encode())
            if value is None:
                raise RowError(f"row {key} is named by the manifest, but it is not in the table")
            return value

        return load

    def _wipe(self) -> None:
        for table in self.ownership.tables.values():
            table.wipe(self.number)


async def _in_slices(steps: Generator[None, None, None]) -> None:
    """Run `steps` to their end, and let the event loop do other work in between."""
    with contextlib.closing(steps):
        slice_s = time.monotonic() + SLICE_S
        for _ in steps:
            if time.monotonic() >= slice_s:
                await asyncio.sleep(0)
                slice_s = time.monotonic() + SLICE_S
