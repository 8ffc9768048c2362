"""Chooses segments to merge: small neighbours, and sparse ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

#: Fullness of a segment that has as many messages, or bytes, as a row may have. Tiers are powers of four of it.
FULL = 1024
_TIERS = (1024, 256, 64, 16, 4)


def mergeable(weights: Sequence[int]) -> list[tuple[int, int]]:
    """Runs ``[i, j)`` of adjacent segments that should become one, by how full they are (in parts of ``FULL``).

    This is merging by size tiers, as in a log-structured store: a run of segments below a tier is merged when together
    they reach that tier. Each merge lifts a message by at least one of five tiers, so a message is rewritten at most
    five times while nothing around it is finished. Few segments stay unmerged: some per tier for each full segment.
    """
    found: list[tuple[int, int]] = []
    taken = bytearray(len(weights))
    for tier in _TIERS:
        i = 0
        while i < len(weights):
            j, total = i, 0
            while j < len(weights) and weights[j] < tier and not taken[j]:
                total += weights[j]
                j += 1
            if j - i > 1 and total >= tier:
                for start, stop in _filled(weights, i, j):
                    if sum(weights[start:stop]) >= min(tier, FULL // 2):
                        found.append((start, stop))
                        taken[start:stop] = b"\1" * (stop - start)
            i = max(j, i + 1)
    return sorted(found)


def _filled(weights: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a run into pieces of several segments that fit into one."""
    i = start
    while i < stop:
        j, total = i + 1, weights[i]
        while j < stop and total + weights[j] <= FULL:
            total += weights[j]
            j += 1
        if j - i > 1:
            yield i, j
        i = j
