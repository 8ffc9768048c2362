"""Pages of long lists. Other work gets its turns while a page is put together."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TypeVar

#: Names that are examined in one turn.
TURN_NAMES = 1_000

Item = TypeVar("Item")


async def page_of(names: Iterable[str], limit: int, visible: Callable[[str], bool]) -> tuple[list[str], str]:
    """The first `limit` visible names, and the name after which the next page begins (empty: there is none)."""
    found: list[str] = []
    for number, name in enumerate(names, 1):
        if not number % TURN_NAMES:
            await asyncio.sleep(0)
        if visible(name):
            if len(found) == limit:
                return found, found[-1]
            found.append(name)
    return found, ""


async def smallest(items: AsyncIterable[Item], limit: int, key: Callable[[Item], int]) -> list[Item]:
    """The `limit` smallest items in order. Keeps no more than that many in memory."""
    kept: list[tuple[int, int, Item]] = []  # a heap, the greatest first
    number = 0
    async for item in items:
        number += 1
        entry = (-key(item), number, item)
        if len(kept) < limit:
            heapq.heappush(kept, entry)
        elif kept and entry > kept[0]:
            heapq.heapreplace(kept, entry)
    return [entry[2] for entry in sorted(kept, key=lambda entry: -entry[0])]
