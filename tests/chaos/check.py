"""The total-queue check: what is wrong in a history. Pure, so that a test can plant each fault in its input.

A violation is a broken guarantee (docs/guarantees.md). Messages that were done twice are no violation by themselves:
`run` has each of them explained by the log.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from tests.chaos.history import FIFO, Asked, History, Name, Place, Seen
from tests.integration.duplicates import Done

#: A message that took longer than this from its send to its end was late: something was not available.
LATE_S = 3.0


@dataclass(frozen=True)
class Violation:
    """A broken guarantee."""

    rule: str
    text: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def violations(history: History) -> list[Violation]:
    """All of them, whatever their number."""
    found = [*_lost(history), *_unknown(history), *_handed_out_twice(history), *_after_the_ack(history)]
    return [*found, *_out_of_order(history), *_two_copies(history)]


def _lost(history: History) -> Iterable[Violation]:
    for one in sorted(history.missing()):
        yield Violation("lost", f"{one} was confirmed, and nobody has finished it", history.confirmed[one][1])


def _unknown(history: History) -> Iterable[Violation]:
    for one in history.begun:
        if one.id not in history.tried:
            yield Violation("unknown", f"{one.id} was delivered, and never sent", one.at_s)


def _handed_out_twice(history: History) -> Iterable[Violation]:
    seen: set[tuple[Place, int]] = set()
    for one in history.begun:
        if (one.place, one.attempt) in seen:
            yield Violation("handed out twice", f"attempt {one.attempt} of {one.id}", one.at_s)
        seen.add((one.place, one.attempt))


def _after_the_ack(history: History) -> Iterable[Violation]:
    for one in history.begun:
        acked_s = history.acked.get(one.place)
        if acked_s is not None and one.asked_s is not None and one.asked_s > acked_s:
            late_s = one.asked_s - acked_s
            yield Violation("after the ack", f"{one.id} was acknowledged {late_s:.3f} s before the receive", one.at_s)


def _out_of_order(history: History) -> Iterable[Violation]:
    """In a group, a message comes for the first time only when all before it are finished."""
    ends: dict[str, float] = {}
    for one in history.finished:
        ends[one.id] = min(one.at_s, ends.get(one.id, one.at_s))
    starts: dict[str, float] = {}
    for one in history.begun:
        starts[one.id] = min(one.at_s, starts.get(one.id, one.at_s))
    names = sorted(name for name in map(Name.of, starts.keys() | history.confirmed.keys()) if name.stream in FIFO)
    for _, group in groupby(names, key=lambda name: name[:2]):
        latest_s, latest = 0.0, None  # of the ends so far; a message that never ended ends after all others
        for name in group:
            began_s = starts.get(str(name))
            if began_s is not None and latest is not None and began_s < latest_s:
                what = f"{name} came {latest_s - began_s:.3f} s before the end of {latest}"
                yield Violation("order", what if latest_s < float("inf") else f"{name} came, {latest} never", began_s)
            end_s = ends.get(str(name), float("inf"))
            if end_s >= latest_s:
                latest_s, latest = end_s, name


def _two_copies(history: History) -> Iterable[Violation]:
    """A FIFO queue has dropped each second copy of a message, by its deduplication id."""
    places: defaultdict[str, set[Place]] = defaultdict(set)
    for one in history.begun:
        if Name.of(one.id).stream in FIFO:
            places[one.id].add(one.place)
            if len(places[one.id]) == 2:
                yield Violation("two copies", f"{one.id} was delivered from {sorted(places[one.id])}", one.at_s)


# -- figures ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The time of one fault: it begins, it is mended, the next one begins."""

    fault: str
    began_s: float
    mended_s: float
    ended_s: float

    def has(self, at_s: float) -> bool:
        return self.began_s <= at_s < self.ended_s


@dataclass
class Figures:
    """What happened in a window, except why messages were done twice."""

    sent: int
    finished: int
    burned: int
    copies: int
    longest_wait_s: float
    recovery_s: float
    #: action -> protocol -> the longest time that a request and its repetitions took until an answer came.
    unanswered_s: dict[str, dict[str, float]]


