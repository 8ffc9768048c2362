"""Sends the producer's batches. It is aiokafka's sender, except that no partition holds up another one.

aiokafka has one request under way to each broker, with a batch of each partition in it. The broker answers when it has
an answer for all of them. So a partition whose replicas do not follow delays the answer for the others, and a refused
one (too few in-sync replicas) keeps its broker idle during the pause before the next attempt. Here

- a broker has `TAKE_TIMEOUT_MS` to confirm batches, and then answers for each partition;
- an unconfirmed partition is *apart* until it is confirmed: it has requests, and connections, of its own;
- its pause before the next attempt concerns no other partition.

The batches of a partition keep their order: one is under way, and after a failure it comes first again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from aiokafka.client import ConnectionGroup
from aiokafka.errors import KafkaError, OutOfOrderSequenceNumber, ProducerFenced
from aiokafka.producer import sender as aiokafka_sender
from aiokafka.protocol.produce import ProduceRequest

from app.streaming.codec import faster

log = logging.getLogger(__name__)

#: Milliseconds that a broker waits for the replicas before it answers that a batch is not confirmed.
TAKE_TIMEOUT_MS = 2_000
#: Seconds that a batch waits at most for a leader of its partition.
METADATA_S = 5.0
#: Seconds that a producer which stops waits for the answers to its requests.
END_S = 0.5
#: Connections to one broker that are shared by all partitions that are apart.
CONNECTIONS_APART = 4

Batches = dict[Any, Any]  # aiokafka's TopicPartition -> its batch


class Sender(aiokafka_sender.Sender):
    """The background task of an idempotent producer without transactions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Partitions that are apart: the last request for them was not confirmed.
        self.apart: set[Any] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: list[asyncio.Task[None]] = []
        self._refresh_s = 0.0  # when partitions without a leader were last asked for

    async def _sender_routine(self) -> None:
        accumulator, loop = self._message_accumulator, asyncio.get_running_loop()
        try:
            while True:
                await self._maybe_wait_for_pid()
                self._reap()
                found, has_unknown = accumulator.drain_by_nodes(
                    ignore_nodes=self._in_flight, muted_partitions=self._muted_partitions
                )
                for node_id, batches in found.items():
                    self._start(node_id, batches)
                timer = None
                if has_unknown:
                    # not as fast as brokers answer, and without delaying other partitions
                    self._refresh_metadata(loop.time())
                    timer = loop.call_later(self._retry_backoff, accumulator._wakeup, accumulator.waiter())
                await accumulator.waiter()  # done when there is something to send, and when a task ends
                if timer is not None:
                    timer.cancel()
                self._reap()
        except asyncio.CancelledError:
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=END_S)
                for task in late:
                    task.cancel()
        except (ProducerFenced, OutOfOrderSequenceNumber):
            raise
        except Exception as exc:
            log.exception("Unexpected error in the task that writes to Kafka")
            raise KafkaError(f"unexpected error while batches were sent: {exc!r}") from exc

    def _refresh_metadata(self, now_s: float) -> None:
        if now_s - self._refresh_s >= self._retry_backoff:
            self._refresh_s = now_s
            self.client.force_metadata_update()

    def _start(self, node_id: int, batches: Batches) -> None:
        together = {tp: batch for tp, batch in batches.items() if tp not in self.apart}
        self._muted_partitions.update(batches)
        if together:
            self._in_flight.add(node_id)
            self._spawn(self._deliver_together(node_id, together))
        for tp, batch in batches.items():
            if tp in self.apart:
                self._spawn(self._deliver(node_id, {tp: batch}, ("apart", hash(tp) % CONNECTIONS_APART)))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """A task has ended: batches that waited for it can be sent. Waiting for all tasks together would cost more."""
        self._tasks.discard(task)
        self._ended.append(task)
        self._message_accumulator._wakeup(self._message_accumulator.waiter())

    def _reap(self) -> None:
        ended, self._ended = self._ended, []
        for task in ended:
            task.result()

    async def _deliver_together(self, node_id: int, batches: Batches) -> None:
        try:
            await self._deliver(node_id, batches, ConnectionGroup.DEFAULT)
        finally:
            self._in_flight.discard(node_id)

    async def _deliver(self, node_id: int, batches: Batches, group: Any) -> None:
        """Send one request. Batches that have to be sent again stay muted until their pause is over."""
        request = _Request(self, batches, group)
        answered = await request.do(node_id)
        again = {batch.tp for batch in request.again}
        if answered:
            self.apart = (self.apart - batches.keys()) | again
        self._muted_partitions.difference_update(batches.keys() - again)
        if again:
            self._spawn(self._send_again(request.again))

    async def _send_again(self, batches: list[Any]) -> None:
        await asyncio.sleep(self._retry_backoff)
        # send to the present leader, if we know it; otherwise the old one answers that it is none
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(METADATA_S):
                await self.client._maybe_wait_metadata()
        for batch in batches:
            self._message_accumulator.reenqueue(batch)
            self._muted_partitions.discard(batch.tp)


class _ProduceRequest(ProduceRequest):
    def build(self, request_struct_class: Any) -> Any:
        return super().build(faster(request_struct_class))


class _Request(aiokafka_sender.SendProduceReqHandler):
    """One produce request; `again`: the batches that have to be sent again."""

    def __init__(self, sender: Sender, batches: Batches, group: Any) -> None:
        super().__init__(sender, batches)
        self.group = group
        self.again: list[Any] = self._to_reenqueue

    def create_request(self) -> _ProduceRequest:
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for tp, batch in self._batches.items():
            topics.setdefault(tp.topic, []).append((tp.partition, batch.get_data_buffer()))
        return _ProduceRequest(
            required_acks=self._sender._acks,
            timeout=TAKE_TIMEOUT_MS,
            topics=list(topics.items()),
            transactional_id=None,
        )

    async def do(self, node_id: int) -> bool:
        """False if the broker did not answer."""
        try:
            response = await self._client.send(node_id, self.create_request(), group=self.group)
        except KafkaError as exc:
            log.warning("Got error produce response: %s", exc)
            if getattr(exc, "invalid_metadata", False):
                self._client.force_metadata_update()
            for batch in self._batches.values():
                if self._can_retry(exc, batch):
                    self.again.append(batch)
                else:
                    batch.failure(exception=exc)
            return False
        self.handle_response(response)
        return True
