"""The next fetch: in Kafka's fetch sessions, without going through partitions that were not touched."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.protocol.fetch import FetchRequest_v4, FetchRequest_v11

from app.streaming import fetch_plan
from app.streaming.fetch_plan import EPOCH_MAX, FetchPlan, Node

GONE, WRONG_EPOCH = 70, 71


class Broker:
    """One broker with fetch sessions, as KIP-227 has them. A log is the number of its records."""

    def __init__(self) -> None:
        self.ends: dict[TopicPartition, int] = {}
        self.sessions: dict[int, dict[str, Any]] = {}
        self.made = 0
        self.named = 0  # partitions in the last request
        self.wait_ms = 0  # of the last request

    def answer(self, request: Any) -> Any:
        asked = {
            TopicPartition(topic, p[0]): p[2]
            for topic, partitions in request.topics
            for p in partitions  # (partition, leader epoch, offset, start of the log, bytes)
        }
        self.wait_ms = request.max_wait_time
        self.named = len(asked) + sum(len(numbers) for _, numbers in request.forgotten_topics_data)
        if request.session_epoch == 0:
            self.sessions.pop(request.session_id, None)
            self.made += 1
            session = self.sessions[self.made] = {"epoch": 1, "at": asked, "seen": {}}
            return self._read(self.made, session, asked)
        session = self.sessions.get(request.session_id)  # type: ignore[assignment]
        if session is None or session["epoch"] != request.session_epoch:
            return SimpleNamespace(
                API_VERSION=11, error_code=GONE if session is None else WRONG_EPOCH, session_id=0, topics=[]
            )
        session["epoch"] += 1
        session["at"].update(asked)
        for topic, numbers in request.forgotten_topics_data:
            for number in numbers:
                session["at"].pop(TopicPartition(topic, number), None)
        return self._read(request.session_id, session, ())

    def _read(self, number: int, session: dict[str, Any], named: Any) -> Any:
        topics = []
        for tp, offset in session["at"].items():
            end = self.ends[tp]
            if offset < end or tp in named or session["seen"].get(tp) != end:
                session["seen"][tp] = end
                topics.append((tp.topic, [(tp.partition, 0, end, offset)]))
        return SimpleNamespace(API_VERSION=11, error_code=0, session_id=number, topics=topics)


class State:
    def __init__(self) -> None:
        self.position = 0
        self.paused = False
        self.has_valid_position = True


class Result:
    """Records that wait for their reader, and for a while hold up the next fetch."""

    def __init__(self, holds: int = 0) -> None:
        self.holds = holds

    def calculate_backoff(self) -> float:
        self.holds -= 1
        return 0.02 if self.holds >= 0 else 0.0


class Lab:
    """A fetcher with so many partitions at one broker."""

    def __init__(self, count: int) -> None:
        self.broker = Broker()
        self.states = {TopicPartition("t", n): State() for n in range(count)}
        self.broker.ends = dict.fromkeys(self.states, 0)
        self.looked_at = 0
        self.since_ms: dict[TopicPartition, int] = {}  # in the last answer
        self.delivered: list[tuple[TopicPartition, int, int]] = []
        self.asked: dict[TopicPartition, int] = {}
        self.assignment: Any = SimpleNamespace(tps=set(self.states), state_value=self._state)
        self.fetcher: Any = SimpleNamespace(
            _client=SimpleNamespace(cluster=SimpleNamespace(_last_successful_refresh_ms=1)),
            _records={},
            _in_flight=set(),
            _pending_tasks=set(),
            _select_read_replica=lambda tp: 1,
            _max_partition_fetch_bytes=1_000,
            _fetch_max_wait_ms=100,
            _fetch_min_bytes=1,
            _fetch_max_bytes=1_000_000,
            _isolation_level=1,
            _fetcher_timeout=0.2,
            _wait_consume_future=None,
            _notify=lambda future: None,
            seek_to=self._seek_to,
            request_offset_reset=lambda tps, strategy: None,
        )
        self.plan = FetchPlan(self.fetcher, ["t"], 500)

    def _state(self, tp: TopicPartition) -> State | None:
        self.looked_at += 1
        return self.states.get(tp)

    def _seek_to(self, tp: TopicPartition, offset: int) -> None:
        self.states[tp].position = offset
        self.fetcher._records.pop(tp, None)

    def fetch(self, fault: str = "", *, room: bool = True) -> int:
        """One request and its answer. Returns how many partitions the answer named."""
        requests, *_ = self.plan.actions(self.assignment)
        if not requests:
            return 0
        ((_, request),) = requests
        struct = request.build(FetchRequest_v11)
        if fault == "request lost":
            request.lost()
            return 0
        response = self.broker.answer(struct)
        if fault == "answer lost":
            request.lost()
            return 0
        request.answered(response)
        self.since_ms = request.since_ms
        for topic, partitions in request.topics:
            for number, asked, _ in partitions:
                self._take(TopicPartition(topic, number), asked, response, room=room)
        return sum(len(partitions) for _, partitions in request.topics)

    def _take(self, tp: TopicPartition, asked: int, response: Any, *, room: bool) -> None:
        state = self.states.get(tp)
        if state is None or state.position != asked:
            return
        (end,) = (p[2] for topic, partitions in response.topics for p in partitions if (topic, p[0]) == tp)
        (offset,) = (p[3] for topic, partitions in response.topics for p in partitions if (topic, p[0]) == tp)
        assert offset == asked, "what the broker sent is what this side believes it was asked for"
        if end > asked:
            if room:
                state.position = end
                self.delivered.append((tp, asked, end))
            else:
                self.fetcher._records[tp] = Result()


def test_a_fetch_without_news_names_no_partition_and_looks_at_none() -> None:
    lab = Lab(1_000)
    lab.fetch()
    lab.fetch()
    lab.looked_at = 0
    for _ in range(5):
        assert lab.fetch() == 0
        assert lab.broker.named == 0
    assert lab.looked_at == 0
    assert lab.broker.made == 1


def test_the_broker_may_wait_for_long_only_while_no_partition_is_left_out() -> None:
    lab = Lab(3)
    tp = TopicPartition("t", 1)
    other = TopicPartition("changelog", 0)  # paused for good, as Faust leaves it after a recovery
    lab.states[other], lab.broker.ends[other] = State(), 0
    lab.states[other].paused = True
    lab.assignment.tps.add(other)

    def wait_ms() -> int:
        lab.broker.wait_ms = 0
        lab.fetch()
        return lab.broker.wait_ms

    assert wait_ms() == 500
    lab.states[tp].paused = True
    lab.plan.touch(tp)
    assert wait_ms() == 100, "when it is resumed, it waits for the end of this fetch"
    lab.states[tp].paused = False
    lab.plan.touch(tp)
    assert wait_ms() == 500
    lab.broker.ends[tp] = 5
    lab.fetch(room=False)
    assert wait_ms() == 100, "when its reader has taken them, it waits for the end of this fetch"
    lab.states[tp].position = 5
    del lab.fetcher._records[tp]
    assert wait_ms() == 500
    lab.plan.expects_partitions = True
    assert wait_ms() == 100, "those that come wait for the end of this fetch"
    lab.assignment = SimpleNamespace(tps=set(lab.states), state_value=lab._state)
    assert wait_ms() == 500


def test_a_fetch_that_ended_while_something_else_woke_the_fetcher_does_not_hold_up_the_next_one() -> None:
    lab = Lab(1)
    lab.fetcher._in_flight.add(1)
    lab.fetcher._pending_tasks.add("a fetch")
    *_, pause_s, _, _ = lab.plan.actions(lab.assignment)
    assert pause_s == 0.2
    lab.fetcher._pending_tasks.clear()  # aiokafka drops the task at once, and frees the broker a turn later
    *_, pause_s, _, _ = lab.plan.actions(lab.assignment)
    assert pause_s == 0.0


def test_only_the_partition_with_news_is_named() -> None:
    lab = Lab(1_000)
    lab.fetch()
    lab.fetch()
    tp = TopicPartition("t", 7)
    lab.broker.ends[tp] = 5
    lab.looked_at = 0
    assert lab.fetch() == 1
    assert lab.delivered == [(tp, 0, 5)]
    lab.fetch()
    assert lab.broker.named == 1
    assert lab.looked_at <= 2


def test_what_is_paused_or_has_no_room_is_not_sent_again_until_it_is_wanted() -> None:
    lab = Lab(3)
    lab.fetch()
    paused, full = TopicPartition("t", 0), TopicPartition("t", 1)
    lab.states[paused].paused = True
    lab.plan.touch(paused)
    lab.broker.ends.update({paused: 4, full: 4})
    assert lab.fetch(room=False) == 1
    assert lab.fetch() == 0
    del lab.fetcher._records[full]
    lab.states[full].position = 4
    lab.states[paused].paused = False
    lab.plan.touch(paused)
    assert lab.fetch() == 1
    assert lab.delivered == [(paused, 0, 4)]


def test_a_thousand_with_data_that_nobody_takes_are_looked_at_once() -> None:
    lab = Lab(1_000)
    lab.fetch()
    lab.broker.ends = dict.fromkeys(lab.states, 3)
    assert lab.fetch(room=False) == 1_000
    lab.fetch()
    lab.looked_at = 0
    for _ in range(5):
        lab.fetch()
    assert lab.looked_at == 0
    taken = TopicPartition("t", 3)
    del lab.fetcher._records[taken]
    lab.states[taken].position = 3
    lab.broker.ends[taken] = 5
    assert lab.fetch() == 1
    assert lab.delivered == [(taken, 3, 5)]
    assert lab.looked_at <= 2


def test_data_holds_up_the_next_fetch_until_its_time_is_over() -> None:
    lab = Lab(2)
    lab.fetch()
    lab.broker.ends[TopicPartition("t", 0)] = 3
    lab.fetch(room=False)
    lab.fetcher._records[TopicPartition("t", 0)].holds = 2
    waits = [lab.plan.actions(lab.assignment) for _ in range(3)]
    assert [pause_s for _, _, pause_s, _, _ in waits] == [0.02, 0.02, 0.2]
    assert [len(requests) for requests, *_ in waits] == [0, 0, 1]


def test_a_new_assignment_begins_a_new_session() -> None:
    lab = Lab(3)
    lab.fetch()
    lab.fetch()
    tp = TopicPartition("t", 2)
    del lab.states[tp]
    lab.assignment = SimpleNamespace(tps=set(lab.states), state_value=lab._state)
    lab.fetch()
    assert lab.broker.named == 2
    assert len(lab.broker.sessions) == 1
    assert all(tp not in session["at"] for session in lab.broker.sessions.values())


def test_an_error_of_a_session_is_tried_again_at_once_and_the_second_one_with_a_pause() -> None:
    lab = Lab(2)
    lab.fetch()
    lab.broker.sessions.clear()
    assert lab.fetch() == 0
    assert lab.fetch() == 2
    node = Node()
    node.answered(GONE, 0)
    with pytest.raises(KafkaError):
        node.answered(GONE, 0)
    node.answered(0, 5)
    node.answered(GONE, 0)


def test_a_broker_that_gives_no_sessions_is_told_everything_each_time() -> None:
    node = Node()
    tp = TopicPartition("t", 0)
    node.want(tp, (0, 1))
    for _ in range(3):
        assert node.next() == ({tp: (0, 1)}, [])
        node.answered(0, 0)


def test_the_number_of_a_request_never_becomes_the_one_that_begins_a_session() -> None:
    node = Node()
    node.answered(0, 9)
    node.epoch = EPOCH_MAX
    node.answered(0, 9)
    assert node.epoch == 1


def test_an_old_broker_is_told_everything_without_sessions() -> None:
    lab = Lab(2)
    for _ in range(2):
        ((_, request),) = lab.plan.actions(lab.assignment)[0]
        struct = request.build(FetchRequest_v4)
        assert [(topic, sorted(partitions)) for topic, partitions in struct.topics] == [
            ("t", [(0, 0, 1_000), (1, 0, 1_000)])
        ]
        request.answered(SimpleNamespace(API_VERSION=4, topics=[]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(ms=1_000)
    monkeypatch.setattr(fetch_plan, "now_ms", lambda: now.ms)
    return now


def fetched(lab: Lab, clock: SimpleNamespace, end: int, passed_ms: int = 100, fault: str = "") -> int | None:
    """Partition 0 ends there when the next answer comes, after so long; since when its records can be in the log."""
    clock.ms += passed_ms
    lab.broker.ends[TopicPartition("t", 0)] = end
    lab.fetch(fault)
    return lab.since_ms.get(TopicPartition("t", 0))


def test_what_came_between_two_answers_was_not_in_the_log_at_the_first(clock: SimpleNamespace) -> None:
    lab = Lab(2)

    assert fetched(lab, clock, 3) is None, "it may have been there for ever"
    assert fetched(lab, clock, 5) == clock.ms - 100


def test_an_answer_that_does_not_name_a_log_says_that_it_ends_where_it_did(clock: SimpleNamespace) -> None:
    lab = Lab(2)
    fetched(lab, clock, 0)
    for _ in range(5):
        fetched(lab, clock, 0)

    assert fetched(lab, clock, 2) == clock.ms - 100


def test_behind_a_pause_it_is_known_from_before_the_pause(clock: SimpleNamespace) -> None:
    lab = Lab(2)
    fetched(lab, clock, 0)
    seen_ms = clock.ms
    lab.states[TopicPartition("t", 0)].paused = True
    lab.plan.touch(TopicPartition("t", 0))
    for _ in range(5):
        fetched(lab, clock, 7)
    lab.states[TopicPartition("t", 0)].paused = False
    lab.plan.touch(TopicPartition("t", 0))

    assert fetched(lab, clock, 9) == seen_ms


@pytest.mark.parametrize("fault", ["request lost", "answer lost"])
def test_a_lost_answer_says_nothing(clock: SimpleNamespace, fault: str) -> None:
    lab = Lab(2)
    fetched(lab, clock, 0)
    fetched(lab, clock, 0)
    seen_ms = clock.ms
    fetched(lab, clock, 0, fault=fault)

    assert fetched(lab, clock, 2) == seen_ms


def test_what_was_in_front_of_the_end_may_have_been_there_for_ever(clock: SimpleNamespace) -> None:
    lab = Lab(2)
    fetched(lab, clock, 9)
    lab.fetcher.seek_to(TopicPartition("t", 0), 4)

    assert fetched(lab, clock, 9) is None


def test_it_is_known_across_assignments_and_leaders(clock: SimpleNamespace) -> None:
    lab = Lab(2)
    fetched(lab, clock, 3)
    seen_ms = clock.ms
    lab.assignment = SimpleNamespace(tps=set(lab.states), state_value=lab._state)

    assert fetched(lab, clock, 5) == seen_ms


@pytest.mark.parametrize("seed", range(60))
def test_every_record_is_delivered_once_in_order_whatever_happens_to_answers_and_sessions(seed: int) -> None:
    rng = random.Random(seed)
    lab = Lab(6)
    tps = list(lab.states)
    for _ in range(300):
        tp = rng.choice(tps)
        state = lab.states[tp]
        match rng.randrange(10):
            case 0 | 1:
                lab.broker.ends[tp] += 1 + rng.randrange(3)
            case 2:
                state.paused = not state.paused
                lab.plan.touch(tp)
            case 3:
                lab.fetcher.seek_to(tp, rng.randrange(lab.broker.ends[tp] + 1))
                lab.delivered = [one for one in lab.delivered if one[0] != tp]
                lab.delivered.append((tp, 0, state.position))
            case 4 if rng.random() < 0.3:
                lab.broker.sessions.clear()
            case 5 if rng.random() < 0.2:
                lab.fetcher._client.cluster._last_successful_refresh_ms += 1
            case 6 if lab.fetcher._records:
                got = rng.choice(list(lab.fetcher._records))
                del lab.fetcher._records[got]
            case _:
                fault = rng.choice(["", "", "", "request lost", "answer lost"])
                lab.fetch(fault, room=rng.random() < 0.8)
    lab.fetcher._records.clear()
    for tp, state in lab.states.items():
        state.paused = False
        lab.plan.touch(tp)
    for _ in range(4):
        lab.fetch()
    assert {tp: state.position for tp, state in lab.states.items()} == lab.broker.ends
    for tp in tps:
        parts = [(start, stop) for one, start, stop in lab.delivered if one == tp]
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(parts))
