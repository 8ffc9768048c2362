"""Tasks that move all messages of a queue. The owner of partition 0 runs them, whichever worker started them.

A task is part of the queue's record. Its progress is written there every second, so another worker can go on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from mode import Service

from app.engine.queue_records import Draft, MoveTask, QueueRecord
from app.service.census import Census
from app.service.operations import QueueService
from marq.core.policies import QueueSettings
from marq.errors import BadValueError, MarqError, NotPossibleError, UnavailableError, UnknownQueueError

#: Tasks that the record of a queue keeps.
KEPT = 10
#: Seconds between checks for tasks, and before a partition that did not answer is asked again.
INTERVAL_S = 0.25
#: Seconds between updates of a task's progress.
NOTE_S = 1.0
#: Seconds that a question about tasks waits for the end of one that has nothing left to move.
SETTLE_S = 2.0
#: The reason of a task that failed because its target was deleted.
NO_TARGET = "the queue that they are moved to does not exist"
#: Messages of one partition that are moved at once.
BATCH = 200


class SameQueueError(BadValueError):
    """The messages would be moved to the queue they are in."""


class OtherTypeError(NotPossibleError):
    """One of the two queues is a FIFO queue, the other is not."""


class UnderWayError(NotPossibleError):
    """Another task of the queue is not over."""


class MoveTasks(Service):
    """Starts, cancels and runs tasks. Those of all queues run where partition 0 is owned."""

    def __init__(self, operations: QueueService, census: Census, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._operations = operations
        self._census = census
        self._ownership = operations.ownership
        self._catalog = operations.catalog
        self._running: dict[str, asyncio.Task[None]] = {}  # by id of the task

    def check(self, queue: str, to: str) -> None:
        """Check that messages of `queue` may be moved to `to`; empty: each to the queue of which it is a dead letter.

        Raises:
            UnknownQueueError: there is no such queue.
            SameQueueError: they are the same queue.
            OtherTypeError: they are of different types.
            NotPossibleError: topic mode.
        """
        self._catalog.require(queue)
        if self._operations.settings.queue_id is not None:
            raise NotPossibleError("in topic mode marq never writes to the topic: messages can't be moved there")
        if not to:
            return
        self._catalog.require(to)
        if to == queue:
            raise SameQueueError("messages can't be moved to the queue they are in")
        source, target = self._catalog.settings_of(queue), self._catalog.settings_of(to)
        if source.fifo != target.fifo:
            raise OtherTypeError(
                f"{queue!r} is {_type_of(source)}, {to!r} is {_type_of(target)}: messages can't be moved between them"
            )

    async def begin(self, queue: str, to: str, per_second: int = 0) -> MoveTask:
        """Start a task that moves all messages which are in `queue` now. See `check` for more errors.

        Args:
            per_second: messages a second at most; 0: as fast as possible.

        Raises:
            UnderWayError: the queue has a task that is not over.
            UnavailableError: Kafka, or the record of the queue, could not be reached in time.
        """
        self.check(queue, to)
        if any(task.active for task in self.tasks_of(queue)):
            raise _under_way(queue)
        topics = self._ownership.topics
        task = MoveTask(
            id=str(uuid4()),
            to=to,
            started_ms=int(time.time() * 1000),
            before=await self._catalog.end_offsets(topics.queue, topics.partitions),
            per_second=per_second,
            total=sum((await self._census.counts_of(queue)).values()),
        )
        await self._write(queue, task)
        return task

    def tasks_of(self, queue: str) -> tuple[MoveTask, ...]:
        """The last tasks of a queue, the newest first."""
        record = self._catalog.records.get(queue)
        return record.moves if record is not None and record.active else ()

    async def settle(self, queue: str) -> None:
        """Wait until a task that has moved all messages is over, for `SETTLE_S` at most."""
        end_s = time.monotonic() + SETTLE_S
        while any(task.active for task in self.tasks_of(queue)) and time.monotonic() < end_s:
            if any((await self._census.counts_of(queue)).values()):
                return
            await asyncio.sleep(INTERVAL_S / 5)

    async def _write(self, queue: str, task: MoveTask) -> None:
        def begun(moves: tuple[MoveTask, ...]) -> tuple[MoveTask, ...]:
            if any(other.active and other.id != task.id for other in moves):
                raise _under_way(queue)
            return moves if task in moves else (task, *moves)[:KEPT]

        await self._change(queue, begun)

    async def cancel(self, queue: str, task_id: str) -> None:
        """End a task before it is done."""
        await self._replace(queue, task_id, lambda task: msgspec.structs.replace(task, state="cancelling"))

    # ------------------------------------------------------------------ records

    async def _change(self, queue: str, change: Callable[[tuple[MoveTask, ...]], tuple[MoveTask, ...]]) -> None:
        default = self._catalog.default

        def draft(base: QueueRecord | None) -> Draft | None:
            old = (
                Draft(default, {}, {}) if base is None else Draft(base.settings, base.attributes, base.tags, base.moves)
            )
            new = old._replace(moves=change(old.moves))
            return None if new == old else new

        await self._catalog.edit(queue, draft)

    async def _replace(self, queue: str, task_id: str, change: Callable[[MoveTask], MoveTask]) -> None:
        await self._change(queue, lambda moves: tuple(change(t) if t.id == task_id and t.active else t for t in moves))

    def _now(self, queue: str, task_id: str) -> MoveTask | None:
        """The task in the record of the queue; None if it is over."""
        record = self._catalog.moving.get(queue)
        return next((t for t in record.moves if t.id == task_id and t.active), None) if record is not None else None

    # ------------------------------------------------------------------ run

    def _is_ours(self) -> bool:
        owned = self._ownership.owned.get(0)
        return owned is not None and owned.serving

    @Service.task
    async def _watch(self) -> None:
        while not self.should_stop:
            await asyncio.sleep(INTERVAL_S)
            if not self._is_ours():
                for running in self._running.values():
                    running.cancel()
                continue
            for queue, record in list(self._catalog.moving.items()):
                for task in record.moves:
                    if task.active and task.id not in self._running:
                        running = self._running[task.id] = asyncio.ensure_future(self._run(queue, task))
                        running.add_done_callback(partial(self._ended, task.id))

    def _ended(self, task_id: str, _: asyncio.Task[None]) -> None:
        self._running.pop(task_id, None)

    async def _run(self, queue: str, task: MoveTask) -> None:
        try:
            try:
                state, moved, reason = await self._move_all(queue, task)
            except MarqError:
                raise
            except Exception as exc:
                self.log.exception("Messages of %r can't be moved", queue)
                now = self._now(queue, task.id)
                state, moved, reason = (
                    "failed",
                    now.moved if now is not None else task.moved,
                    f"internal error: {exc!r}",
                )

            def ended(now: MoveTask) -> MoveTask:
                return msgspec.structs.replace(now, state=state, moved=moved, reason=reason)

            await self._replace(queue, task.id, ended)
        except MarqError as exc:
            self.log.warning("Messages of %r are not moved right now: %s", queue, exc)
            await asyncio.sleep(1.0)  # the next check goes on with the task

    async def _move_all(self, queue: str, task: MoveTask) -> tuple[str, int, str]:
        """Move until nothing is left or the task is cancelled. Returns its last state, the count, and why it failed."""
        moved, noted_s, began_s = task.moved, time.monotonic(), time.monotonic()
        already = moved
        await self._operations.receives.read_up_everywhere(queue)
        left = [n for n in range(self._ownership.topics.partitions) if n < len(task.before) and task.before[n] > 0]
        while left:
            now = self._now(queue, task.id)
            if now is None or now.state == "cancelling":
                return "cancelled", moved, ""
            for number in list(left):
                room = BATCH
                if task.per_second:
                    allowed = int((time.monotonic() - began_s) * task.per_second) + 1 - (moved - already)
                    room = max(0, min(room, allowed))
                if room == 0:
                    break
                count, done, reason = await self._move_in(number, queue, task, room)
                moved += count
                if reason:
                    return "failed", moved, reason
                if done:
                    left.remove(number)
            if time.monotonic() - noted_s > NOTE_S:
                noted_s = time.monotonic()
                await self._note(queue, task.id, moved)
            await asyncio.sleep(1 / task.per_second if task.per_second and task.per_second < 20 else 0.02)
        return "completed", moved, ""

    async def _note(self, queue: str, task_id: str, moved: int) -> None:
        await self._replace(queue, task_id, lambda task: msgspec.structs.replace(task, moved=moved))

    async def _move_in(self, number: int, queue: str, task: MoveTask, limit: int) -> tuple[int, bool, str]:
        """Move some messages of one partition. Returns how many, True if there are no more, and why the task fails."""
        found = await self._operations.moves.move_in(number, queue, None, limit, task.to or None, make=False)
        if isinstance(found, UnavailableError):
            await asyncio.sleep(INTERVAL_S)
            return 0, False, ""
        if isinstance(found, MarqError):
            return 0, False, str(found)
        errors = [result for result in found.values() if isinstance(result, MarqError)]
        count = len(found) - len(errors)
        if any(isinstance(error, UnknownQueueError) for error in errors):
            return count, False, NO_TARGET
        if errors and not count and not any(isinstance(error, UnavailableError) for error in errors):
            return 0, False, str(errors[0])
        return count, not found or min(found) >= task.before[number], ""

    async def on_stop(self) -> None:
        for running in list(self._running.values()):
            running.cancel()
        for running in list(self._running.values()):
            with contextlib.suppress(asyncio.CancelledError):
                await running


def _under_way(queue: str) -> UnderWayError:
    return UnderWayError(f"a task that moves messages of {queue!r} is under way")


def _type_of(settings: QueueSettings) -> str:
    return "a FIFO queue" if settings.fifo else "a standard queue"
