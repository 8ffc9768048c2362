"""The last 15 minutes as series with one number a step: of all queues of a worker, and of each queue."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

#: Seconds between two points of a history, and how many points there are: 15 minutes.
STEP_S = 5
POINTS = 180
#: Points over which a rate is the mean.
RATE_POINTS = 2
#: Events that are counted for all queues together.
FLOWS = ("sent", "delivered", "redelivered", "acked", "dead", "other_ends")
#: The greatest number of a history: four bytes each, as there may be many.
_NUMBER_MAX = (1 << 32) - 1


class Point(msgspec.Struct, array_like=True):
    """All queues of a worker in one step: the messages that went through, and the counts at its end."""

    step: int  # number of the step since 1970
    flows: tuple[int, int, int, int, int, int]  # as `FLOWS`
    unfinished: int
    in_flight: int
    oldest_ms: int


class Series(msgspec.Struct):
    """The history of a queue: from the step ``first`` on, one number a step."""

    first: int
    sent: list[int]
    unfinished: list[int]
    in_flight: list[int]

    def since(self, step: int) -> Series:
        """The part from a step on, with two points at least."""
        cut = max(0, min(step - self.first, len(self.sent) - 2))
        return Series(self.first + cut, self.sent[cut:], self.unfinished[cut:], self.in_flight[cut:])

    @property
    def done(self) -> list[int]:
        """The messages that were finished in each step."""
        changes = [0, *(after - before for before, after in pairwise(self.unfinished))]
        return [max(0, sent - change) for sent, change in zip(self.sent, changes, strict=True)]


class History:
    """The last points of one queue: three rings of numbers."""

    __slots__ = ("in_flight", "sent", "step", "unfinished")

    def __init__(self, step: int, unfinished: int) -> None:
        self.step = step  # of the last point
        self.sent = array("I", [0] * POINTS)
        self.unfinished = array("I", [min(unfinished, _NUMBER_MAX)] * POINTS)
        self.in_flight = array("I", [0] * POINTS)

    def note(self, step: int, sent: int, unfinished: int, in_flight: int) -> None:
        """Add a point at the end of a step. Messages sent since the last point are spread over the steps between."""
        sent, unfinished, in_flight = (min(number, _NUMBER_MAX) for number in (sent, unfinished, in_flight))
        gap = step - self.step
        if gap <= 0:
            place = self.step % POINTS
            self.sent[place] = min(self.sent[place] + sent, _NUMBER_MAX)
            self.unfinished[place], self.in_flight[place] = unfinished, in_flight
            return
        before = self.step % POINTS
        stood, flew = self.unfinished[before], self.in_flight[before]
        steps = min(gap, POINTS)
        for i in range(1, steps + 1):
            place = (step - steps + i) % POINTS
            self.sent[place] = sent * i // steps - sent * (i - 1) // steps
            self.unfinished[place] = stood + (unfinished - stood) * i // steps
            self.in_flight[place] = flew + (in_flight - flew) * i // steps
        self.step = step

    def series(self) -> Series:
        """From the oldest point on."""
        first = self.step + 1
        cut = first % POINTS

        def turned(ring: array[int]) -> list[int]:
            return [*ring[cut:], *ring[:cut]]

        return Series(first - POINTS, turned(self.sent), turned(self.unfinished), turned(self.in_flight))

    def rates(self) -> tuple[float, float]:
        """Messages sent and finished a second, lately."""
        sent = done = 0
        for step in range(self.step - RATE_POINTS + 1, self.step + 1):
            came = self.sent[step % POINTS]
            sent += came
            done += max(0, came - self.unfinished[step % POINTS] + self.unfinished[(step - 1) % POINTS])
        return sent / (RATE_POINTS * STEP_S), done / (RATE_POINTS * STEP_S)


def merged(histories: Iterable[Sequence[Point]], last: int) -> tuple[int, list[Point]]:
    """The sum of the histories of workers: its first step, and its points up to the step `last`."""
    points: dict[int, Point] = {}
    for history in histories:
        for point in history:
            if not last - POINTS < point.step <= last:
                continue
            total = points.get(point.step)
            if total is None:
                points[point.step] = point
                continue
            flows: Any = tuple(a + b for a, b in zip(total.flows, point.flows, strict=True))
            points[point.step] = Point(
                point.step,
                flows,
                total.unfinished + point.unfinished,
                total.in_flight + point.in_flight,
                max(total.oldest_ms, point.oldest_ms),
            )
    if not points:
        return last + 1, []
    first = min(points)
    nothing = Point(0, (0, 0, 0, 0, 0, 0), 0, 0, -1)
    found: list[Point] = []
    for step in range(first, last + 1):
        if step in points:
            found.append(points[step])
        else:  # no worker took a sample in time: repeat the counts of before
            before = found[-1]
            found.append(Point(step, nothing.flows, before.unfinished, before.in_flight, before.oldest_ms))
    return first, found


def summed(told: Sequence[Series], last: int) -> Series:
    """The sum of histories of a queue, of `POINTS` steps up to ``last``."""
    first = last - POINTS + 1
    total = Series(first, [0] * POINTS, [0] * POINTS, [0] * POINTS)
    for one in told:
        end = one.first + len(one.sent) - 1
        for i in range(POINTS):
            step = first + i
            at = min(max(step - one.first, 0), len(one.sent) - 1)
            total.unfinished[i] += one.unfinished[at]
            total.in_flight[i] += one.in_flight[at]
            if one.first <= step <= end:
                total.sent[i] += one.sent[at]
    return total
