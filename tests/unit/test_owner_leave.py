"""A partition goes to another worker while starts are on their way; and markers of a later version of the protocol."""

from __future__ import annotations

import json

import pytest

from marq.core import markers as m
from marq.core.markers import End, Keepalive, Own, Purge, Release, Start, Tick
from marq.core.owner import Phase
from marq.core.policies import Limits, QueueSettings
from marq.core.versions import place_of_markers, place_of_queue, version_seal
from marq.errors import MarkerError, NewerVersionError
from tests.unit.core_helpers import LEASE_MS, Worker


def with_an_exhausted_message() -> Worker:
    """An owner that has begun to dead-letter its message."""
    w = Worker(settings={"q": QueueSettings(max_receives=1)}).serve()
    w.send(1)
    w.receive(lease_ms=1_000)
    w.wait(1_200)
    w.owner.work(w.clock_ms)
    return w


def leaves(w: Worker) -> None:
    """The worker is told that the partition goes to another one."""
    last = w.owner.leave()
    if last:
        w.broker.append(m.encode(last))


def taken_over(w: Worker) -> Worker:
    """The next owner, once it serves."""
    n = Worker(w.broker, name="w2", table=w.table, queue_log=w.queue_log, settings=w.settings)
    n.clock_ms = w.clock_ms
    return n.serve()


def test_a_message_whose_start_was_sent_goes_to_a_receiver_of_the_next_owner_uncounted() -> None:
    w = Worker(settings={"q": QueueSettings(max_receives=1)}).serve()
    w.send(1)
    w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)
    w.append()  # in the log, but its acknowledgement comes too late
    leaves(w)
    n = taken_over(w)
    (handout,) = n.receive()
    assert handout.offsets == [0]
    assert n.owner.partition.receives(0) == 1


def test_so_does_one_whose_start_takes_effect_after_the_owner_has_left() -> None:
    w = Worker().serve()
    w.send(1)
    w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)
    _, start = w.lose()
    last = w.owner.leave()
    w.broker.append(m.encode(start, w.owner.nonce, 1))
    w.broker.append(m.encode(last))
    assert [h.offsets for h in taken_over(w).receive()] == [[0]]


def test_what_was_folded_but_not_handed_out_is_released_uncounted() -> None:
    w = Worker().serve()
    w.send(1)
    w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)
    w.flush()
    assert w.owner._agenda.handouts
    leaves(w)
    assert [h.offsets for h in taken_over(w).receive()] == [[0]]


def test_what_was_handed_out_is_its_receivers() -> None:
    w = Worker().serve()
    w.send(1)
    (handout,) = w.receive()
    assert w.owner.leave() == []
    n = taken_over(w)
    assert not n.receive()
    assert n.owner.partition.is_current(0, *handout.receipt)


def test_a_start_that_was_not_sent_is_dropped() -> None:
    w = Worker().serve()
    w.send(1)
    w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)
    assert w.owner.leave() == []
    assert [h.offsets for h in taken_over(w).receive()] == [[0]]


def test_a_message_about_to_be_dead_lettered_is_released() -> None:
    w = with_an_exhausted_message()
    w.flush()
    assert w.dead == [0]
    leaves(w)
    n = taken_over(w)
    n.owner.work(n.clock_ms)
    n.flush()
    assert n.dead == [0]


def test_markers_of_receivers_are_said_all_the_same() -> None:
    w = Worker().serve()
    w.send(3)
    (handout,) = w.receive()
    w.owner.acked([0], handout.receipt)
    w.owner.release([1], handout.receipt)
    w.owner.extend([2], handout.receipt, LEASE_MS)
    w.owner.purge("q", 3)
    w.owner.tick(w.clock_ms + 5_000)
    assert [type(marker) for marker in w.owner.leave()] == [End, Release, Keepalive]


def test_who_has_left_has_no_effects() -> None:
    w = Worker().serve()
    w.send(1)
    leaves(w)
    assert w.owner.phase is Phase.LEFT
    assert not w.receive()
    assert w.owner.step(w.clock_ms + 10_000) is None
    assert w.owner.leave() == []


def test_who_only_claims_leaves_without_a_word() -> None:
    w = Worker()
    w.claim()
    assert w.owner.leave() == []


@pytest.mark.parametrize(
    ("marker", "owners"),
    [
        (Own("w", "n"), True),
        (Start(1, 1, [0, 1], 5), True),
        (Purge(1, "q", 5), True),
        (Tick(), True),
        (End(1, [0, 1], "dead"), True),
        (End(1, [0, 1], "acked", 1), False),
        (Release(1, 1, [0, 1]), False),
        (Keepalive(1, 1, [0, 1], 5), False),
    ],
)
def test_which_markers_only_an_owner_says(marker: m.Marker, owners: bool) -> None:
    assert m.is_owners(marker) is owners


# ---------------------------------------------------------------------- it learns of its next owner from the log


def loses(w: Worker) -> Worker:
    """Another worker claims the partition, and the first one reads that. Returns the next owner, once it serves."""
    n = Worker(w.broker, name="w2", table=w.table, queue_log=w.queue_log, settings=w.settings)
    n.clock_ms = w.clock_ms
    n.claim()
    w.read_markers()
    assert w.owner.phase is Phase.LOST
    last = w.owner.leave()
    if last:
        w.broker.append(m.encode(last))
    n.restore()
    n.read_markers()
    n.read_queue()
    return n


