"""Gathers entries that arrive while a request of their kind is in progress into the next request.

The first entry is sent at once, so none waits for others. Under load requests grow by themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from marq.errors import ClosedError, RequestError
from marq.protocol.limits import CLIENT_BATCH_BYTES, CLIENT_BATCH_MAX

Post = Callable[[Any, list[Any]], Awaitable[list[Any]]]
"""Sends entries of one kind. Returns a result per entry, in order."""


def _no_size(entry: Any) -> int:
    return 0


class _Group:
    """Entries of one caller, in one request."""

    __slots__ = ("entries", "future", "size_bytes")

    def __init__(self, entries: list[Any], size_bytes: int, future: asyncio.Future[list[Any]]) -> None:
        self.entries = entries
        self.size_bytes = size_bytes
        self.future = future


class _Lane:
    """The entries of one kind."""

    __slots__ = ("count", "scheduled", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Group] = deque()
        self.count = 0  # waiting entries
        self.scheduled = False  # they are sent in the next turn of the loop, together
        self.under_way = 0  # requests in progress


class Batching:
    """Gathers entries of a kind into requests.

    Args:
        post: makes a request.
        size_of: bytes of an entry.
        at_once: most requests of a kind at the same time. With one, entries keep their order. With more, further
            requests are made only when they are full.
    """

    def __init__(self, post: Post, size_of: Callable[[Any], int] = _no_size, at_once: int = 1) -> None:
        self._post = post
        self._size_of = size_of
        self._at_once = at_once
        self._lanes: dict[Hashable, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def put(self, kind: Hashable, entries: Sequence[Any]) -> list[Any]:
        """Results of `entries`, in order: for those whose request failed, its error. Raises it if all requests did."""
        if self._closed:
            raise ClosedError("this service was closed; make a new Service")
        groups = self._groups(entries)
        lane = self._lanes.get(kind)
        if lane is None:
            lane = self._lanes[kind] = _Lane()
        lane.waiting.extend(groups)
        lane.count += len(entries)
        if not lane.scheduled:
            lane.scheduled = True
            asyncio.get_running_loop().call_soon(self._send, kind, lane)
        if len(groups) == 1:
            return await groups[0].future
        outcomes = await asyncio.gather(*(group.future for group in groups), return_exceptions=True)
        if all(isinstance(outcome, BaseException) for outcome in outcomes):
            raise outcomes[0]  # type: ignore[misc]
        results: list[Any] = []
        for group, outcome in zip(groups, outcomes, strict=True):
            results.extend([outcome] * len(group.entries) if isinstance(outcome, BaseException) else outcome)
        return results

    def _send(self, kind: Hashable, lane: _Lane) -> None:
        """Start as many requests as are allowed now."""
        lane.scheduled = False
        if self._closed:
            return
        while lane.waiting and lane.under_way < (self._at_once if lane.count >= CLIENT_BATCH_MAX else 1):
            groups = _take(lane)
            if groups:
                lane.under_way += 1
                task = asyncio.ensure_future(self._carry_out(kind, lane, groups))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if not lane.under_way and self._lanes.get(kind) is lane:
            del self._lanes[kind]

    async def _carry_out(self, kind: Hashable, lane: _Lane, groups: list[_Group]) -> None:
        try:
            await self._request(kind, groups)
        finally:
            lane.under_way -= 1
            self._send(kind, lane)

    def _groups(self, entries: Sequence[Any]) -> list[_Group]:
        """Split the entries into parts that fit into a request."""
        loop = asyncio.get_running_loop()
        groups: list[_Group] = []
        part: list[Any] = []
        part_bytes = 0
        for entry in entries:
            size_bytes = self._size_of(entry)
            if part and (len(part) >= CLIENT_BATCH_MAX or part_bytes + size_bytes > CLIENT_BATCH_BYTES):
                groups.append(_Group(part, part_bytes, loop.create_future()))
                part, part_bytes = [], 0
            part.append(entry)
            part_bytes += size_bytes
        groups.append(_Group(part, part_bytes, loop.create_future()))
        return groups

    async def _request(self, kind: Hashable, groups: list[_Group]) -> None:
        try:
            results = await self._post(kind, [entry for group in groups for entry in group.entries])
        except RequestError as exc:
            if len(groups) == 1:
                _fail(groups, exc)
            else:
                # one caller's bad value must not fail the others
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
        """Stop. Callers that still wait are cancelled."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in self._lanes.values():
            for group in lane.waiting:
                group.future.cancel()
        self._lanes.clear()


def _take(lane: _Lane) -> list[_Group]:
    """As many groups as fit into one request, without those whose callers no longer wait."""
    waiting = lane.waiting
    groups: list[_Group] = []
    count = size_bytes = 0
    while waiting:
        group = waiting[0]
        if group.future.done():
            waiting.popleft()
            lane.count -= len(group.entries)
            continue
        count += len(group.entries)
        size_bytes += group.size_bytes
        if groups and (count > CLIENT_BATCH_MAX or size_bytes > CLIENT_BATCH_BYTES):
            break
        groups.append(waiting.popleft())
        lane.count -= len(group.entries)
    return groups


def _fail(groups: list[_Group], error: Exception) -> None:
    for group in groups:
        if not group.future.done():
            group.future.set_exception(error)
