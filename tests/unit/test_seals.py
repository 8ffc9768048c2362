"""Seals of calls between workers: a genuine call is accepted once, and no other call is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cluster import seals
from app.cluster.seals import OtherVersionError, Seals, StaleCallError
from marq.errors import NotAuthenticatedError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
NOW_MS = 1_769_000_000_000
HERE = "http://here:9324"
CALL = ("POST", "/v1/peer/watch", HERE)


class Clock:
    def __init__(self, ms: int = NOW_MS) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


def workers(ahead_ms: int = 0) -> tuple[Seals, Seals, Clock, Clock]:
    """A caller, a receiver whose time it knows, and their clocks."""
    mine, theirs = Clock(), Clock(NOW_MS + ahead_ms)
    caller, receiver = Seals([KEY], mine), Seals([KEY], theirs)
    introduce(caller, receiver)
    return caller, receiver, mine, theirs


def introduce(caller: Seals, receiver: Seals) -> None:
    """A caller makes its first call, whose time can only be wrong, and learns the right one."""
    call, header = caller.call(*CALL, b"first")
    opened, key = receiver.open(header, *CALL)
    with pytest.raises(StaleCallError, match="not of the present time"):
        receiver.take(opened)
    answer = receiver.answer(opened, key, 401, "t", b"stale")
    caller.check_answer(call, answer, 401, "t", b"stale")
    caller.learn_time(call, answer)


def test_a_call_is_taken_once() -> None:
    caller, receiver, _, _ = workers()
    call, header = caller.call(*CALL, b"body")

    opened, _ = receiver.open(header, *CALL)
    receiver.take(opened)

    assert opened == call
    with pytest.raises(StaleCallError, match="before"):
        receiver.take(receiver.open(header, *CALL)[0])


@pytest.mark.parametrize(
    "other",
    [
        ("GET", "/v1/peer/watch", HERE),
        ("POST", "/v1/peer/wake", HERE),
        ("POST", "/v1/peer/watch?x", HERE),
        ("POST", "/v1/peer/watch", "http://there:9324"),
    ],
    ids=["method", "path", "query", "receiver"],
)
def test_a_call_to_somewhere_else_is_not_ours(other: tuple[str, str, str]) -> None:
    caller, receiver, _, _ = workers()
    _, header = caller.call(*CALL, b"body")

    with pytest.raises(NotAuthenticatedError):
        receiver.open(header, *other)


@given(at=st.integers(0, 260), byte=st.characters(max_codepoint=255))
def test_a_header_that_is_changed_is_refused_or_means_the_same(at: int, byte: str) -> None:
    caller, receiver, _, _ = workers()
    call, header = caller.call(*CALL, b"body")
    changed = header[:at] + byte + header[at + 1 :]
    try:
        opened, _ = receiver.open(changed, *CALL)
    except NotAuthenticatedError:
        return
    assert opened == call


@pytest.mark.parametrize(
    "header",
    [
        "",
        ",",
        "=" * 400,
        "version=1",
        "version=1,time=1,sender=a,number=1,body=b",
        "version=1,time=x,sender=a,number=1,body=b,seal=c",
        "time=1,sender=a,number=1,body=b,seal=c",
        "\xff" * 99,
    ],
    ids=["empty", "comma", "signs", "version", "unsealed", "time", "no version", "bytes"],
)
def test_what_is_no_seal_is_refused(header: str) -> None:
    with pytest.raises(NotAuthenticatedError):
        workers()[1].open(header, *CALL)


@pytest.mark.parametrize(
    ("header", "version"),
    [("version=2", "2"), ("version=2,whatever", "2"), ("version=02,time=1", "02"), ("0123456789abcdef" * 4, "0")],
    ids=["alone", "with more", "other digits", "marq 0.1"],
)
def test_a_header_of_another_version_is_told_from_one_of_nobody(header: str, version: str) -> None:
    caller, receiver, _, _ = workers()
    with pytest.raises(OtherVersionError) as refused:
        receiver.open(header, *CALL)
    assert refused.value.version == version

    with pytest.raises(OtherVersionError):
        caller.check_answer(caller.call(*CALL, b"")[0], header, 200, "application/msgpack", b"")


def test_a_call_can_not_be_passed_off_as_one_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, receiver, _, _ = workers()
    _, header = caller.call(*CALL, b"body")
    monkeypatch.setattr(seals, "VERSION", "2")

    with pytest.raises(NotAuthenticatedError) as refused:
        receiver.open(header.replace("version=1", "version=2"), *CALL)
    assert not isinstance(refused.value, OtherVersionError)


@pytest.mark.parametrize("late_ms", [seals.FRESH_MS + 1, -seals.FRESH_MS - 1], ids=["old", "future"])
def test_a_call_is_fresh_for_thirty_seconds(late_ms: int) -> None:
    caller, receiver, _, clock = workers()
    _, header = caller.call(*CALL, b"body")
    clock.ms += late_ms

    with pytest.raises(StaleCallError):
        receiver.take(receiver.open(header, *CALL)[0])


@pytest.mark.parametrize("later_ms", [1_000, 0, -seals.FRESH_MS], ids=["later", "at once", "with a clock set back"])
def test_a_receiver_that_began_anew_takes_nothing_from_before(later_ms: int) -> None:
    caller, _, _, clock = workers()
    _, header = caller.call(*CALL, b"body")
    clock.ms += later_ms
    receiver = Seals([KEY], clock)

    with pytest.raises(StaleCallError):
        receiver.take(receiver.open(header, *CALL)[0])


@pytest.mark.parametrize("ahead_ms", [3_600_000, -3_600_000], ids=["ahead", "behind"])
def test_workers_whose_clocks_differ_understand_each_other_after_one_answer(ahead_ms: int) -> None:
    caller, receiver, mine, theirs = workers(ahead_ms)
    mine.ms += 5
    theirs.ms += 5

    receiver.take(receiver.open(caller.call(*CALL, b"body")[1], *CALL)[0])


def test_a_clock_that_is_set_refuses_nobody_for_longer_than_an_answer() -> None:
    caller, receiver, _, clock = workers()
    clock.ms -= 3_600_000
    introduce(caller, receiver)

    receiver.take(receiver.open(caller.call(*CALL, b"")[1], *CALL)[0])


def test_calls_may_come_in_any_order_and_each_once() -> None:
    caller, receiver, _, _ = workers()
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    headers = [caller.call(*CALL, b"")[1] for _ in range(500)]
    random.Random(seed).shuffle(headers)
    for header in headers:
        receiver.take(receiver.open(header, *CALL)[0])
    for header in headers:
        with pytest.raises(StaleCallError):
            receiver.take(receiver.open(header, *CALL)[0])


def test_what_is_remembered_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "NUMBERS_MAX", 10)
    caller, receiver, _, clock = workers()
    headers = [caller.call(*CALL, b"")[1] for _ in range(1_000)]
    for header in headers[::2]:  # each other one is lost
        receiver.take(receiver.open(header, *CALL)[0])
    (seen,) = receiver._seen.values()
    assert len(seen._above) <= 10
    for header in headers[:900]:
        with pytest.raises(StaleCallError):
            receiver.take(receiver.open(header, *CALL)[0])

    clock.ms += 2 * seals.FRESH_MS + 1
    other = Seals([KEY], clock)
    introduce(other, receiver)
    receiver.take(receiver.open(other.call(*CALL, b"")[1], *CALL)[0])
    assert len(receiver._seen) == 1


def test_an_answer_is_sealed_for_its_call() -> None:
    caller, receiver, _, _ = workers()
    call, header = caller.call(*CALL, b"body")
    other, _ = caller.call(*CALL, b"body")
    opened, key = receiver.open(header, *CALL)
    answer = receiver.answer(opened, key, 200, "application/msgpack", b"yes")

    caller.check_answer(call, answer, 200, "application/msgpack", b"yes")

    for wrong in (
        (call, answer, 200, "application/msgpack", b"no"),
        (call, answer, 404, "application/msgpack", b"yes"),
        (call, answer, 200, "application/json", b"yes"),
        (other, answer, 200, "application/msgpack", b"yes"),
        (call, "", 200, "application/msgpack", b"yes"),
    ):
        with pytest.raises(NotAuthenticatedError):
            caller.check_answer(*wrong)


def test_seals_of_all_keys_are_good_and_the_first_makes_them() -> None:
    clock = Clock()
    old, new = Seals([KEY], clock), Seals([OTHER_KEY, KEY], clock)

    assert new.open(old.call(*CALL, b"")[1], *CALL)[1] == 1
    with pytest.raises(NotAuthenticatedError):
        old.open(new.call(*CALL, b"")[1], *CALL)
    assert old.open(new.call(*CALL, b"", key=1)[1], *CALL)[1] == 0
