"""Partitions are dealt out evenly, and move only where that makes shares more even."""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from app.streaming import assignor as module
from app.streaming.assignor import StickyAssignor, share_out, url_of_member
from app.streaming.faust_app import MarqApp

TOPICS = ["a", "b"]


def moved(before: dict[str, list[int]], after: dict[str, list[int]]) -> int:
    """Partitions that moved away from members that are still there."""
    return sum(len(set(had) - set(after[member])) for member, had in before.items() if member in after)


def test_the_first_members_share_all() -> None:
    assert share_out(4, {"a": []}) == {"a": [0, 1, 2, 3]}
    assert sorted(len(share) for share in share_out(8, {"a": [], "b": [], "c": []}).values()) == [2, 3, 3]


def test_nothing_moves_when_nothing_has_changed() -> None:
    shares = {"a": [0, 5, 7], "b": [1, 2, 6], "c": [3, 4]}
    assert share_out(8, shares) == shares


def test_who_joins_gets_its_share_and_nobody_else_gets_anything() -> None:
    before = {"a": [0, 1, 2], "b": [3, 4, 5], "c": [6, 7]}
    after = share_out(8, {**before, "d": []})
    assert len(after["d"]) == 2
    assert moved(before, after) == 2


def test_what_a_member_leaves_is_shared_and_all_others_stay() -> None:
    before = {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]}
    after = share_out(8, {member: had for member, had in before.items() if member != "b"})
    assert moved(before, after) == 0
    assert sorted(len(share) for share in after.values()) == [2, 3, 3]


def test_of_two_who_say_they_have_a_partition_one_keeps_it() -> None:
    after = share_out(4, {"a": [0, 1], "b": [1, 2, 3]})
    assert sorted(p for share in after.values() for p in share) == [0, 1, 2, 3]
    assert after["b"] == [1, 2] or after["b"] == [2, 3] or after["b"] == [1, 3]


def test_more_members_than_partitions_and_partitions_that_are_no_more() -> None:
    after = share_out(2, {"a": [0, 1, 9], "b": [], "c": []})
    assert sorted(len(share) for share in after.values()) == [0, 1, 1]


def test_any_history_stays_even_and_moves_as_little_as_can_be() -> None:
    r = random.Random(3)
    for _ in range(300):
        count, shares, serial = r.randrange(1, 20), {"m0": []}, 0
        for _ in range(20):
            before = dict(shares)
            if len(shares) > 1 and r.random() < 0.5:
                del before[r.choice(list(before))]
            else:
                serial += 1
                before[f"m{serial}"] = []
            shares = share_out(count, before)
            sizes = [len(share) for share in shares.values()]
            assert max(sizes) - min(sizes) <= 1
            assert sorted(p for share in shares.values() for p in share) == list(range(count))
            # only members above their share have to give partitions away
            least, larger = divmod(count, len(shares))
            over = sorted((len(had) - least for had in before.values()), reverse=True)
            must = sum(max(0, o - (i < larger)) for i, o in enumerate(over))
            assert moved(before, shares) == must


def member_of(url: str, admitted: set[str]) -> StickyAssignor:
    """The assignor of one worker."""
    tables = SimpleNamespace(changelog_topics={"b"}, data={})
    app: Any = SimpleNamespace(
        tables=tables,
        address=url,
        admits=lambda url: url in admitted,
        chunked_topics={"a"},
        partitions_among=lambda counts: MarqApp.partitions_among(None, counts),  # type: ignore[arg-type]
    )
    return StickyAssignor(app)


def dealt(
    leader: StickyAssignor, joined: dict[str, Any], counts: dict[str, int] | None = None
) -> dict[str, ConsumerProtocolMemberAssignment]:
    """What the leader makes of those that joined, as each gets it. ``counts``: the partitions of topics."""
    counts = {"a": 4, "b": 4} if counts is None else counts
    cluster = SimpleNamespace(partitions_for_topic=lambda topic: set(range(counts[topic])) if topic in counts else None)
    made: dict[str, Any] = leader._perform_assignment(cluster, joined)
    return {name: ConsumerProtocolMemberAssignment.decode(one.encode()) for name, one in made.items()}


def test_who_has_another_secret_gets_no_partitions_learns_it_and_nobody_learns_of_it() -> None:
    admitted = {"http://one", "http://two"}
    workers = {url: member_of(url, admitted) for url in (*sorted(admitted), "http://three")}
    made = dealt(workers["http://one"], {url: worker.metadata(set(TOPICS)) for url, worker in workers.items()})
    for url, worker in workers.items():
        worker.on_assignment(made[url])

    assert [worker.is_refused for worker in workers.values()] == [False, False, True]
    assert [len(worker.assigned_actives()) for worker in workers.values()] == [4, 4, 0]
    assert workers["http://two"].changelog_distribution.keys() == admitted


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 9, b"{}", b"[" * 100_000, b'{"url": 7, "assignment": 9, "changelog_distribution": 8}']
)
def test_a_member_that_is_no_worker_gets_no_partitions_and_costs_no_other_member_any(data: bytes) -> None:
    worker = member_of("http://one", {"http://one"})
    stranger = ConsumerProtocolMemberMetadata(4, TOPICS, data)
    made = dealt(worker, {"one": worker.metadata(set(TOPICS)), "stranger": stranger})

    assert made["stranger"].assignment == []
    assert sorted(topic for topic, _ in made["one"].assignment) == TOPICS


@pytest.mark.parametrize("counts", [{"a": 8, "b": 4}, {"a": 4, "b": 8}, {"b": 4}])
def test_partitions_of_one_number_are_with_one_worker_whatever_the_topics_have(counts: dict[str, int]) -> None:
    """Partitions were added to one of the topics, or it was deleted."""
    admitted = {"http://one", "http://two"}
    workers = {url: member_of(url, admitted) for url in admitted}
    before = dealt(workers["http://one"], {url: worker.metadata(set(TOPICS)) for url, worker in workers.items()})
    for url, worker in workers.items():
        worker.on_assignment(before[url])

    after = dealt(workers["http://one"], {url: w.metadata(set(TOPICS)) for url, w in workers.items()}, counts)

    for url in admitted:
        assert dict(after[url].assignment) == dict(before[url].assignment)
        assert dict(after[url].assignment)["a"] == dict(after[url].assignment)["b"]


def test_partitions_that_a_member_says_it_had_and_that_can_not_be_are_ignored() -> None:
    worker = member_of("http://one", {"http://one"})
    worker._assignment.actives = {"a": [0, 9, -1, "x"], "b": "none"}  # type: ignore[list-item,dict-item]
    made = dealt(worker, {"one": worker.metadata(set(TOPICS))})
    assert dict(made["one"].assignment) == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}


def test_an_assignment_is_not_unpacked_beyond_what_a_leader_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASSIGNMENT_MAX_BYTES", 10_000)
    bomb = ConsumerProtocolMemberAssignment(4, [], zlib.compress(b" " * 10_001))
    with pytest.raises(ValueError, match="more than 10,000 bytes"):
        url_of_member(bomb.encode())
    with pytest.raises(ValueError, match="more than 10,000 bytes"):
        member_of("http://one", set()).on_assignment(bomb)
