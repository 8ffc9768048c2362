"""Puts `app.streaming.batches` into aiokafka's fetcher, in the place of its own decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.protocol.fetch import FetchRequest

from app.streaming.batches import BASE_LENGTH, Fault, FetchedRecords
from app.streaming.fetch_plan import PlannedRequest

#: Bytes that a fetch of a partition may ask for if a batch is larger than usual.
FETCH_MAX_BYTES = 64 * 1024 * 1024
#: Fetches of one position without a usable record before its offset is given up: an answer may be cut short.
PATIENCE = 3


class _Client:
    """aiokafka's client as its fetcher sees it. It keeps back the records of some topics."""

    def __init__(self, client: Any, topics: Callable[[str], bool]) -> None:
        self._client = client
        self._topics = topics
        #: By node: partition -> (end of the log, aborted transactions, batches).
        self.kept: dict[Any, dict[TopicPartition, tuple[int, Any, bytes]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node_id: Any, request: Any, **options: Any) -> Any:
        try:
            response = await self._client.send(node_id, request, **options)
        except BaseException:
            if isinstance(request, PlannedRequest):
                request.lost()
            raise
        if isinstance(request, PlannedRequest):
            request.answered(response)
        if isinstance(request, FetchRequest):
            kept = self.kept[node_id] = {}
            response.topics = [
                (topic, [self._without(kept, topic, p, response.API_VERSION) for p in partitions])
                if self._topics(topic)
                else (topic, partitions)
                for topic, partitions in response.topics
            ]
        return response

    @staticmethod
    def _without(kept: dict[TopicPartition, tuple[int, Any, bytes]], topic: str, part: Any, version: int) -> Any:
        number, error, end, *more, data = part
        if error or not data:
            return part
        # behind the end of the log: last stable offset, first offset, aborted transactions, preferred replica
        aborted = more[2] if version >= 11 else more[-1] if version >= 4 else None
        kept[TopicPartition(topic, number)] = (end, aborted, data)
        return (number, error, end, *more, b"")


def decode_with(
    consumer: AIOKafkaConsumer, topics: Callable[[str], bool], on_fault: Callable[[TopicPartition, Fault], None]
) -> None:
    """Make a consumer of aiokafka that was started decode the records of some topics with `FetchedRecords`.

    aiokafka has no place for a decoder: it makes its own in the middle of `_proc_fetch_request`, in Cython. So the
    records are taken out of the answer before that method sees them, and put where it would have put them.
    """
    fetcher = consumer._fetcher
    client = fetcher._client = _Client(fetcher._client, topics)
    stuck: dict[TopicPartition, tuple[int, int]] = {}  # position, and its fetches without a usable record
    proceed = fetcher._proc_fetch_request

    def result_of(assignment: Any, tp: TopicPartition, position: int, kept: tuple[int, Any, bytes]) -> FetchResult:
        end, aborted, data = kept
        before, times = stuck.get(tp, (-1, 0))
        patient = before != position or times < PATIENCE
        stuck[tp] = (position, times + 1 if before == position else 1)
        records = FetchedRecords(
            data,
            aborted,
            position,
            end=end,
            patient=patient,
            on_fault=lambda fault: on_fault(tp, fault),
        )
        return FetchResult(tp, assignment=assignment, partition_records=records, backoff=fetcher._prefetch_backoff)

    async def fetch(assignment: Any, node_id: Any, request: Any) -> bool:
        client.kept.pop(node_id, None)
        has_data = bool(await proceed(assignment, node_id, request))
        kept = client.kept.pop(node_id, {})
        if not assignment.active:
            return has_data
        for topic, partitions in request.topics:
            for number, position, _ in partitions:
                tp = TopicPartition(topic, number)
                state = assignment.state_value(tp)
                if tp not in kept or tp in fetcher._records or state is None:
                    continue
                if not state.has_valid_position or state.position != position:
                    continue  # a seek came in between
                needed = _cut_off(kept[tp][2], position)
                if needed > fetcher._max_partition_fetch_bytes:
                    # a broker may send nothing of a batch that is larger than the requested size
                    fetcher._max_partition_fetch_bytes = min(needed, FETCH_MAX_BYTES)
                fetcher._records[tp] = result_of(assignment, tp, position, kept[tp])
                has_data = True
        return has_data

    fetcher._proc_fetch_request = fetch


def _cut_off(data: bytes, position: int) -> int:
    """The size of the first batch if it is incomplete; else 0."""
    if len(data) < BASE_LENGTH.size:
        return 0
    base, length = BASE_LENGTH.unpack_from(data)
    size = BASE_LENGTH.size + length
    return size if size > len(data) and 0 <= base <= position else 0
