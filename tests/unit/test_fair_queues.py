"""Groups of a standard queue take turns: a noisy one does not starve the others."""

from __future__ import annotations

import pytest

from marq.core.backlog import PRUNE_SLACK
from marq.core.policies import QueueSettings
from marq.core.stamps import next_stamps, shares_of
from tests.unit.core_helpers import LEASE_MS, TwoLogs
from tests.unit.test_fifo import of_groups, send, take

FAIR = QueueSettings()


def test_a_quiet_group_is_served_with_the_next_delivery() -> None:
    logs = of_groups(*["noisy"] * 1_000, "quiet")
    assert 1_000 in take(logs, 2, FAIR)


def test_single_deliveries_go_round() -> None:
    logs = of_groups(*["noisy"] * 5, "quiet", "quiet", None)
    assert [take(logs, 1, FAIR)[0] for _ in range(6)] == [0, 5, 7, 1, 6, 2]


@pytest.mark.parametrize("noisy", range(1, 10))
def test_behind_groups_that_are_noisy_to_aws_a_message_waits_for_one_of_each(noisy: int) -> None:
    """Nine groups at most can have more than a tenth of what is in flight."""
    names = [f"noisy-{i}" for i in range(noisy)]
    logs = of_groups(*names * 50)
    for _ in range(30 * noisy):  # each has 30 in flight, as much as all other groups together or as each other
        (taken,) = take(logs, 1, FAIR)
        logs.start(taken)
        logs.partition.unreserve([taken])
    quiet = send(logs, "quiet")
    logs.read()
    waited = [take(logs, 1, FAIR)[0] for _ in range(noisy + 1)]
    assert quiet in waited
    assert len({logs.partition.group_of(offset) for offset in waited}) == len(waited)


def test_a_group_is_not_put_behind_the_others_for_what_it_has_in_flight() -> None:
    logs = of_groups(*["noisy"] * 100)
    for _ in range(40):
        (offset,) = take(logs, 1, FAIR)
        logs.start(offset)
        logs.partition.unreserve([offset])
    quiet = [send(logs, "quiet") for _ in range(4)]
    logs.read()
    taken = take(logs, 8, FAIR)
    assert [o for o in taken if o in quiet] == quiet and len(taken) == 8  # half of it, message by message


def test_a_group_alone_gets_everything() -> None:
    assert take(of_groups(*["a"] * 5), 4, FAIR) == [0, 1, 2, 3]


def test_redeliveries_go_round_too() -> None:
    logs = of_groups(*["noisy"] * 6, "quiet")
    taken = take(logs, 7, FAIR)
    delivery = logs.start(*taken)
    logs.partition.unreserve(taken)
    logs.release(delivery)
    assert 6 in take(logs, 2, FAIR)


def test_redeliveries_get_half_while_first_deliveries_wait() -> None:
    logs = of_groups(*"abab")
    taken = take(logs, 4, FAIR)
    delivery = logs.start(*taken)
    logs.partition.unreserve(taken)
    logs.release(delivery)
    for name in "abab":
        send(logs, name)
    logs.read()
    assert len([o for o in take(logs, 4, FAIR) if o < 4]) == 2


def test_groups_keep_their_turns_when_their_messages_are_parked_and_after_a_crash() -> None:
    logs = of_groups(*["noisy"] * 20, "quiet")
    logs.persist()
    logs.partition.shed(1 << 40)
    assert 20 in take(logs, 2, FAIR)
    logs.crash()
    assert 20 in take(logs, 2, FAIR)


def test_what_has_no_group_takes_its_turn() -> None:
    logs = of_groups(*["a"] * 50, None)
    assert 50 in take(logs, 2, FAIR)


def test_groups_that_are_done_are_forgotten() -> None:
    logs = TwoLogs()
    logs.own()
    for i in range(5 * PRUNE_SLACK):
        offset = send(logs, str(i))
        logs.read()
        logs.ack(logs.start(offset, lease_ms=LEASE_MS))
    assert len(logs.partition.backlogs["q"].groups) <= PRUNE_SLACK


@pytest.mark.parametrize("other", ["quiet", None])
def test_groups_of_several_partitions_take_turns_in_receives_of_one_message(other: str | None) -> None:
    """What is sent last, alone in its partition, does not wait until the backlog of another partition is done."""
    noisy, quiet = of_groups(*["noisy"] * 100), of_groups()
    quiet.now_ms += 60_000
    send(quiet, other)
    quiet.read()
    partitions = [noisy.partition, quiet.partition]
    received = []
    for turn in range(4):
        owned = partitions[turn % 2 :] + partitions[: turn % 2]
        ((i, count),) = shares_of(1, next_stamps(owned, "q", 1))
        received += [owned[i] for _ in owned[i].take("q", count, FAIR)]
    assert quiet.partition in received
