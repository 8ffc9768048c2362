"""The last 15 minutes as series with one number a step: of all queues of a worker, and of each queue."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
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
    counted: int = -1  # partitions that are counted to their end; -1: a worker of an earlier version


class Series(msgspec.Struct):
    """The history of a queue: from the step ``first`` on, one number a step; None: not known."""

    first: int
    sent: list[int | None]
    unfinished: list[int | None]
    in_flight: list[int | None]

    def since(self, step: int) -> Series:
        """The part from a step on, with two points at least."""
        cut = max(0, min(step - self.first, len(self.sent) - 2))
        return Series(self.first + cut, self.sent[cut:], self.unfinished[cut:], self.in_flight[cut:])

    @property
    def done(self) -> list[int | None]:
        """The messages that were finished in each step."""
        changes = [0, *(None if None in both else both[1] - both[0] for both in pairwise(self.unfinished))]  # type: ignore[operator]
        return [
            None if sent is None or change is None else max(0, sent - change)
            for sent, change in zip(self.sent, changes, strict=True)
        ]


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

        def turned(ring: array[int]) -> list[int | None]:
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


def merged(histories: Iterable[Sequence[Point]], last: int, partitions: int) -> tuple[int, list[Point | None]]:
    """The sum of the histories of workers: its first step, and its points up to the step `last`.

    A point is None if not all partitions are in it: a worker stood still, or was late, or they had no owner. That of
    the last step is left out then, because it may be on its way.
    """
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
                -1 if min(total.counted, point.counted) < 0 else total.counted + point.counted,
            )
    if not points:
        return last + 1, []
    first = min(points)
    found: list[Point | None] = []
    for step in range(first, last + 1):
        known = points.get(step)
        found.append(known if known is not None and known.counted in (-1, partitions) else None)
    if found[-1] is None:
        found.pop()
    return first, found


def summed(told: Sequence[Series], last: int, known: Container[int]) -> Series:
    """The sum of histories of a queue, of `POINTS` steps up to ``last``. Steps that are not ``known`` have None."""
    steps = range(last - POINTS + 1, last + 1)
    total = Series(steps.start, [None] * POINTS, [None] * POINTS, [None] * POINTS)
    for i, step in enumerate(steps):
        if step not in known:
            continue
        sent = unfinished = in_flight = 0
        for one in told:
            at = min(max(step - one.first, 0), len(one.sent) - 1)
            unfinished += one.unfinished[at] or 0
            in_flight += one.in_flight[at] or 0
            if 0 <= step - one.first < len(one.sent):
                sent += one.sent[at] or 0
        total.sent[i], total.unfinished[i], total.in_flight[i] = sent, unfinished, in_flight
    return total
