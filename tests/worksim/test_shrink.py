"""A failing run is made smaller, and its story has what concerns the failure."""

from __future__ import annotations

import pytest

from tests.worksim.mutations import MUTATIONS, seeds_until_failure
from tests.worksim.shrink import Shrinker, short_story
from tests.worksim.world import World

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RUNS = 25


def test_a_smaller_run_breaks_the_same_rule_and_its_story_is_short() -> None:
    name = "not read on"
    seed = seeds_until_failure(name, 10)
    assert seed is not None
    with MUTATIONS[name].patch():
        found = Shrinker(seed, RUNS).shrink()
        assert found is not None
        story: list[str] = []
        with pytest.raises(Exception, match="liveness"):
            World(seed, found.shape, story, found.cut).run()
    whole = World(seed)
    whole.run()
    assert found.shape.workers == 1
    assert found.world.statistics["messages"] < whole.statistics["messages"]
    assert len(short_story(story, str(found.world.violation))) < 30


def test_a_run_that_does_not_fail_is_not_made_smaller() -> None:
    assert Shrinker(1, RUNS).shrink() is None


def test_the_story_of_a_message_has_its_records_and_what_happened_to_all() -> None:
    story = [
        "    1.0000 w0 starts",
        "    2.0000 queue 0 @5 b'm1'",
        "    2.0000 queue 1 @5 b'm2'",
        "    3.0000 markers 0 @1 by a: [Own(worker='w0', nonce='a')]",
        "    3.1000 markers 0 @2 by a: [Start(epoch=1, delivery=1, offsets=[4, 6], redeliver_after_ms=1)]",
        "    3.1000 markers 0 @3 by a: [Start(epoch=1, delivery=2, offsets=[6, 9], redeliver_after_ms=1)]",
        "    3.2000 w0 hands out [(0, 5, 1), (0, 6, 1)]",
        "    3.2000 w0 hands out [(1, 5, 1)]",
        "    4.0000 marq.markers:0 has no leader for 2.0 s",
    ]
    told = short_story(story, "G2: partition 0: w0 hands out @5 as 1/1, which ended")
    assert told == [story[i] for i in (0, 1, 3, 4, 6, 8)]
