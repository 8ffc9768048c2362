"""The command `repair`: lets a partition go on without records that were deleted unread, or that no replica has whole.

What was in these records is not known any more, so no worker goes on by itself. The command says what is gone. With
`--accept-loss` it takes the partition as a worker would: an own marker, the tables, the markers up to it. It moves the
positions to the first offsets of the logs, and writes a manifest that names the loss. The next owner goes on there.
Offsets of the queue topic that no replica has whole are ended by a marker instead, so the partition may be served.

With `--accept-copy` it takes a state that was made from other logs, if the markers topic has an own marker where that
state knows one, and writes a manifest that is of the logs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientSession, ClientTimeout
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from app.cluster import addresses
from app.engine.changelogs import check_rows, first_newer
from app.kafka.connection import end_client, kafka_client_args
from app.kafka.identity import identify
from app.kafka.topics import Topics, ensure_topics
from app.settings import Settings
from app.streaming.assignor import url_of_member
from app.streaming.fetching import Decoder, decode_with
from marq.core import markers as m
from marq.core.checkpoint_cycle import WriteManifest, WriteRows
from marq.core.owner import Owner, Phase
from marq.core.policies import Limits
from marq.core.reading import Unreadable
from marq.core.recovery import Edges, LastRead, last_read, newest
from marq.core.rows import Loss, table_of
from marq.core.world import World
from marq.errors import BrokerError, MarkerError, NotPossibleError, RowError
from marq.protocol.limits import RECORD_MAX_BYTES
from marq.text import reason_of

#: Seconds without a record after which a read fails, and seconds that a write may take.
TIMEOUT_S = 30.0
#: Seconds that a worker may take to say which partitions it serves.
ASK_TIMEOUT_S = 5.0

#: The name of the owner in the own marker.
REPAIR = "repair"


class Repair(NamedTuple):
    """What was found, and whether the partition was repaired."""

    partition: int
    losses: list[Loss]  # that this repair gives up, or would give up; without messages: all of them were done
    done: bool
    copied: bool = False  # the state was made from other logs


async def repair(settings: Settings, number: int, *, accept_loss: bool, accept_copy: bool = False) -> Repair:
    """Report the deleted records of a partition, and with `accept_loss` let it go on without them.

    Args:
        accept_copy: take a state that was made from other logs, of which these are a copy with the same offsets.

    Raises:
        NotPossibleError: a worker serves the partition, or may do so; or the logs are no such copy.
        RowError: the tables are damaged, which `repair` can't mend.
        BrokerError: Kafka is away, or too slow.
    """
    topics = await ensure_topics(settings, settings.name)
    if not 0 <= number < topics.partitions:
        raise NotPossibleError(f"there are partitions 0 to {topics.partitions - 1}, not {number}")
    try:
        async with _Logs.opened(settings, topics, number) as logs:
            if unreadable := await _unreadable(logs):
                if accept_loss:
                    await _end_unreadable(logs, unreadable)
                return Repair(number, unreadable, accept_loss)
            await _check_unserved(settings, number)
            return await _repair(settings, topics, logs, number, accept_loss, accept_copy)
    except (KafkaError, TimeoutError) as exc:
        raise BrokerError(f"Kafka did not answer: {reason_of(exc)}") from exc


async def _repair(
    settings: Settings, topics: Topics, logs: _Logs, number: int, accept_loss: bool, accept_copy: bool = False
) -> Repair:
    here = await logs.world()
    copied = accept_copy and await _is_copy(logs, number, here)
    world = None if copied else here
    owner = _owner(settings, topics, number)
    # a dry run: an own marker that only this command sees
    own = m.encode([owner.claim()], owner.nonce, 0)
    losses = await _take(logs, owner, world, await logs.end(topics.markers), own)
    if not (accept_loss if any(map(is_loss, losses)) else copied):
        return Repair(number, losses, False)
    owner = _owner(settings, topics, number)
    own_offset = await logs.append(topics.markers, None, m.encode([owner.claim()], owner.nonce, 0))
    losses = await _take(logs, owner, world, own_offset, None)
    owner.partition.world = here
    await _write(topics, logs, owner)
    return Repair(number, losses, True, copied)


async def _unreadable(logs: _Logs) -> list[Loss]:
    """What the newest manifest names as unreadable, and no replica has whole now either."""
    manifest = newest(_manifests(await logs.tables()).values(), await logs.world())
    found: list[Loss] = []
    for at in range(0, len(manifest.unreadable) if manifest is not None else 0, 2):
        start, stop = manifest.unreadable[at : at + 2]  # type: ignore[union-attr]
        found += [Loss("queue", a, b, b - a, 0) for a, b in await logs.still_unreadable(start, stop)]
    return found


async def _end_unreadable(logs: _Logs, losses: list[Loss]) -> None:
    """End these offsets as their owner. A worker that serves the partition takes it back a second later."""
    epoch = await logs.append(logs.topics.markers, None, m.encode([m.Own(REPAIR, uuid.uuid4().hex)], REPAIR, 0))
    ranges = [edge for loss in losses for edge in (loss.start, loss.stop)]
    for marker in m.split(m.End(epoch, ranges, "poison")):
        await logs.append(logs.topics.markers, None, m.encode([marker], REPAIR, 0))


async def _is_copy(logs: _Logs, number: int, here: World) -> bool:
    """True if the state is of other logs, and of some with the same offsets, as far as that can be seen.

    Raises:
        NotPossibleError: the offsets are others.
    """
    manifests = _manifests(await logs.tables()).values()
    manifest = newest(manifests, None)
    if manifest is None or newest(manifests, here) is not None:
        return False
    _, markers_start = (await logs.edges(None)).start
    if markers_start <= manifest.own:
        found = await logs.read(logs.topics.markers, manifest.own, manifest.own + 1)
        if not any(type(marker) is m.Own for record in found for marker in _markers_of(record)):
            raise NotPossibleError(
                f"partition {number}: offset {manifest.own} of the markers topic is no own marker, as it was in the "
                "logs that the state was made from: these are no copy with the same offsets"
            )
    return True


def _markers_of(record: Any) -> Sequence[Any]:
    try:
        return m.decode(record.value).markers
    except MarkerError:
        return ()


def _manifests(tables: Mapping[str, bytes]) -> dict[str, bytes]:
    return {key: value for key, value in tables.items() if key.count("/") == 1}


def _owner(settings: Settings, topics: Topics, number: int) -> Owner:
    limits = Limits(queue_id=settings.queue_id, partitions=topics.partitions, pass_deleted=True)
    return Owner(number, REPAIR, uuid.uuid4().hex, limits=limits)


async def _take(logs: _Logs, owner: Owner, world: World | None, own_offset: int, own: bytes | None) -> list[Loss]:
    """Take the state as a worker does, up to the own marker (`own`: one that is not in the log). Returns the losses."""
    tables = await logs.tables()
    manifests = _manifests(tables)
    manifest = newest(manifests.values(), world)
    read = None if manifest is None else last_read(manifest, owner.limits.queue_id)
    edges = (await logs.edges(read))._replace(world=world)
    if edges.end is not None:  # what is behind the own marker is for the next owner
        edges = edges._replace(end=(edges.end[0], min(edges.end[1], own_offset + 1)))

    def load(key: str) -> bytes:
        if key not in tables:
            raise RowError(f"row {key} is named by the manifest, but it is not in the table")
        return tables[key]

    row_keys = [key for key in tables if key not in manifests]
    owner.restore(manifests, row_keys, load, edges, own_offset, accept_loss=True)
    if owner.phase is Phase.LOST:
        raise NotPossibleError(f"a worker has taken partition {owner.number} meanwhile")
    position, queue_position = owner.partition.markers_position, owner.partition.position
    records = await logs.read(logs.topics.markers, position, own_offset + (own is None))
    if own is not None:
        records.append(_Own(own_offset, records[-1].timestamp if records else 0, own))
    readable: list[Any] = []
    for record in records:
        if type(record) is Unreadable:
            owner.read_markers(position, record.offset, readable, 0)
            position = record.stop
            owner.skip_unreadable(record.offset, position)
            readable.clear()
        else:
            readable.append(record)
    owner.read_markers(position, own_offset + 1, readable, 0)
    if owner.phase is not Phase.SERVING:
        raise NotPossibleError(f"a worker has taken partition {owner.number} meanwhile")
    losses = owner.partition.lost[0 if manifest is None else len(manifest.lost) :]
    if edges.start[0] > queue_position and not any(loss.log == "queue" for loss in losses):
        losses.append(Loss("queue", queue_position, edges.start[0], 0, owner.partition.last_timestamp_ms))
    return losses


def is_loss(loss: Loss) -> bool:
    """False if all messages whose records were deleted unread are known to be done."""
    return loss.log == "markers" or loss.unfinished > 0


class _Own(NamedTuple):
    """An own marker that is not in the log."""

    offset: int
    timestamp: int
    value: bytes


async def _write(topics: Topics, logs: _Logs, owner: Owner) -> None:
    """Write the state as a checkpoint: rows first, then the manifest that names them."""
    owner.hurry_checkpoint()
    while (step := owner.step(0)) is not None:
        if isinstance(step, WriteRows):
            for key, value in step.rows:
                await logs.append(topics.changelogs[table_of(key)], key.encode(), value)
        elif isinstance(step, WriteManifest):
            await logs.append(topics.changelogs["progress"], step.key.encode(), step.value)
            return
        owner.written(0)
    raise AssertionError("a manifest is written")


class _Logs:
    """Both logs and the changelogs of one partition."""

    def __init__(
        self,
        topics: Topics,
        number: int,
        consumer: AIOKafkaConsumer,
        producer: AIOKafkaProducer,
        decoder: Decoder,
    ) -> None:
        self.topics = topics
        self._decoder = decoder
        self.number = number
        self._consumer = consumer
        self._producer = producer

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, settings: Settings, topics: Topics, number: int) -> AsyncIterator[_Logs]:
        args = kafka_client_args(settings)
        consumer = AIOKafkaConsumer(
            enable_auto_commit=False, auto_offset_reset="none", isolation_level="read_committed", **args
        )
        producer = AIOKafkaProducer(acks="all", enable_idempotence=True, max_request_size=RECORD_MAX_BYTES, **args)
        try:
            await consumer.start()
            contiguous = (topics.markers, *(() if settings.queue_id else (topics.queue,)))
            decoder = decode_with(consumer, lambda topic: True, lambda tp, fault: None, contiguous.__contains__)
            await producer.start()
            yield cls(topics, number, consumer, producer, decoder)
        finally:
            await end_client(producer.stop())
            await end_client(consumer.stop())

    def _tp(self, topic: str) -> TopicPartition:
        return TopicPartition(topic, self.number)

    async def end(self, topic: str) -> int:
        return int((await self._consumer.end_offsets([self._tp(topic)]))[self._tp(topic)])

    async def world(self) -> World:
        """The cluster and the topics of both logs."""
        identity = await identify(self._consumer._client, (self.topics.queue, self.topics.markers))
        return identity.world(self.topics)

    async def edges(self, read: LastRead | None) -> Edges:
        """Where both logs begin and end."""
        queue, markers = self._tp(self.topics.queue), self._tp(self.topics.markers)
        starts = await self._consumer.beginning_offsets([queue, markers])
        ends = await self._consumer.end_offsets([queue, markers])
        newer = None
        if read is not None:
            found = (await self._consumer.offsets_for_times({queue: read.newest_ms + 1}))[queue]
            if found is not None and found.offset < read.position:
                async with asyncio.timeout(TIMEOUT_S):  # an open transaction may hide what it looks for
                    newer = await first_newer(self._consumer, queue, found.offset, read)
        return Edges((starts[queue], starts[markers]), (ends[queue], ends[markers]), newer)

    async def read(self, topic: str, start: int, stop: int) -> list[Any]:
        """The existing records in `[start, stop)`."""
        tp, records, consumer = self._tp(topic), list[Any](), self._consumer
        if start >= stop:
            return records
        consumer.assign([tp])
        consumer.seek(tp, start)
        deadline = time.monotonic() + TIMEOUT_S
        while (position := await consumer.position(tp)) < stop:
            for batch in (await consumer.getmany(timeout_ms=500)).values():
                records += [record for record in batch if record.offset < stop]
            if await consumer.position(tp) > position:
                deadline = time.monotonic() + TIMEOUT_S
            elif time.monotonic() > deadline:
                raise TimeoutError(f"{topic}:{self.number} could not be read beyond {position}")
        return records

    async def still_unreadable(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What no replica has whole of a range of the queue topic, or was deleted: each from, and behind."""
        tp, found = self._tp(self.topics.queue), list[tuple[int, int]]()
        first = (await self._consumer.beginning_offsets([tp]))[tp]  # its replicas are known from here on
        if start < first:
            found.append((start, min(first, stop)))
            start = first
        while start < stop:
            before, (start, records) = start, await self._decoder.read_again(tp, start, stop)
            if start == before:
                raise TimeoutError(f"no broker says what {tp.topic}:{self.number} has at {start}")
            found += [(record.offset, record.stop) for record in records if type(record) is Unreadable]
        return found

    async def tables(self) -> dict[str, bytes]:
        """All rows and manifests of the partition."""
        found: dict[str, bytes] = {}
        prefix = f"{self.number}/"
        for topic in self.topics.changelogs.values():
            tp = self._tp(topic)
            start = (await self._consumer.beginning_offsets([tp]))[tp]
            records = await self.read(topic, start, await self.end(topic))
            check_rows(tp, records)
            for record in records:
                key = (record.key or b"").decode()
                if not key.startswith(prefix):
                    continue
                if record.value is None:
                    found.pop(key, None)
                else:
                    found[key] = record.value
        return found

    async def append(self, topic: str, key: bytes | None, value: bytes) -> int:
        """Write a record. Returns its offset."""
        async with asyncio.timeout(TIMEOUT_S):
            sent = await self._producer.send_and_wait(topic, value, key, self.number)
        return int(sent.offset)


