"""Why a message was done twice: every such case is explained by the log, or is a fault.

What docs/guarantees.md allows (`CAUSES`): the acknowledgement was folded after its lease, when the next delivery had
started; or it never got into the log, because the process that was to write it was killed, or told its receiver so. The
log tells which: of each delivery its start, the end of its lease, the place of its acknowledgement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marq.core.markers import End, Keepalive, Release, Start, decode
from marq.core.partition import Partition
from marq.core.ranges import offsets_in
from marq.errors import MarkerError

LATE = "acknowledged after its lease was over and the next delivery had started"
KILLED = "finished, and its process was killed before the acknowledgement was in the log"
REFUSED = "finished, and its receiver was told that the acknowledgement failed"
LEFT = "finished by a call in a thread that its worker had to leave behind when it stopped"
CAUSES = (LATE, KILLED, REFUSED, LEFT)

Place = tuple[int, int]
"""Partition and offset of a message."""


class Done(NamedTuple):
    """A receiver was finished with a delivery of a message."""

    partition: int
    offset: int
    attempt: int
    pid: int = 0  # of its process; 0: not that of a worker
    in_thread: bool = False


@dataclass
class Delivery:
    """A delivery that took effect: offsets in the markers topic, times of the partition clock."""

    epoch: int
    delivery: int
    attempt: int
    at: int
    at_ms: int
    lease_until_ms: int
    acked_at: int | None = None  # the first acknowledgement with its receipt, whether it took effect or not
    given_back_at: int | None = None
    uncounted: bool = False

    def __str__(self) -> str:
        ack = f"acknowledged at {self.acked_at}" if self.acked_at is not None else "never acknowledged"
        back = f", given back at {self.given_back_at}" if self.given_back_at is not None else ""
        return (
            f"attempt {self.attempt} ({self.epoch}/{self.delivery}) started at {self.at} ({self.at_ms} ms), its lease "
            f"until {self.lease_until_ms} ms, {ack}{back}"
        )


@dataclass
class Explained:
    """The messages that were done more than once."""

    causes: Counter[str] = field(default_factory=Counter)  # the number of times that messages were done too often
    unexplained: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "; ".join(f"{count} {cause}" for cause, count in sorted(self.causes.items())) or "none"


def deliveries(records: Iterable[Any], wanted: Collection[int]) -> dict[int, list[Delivery]]:
    """All deliveries of the wanted offsets, in order, by the records of the markers topic from its beginning."""
    partition = Partition(0)
    found: dict[int, list[Delivery]] = {offset: [] for offset in wanted}
    for record in records:
        try:
            markers = decode(record.value).markers
        except MarkerError:
            markers = []
        effects = partition.fold(record.offset, record.timestamp, markers)
        for marker, effect in zip(markers, effects, strict=True):
            if isinstance(marker, Start):
                for offset in set(effect).intersection(wanted):
                    before = found[offset]
                    attempt = 1 + sum(not one.uncounted for one in before)
                    until_ms = partition.clock_ms + marker.redeliver_after_ms
                    before.append(
                        Delivery(marker.epoch, marker.delivery, attempt, record.offset, partition.clock_ms, until_ms)
                    )
            elif isinstance(marker, Keepalive | Release):
                for offset in set(effect).intersection(wanted):
                    last = found[offset][-1]
                    if isinstance(marker, Keepalive):
                        last.lease_until_ms = partition.clock_ms + marker.redeliver_after_ms
                    else:
                        last.given_back_at, last.uncounted = record.offset, not marker.counted
            elif isinstance(marker, End) and marker.outcome == "acked":
                for offset in set(offsets_in(marker.offsets)).intersection(wanted):
                    for one in found[offset]:
                        if (one.epoch, one.delivery) == (marker.epoch, marker.delivery) and one.acked_at is None:
                            one.acked_at = record.offset
    return found


def explain(
    done: Iterable[Done],
    markers: Mapping[int, Iterable[Any]],
    *,
    killed: Collection[int] = (),
    refused: Collection[Place] | None = None,
) -> Explained:
    """Look for the cause of each time that a message was done after it had been done.

    Args:
        markers: records of the markers topic from its beginning, by partition.
        killed: processes that did not end by themselves.
        refused: messages whose receiver got an error for its acknowledgement.
    """
    places: dict[Place, list[Done]] = {}
    for one in done:
        places.setdefault((one.partition, one.offset), []).append(one)
    twice = {place: sorted(found, key=lambda d: d.attempt) for place, found in places.items() if len(found) > 1}
    result = Explained()
    for number in sorted({partition for partition, _ in twice}):
        offsets = {offset for partition, offset in twice if partition == number}
        told = deliveries(markers[number], offsets)
        for offset in sorted(offsets):
            for one in twice[number, offset][:-1]:
                cause, why = _cause(one, told[offset], killed, refused or ())
                if cause is not None:
                    result.causes[cause] += 1
                else:
                    history = "; ".join(map(str, told[offset]))
                    result.unexplained.append(f"{number}:{offset}, attempt {one.attempt}: {why}. The log: {history}")
            attempts = Counter(one.attempt for one in twice[number, offset])
            result.unexplained += [
                f"{number}:{offset}: attempt {attempt} was done {times} times"
                for attempt, times in attempts.items()
                if times > 1
            ]
    return result


def _cause(
    one: Done, told: list[Delivery], killed: Collection[int], refused: Collection[Place]
) -> tuple[str | None, str]:
    """Why a delivery that was done did not keep the next one from starting."""
    mine = [d for d in told if d.attempt == one.attempt and not d.uncounted]
    if not mine:
        return None, "no delivery of that attempt took effect: it was handed out though it was void"
    delivery = mine[-1]
    later = [d for d in told if d.at > delivery.at]
    if not later:
        return None, "it was done again, but no later delivery is in the log"
    following = later[0]
    over = following.at_ms >= delivery.lease_until_ms
    if delivery.acked_at is not None:
        if delivery.acked_at < following.at:
            return None, "it was started again after its acknowledgement"
        if over or delivery.given_back_at is not None:
            return LATE, ""
        return None, "it was started again while its lease was on"
    if delivery.given_back_at is not None and one.in_thread:
        return LEFT, ""
    if not over and delivery.given_back_at is None:
        return None, "it was started again while its lease was on"
    if one.pid in killed:
        return KILLED, ""
    if (one.partition, one.offset) in refused:
        return REFUSED, ""
    return None, "its acknowledgement is not in the log, though its process was not killed"
