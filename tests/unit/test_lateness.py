"""A worker that is late hands out less, then nothing; after a stall it waits for what receivers said meanwhile."""

from __future__ import annotations

import pytest

from marq.core.lateness import HALF_LIFE_MS, STALL_HOLD_MAX_MS, STALL_MS, Lateness


def late(lag_ms: int) -> Lateness:
    lateness = Lateness()
    lateness.woke(0, 0)
    lateness.woke(1_000, lag_ms)
    return lateness


@pytest.mark.parametrize(
    ("lag_ms", "ack_ms", "lease_ms", "share"),
    [
        (0, 0, 5_000, 1.0),
        (166, 0, 5_000, 1.0),
        (0, 500, 5_000, 1.0),
        (500, 200, 5_000, 0.0),
        (0, 1_667, 5_000, 0.0),
        (556, 0, 5_000, 0.0),
        (300, 0, 5_000, 0.657),
        (900, 767, 60_000, 1.0),
        (0, 10_000, 60_000, 0.714),
        (0, 100_000, 60_000, 0.0),
        (0, 0, 0, 1.0),
        (1, 0, 100, 1.0),
        (100, 0, 0, 1.0),
    ],
)
def test_the_share_goes_by_how_late_acks_are_against_the_lease(
    lag_ms: int, ack_ms: int, lease_ms: int, share: float
) -> None:
    assert late(lag_ms).share(1_000, lease_ms, ack_ms) == pytest.approx(share, abs=0.001)


def test_the_share_never_grows_while_a_worker_gets_later() -> None:
    shares = [late(9 * i).share(1_000, 5_000, 10 * i) for i in range(100)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[-1] == 0.0


def test_as_long_as_there_is_a_share_one_message_goes_out() -> None:
    lateness = late(0)
    assert lateness.room(1_000, 500, 5_000) == 500
    assert 1 < lateness.room(1_000, 500, 5_000, 1_000) < 500
    assert lateness.room(1_000, 1, 5_000, 1_600) == 1
    assert lateness.room(1_000, 500, 5_000, 1_700) == 0
    assert lateness.room(1_000, 0, 5_000) == 0


def test_a_lag_counts_at_once_and_fades() -> None:
    lateness = late(800)
    assert lateness.lag_ms == 800
    lateness.woke(1_000 + HALF_LIFE_MS, 0)
    assert lateness.lag_ms == pytest.approx(400)
    for i in range(100):
        lateness.woke(2_000 + 20 * i, 0)
    assert lateness.lag_ms < 50


def test_a_lag_that_goes_on_does_not_fade() -> None:
    lateness = late(800)
    for i in range(1, 20):
        lateness.woke(1_000 + 820 * i, 800)
    assert lateness.lag_ms == 800


def test_after_a_stall_everything_is_held_back_for_as_long() -> None:
    lateness = late(4_000)
    assert lateness.held_back(1_000)
    assert lateness.share(4_999, 3_600_000) == 0.0
    assert lateness.held_back(4_999)
    assert not lateness.held_back(5_000)
    assert lateness.stalls == 1


def test_what_is_held_back_after_a_long_stall_has_a_limit() -> None:
    lateness = late(3_600_000)
    assert lateness.held_back(1_000 + STALL_HOLD_MAX_MS - 1)
    assert not lateness.held_back(1_000 + STALL_HOLD_MAX_MS)


def test_much_to_do_is_no_stall() -> None:
    lateness = late(STALL_MS - 1)
    assert not lateness.held_back(1_000)
    assert lateness.stalls == 0
