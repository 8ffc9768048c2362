"""Remembers which extensions and releases had no effect, so that receivers can be told."""

from __future__ import annotations

from collections.abc import Iterable

from marq.core.markers import Keepalive, Release
from marq.core.partition import Partition
from marq.core.ranges import offsets_in

#: Extensions and releases without effect that are remembered, message by message.
IGNORED_MAX = 10_000


class IgnoredMarkers:
    """Remembers extensions and releases without effect, since the state of ``partition`` was restored."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        # (epoch, delivery, offset) -> the first record that had no effect on it
        self._records: dict[tuple[int, int, int], int] = {}
        self._known_from = partition.markers_position  # of records below it nothing is known

    def note(self, record: int, marker: Keepalive | Release, effect: Iterable[int]) -> None:
        """A marker in the record at offset ``record`` took effect on ``effect`` only."""
        took, records = set(effect), self._records
        for offset in offsets_in(marker.offsets):
            if offset not in took:
                records.setdefault((marker.epoch, marker.delivery, offset), record)
        while len(records) > IGNORED_MAX:
            oldest = next(iter(records))
            self._known_from = max(self._known_from, records.pop(oldest) + 1)

    def took_effect(self, record: int, epoch: int, delivery: int, offset: int) -> bool:
        """True if the extension or release of a delivery in the record at offset ``record`` had effect.

        A delivery that is over never comes back: if one record could not extend or release it, no later one can.
        """
        ignored = self._records.get((epoch, delivery, offset))
        if ignored is not None:
            return 0 <= record < ignored
        # of a record that was folded before the state was restored, what is there now is all that is known
        return record >= self._known_from or self._partition.is_current(offset, epoch, delivery)
