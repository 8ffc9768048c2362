"""A receive sees everything that was confirmed before it: waits until all that Kafka has confirmed so far is folded.

A send, an ack, a release or a purge is answered when it is in the log, which may be before the owner of the partition
has read it. So a receive that finds nothing asks Kafka where the logs end, and answers only once this worker's
partitions have been read up to there. It does not matter who wrote: this worker, another one, or a Kafka producer.

    receive finds nothing ─► ends of the logs? ─► read up to there ─► nothing is there
                    (one question at a time, shared by all who asked before it was sent)

A receive that finds something, or that waits for messages, need not ask: the logs are read meanwhile. Not covered: a
partition that changes hands at that moment; records of an open transaction; and records that take longer than
`READ_UP_S` to read, because Kafka or this worker is slow or memory is short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, LeaderNotAvailableError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords
from mode import Service

from app.engine.queues_topic import ends_of
from app.engine.transactions import Begin
from app.kafka.connection import end_client, start_consumer
from marq.errors import UnavailableError

if TYPE_CHECKING:
    from app.engine.owned_partition import OwnedPartition
    from app.kafka.topics import Topics
    from app.settings import Settings

log = logging.getLogger(__name__)

#: Seconds that a receive which found nothing waits at most until the logs are read, …
READ_UP_S = 0.2
#: … and until Kafka says where they end.
QUESTION_S = 1.0
#: Seconds between looks at whether dead letters that are being made are in the log.
DYING_CHECK_S = 0.002
_LOG_APPEND_TIME = 1
#: Where partitions of topics end.
Ends = Mapping[TopicPartition, int]
Ask = Callable[[Sequence[TopicPartition]], Awaitable[Ends]]


class LogEnds(Service):
    """Asks Kafka where logs end, over a connection without fetches, which would delay the answer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._consumer: AIOKafkaConsumer | None = None

    async def ask(self, tps: Sequence[TopicPartition]) -> Ends:
        """The end of each that has a leader, as readers see it. Raises `KafkaError`.

        aiokafka would answer for none as long as one has no leader.
        """
        if self._consumer is None:
            return {}
        client = self._consumer._client
        for topic in dict.fromkeys(tp.topic for tp in tps):
            await client._wait_on_metadata(topic)
        leaders = {tp: client.cluster.leader_for_partition(tp) for tp in tps}
        led = [tp for tp, node in leaders.items() if node is not None and node >= 0]
        if len(led) < len(tps):
            client.force_metadata_update()
        return await self._consumer.end_offsets(led) if led else {}

    async def begin_of(self, tp: TopicPartition, offset: int) -> Begin | None:
        """The first record of a transaction, which is at this offset; None if there is no such transaction.

        Raises:
            KafkaError, TimeoutError: Kafka did not answer.
            UnavailableError: this worker has not started.
        """
        if self._consumer is None:
            raise UnavailableError("this worker has not started")
        client = self._consumer._client
        # also what is not committed; a broker sends one batch whole, however few bytes are asked for
        request = FetchRequest(0, 0, 1, 0, [(tp.topic, [(tp.partition, offset, 1)])])
        async with asyncio.timeout(QUESTION_S):
            await client._wait_on_metadata(tp.topic)
            node = client.cluster.leader_for_partition(tp)
            if node is None or node < 0:
                raise LeaderNotAvailableError(tp)
            ((_, (part,)),) = (await client.send(node, request)).topics
        if part[1]:
            client.force_metadata_update()
            raise for_code(part[1])(tp)
        batch = MemoryRecords(part[-1] or b"").next_batch()
        if batch is None or not getattr(batch, "is_transactional", False):
            return None
        return Begin(batch.producer_id, batch.max_timestamp if batch.timestamp_type == _LOG_APPEND_TIME else None)

    async def of(self, topic: str, partitions: int) -> tuple[int, ...]:
        """Where each partition of a topic ends now. Raises `UnavailableError`."""
        if self._consumer is None:
            raise UnavailableError("this worker has not started")
        return await ends_of(topic, partitions, self._consumer.end_offsets)

    async def on_start(self) -> None:
        self._consumer = await start_consumer(self._settings, isolation_level="read_committed")

    async def on_stop(self) -> None:
        if self._consumer is not None:
            await end_client(self._consumer.stop())


