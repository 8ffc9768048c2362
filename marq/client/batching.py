"""Entries that come while a request of their kind is under way go together in the next one.

The first goes at once, so nothing waits for company; under load requests grow by themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from marq.client.wire import BATCH_MAX, BATCH_MAX_BYTES
from marq.errors import RequestError

Post = Callable[[Any, list[Any]], Awaitable[list[Any]]]
"""Sends entries of one kind; answers per entry, in order."""


def _no_size(entry: Any) -> int:
    return 0


class _Group:
    """Entries of one caller, in one request."""

    __slots__ = ("entries", "future", "size_bytes")

    def __init__(self, entries: list[Any], size_bytes: int, future: asyncio.Future[list[Any]]) -> None:
        self.entries = entries
        self.size_bytes = size_bytes
        self.future = future


class Batching:
    """One request at a time per kind, so entries of a kind keep their order."""

    def __init__(self, post: Post, size_of: Callable[[Any], int] = _no_size) -> None:
        self._post = post
        self._size_of = size_of
        self._waiting: dict[Hashable, deque[_Group]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, kind: Hashable, entries: Sequence[Any]) -> list[Any]:
        """The answers to `entries`, in order; an error where their request failed. Raises it if all of them did."""
        groups = self._groups(entries)
        waiting = self._waiting.get(kind)
        if waiting is None:
            waiting = self._waiting[kind] = deque()
            task = asyncio.ensure_future(self._run(kind, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        waiting.extend(groups)
        if len(groups) == 1:
            return await groups[0].future
        outcomes = await asyncio.gather(*(group.future for group in groups), return_exceptions=True)
        if all(isinstance(outcome, BaseException) for outcome in outcomes):
            raise outcomes[0]  # type: ignore[misc]
        results: list[Any] = []
        for group, outcome in zip(groups, outcomes, strict=True):
            results.extend([outcome] * len(group.entries) if isinstance(outcome, BaseException) else outcome)
        return results

    def _groups(self, entries: Sequence[Any]) -> list[_Group]:
        """The entries, in parts that a request may have."""
        loop = asyncio.get_running_loop()
        groups: list[_Group] = []
        part: list[Any] = []
        part_bytes = 0
        for entry in entries:
            size_bytes = self._size_of(entry)
            if part and (len(part) >= BATCH_MAX or part_bytes + size_bytes > BATCH_MAX_BYTES):
                groups.append(_Group(part, part_bytes, loop.create_future()))
                part, part_bytes = [], 0
            part.append(entry)
            part_bytes += size_bytes
        groups.append(_Group(part, part_bytes, loop.create_future()))
        return groups

    async def _run(self, kind: Hashable, waiting: deque[_Group]) -> None:
        try:
            while waiting:
                if groups := _take(waiting):
                    await self._request(kind, groups)
        finally:
            # nothing was put since the last look: no await lies between
            del self._waiting[kind]
            for group in waiting:
                group.future.cancel()

    async def _request(self, kind: Hashable, groups: list[_Group]) -> None:
        try:
            results = await self._post(kind, [entry for group in groups for entry in group.entries])
        except RequestError as exc:
            if len(groups) == 1:
                _fail(groups, exc)
            else:
                # one caller's bad value is nothing to the others
                for group in groups:
                    await self._request(kind, [group])
        except Exception as exc:
            _fail(groups, exc)
        except BaseException:
            for group in groups:
                group.future.cancel()
            raise
        else:
            start = 0
            for group in groups:
                end = start + len(group.entries)
                if not group.future.done():
                    group.future.set_result(results[start:end])
                start = end

    async def close(self) -> None:
        """Stop; whoever still waits is cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _take(waiting: deque[_Group]) -> list[_Group]:
    """As many groups as go into one request, without those that nobody waits for any more."""
    groups: list[_Group] = []
    count = size_bytes = 0
    while waiting:
        group = waiting[0]
        if group.future.done():
            waiting.popleft()
            continue
        count += len(group.entries)
        size_bytes += group.size_bytes
        if groups and (count > BATCH_MAX or size_bytes > BATCH_MAX_BYTES):
            break
        groups.append(waiting.popleft())
    return groups


def _fail(groups: list[_Group], error: Exception) -> None:
    for group in groups:
        if not group.future.done():
            group.future.set_exception(error)
