"""Puts `app.streaming.batches` into aiokafka's fetcher, in the place of its own decoder.

Where the answer of a broker has a flaw, the same offset is read again, from all replicas in turn, while the other
partitions are read on:

    answer ─► records up to the flaw ─► asked again: still a flaw ─► leader, followers ─► records of the first whole one
                                                                              └─► none has it: the flaw is given up
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.errors import CorruptRecordException, KafkaError, KafkaStorageError, UnknownError
from aiokafka.protocol.fetch import FetchRequest

from app.streaming.batches import BASE_LENGTH, UNUSABLE, Fault, FetchedRecords, Flaw, below
from app.streaming.fetch_plan import PlannedRequest
from marq.core.reading import Unreadable

#: Bytes that a fetch of a partition may ask for if a batch is larger than usual.
FETCH_MAX_BYTES = 64 * 1024 * 1024
#: Fetches of one position without a usable record before the replicas are asked: an answer may be cut short.
PATIENCE = 3
#: Rounds through the replicas before a flaw is given up though not all of them have answered.
ROUNDS = 4
#: Seconds between two such rounds at first, doubled each time; and seconds in which a replica has to answer.
ROUND_S = 0.25
ASK_S = 5.0

#: Beyond every log.
END = 1 << 62

#: Errors of a broker that can't read its own log.
_BROKEN = {0} | {error.errno for error in (CorruptRecordException, KafkaStorageError, UnknownError)}


class Answer(NamedTuple):
    """What a broker has sent of one partition."""

    end: int  # of the log
    stable: int  # the last stable offset: what is behind it may be hidden by an open transaction; -1: not known
    aborted: Any  # transactions
    data: bytes  # batches
    error: int = 0
    since_ms: int | None = None  # when the log was last seen to end at the position, or below


class _Client:
    """aiokafka's client as its fetcher sees it. It keeps back the records of some topics."""

    def __init__(self, client: Any, topics: Callable[[str], bool]) -> None:
        self._client = client
        self._topics = topics
        #: By node: what it has sent of these topics.
        self.kept: dict[Any, dict[TopicPartition, Answer]] = {}

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
    def _without(kept: dict[TopicPartition, Answer], topic: str, part: Any, version: int) -> Any:
        answer = _answer_of(part, version)
        if answer.error not in _BROKEN:
            return part
        kept[TopicPartition(topic, part[0])] = answer
        return (*part[:-1], b"")

    async def ask(self, node_id: int, tp: TopicPartition, position: int, size: int) -> Answer | None:
        """What one replica has at a position. None: it does not say."""
        request = FetchRequest(0, 1, size, 1, [(tp.topic, [(tp.partition, position, size)])])
        try:
            async with asyncio.timeout(ASK_S):
                response = await self._client.send(node_id, request)
        except (KafkaError, TimeoutError):
            return None
        ((_, (part,)),) = response.topics
        answer = _answer_of(part, response.API_VERSION)
        return answer if answer.error in _BROKEN else None


def _answer_of(part: Any, version: int) -> Answer:
    _, error, end, *more, data = part
    # behind the end of the log: last stable offset, first offset, aborted transactions, preferred replica
    aborted = more[2] if version >= 11 else more[-1] if version >= 4 else None
    return Answer(end, more[0] if version >= 4 else -1, aborted, data or b"", error)


def _awaited(assignment: Any, tp: TopicPartition) -> FetchResult:
    """A result without records that stays while the replicas are asked: aiokafka does not fetch the partition then."""
    result = FetchResult(tp, assignment=assignment, partition_records=(), backoff=0.0)
    result.getall = lambda max_records=None: []
    return result