# ------------------------------------------------------------------ who serves


async def _check_unserved(settings: Settings, number: int) -> None:
    """Ask every worker of the group. Raises `NotPossibleError` if one serves the partition, or does not answer."""
    urls = await _workers(settings)
    verify: Any = True
    if settings.web_tls_ca_file is not None:
        import ssl

        verify = ssl.create_default_context(cafile=str(settings.web_tls_ca_file))
    async with ClientSession(timeout=ClientTimeout(total=ASK_TIMEOUT_S)) as session:
        for url in urls:
            try:
                async with session.get(url.rstrip("/") + "/health/ready", ssl=verify) as response:
                    serving = (await response.json())["serving"]
            except (ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as exc:
                raise NotPossibleError(
                    f"worker {url} does not say which partitions it serves ({reason_of(exc)}): stop it first"
                ) from exc
            if number in serving:
                raise NotPossibleError(f"worker {url} serves partition {number}: there is nothing to repair")


async def _workers(settings: Settings) -> list[str]:
    """Addresses of the workers in the consumer group."""
    admin = AIOKafkaAdminClient(**kafka_client_args(settings))
    await admin.start()
    try:
        (answer,) = await admin.describe_consumer_groups([settings.name])
    finally:
        await end_client(admin.close())
    _, _, state, _, _, members = answer.groups[0][:6]
    if state not in ("Stable", "Empty", "Dead"):
        raise NotPossibleError(
            f"the workers of group {settings.name} are about to share out partitions ({state}): try again"
        )
    urls = []
    for _, client_id, host, _, assignment in (member[:5] for member in members):
        try:
            address = addresses.read(url_of_member(assignment), tuple)
            if address.worker == addresses.NO_WORKER:
                raise ValueError("no address of a worker")
        except Exception as exc:
            raise NotPossibleError(
                f"member {client_id} at {host} of group {settings.name} is no worker of marq"
            ) from exc
        urls.append(address.url)
    return sorted(set(urls))


def lines_of(found: Repair) -> list[str]:
    """The result as text for users."""
    if found.copied:
        return [f"partition {found.partition}: goes on with these logs, which is written down in its manifest"]
    if not found.losses:
        return [f"partition {found.partition}: no record is missing or unreadable, there is nothing to repair"]
    lines = []
    for loss in found.losses:
        records = (
            f"offsets {loss.start} to {loss.stop - 1} of the {loss.log} topic ({loss.stop - loss.start:,} records)"
        )
        if not is_loss(loss):
            what = "all messages among them are done: 0 lost"
        elif loss.log == "queue":
            what = f"{loss.unfinished:,} messages among them were not known to be done: they are lost"
        else:
            what = f"of {loss.unfinished:,} messages, those that they said are done come again"
        lines.append(f"partition {found.partition}: {records} were deleted unread, or are whole on no replica; {what}")
    if found.done:
        lines.append(f"partition {found.partition}: goes on without them, which is written down in its manifest")
    elif any(map(is_loss, found.losses)):
        lines.append("nothing was changed; go on without them with --accept-loss")
    else:
        lines.append(f"partition {found.partition}: there is nothing to repair, workers go on by themselves")
    return lines
