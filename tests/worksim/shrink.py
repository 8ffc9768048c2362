"""Makes a failing run smaller while it breaks the same rule, and tells its story in a few lines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tests.worksim.kafka import Odds
from tests.worksim.world import Cut, Shape, World

T = TypeVar("T")

#: Runs that shrinking may take.
RUNS_MAX = 300
#: Other orders of events that are tried for a smaller installation, in which the failure takes another way.
SALTS = 3
#: Lines of a story that say what the workers, Kafka and the faults did, whatever the message.
OF_ALL = re.compile(
    r" starts$| is killed| stands still| is told to end| has ended| fails: |generation |gives .* up|VIOLATED|"
    r"no leader|is away|below its minimum|clock of|faults are over|is new$|learns that|store of|is full|"
    r"no right|refuses a batch"
)


class Failing(NamedTuple):
    """A run that fails."""

    shape: Shape
    cut: Cut
    world: World

    @property
    def rule(self) -> str:
        return self.world.violation.rule if self.world.violation is not None else ""

    def __str__(self) -> str:
        shape, world = self.shape, self.world
        return (
            f"{shape.workers} workers, {shape.partitions} partitions, {shape.clients} clients, "
            f"{len(world.faults.happened)} faults, {len(world.clients.happened)} operations, "
            f"{world.statistics['messages']} messages, {world.loop.now:.1f} s"
        )


class Shrinker:
    """Looks for a smaller run of one seed that breaks the same rule.

    Faults and operations of clients draw from random generators of their own, so each can be left out without another
    one becoming different. What Kafka and the network draw shifts all the same, so each smaller run has to be tried.
    """

    def __init__(self, seed: int, runs_max: int = RUNS_MAX, say: Callable[[str], None] = lambda line: None) -> None:
        self.seed = seed
        self.runs_left = runs_max
        self.say = say
        self.rule = ""

    def run(self, shape: Shape | None, cut: Cut) -> Failing | None:
        """The run, if it fails by the same rule. Anything but a broken guarantee counts as a rule of its own."""
        if self.runs_left <= 0:
            return None
        self.runs_left -= 1
        world = World(self.seed, shape, cut=cut)
        try:
            world.run()
        except Exception as exc:
            rule = getattr(exc, "rule", repr(exc)[:60])
            if not self.rule or rule == self.rule:
                self.rule = rule
                return Failing(world.shape, cut, world)
        return None

    def shrink(self) -> Failing | None:
        """The smallest failing run that was found; None if the seed does not fail."""
        found = self.run(None, Cut())
        if found is None:
            return None
        before = ""
        while str(found) != before and self.runs_left > 0:
            before = str(found)
            self.say(before)
            found = self._smaller(found)
            found = self._without_odds(found)
            found = self._without_faults(found)
            found = self._without_operations(found)
        return found

    def _smaller(self, found: Failing) -> Failing:
        """Fewer workers, partitions, clients and seconds."""
        for field in ("seconds", "workers", "clients", "partitions"):
            while (shape := _less(found, field)) is not None:
                better = next(
                    (b for salt in range(1 + SALTS) if (b := self.run(shape, _salted(found.cut, salt))) is not None),
                    None,
                )
                if better is None:
                    break
                found = better
        return found

    def _without_odds(self, found: Failing) -> Failing:
        for name in (*Odds._fields, "network"):
            if name not in found.cut.odds:
                found = self.run(found.shape, found.cut._replace(odds=found.cut.odds | {name})) or found
        if found.cut.ambushes:
            found = self.run(found.shape, found.cut._replace(ambushes=False)) or found
        return found

    def _without_faults(self, found: Failing) -> Failing:
        def tried(without: Sequence[int]) -> bool:
            nonlocal found
            better = self.run(found.shape, found.cut._replace(faults=found.cut.faults.union(without)))
            found = better or found
            return better is not None

        _leave_out(sorted(found.world.faults.happened), tried)
        return found

    def _without_operations(self, found: Failing) -> Failing:
        def tried(without: Sequence[tuple[int, int]]) -> bool:
            nonlocal found
            better = self.run(found.shape, found.cut._replace(operations=found.cut.operations.union(without)))
            found = better or found
            return better is not None

        _leave_out(sorted(found.world.clients.happened), tried)
        return found


def _salted(cut: Cut, salt: int) -> Cut:
    return cut._replace(salt=cut.salt + salt)


def _less(found: Failing, field: str) -> Shape | None:
    """A smaller shape; None if it is as small as it may be."""
    shape = found.shape
    if field != "seconds":
        value = getattr(shape, field)
        return shape._replace(**{field: value - 1}) if value > 1 else None
    seconds = min(math.ceil(found.world.loop.now), shape.seconds) if found.world.loop.now < shape.seconds else 0.0
    seconds = seconds if 0 < seconds < shape.seconds else math.floor(shape.seconds / 2)
    return shape._replace(seconds=float(seconds)) if seconds >= 1 else None


def _leave_out(items: Sequence[T], tried: Callable[[Sequence[T]], bool]) -> None:
    """Try to leave out halves, then quarters, down to single ones."""
    for part in _parts(items):
        tried(part)


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    size = len(items)
    while size >= 1:
        for i in range(0, len(items), size):
            yield items[i : i + size]
        if size == 1:
            return
        size = -(-size // 2)


# ---------------------------------------------------------------------- the story


def short_story(story: Sequence[str], text: str) -> list[str]:
    """The lines of a story that concern all, and those of the partition and the offsets that `text` names."""
    partition = re.search(r"partition (\d+)|\b(\d+)@", text)
    number = next((group for group in partition.groups() if group), None) if partition is not None else None
    offsets = {int(found) for found in re.findall(r"@(\d+)", text)}
    return [line for line in story if OF_ALL.search(line) or (number is not None and _concerns(line, number, offsets))]


def _concerns(line: str, number: str, offsets: set[int]) -> bool:
    """Whether a line is about one of the messages."""
    said = re.match(r"\s*[\d.]+ (queue|markers) (\d+) @(\d+)", line)
    if said is not None:
        kind, where, offset = said.groups()
        if where != number:
            return False
        if kind == "queue":
            return int(offset) in offsets
        if "Own(" in line:
            return True
        ranges = [
            [int(n) for n in found.split(",") if n.strip()] for found in re.findall(r"offsets=\[([\d, ]*)\]", line)
        ]
        return any(one[i] <= o < one[i + 1] for one in ranges for i in range(0, len(one), 2) for o in offsets)
    return any(f"({number}, {offset}," in line for offset in offsets)