class Decoder:
    """Decodes what the fetcher of a consumer gets of some topics: see `decode_with`."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        topics: Callable[[str], bool],
        on_fault: Callable[[TopicPartition, Fault], None],
        contiguous: Callable[[str], bool],
    ) -> None:
        self._fetcher = fetcher = consumer._fetcher
        self._on_fault = on_fault
        self._contiguous = contiguous
        self._stuck: dict[TopicPartition, tuple[int, int]] = {}  # position, and its fetches without a usable record
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = fetcher._client = _Client(fetcher._client, topics)
        self._proceed = fetcher._proc_fetch_request
        fetcher._fetch_task.add_done_callback(lambda _: [task.cancel() for task in self._tasks])
        fetcher._proc_fetch_request = self._fetch

    async def _fetch(self, assignment: Any, node_id: Any, request: Any) -> bool:
        self._client.kept.pop(node_id, None)
        has_data = bool(await self._proceed(assignment, node_id, request))
        kept = self._client.kept.pop(node_id, {})
        if not assignment.active:
            return has_data
        since_ms = request.since_ms if isinstance(request, PlannedRequest) else {}
        for topic, partitions in request.topics:
            for number, position, _ in partitions:
                tp = TopicPartition(topic, number)
                if tp in kept and self._is_wanted(assignment, tp, position):
                    answer = kept[tp]._replace(since_ms=since_ms.get(tp))
                    has_data |= self._take(assignment, tp, position, answer)
        return has_data

    def _is_wanted(self, assignment: Any, tp: TopicPartition, position: int) -> bool:
        """False if a seek came in between, or there are records that nobody has taken."""
        state = assignment.state_value(tp)
        if tp in self._fetcher._records or state is None:
            return False
        return bool(state.has_valid_position and state.position == position)

    def _take(self, assignment: Any, tp: TopicPartition, position: int, answer: Answer) -> bool:
        if not answer.data and not answer.error and position >= answer.stable:
            return False  # the end of the log
        fetcher = self._fetcher
        needed = _cut_off(answer.data, position)
        if needed > fetcher._max_partition_fetch_bytes:
            # a broker may send nothing of a batch that is larger than the requested size
            fetcher._max_partition_fetch_bytes = min(needed, FETCH_MAX_BYTES)
        before, times = self._stuck.get(tp, (-1, 0))
        times = times + 1 if before == position else 1
        self._stuck[tp] = (position, times)
        if times > 1:
            # nothing was read of the last answer
            flaw = self._decoded(tp, position, answer).first_flaw()
            if flaw is not None and (flaw is not UNUSABLE or times > PATIENCE):
                self._look_elsewhere(assignment, tp, position, answer, flaw)
                return False
        self._put(assignment, tp, self._decoded(tp, position, answer))
        return True

    def _decoded(self, tp: TopicPartition, position: int, answer: Answer, given_up: int = -1) -> FetchedRecords:
        return FetchedRecords(
            answer.data,
            answer.aborted,
            position,
            end=answer.end,
            given_up=(given_up,),
            contiguous=self._contiguous(tp.topic),
            since_ms=answer.since_ms,
            on_fault=lambda fault: self._on_fault(tp, fault),
        )

    def _put(self, assignment: Any, tp: TopicPartition, records: FetchedRecords) -> None:
        fetcher = self._fetcher
        fetcher._records[tp] = FetchResult(
            tp, assignment=assignment, partition_records=records, backoff=fetcher._prefetch_backoff
        )

    # -- where the answer of the leader has a flaw

    def _look_elsewhere(self, assignment: Any, tp: TopicPartition, position: int, answer: Answer, flaw: Flaw) -> None:
        awaited = self._fetcher._records[tp] = _awaited(assignment, tp)
        task = asyncio.ensure_future(self._elsewhere(assignment, tp, position, answer, flaw, awaited))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _elsewhere(
        self, assignment: Any, tp: TopicPartition, position: int, answer: Answer, flaw: Flaw, awaited: FetchResult
    ) -> None:
        fetcher = self._fetcher
        found, _ = await self._whole(tp, position, ROUNDS)
        if fetcher._records.get(tp) is not awaited:
            return  # a seek or a rebalance came in between
        del fetcher._records[tp]
        if not assignment.active or not self._is_wanted(assignment, tp, position):
            return
        if found is None:
            self._put(assignment, tp, self._decoded(tp, position, answer, given_up=position))
        else:
            node_id, whole = found
            # behind the flaw the leader's log is good, or has a flaw that must be named as well
            stop, data = below(whole.data, max(position + 1, flaw.stop) if answer.data else END)
            self._on_fault(tp, Fault(position, position, flaw.reason, stop, True, node_id))
            self._put(assignment, tp, self._decoded(tp, position, whole._replace(data=data)))
        self._stuck.pop(tp, None)
        for waiter in fetcher._fetch_waiters:
            fetcher._notify(waiter)

    async def read_again(self, tp: TopicPartition, start: int, stop: int) -> tuple[int, list[Any]]:
        """The records of what can be read now in `[start, stop)`, from any replica, and the position behind them.

        At most one answer of a broker is read. What no replica has whole is among them as `Unreadable`.
        """
        records: list[Any] = []
        while start < stop:
            found, flaw = await self._whole(tp, start, 1)
            if found is not None:
                fetched = self._decoded(tp, start, found[1])
                records += [record for record in fetched if record.offset < stop]
                return max(fetched.next_fetch_offset, start), records
            if flaw is None:
                break  # nobody has answered
            behind = min(max(flaw.stop, start + 1), stop)
            records.append(Unreadable(start, -1, behind, flaw.reason))
            start = behind
        return start, records

    async def _whole(
        self, tp: TopicPartition, position: int, rounds: int
    ) -> tuple[tuple[int, Answer] | None, Flaw | None]:
        """The first replica that has no flaw at a position, and its answer; else None, and the flaw of another one."""
        client, pause_s, known = self._client, ROUND_S, None
        for left in reversed(range(rounds)):
            silent = False
            for node_id in _replicas(client.cluster, tp):
                answer = await client.ask(node_id, tp, position, self._fetcher._max_partition_fetch_bytes)
                if answer is None or (not answer.data and not answer.error):
                    silent = True  # away, or a follower that does not have it yet
                elif (flaw := self._decoded(tp, position, answer).first_flaw()) is None:
                    return (node_id, answer), None
                elif known is None or flaw.stop > known.stop:
                    known = flaw
            if not silent or not left:
                break
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return None, known


def decode_with(
    consumer: AIOKafkaConsumer,
    topics: Callable[[str], bool],
    on_fault: Callable[[TopicPartition, Fault], None],
    contiguous: Callable[[str], bool] = lambda topic: False,
) -> Decoder:
    """Make a consumer of aiokafka that was started decode the records of some topics with `FetchedRecords`.

    aiokafka has no place for a decoder: it makes its own in the middle of `_proc_fetch_request`, in Cython. So the
    records are taken out of the answer before that method sees them, and put where it would have put them.

    Args:
        contiguous: which of them are not compacted: a gap between two batches is lost records.
    """
    return Decoder(consumer, topics, on_fault, contiguous)


def said_of(tp: TopicPartition, fault: Fault) -> str:
    """A fault as a line for the log."""
    where = f"{tp.topic}:{tp.partition} [{fault.start}, {fault.batch_stop or fault.stop})"
    if not fault.is_flaw:
        return f"{tp.topic}:{tp.partition} [{fault.start}, {fault.stop}) can't be decoded: {fault.reason}"
    if fault.read_from < 0:
        return f"{where} can't be read, no replica has it whole ({fault.reason}): it is looked at again"
    return (
        f"{where} is damaged on the disk of a broker, or was on the way ({fault.reason}): "
        f"read from broker {fault.read_from}"
    )


def _replicas(cluster: Any, tp: TopicPartition) -> list[int]:
    """The brokers that have a partition, its leader first."""
    known = cluster._partitions.get(tp.topic, {}).get(tp.partition)
    return sorted(known.replicas, key=lambda node: node != known.leader) if known is not None else []


def _cut_off(data: bytes, position: int) -> int:
    """The size of the first batch if it is incomplete; else 0."""
    if len(data) < BASE_LENGTH.size:
        return 0
    base, length = BASE_LENGTH.unpack_from(data)
    size = BASE_LENGTH.size + length
    return size if size > len(data) and 0 <= base <= position else 0
