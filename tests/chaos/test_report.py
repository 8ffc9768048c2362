"""Plans repeat by their seed, and figures of several runs are added up."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

from tests.chaos.check import Figures
from tests.chaos.faults import FAULTS
from tests.chaos.report import MIXED_ROW, Row, as_json, of_json, table, total
from tests.chaos.run import MIXED, Options, plan


def names(seed: int) -> list[list[str]]:
    rounds = plan(Options(seed=seed, minutes=1, mixed=3), list(FAULTS))
    return [[fault.name for fault in some] for some in islice(rounds, 2 * len(FAULTS))]


def test_a_seed_gives_the_same_faults_in_the_same_order() -> None:
    assert names(7) == names(7) != names(8)


def test_each_fault_comes_once_then_several_at_once_in_different_parts() -> None:
    found = names(7)
    assert sorted(name for some in found[: len(FAULTS)] for name in some) == sorted(FAULTS)
    for some in found[len(FAULTS) : len(FAULTS) + 3]:
        assert len({FAULTS[name].part for name in some}) == len(some) >= 2
    assert FAULTS.keys() >= set(MIXED)


def test_faults_of_one_part_are_not_mixed() -> None:
    rounds = plan(Options(seed=7, mixed=3), ["worker-kill", "worker-pause"])
    assert [len(some) for some in rounds] == [1, 1]


def test_figures_of_several_runs_are_added_up() -> None:
    first = Row("worker-kill", times=1, twice=2, causes=Counter(killed=2), violations=Counter(lost=1))
    first.add(Figures(1000, 1000, 5, 0, 12.0, 3.0, {"send": {"json": 2.0, "sqs": 7.0}}))
    second = Row("worker-kill", times=2)
    second.add(Figures(500, 500, 1, 1, 4.0, 9.0, {"send": {"json": 4.0}, "ack": {"json": 1.0}}))
    runs = [json.loads(json.dumps(as_json([row], seed=1))) for row in (first, second)]
    (both,) = of_json(runs)
    assert (both.times, both.sent, both.twice, both.lost, both.burned, both.copies) == (3, 1500, 2, 1, 6, 1)
    assert (both.recovery_s, both.longest_wait_s) == (9.0, 12.0)
    assert both.unanswered_s == {"send": {"json": 4.0, "sqs": 7.0}, "ack": {"json": 1.0}}
    assert total([both, Row(MIXED_ROW, sent=500)]).twice_per_million == 1000.0


def test_a_row_without_duplicates_says_below_what_the_figure_is() -> None:
    """Three in N, with 95 %."""
    row = Row("broker-kill", times=1, sent=300_000)
    assert round(row.at_most_per_million) == 10
    assert "0 (< 10)" in table([row], list(FAULTS))
