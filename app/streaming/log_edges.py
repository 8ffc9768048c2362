"""Where logs begin and end, or reach a time, for many partitions in one request to each broker.

    ask ─┐
    ask ─┼─ gathered for `GATHER_S` ─► one request to each leader ─► each asker gets its own partitions
    ask ─┘          ▲                                                  │
                    └── without an answer, while somebody waits ◄──────┘

We ask again for a partition without a leader, or with a retriable error, in a separate request, so it does not delay
others. A worker that takes over a thousand partitions makes a few requests, not three thousand. Each asker has futures
of its own, which end when it gives up: a question without any is not asked again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, LeaderNotAvailableError, UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.offset import OffsetRequest

#: The two edges of a log, as Kafka has them.
BEGIN, END = -2, -1
#: Seconds for which questions are gathered: those of one turn of the event loop, and of the tasks that it wakes.
GATHER_S = 0.002
#: Seconds before a partition is asked for again.
AGAIN_S = 0.1

_READ_UNCOMMITTED = 0
_Question = tuple[TopicPartition, int]  # BEGIN, END, or milliseconds since 1970
_Asked = dict[_Question, list[asyncio.Future[int]]]  # who waits for the answer


class LogEdges:
    """Asks over the connection of a consumer that fetches nothing."""

    def __init__(self, consumer: Callable[[], Awaitable[AIOKafkaConsumer]]) -> None:
        self._consumer = consumer
        self._waiting: _Asked = {}  # not sent yet
        self._later: _Asked = {}  # to be sent again after a pause
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each log. Raises `KafkaError`. Waits for a leader for as long as there is none."""
        return await self._ask(tps, BEGIN)

    async def end(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset behind the last one of each log, at a time after this call. As `begin`."""
        return await self._ask(tps, END)

    async def since(self, tp: TopicPartition, time_ms: int) -> int:
        """The first offset with a timestamp that is not below `time_ms`; -1: there is none. As `begin`."""
        return (await self._ask([tp], time_ms))[tp]

    def close(self) -> None:
        """Answer nobody any more."""
        for task in self._tasks:
            task.cancel()

    async def _ask(self, tps: Iterable[TopicPartition], edge: int) -> dict[TopicPartition, int]:
        futures = {tp: self._answer_to((tp, edge)) for tp in tps}
        try:
            offsets = await asyncio.gather(*futures.values())
        finally:
            for future in futures.values():
                future.cancel()
        return dict(zip(futures, offsets, strict=True))

    def _answer_to(self, question: _Question) -> asyncio.Future[int]:
        # only an unsent question may be shared: the answer has to be newer than the call
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._wait({question: [future]})
        return future

    def _wait(self, asked: _Asked) -> None:
        if asked and not self._waiting:
            self._spawn(self._send_gathered())
        for question, futures in asked.items():
            self._waiting.setdefault(question, []).extend(futures)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_gathered(self) -> None:
        await asyncio.sleep(GATHER_S)
        asked, self._waiting = _open(self._waiting), {}
        if not asked:
            return
        try:
            client = (await self._consumer())._client
            await client._maybe_wait_metadata()
        except BaseException as exc:
            _fail(asked, exc)
            if not isinstance(exc, Exception):
                raise
            return
        by_node: dict[int, _Asked] = defaultdict(dict)
        again: _Asked = {}
        for question, futures in asked.items():
            node = client.cluster.leader_for_partition(question[0])
            if node is None or node < 0:
                client.add_topic(question[0].topic)
                again[question] = futures
            else:
                by_node[node][question] = futures
        for node, questions in by_node.items():
            for part in _once(questions):
                self._spawn(self._send(client, node, part))
        if again:
            self._again(client, again)

    async def _send(self, client: Any, node: int, asked: _Asked) -> None:
        topics: dict[str, list[tuple[int, int]]] = defaultdict(list)
        edges = dict(asked.keys())
        for tp, edge in asked:
            topics[tp.topic].append((tp.partition, edge))
        try:
            response = await client.send(node, OffsetRequest(-1, _READ_UNCOMMITTED, list(topics.items())))
        except KafkaError as exc:
            if exc.retriable:
                self._again(client, asked)
            else:
                _fail(asked, exc)
            return
        except BaseException as exc:
            _fail(asked, exc)
            raise
        again: _Asked = {}
        for topic, partitions in response.topics:
            for number, code, _timestamp, offset, *_ in partitions:
                tp = TopicPartition(topic, number)
                question = (tp, edges[tp])
                futures = asked.pop(question)
                if not code:
                    _tell(futures, offset)
                    continue
                error = for_code(code)
                if error.retriable or error in (UnknownTopicOrPartitionError, LeaderNotAvailableError):
                    again[question] = futures
                else:
                    _fail({question: futures}, error(f"{topic}:{number}"))
        if again or asked:
            self._again(client, again | asked)

    def _again(self, client: Any, asked: _Asked) -> None:
        """Ask again for edges without an answer, all at one pace, while somebody waits."""
        if not self._later:
            client.force_metadata_update()
            self._spawn(self._wait_again())
        for question, futures in asked.items():
            self._later.setdefault(question, []).extend(futures)

    async def _wait_again(self) -> None:
        try:
            await asyncio.sleep(AGAIN_S)
        except BaseException as exc:
            _fail(self._later, exc)
            raise
        later, self._later = self._later, {}
        self._wait(_open(later))


def _open(asked: _Asked) -> _Asked:
    """The questions that somebody still waits for."""
    waiting = {question: [one for one in futures if not one.done()] for question, futures in asked.items()}
    return {question: futures for question, futures in waiting.items() if futures}


def _once(asked: _Asked) -> list[_Asked]:
    """Questions by request. An answer does not say what was asked, so each log is in a request once."""
    requests: list[dict[TopicPartition, _Question]] = []
    for question in asked:
        request = next((request for request in requests if question[0] not in request), None)
        if request is None:
            requests.append(request := {})
        request[question[0]] = question
    return [{question: asked[question] for question in request.values()} for request in requests]


def _tell(futures: Iterable[asyncio.Future[int]], offset: int) -> None:
    for future in futures:
        if not future.done():
            future.set_result(offset)


def _fail(asked: _Asked, exc: BaseException) -> None:
    for futures in asked.values():
        for future in futures:
            if not future.done():
                if isinstance(exc, Exception):
                    future.set_exception(exc)
                else:
                    future.cancel()


def release(consumer: AIOKafkaConsumer) -> None:
    """Stop reading with a consumer, but keep the leaders that it knows.

    `unsubscribe` would make it ask for all topics of the cluster, and forget those that are read next.
    """
    consumer._subscription.unsubscribe()
