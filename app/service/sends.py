"""Sends: choose the partition of a message and the headers of its record, append it, wait for Kafka."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordTooLargeError

from app.engine.ownership import Ownership
from app.engine.stalls import is_stalled, stalled_error
from app.service.fifo import check_fit, fifo_headers
from app.service.meters import Meters
from app.service.turnstile import Turnstile
from app.service.waits import all_done
from app.streaming.producer import ProducerFull
from marq.core.placing import fifo_partition
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.errors import BadValueError, MarqError, NotPossibleError, TooLargeError, UnavailableError
from marq.protocol.headers import H_DELAY, H_GROUP, H_TTL, HEADER_KEY, PROTOCOLS, PROTOCOLS_LENGTH, RESERVED
from marq.protocol.limits import HEADERS_MAX, MESSAGE_MAX_BYTES
from marq.protocol.messages import Entry, Sent

if TYPE_CHECKING:
    from app.settings import Settings
    from marq.core.policies import QueueSettings

#: Seconds until Kafka has to confirm the messages of a request.
CONFIRM_TIMEOUT_S = 10.0
#: Messages of one request that go to one partition in a row: enough for a full batch, few enough to spread.
RUN_MESSAGES = 500
#: Bytes of a message that are left for its headers' and the record's own.
RECORD_ROOM_BYTES = 1024


class FromProtocol(Entry, frozen=True, kw_only=True):
    """A message to send, with headers that its protocol adds.

    `size_bytes`: its size for the limit of the queue, as the protocol counts it; None: all of it counts.
    """

    protocol_headers: dict[str, bytes] = {}  # noqa: RUF012 - a struct copies it
    size_bytes: int | None = None


class Sends:
    """Appends messages to the queue topic."""

    def __init__(self, ownership: Ownership, settings: Settings, meters: Meters, turnstile: Turnstile) -> None:
        self._ownership = ownership
        self._catalog = ownership.catalog
        self._settings = settings
        self._meters = meters
        self._turnstile = turnstile
        self._partition_turn = random.randrange(1 << 16)

    async def send(self, queue: str, messages: Sequence[Entry]) -> list[Sent | MarqError]:
        """See `app.service.operations.QueueService.send`."""
        await self._turnstile.turn(len(messages))
        await self._check_sendable(queue)
        topic, count = self._ownership.topics.queue, self._ownership.topics.partitions
        key, settings, generation = queue.encode(), self._catalog.settings_of(queue), self._catalog.generation_of(queue)
        producer = self._ownership.app.producer
        results: list[Any] = [None] * len(messages)
        unavailable: UnavailableError | None = None
        sent = 0
        runs: dict[int, tuple[list[int], list[tuple[bytes, list[tuple[str, bytes]]]]]] = {}
        partition = 0
        # where Kafka takes messages but no markers, nothing would be delivered for now
        avoided = set(self._ownership.stalls.now())
        stalled = {number for number in avoided if is_stalled(producer, topic, number)}
        if len(stalled) == count:
            raise stalled_error()
        if len(avoided) == count:
            avoided = stalled
        for i, message in enumerate(messages):
            if i % RUN_MESSAGES == 0:
                self._partition_turn += 1
                while self._partition_turn % count in avoided:
                    self._partition_turn += 1
                partition = self._partition_turn % count
            try:
                headers = record_headers(message, settings, generation)
            except MarqError as exc:
                results[i] = exc
                continue
            number = partition
            if settings.fifo:
                number = fifo_partition(key, (message.group or "").encode(), settings, count)
                if number in stalled:  # the group keeps its partition
                    results[i] = unavailable = stalled_error()
                    continue
            run = runs.get(number)
            if run is None:
                run = runs[number] = ([], [])
            run[0].append(i)
            run[1].append((message.payload, headers))
        appended = [
            (number, places, producer.append_run(topic, number, key, records))
            for number, (places, records) in runs.items()
        ]
        futures = [future for _, _, parts in appended for _, future in parts]
        await all_done(futures, CONFIRM_TIMEOUT_S)
        accepted = False
        for number, places, parts in appended:
            at = 0
            for length, future in parts:
                outcome = _outcome_of(future)
                if isinstance(outcome, UnavailableError):
                    unavailable = outcome
                else:
                    accepted = True
                for k in range(length):
                    if isinstance(outcome, int):
                        results[places[at + k]] = Sent(topic, number, outcome + k if outcome >= 0 else -1)
                        sent += 1
                    else:
                        results[places[at + k]] = outcome
                at += length
        if unavailable is not None and not accepted:
            raise unavailable
        self._meters.sent.inc(sent)
        self._meters.sent_bytes.inc(sum(len(message.payload) for message in messages))
        return results

    async def _check_sendable(self, queue: str) -> None:
        if self._settings.queue_id is not None:
            raise NotPossibleError(
                f"in topic mode marq never writes to the topic: send to {self._ownership.topics.queue} with a Kafka "
                "producer"
            )
        await self._catalog.require_or_make(queue)


def record_headers(message: Entry, settings: QueueSettings, generation: int) -> list[tuple[str, bytes]]:
    """The headers of a message's record.

    Raises:
        BadValueError: a header is not the sender's to set, or the message does not fit the type of the queue.
        TooLargeError: the message is larger than its queue or a record allows.
    """
    if settings.fifo or message.deduplication_id is not None:
        check_fit(message, settings)
    delay_ms = settings.delay_ms
    if (
        not message.headers
        and message.key is None
        and message.delay_ms is None
        and message.ttl_ms is None
        and type(message) is not FromProtocol
    ):
        headers: list[tuple[str, bytes]] = []
        size = len(message.payload)
    else:
        headers = list(message.headers.items())
        for name in message.headers:
            if name.startswith(RESERVED):
                raise BadValueError(f"header {name!r}: names that begin with {RESERVED!r} are marq's own")
            if name[:PROTOCOLS_LENGTH].lower().startswith(PROTOCOLS):
                raise BadValueError(f"header {name!r}: names that begin with AWS. or Amazon. are those of protocols")
        if isinstance(message, FromProtocol):
            headers += message.protocol_headers.items()
        if len(headers) > HEADERS_MAX:
            raise BadValueError(f"a message with {len(headers)} headers; at most {HEADERS_MAX}")
        size = len(message.payload) + sum(len(name.encode()) + len(value) for name, value in headers)
        if message.key is not None:
            headers.append((HEADER_KEY, message.key))
            size += len(message.key)
        if message.delay_ms is not None:
            delay_ms = message.delay_ms
        if message.ttl_ms:
            headers.append((H_TTL, b"%d" % message.ttl_ms))
    if delay_ms:
        headers.append((H_DELAY, b"%d" % delay_ms))
    if settings.fifo:
        headers += fifo_headers(message, settings, generation)
    elif message.group is not None:
        headers.append((H_GROUP, message.group.encode()))
    counted = size
    if type(message) is FromProtocol and message.size_bytes is not None:
        counted = message.size_bytes
    if settings.max_message_bytes and counted > settings.max_message_bytes:
        raise TooLargeError(f"a message of {counted} bytes; the queue takes at most {settings.max_message_bytes}")
    if size > MESSAGE_MAX_BYTES // 2:
        size = len(message.payload) + sum(HEADER_OVERHEAD_BYTES + len(n.encode()) + len(v) for n, v in headers)
        if size > MESSAGE_MAX_BYTES - RECORD_ROOM_BYTES:
            raise TooLargeError(
                f"a message of {size} bytes; at most {MESSAGE_MAX_BYTES - RECORD_ROOM_BYTES} with key and headers "
                f"({HEADER_OVERHEAD_BYTES} for each)"
            )
    return headers


def _outcome_of(future: asyncio.Future[Any]) -> int | MarqError:
    """The offset of an append, or an error."""
    if not future.done():
        future.cancel()
        return UnavailableError("Kafka did not confirm it in time; it may still get there")
    error = future.exception()
    if error is None:
        return int(future.result().offset)
    if isinstance(error, MessageSizeTooLargeError | RecordTooLargeError):
        return TooLargeError("Kafka refuses the message: it is larger than the topic allows")
    if isinstance(error, ProducerFull):
        return UnavailableError(str(error))
    if isinstance(error, KafkaError):
        return UnavailableError(f"Kafka did not take it; it may still get there: {type(error).__name__}")
    return UnavailableError(f"not sent: {type(error).__name__}")