def test_a_start_that_was_read_together_with_the_next_owner_reaches_nobody_and_is_released_uncounted() -> None:
    w = Worker(settings={"q": QueueSettings(max_receives=1)}).serve()
    w.send(1)
    w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)
    w.append()  # in the log, but its acknowledgement comes too late
    n = loses(w)
    (handout,) = n.receive()
    assert handout.offsets == [0]
    assert n.owner.partition.receives(0) == 1


def test_a_message_that_was_read_as_about_to_be_dead_lettered_with_the_next_owner_is_released() -> None:
    w = with_an_exhausted_message()
    w.append()
    n = loses(w)
    n.owner.work(n.clock_ms)
    n.flush()
    assert n.dead == [0]


def test_a_part_of_a_start_that_landed_before_the_next_owner_is_released_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(m, "RECORD_BYTES", 8192 + 40)  # one range a record
    w = Worker().serve()
    for queue in ("q", "other", "q"):
        w.send(1, queue)
    w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)
    first, second = w.owner.take_appends()
    w.owner.sent(1, [first])
    w.broker.append(m.encode([first], w.owner.nonce, 1))
    w.owner.sent(2, [second])  # never lands
    n = loses(w)
    assert [h.offsets for h in n.receive()] == [[0, 2]]
    assert n.owner.partition.receives(0) == n.owner.partition.receives(2) == 1


def test_what_was_read_as_given_back_together_with_the_next_owner_is_given_back() -> None:
    w = Worker().serve()
    w.send(1)
    pending = w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)
    assert pending is not None
    pending.cancel()
    w.append()
    assert [h.offsets for h in loses(w).receive()] == [[0]]


def test_who_loses_a_partition_says_nothing_more_as_its_owner() -> None:
    w = Worker().serve()
    w.send(2)
    w.receive(1)
    w.owner.acquire(["q"], 10, "r", w.clock_ms, lease_ms=LEASE_MS)  # not sent
    w.owner.purge("q", 2)
    Worker(w.broker, name="w2").claim()
    w.read_markers()
    assert w.owner.leave() == []


# ---------------------------------------------------------------------- a later version


KEY, PREVIOUS, STRANGE = b"k" * 32, b"p" * 32, b"s" * 32
#: With the secret of an installation, and the one before it.
LIMITS = Limits(version_keys=(KEY, PREVIOUS))


def of_version(version: object, **fields: object) -> bytes:
    return json.dumps({"v": version, "markers": [{"type": "own", "worker": "n", "nonce": "n"}], **fields}).encode()


def sealed(value: bytes, key: bytes = KEY, place: str = place_of_markers(0)) -> bytes:
    return b'%b,"seal":"%b"}' % (value[:-1], version_seal(value[:-1], place, key))


@pytest.mark.parametrize("key", [KEY, PREVIOUS])
def test_an_owner_stops_at_an_own_marker_of_a_later_version(key: bytes) -> None:
    w = Worker(limits=LIMITS).serve()
    w.send(2)
    w.broker.append(sealed(of_version(2), key))
    w.read_markers()
    assert w.owner.phase is Phase.STOPPED
    assert "version 2" in w.owner.reason
    assert not w.receive()
    assert not w.checkpoint()


def test_markers_of_a_later_version_that_can_not_be_read_stop_it_too() -> None:
    w = Worker(limits=LIMITS).serve()
    w.broker.append(sealed(of_version(3, markers={"lease": [0, 5]})))
    w.read_markers()
    assert w.owner.phase is Phase.STOPPED
    assert "offset 1:" in w.owner.reason


def test_a_recovery_stops_there_as_well() -> None:
    w = Worker(limits=LIMITS)
    w.broker.append(sealed(of_version(2)))
    w.claim()
    w.restore()
    w.read_markers()
    assert w.owner.phase is Phase.STOPPED


@pytest.mark.parametrize(
    "value",
    [
        b'{"v":99}',
        of_version(2),
        of_version(2, seal="0" * 24),
        sealed(of_version(2), STRANGE),
        sealed(of_version(2), place=place_of_markers(1)),
        sealed(of_version(2), place=place_of_queue("markers/0")),
        sealed(of_version(2)).replace(b'"v": 2', b'"v": 3'),
        sealed(of_version(2)) + b" ",
        sealed(of_version(2)).replace(b'"seal":"', b'"seal":"\xff'),
    ],
)
def test_a_later_version_that_the_installation_has_not_sealed_is_only_unreadable(value: bytes) -> None:
    w = Worker(limits=LIMITS).serve()
    w.send(2)
    w.broker.append(value)
    w.read_markers()
    assert w.owner.phase is Phase.SERVING
    assert w.owner.partition.counters["unreadable_markers"] == 1
    assert w.receive()


def test_an_owner_that_does_not_know_the_secret_stops_at_every_seal() -> None:
    w = Worker().serve()
    w.broker.append(b'{"v":99}')
    w.read_markers()
    assert w.owner.partition.counters["unreadable_markers"] == 1
    w.broker.append(sealed(of_version(2), STRANGE))
    w.read_markers()
    assert w.owner.phase is Phase.STOPPED


@pytest.mark.parametrize("version", [0, -1, "2", None, 2.5, True])
def test_what_has_no_version_is_only_unreadable(version: object) -> None:
    with pytest.raises(MarkerError) as error:
        m.decode(of_version(version))
    assert not isinstance(error.value, NewerVersionError)