class _Round:
    """The callers that share one question to Kafka."""

    __slots__ = ("asked", "behind", "over", "waiting")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()  # Kafka has said where the logs end
        self.over: asyncio.Future[None] = loop.create_future()
        self.waiting = 0
        # partition -> the ends of its two logs, until it was read up to there
        self.behind: dict[int, tuple[OwnedPartition, int, int]] = {}


class Dying(Protocol):
    """Knows which messages are about to become dead letters."""

    def are_dying(self, owned: OwnedPartition, queue: str) -> bool:
        """True if dead letters of a queue, or for it, are being made in a partition."""


class ReadUp:
    """Waits for the partitions of this worker."""

    def __init__(
        self,
        ask: Ask,
        topics: Callable[[], Topics],
        owned: Mapping[int, OwnedPartition],
        look: Callable[[], None],
        spawn: Callable[[Any], asyncio.Task[None]],
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._topics = topics
        self._held = owned
        self._look = look
        self._spawn = spawn
        self._hurry = hurry  # let nothing delay reading
        self._next: _Round | None = None  # the question that was not sent yet
        self._asking: asyncio.Task[None] | None = None
        #: Times that something was not read in time.
        self.late = 0
        #: Rounds of which something is still to be read.
        self.rounds: list[_Round] = []

    async def wait(self, queue: str, dying: Dying | None = None) -> None:
        """Return once all records that were confirmed before are folded here, or when that takes too long.

        Args:
            queue: what the caller wants to know about.
            dying: also wait for dead letters that are being made of messages of the queue, or for the queue.
        """
        try:
            await self._read_up()
            if dying is not None:
                async with asyncio.timeout(READ_UP_S):
                    await self._settle(queue, dying)
        except TimeoutError:
            self.late += 1

    async def _settle(self, queue: str, dying: Dying) -> None:
        self._look()
        if not self._are_dying(queue, dying):
            return
        while self._are_dying(queue, dying):
            await asyncio.sleep(DYING_CHECK_S)
        await self._read_up()

    def _are_dying(self, queue: str, dying: Dying) -> bool:
        return any(owned.serving and dying.are_dying(owned, queue) for owned in self._held.values())

    async def _read_up(self) -> None:
        if not any(owned.serving for owned in self._held.values()):
            return
        self._hurry()
        if self._next is None:
            self._next = _Round()
            if self._asking is None or self._asking.done():
                self._asking = self._spawn(self._ask_on())
        one = self._next
        one.waiting += 1
        try:
            async with asyncio.timeout(QUESTION_S):
                await asyncio.shield(one.asked)
            async with asyncio.timeout(READ_UP_S):
                await asyncio.shield(one.over)
        finally:
            one.waiting -= 1
            if not one.waiting and one in self.rounds:
                self.rounds.remove(one)

    async def _ask_on(self) -> None:
        while self._next is not None:
            await asyncio.sleep(0)  # all callers of this turn share the question
            one, self._next = self._next, None
            topics = self._topics()
            owned = [h for h in self._held.values() if h.serving]
            tps = [TopicPartition(topic, h.number) for topic in (topics.queue, topics.markers) for h in owned]
            try:
                async with asyncio.timeout(QUESTION_S):
                    ends = await self._ask(tps)
            except (KafkaError, OSError, TimeoutError) as exc:
                log.debug("Kafka does not tell where the logs end: %r", exc)
                ends = {}
            for h in owned:
                queue_end = ends.get(TopicPartition(topics.queue, h.number), 0)
                markers_end = ends.get(TopicPartition(topics.markers, h.number), 0)
                if not _is_read(h, queue_end, markers_end):
                    one.behind[h.number] = (h, queue_end, markers_end)
            one.asked.set_result(None)
            if one.behind and one.waiting:
                self.rounds.append(one)
            else:
                one.over.set_result(None)

    def advanced(self, owned: OwnedPartition) -> None:
        """A partition was read on, or is gone."""
        for one in self.rounds:
            behind = one.behind.get(owned.number)
            if behind is None or (behind[0] is owned and owned.serving and not _is_read(*behind)):
                continue
            del one.behind[owned.number]
            if not one.behind:
                one.over.set_result(None)
        self.rounds = [one for one in self.rounds if one.behind]


def _is_read(owned: OwnedPartition, queue_end: int, markers_end: int) -> bool:
    partition = owned.owner.partition
    return partition.position >= queue_end and partition.markers_position >= markers_end
