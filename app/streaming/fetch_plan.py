"""Decides which partitions to fetch next, in Kafka's fetch sessions: an empty fetch costs the same for 1 and 1,000.

aiokafka goes through all partitions after each answer, and names each of them in each request. Here we look at a
partition only when something happened to it (it was *touched*), and a request names only what has changed since the
last one (KIP-227). The broker answers with the partitions that have records.

    touch ─► look ─► wanted, by broker ─► the changes go into the next request of its session

Code that pauses, resumes or moves a partition has to touch it. Partitions in an answer are touched, so that the next
request has their new positions: otherwise the broker would send the same records again. When an answer is lost, or has
an error of the session, the next request names everything again.

So an answer also says where the logs end that it does not name: where they did before. Whoever reads a record knows
since when it can be in its log.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import for_code
from aiokafka.protocol.fetch import FetchRequest

from app.streaming.codec import faster
from marq.clock import now_ms

#: First versions of the request with sessions, and with the epoch of the leader.
SESSIONS_FROM, LEADER_EPOCH_FROM, RACK_FROM = 7, 9, 11
#: The highest number of a request in a session; the next one is 1.
EPOCH_MAX = 2**31 - 1

_Wanted = tuple[int, int]  # the position, and bytes at most
_Topics = list[tuple[str, list[tuple[int, int, int]]]]


class End(NamedTuple):
    """Where a log ended."""

    offset: int
    at_ms: int  # when the answer came that said so
    session: int  # of that answer; 0: the later answers of its session did not speak of this log


class Node:
    """What we want of one broker, and what the broker knows of it."""

    def __init__(self) -> None:
        self.wanted: dict[TopicPartition, _Wanted] = {}
        self.told: dict[TopicPartition, _Wanted] = {}  # as the broker knows it
        self.changed: set[TopicPartition] = set()  # partitions for which the two may differ
        self.session = 0  # 0: there is none
        self.epoch = 0  # number of the next request; with 0 it names everything, and asks for a session
        self.answered_ms = 0  # when the last answer without an error came
        self._errors = 0  # one after another

    def want(self, tp: TopicPartition, what: _Wanted | None) -> None:
        """Set what we want of a partition from now on; None: nothing."""
        if what is not None:
            self.wanted[tp] = what
        elif self.wanted.pop(tp, None) is None:
            return
        self.changed.add(tp)

    def next(self) -> tuple[dict[TopicPartition, _Wanted], list[TopicPartition]]:
        """What the next request has to name: partitions that we want, and those that we no longer want."""
        if not self.epoch:
            named, forgotten = dict(self.wanted), []
            self.told = dict(self.wanted)
        else:
            named = {tp: self.wanted[tp] for tp in self.changed if tp in self.wanted}
            forgotten = [tp for tp in self.changed if tp not in self.wanted and tp in self.told]
            self.told.update(named)
            for tp in forgotten:
                del self.told[tp]
        self.changed.clear()
        return named, forgotten

    def lost(self) -> None:
        """An answer was lost: nobody knows what the broker knows."""
        self.epoch = 0

    def answered(self, code: int, session: int) -> None:
        """An answer arrived, with an error of the session, or 0.

        Raises:
            KafkaError: it is the second error in a row: naming everything again has not helped.
        """
        if code:
            self.session = self.epoch = 0
            self._errors += 1
            if self._errors > 1:
                raise for_code(code)("the session of a fetch")
            return
        self._errors = 0
        self.answered_ms = now_ms()
        if self.epoch and session == self.session:
            self.epoch = self.epoch % EPOCH_MAX + 1
        else:
            self.session, self.epoch = session, int(bool(session))


class PlannedRequest(FetchRequest):  # type: ignore[misc]  # aiokafka has no types for it
    """The next request to a broker."""

    def __init__(self, plan: FetchPlan, node: Node, wait_ms: int, min_bytes: int, max_bytes: int, isolation: int):
        super().__init__(wait_ms, min_bytes, max_bytes, isolation, [])
        self._plan = plan
        self._node = node
        self._answered: dict[TopicPartition, _Wanted] = {}
        #: For partitions in the answer: when their logs were last seen to end where it begins, or below.
        self.since_ms: dict[TopicPartition, int] = {}

    @property
    def topics(self) -> _Topics:
        """What was asked of those partitions that are in the answer."""
        return _by_topic((tp, what) for tp, what in self._answered.items())

    def build(self, request_struct_class: Any) -> Any:
        node, version = self._node, request_struct_class.API_VERSION
        if version < SESSIONS_FROM:
            node.lost()
            self._topics = _by_topic(node.next()[0].items())
            return super().build(faster(request_struct_class))
        session, epoch = node.session, node.epoch
        named, forgotten = node.next()
        gone: dict[str, list[int]] = defaultdict(list)
        for tp in forgotten:
            gone[tp.topic].append(tp.partition)
        nobody = -1  # no replica, leader epoch and start of the log: a consumer
        topics = [
            (
                topic,
                [
                    (number, nobody, position, nobody, size)
                    if version >= LEADER_EPOCH_FROM
                    else (number, position, nobody, size)
                    for number, position, size in partitions
                ],
            )
            for topic, partitions in _by_topic(named.items())
        ]
        head = (nobody, self._max_wait_ms, self._min_bytes, self._max_bytes, self._isolation_level, session, epoch)
        rack = (self._rack_id,) if version >= RACK_FROM else ()
        return faster(request_struct_class)(*head, topics, list(gone.items()), *rack)

    def lost(self) -> None:
        """There will be no answer."""
        self._node.lost()

    def answered(self, response: Any) -> None:
        """Take note of the answer. Raises `KafkaError` for one that says that the session is over, once more."""
        told, touched = self._node.told, self._plan.touched
        has_sessions = response.API_VERSION >= SESSIONS_FROM
        session, at_ms = response.session_id if has_sessions else 0, now_ms()
        for topic, partitions in response.topics:
            for number, error, end, *_ in partitions:
                tp = TopicPartition(topic, number)
                asked = self._answered[tp] = told.get(tp, (-1, 0))
                touched.add(tp)
                if not error:
                    since_ms = self._plan.ended(tp, asked[0], self._node, End(end, at_ms, session))
                    if since_ms is not None:
                        self.since_ms[tp] = since_ms
        if has_sessions:
            self._node.answered(response.error_code, response.session_id)


class FetchPlan:
    """Takes the place of a fetcher's `_get_actions_per_node`. Use it in the thread of the fetcher.

    Args:
        fetcher: aiokafka's.
        topics: those that are read all the time. Others are read for a while, and paused for good.
        whole_wait_ms: milliseconds that a broker may wait for records when no partition of `topics` is left out. One
            that is left out is fetched when the present fetch is over, so then the wait is the fetcher's own, which is
            short.
    """

    def __init__(self, fetcher: Any, topics: Collection[str] = (), whole_wait_ms: int = 0) -> None:
        self._fetcher = fetcher
        self._topics = topics
        self._whole_wait_ms = whole_wait_ms
        self._left_out: set[TopicPartition] = set()  # of these topics, those that the brokers are not asked for
        #: Whether partitions may come soon: they should not wait for the end of a fetch.
        self.expects_partitions = False
        self._nodes: dict[int, Node] = {}
        self._node_of: dict[TopicPartition, int] = {}
        self._assignment: Any = None
        self._metadata: Any = None  # the metadata from which the leaders are
        self._unread: set[TopicPartition] = set()  # with data that nobody has taken, at the last look
        self._holding: set[TopicPartition] = set()  # of these, those that still hold up the next fetch
        #: Partitions to look at before the next request.
        self.touched: set[TopicPartition] = set()
        self._ends: dict[TopicPartition, End] = {}
        self._told: deque[TopicPartition] = deque()  # more of them: Faust moves some from another thread
        seek_to, request_offset_reset = fetcher.seek_to, fetcher.request_offset_reset

        def touching_seek_to(tp: TopicPartition, offset: int) -> None:
            seek_to(tp, offset)
            self._told.append(tp)

        def touching_reset(tps: Iterable[TopicPartition], strategy: int) -> Any:
            waiting = request_offset_reset(tps, strategy)
            self._told.extend(tps)
            return waiting

        fetcher.seek_to = touching_seek_to
        fetcher.request_offset_reset = touching_reset
        fetcher._get_actions_per_node = self.actions

    def touch(self, tp: Any) -> None:
        """Something happened to a partition: look at it, now if nothing is under way."""
        self._told.append(TopicPartition(*tp))
        self._fetcher._notify(self._fetcher._wait_consume_future)

    def actions(self, assignment: Any) -> tuple[list[Any], dict[int, list[Any]], float, bool, list[Any]]:
        """The requests to send now. Unlike in aiokafka, nothing waits for a `resume`, which touches its partition."""
        fetcher = self._fetcher
        cluster = fetcher._client.cluster
        if assignment is not self._assignment:
            self._assignment = assignment
            self._node_of.clear()
            self._left_out.clear()
            self.expects_partitions = False
            for node in self._nodes.values():
                node.wanted.clear()
                node.lost()
            self.touched = set(assignment.tps)
            self._ends = {tp: end for tp, end in self._ends.items() if tp in self.touched}
        if cluster._last_successful_refresh_ms != self._metadata:
            self._metadata = cluster._last_successful_refresh_ms
            self.touched.update(assignment.tps)
        while self._told:
            self.touched.add(self._told.popleft())
        records = fetcher._records
        # a thousand whose data waits for room are not looked at for each fetch
        unread = set(records)
        self.touched |= unread ^ self._unread
        self._unread = unread
        awaiting_reset: dict[int, list[Any]] = defaultdict(list)
        again: set[TopicPartition] = set()
        no_leader = False
        for tp in self.touched:
            state = assignment.state_value(tp)
            node_id = fetcher._select_read_replica(tp)
            what: _Wanted | None = None
            if state is None:
                pass
            elif tp in records:
                self._holding.add(tp)  # and looked at again when the data was taken
            elif node_id is None or node_id < 0:
                no_leader = True
                again.add(tp)
            elif not state.has_valid_position:
                again.add(tp)
                if node_id not in fetcher._in_flight:
                    awaiting_reset[node_id].append(tp)
            elif not state.paused:
                what = (state.position, fetcher._max_partition_fetch_bytes)
            self._want(tp, node_id, what)
            if what is None and state is not None and tp.topic in self._topics:
                self._left_out.add(tp)
            else:
                self._left_out.discard(tp)
        self.touched = again
        waits_s = self._waits_s(records)
        requests = [
            (node_id, self._request(node))
            for node_id, node in self._nodes.items()
            if node.wanted and not (node_id in fetcher._in_flight or node_id in waits_s or node_id in awaiting_reset)
        ]
        pause_s = min(waits_s.values()) if waits_s else fetcher._fetcher_timeout
        if len(fetcher._pending_tasks) < len(fetcher._in_flight):
            # a fetch ended in the turn in which a touch woke aiokafka, which learns of the free broker in the next one
            pause_s = 0.0
        return requests, awaiting_reset, pause_s, no_leader, []

    def ended(self, tp: TopicPartition, position: int, node: Node, end: End) -> int | None:
        """A log ends at `end`. Returns when it was last seen to end at `position` or below; None if it never was."""
        before, self._ends[tp] = self._ends.get(tp), end
        if before is None or position < before.offset:
            return None
        return node.answered_ms if before.session and before.session == node.session else before.at_ms

    def _want(self, tp: TopicPartition, node_id: int | None, what: _Wanted | None) -> None:
        before = self._node_of.get(tp)
        if before is not None and (before != node_id or what is None):
            node, end = self._nodes[before], self._ends.get(tp)
            node.want(tp, None)
            del self._node_of[tp]
            if end is not None and end.session and end.session == node.session:
                self._ends[tp] = End(end.offset, node.answered_ms, 0)
        if what is not None and node_id is not None:
            self._node_of[tp] = node_id
            self._nodes.setdefault(node_id, Node()).want(tp, what)

    def _waits_s(self, records: Any) -> dict[int, float]:
        """By broker, the seconds to wait with the next fetch, so that readers can take the present data first."""
        waits_s: dict[int, float] = {}
        for tp in list(self._holding):
            result = records.get(tp)
            pause_s = result.calculate_backoff() if result is not None else 0.0
            if pause_s:
                node_id = self._fetcher._select_read_replica(tp)
                waits_s[node_id] = max(pause_s, waits_s.get(node_id, 0.0))
            else:
                self._holding.discard(tp)
        return waits_s

    def _request(self, node: Node) -> PlannedRequest:
        f = self._fetcher
        is_whole = not self._left_out and not self.expects_partitions
        wait_ms = max(self._whole_wait_ms, f._fetch_max_wait_ms) if is_whole else f._fetch_max_wait_ms
        return PlannedRequest(self, node, wait_ms, f._fetch_min_bytes, f._fetch_max_bytes, f._isolation_level)


def _by_topic(partitions: Iterable[tuple[TopicPartition, _Wanted]]) -> _Topics:
    topics: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for tp, (position, size) in partitions:
        topics[tp.topic].append((tp.partition, position, size))
    return list(topics.items())
