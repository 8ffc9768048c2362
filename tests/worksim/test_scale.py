"""What workers say to each other for a receive does not grow with their number."""

from __future__ import annotations

from unittest import mock

import pytest

from app.service.polling import PeerPolling
from tests.worksim.scale import Large

# what a run leaves behind can't wait for the end of connections any more
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120),
]

#: Calls for a receive, if each receiver stays at its worker, and if it goes to any. A receive that gets less than it
#: asked for soon after it came asks all workers.
MOST = {"sticky: 100 messages/s": 3.0, "anywhere: 100 messages/s": 6.0}


def calls_of(workers: int) -> dict[str, float]:
    world = Large(1, workers, 12, 6 * workers, seconds=3.0, rates=(100,))
    world.run()
    # what is told every few seconds is no matter of receives
    return {
        what: (found.calls.total() - found.calls["handlers"]) / max(1, found.receives)
        for what, found in world.measured.items()
    }


def test_calls_for_a_receive_do_not_grow_with_the_workers() -> None:
    found = calls_of(12)
    assert {what: found[what] for what in MOST if found[what] > MOST[what]} == {}


def test_they_do_if_all_who_watch_are_woken() -> None:
    wake_some = PeerPolling._wake_some
    with mock.patch.object(PeerPolling, "_wake_some", lambda polling, queue, count: wake_some(polling, queue, 1_000)):
        found = calls_of(12)
    assert any(found[what] > MOST[what] for what in MOST)