def done_twice(history: History) -> dict[Place, list[Seen]]:
    """Messages that were finished more than once: each time, in order."""
    places: defaultdict[Place, list[Seen]] = defaultdict(list)
    for one in history.finished:
        places[one.place].append(one)
    return {place: sorted(seen, key=lambda s: s.at_s) for place, seen in places.items() if len(seen) > 1}


def as_done(seen: Iterable[Seen]) -> list[Done]:
    """As the explanation by the log wants it."""
    return [Done(*one.place, one.attempt, one.pid) for one in seen]


def figures(history: History, window: Window) -> Figures:
    """The figures of a window."""
    first: dict[str, float] = {}
    for one in history.finished:
        first[one.id] = min(one.at_s, first.get(one.id, one.at_s))
    # of this window is what ends in it: what the next fault holds up may have been sent before
    waits = [
        (first[name] - sent_s, first[name])
        for name, (sent_s, _) in history.confirmed.items()
        if name in first and window.has(first[name])
    ]
    late = [at_s for wait_s, at_s in waits if wait_s > LATE_S]
    places: defaultdict[str, set[Place]] = defaultdict(set)
    for one in history.begun:
        places[one.id].add(one.place)
    return Figures(
        sent=sum(window.has(sent_s) for sent_s, _ in history.confirmed.values()),
        finished=sum(window.has(one.at_s) for one in history.finished),
        burned=sum(one.attempt > 1 and window.has(one.at_s) for one in history.begun),
        copies=sum(
            len(places[n]) - 1 for n, (s, _) in history.confirmed.items() if len(places[n]) > 1 and window.has(s)
        ),
        longest_wait_s=max((wait_s for wait_s, _ in waits), default=0.0),
        recovery_s=max(0.0, max(late, default=0.0) - window.mended_s),
        unanswered_s=_unanswered(history.asked, window),
    )


def late(history: History, windows: Iterable[Window]) -> list[str]:
    """A line for each message that took long, for whoever looks into a run that was kept."""
    deliveries: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for what, seen in (("begun", history.begun), ("finished", history.finished)):
        for one in seen:
            deliveries[one.id].append((one.at_s, f"{what} as {one.attempt} of {one.place} by {one.pid or 'a client'}"))
    lines = []
    for window in windows:
        for name, (sent_s, confirmed_s) in sorted(history.confirmed.items(), key=lambda item: item[1]):
            first_s = min((at_s for at_s, what in deliveries[name] if "fin" in what), default=float("inf"))
            if window.has(first_s) and first_s - sent_s > LATE_S:
                told = [f"{what} {at_s - window.began_s:+.1f}" for at_s, what in sorted(deliveries[name])]
                sent = f"sent {sent_s - window.began_s:+.1f}, confirmed {confirmed_s - window.began_s:+.1f}"
                lines.append(f"{window.fault}: {name} {sent}; {'; '.join(told)}")
    return lines


def _unanswered(asked: Iterable[Asked], window: Window) -> dict[str, dict[str, float]]:
    """A client repeats what failed: the time counts from its first attempt to the answer, or to the last attempt."""
    of_clients: defaultdict[tuple[str, str], list[Asked]] = defaultdict(list)
    for one in asked:
        of_clients[one.client, one.action].append(one)
    worst: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (client, action), requests in of_clients.items():
        protocol = client.partition(" ")[0]
        requests.sort(key=lambda a: a.began_s)
        since_s: float | None = None
        for one in requests:
            since_s = one.began_s if since_s is None else since_s
            if one.answered or one is requests[-1]:
                if window.has(one.ended_s):
                    took_s = one.ended_s - since_s
                    worst[action][protocol] = max(took_s, worst[action].get(protocol, 0.0))
                since_s = None
    return dict(worst)


def counted(found: Iterable[Violation]) -> Counter[str]:
    return Counter(one.rule for one in found)
