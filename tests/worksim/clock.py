"""Virtual time: an event loop whose clock advances when nothing is left to do, and processes that run in it.

A *process* is a context (`contextvars`): every task and callback that it makes belongs to it. So a process can be
killed (nothing of it runs any more) or stopped and continued (what came meanwhile runs then), and its parts know no
difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import os
import random
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any
from unittest import mock

#: Seconds since 1970 at which each run begins.
EPOCH_S = 1_700_000_000
#: Seconds that a callback takes: so a loop that waits for nothing can't stop the time.
STEP_S = 0.000_005
#: Cancelled timers before they are thrown away.
CANCELLED_MAX = 200

_current: ContextVar[Process | None] = ContextVar("process", default=None)


class Stuck(Exception):
    """Nothing will ever happen again."""


def current() -> Process:
    """The process that runs now."""
    process = _current.get()
    assert process is not None, "no process runs now"
    return process


class Process:
    """One simulated operating system process."""

    RUNS, STANDS, DEAD = "runs", "stands", "dead"

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.state = self.RUNS
        self.clock_s = 0.0  # by which its wall clock is wrong
        self.kept: list[asyncio.Handle] = []
        self.world: Any = None  # the objects of others that it can reach
        self._loop = loop
        self.context: Context = copy_context()
        self.context.run(_current.set, self)

    def call(self, function: Callable[..., object], *args: Any, delay_s: float = 0.0) -> None:
        """Run a function in this process, soon."""
        if delay_s > 0:
            self._loop.call_later(delay_s, function, *args, context=self.context)
        else:
            self._loop.call_soon(function, *args, context=self.context)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine, context=self.context.copy())
        self._loop.kept.append(task)
        return task

    def stand(self) -> None:
        """As SIGSTOP does."""
        if self.state == self.RUNS:
            self.state = self.STANDS

    def go_on(self) -> None:
        """As SIGCONT does."""
        if self.state == self.STANDS:
            self.state = self.RUNS
            self._loop._ready.extend(self.kept)
            self.kept.clear()

    def kill(self) -> None:
        """As SIGKILL does."""
        self.state = self.DEAD
        self._loop.kept.append(self)  # its coroutines must not be collected, which would end them, while others run


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files, threads and real time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers = 0
        self._cancelled = 0
        self.over = False
        #: What must live as long as the loop.
        self.kept: list[Any] = []
        self.outside = copy_context()
        self._selector = mock.Mock(spec=["close"])

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.over:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers += 1
        heapq.heappush(self._due, (when, self._timers, timer))
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise AssertionError("threads have no place in a simulation")

    def throw_away(self) -> None:
        """The run is over: nothing that is left has a say any more."""
        self.over = True
        asyncio.events._set_running_loop(self)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(4):  # what ends one may begin others
                    for task in asyncio.all_tasks(self):
                        task._log_destroy_pending = False  # type: ignore[attr-defined]
                        _close(task.get_coro())
        finally:
            asyncio.events._set_running_loop(None)
        self._ready.clear()
        self._due.clear()

    def _run_once(self) -> None:
        ready, due = self._ready, self._due
        if self._cancelled > CANCELLED_MAX:
            due[:] = [entry for entry in due if not entry[2]._cancelled]
            heapq.heapify(due)
            self._cancelled = 0
        if not ready:
            while due and due[0][2]._cancelled:
                heapq.heappop(due)
            if not due:
                raise Stuck
            self.now = max(self.now, due[0][0])
        while due and due[0][0] <= self.now:
            ready.append(heapq.heappop(due)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_current)
            if process is not None and process.state is not Process.RUNS:
                if process.state is Process.STANDS:
                    process.kept.append(handle)
                continue
            self.now += STEP_S
            self.steps += 1
            handle._run()


def _close(coroutine: Any) -> None:
    """End a coroutine, even if it awaits something while it ends."""
    for _ in range(20):
        try:
            coroutine.close()
        except RuntimeError:
            continue
        except BaseException:
            return
        return


class Entropy:
    """All chance: of the simulation, and of the code that it runs."""

    def __init__(self, seed: int) -> None:
        self._makes = Random(seed)
        self.of_product = Random(self._makes.getrandbits(64))

    def stream(self, name: str) -> Random:
        """A separate random generator for one part, so that its draws do not depend on the others."""
        return Random(f"{name} {self._makes.getrandbits(64)}")


@contextlib.contextmanager
def virtual(loop: VirtualLoop, entropy: Entropy) -> Iterator[None]:
    """Takes clocks and random numbers of all modules from the loop and the seed."""
    product = entropy.of_product

    class Chance(Random):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(product.getrandbits(64) if seed is None else seed)

    def skew() -> float:
        process = _current.get()
        return process.clock_s if process is not None else 0.0

    patches: list[tuple[Any, str, Any]] = [
        (time, "monotonic", lambda: loop.now),
        (time, "monotonic_ns", lambda: int(loop.now * 1e9)),
        (time, "perf_counter", lambda: loop.now),
        (time, "thread_time", lambda: loop.now),
        (time, "time", lambda: EPOCH_S + loop.now + skew()),
        (time, "time_ns", lambda: int((EPOCH_S + loop.now + skew()) * 1e9)),
        (time, "clock_gettime", lambda _: loop.now),
        (time, "clock_gettime_ns", lambda _: int(loop.now * 1e9)),
        (time, "sleep", _no_sleep),
        (os, "urandom", product.randbytes),
        (random, "_urandom", product.randbytes),
        (random, "Random", Chance),
        (random, "random", product.random),
        (random, "randrange", product.randrange),
        (random, "uniform", product.uniform),
        (random, "choice", product.choice),
    ]
    before = asyncio.events._get_running_loop()
    assert before is None, "a loop runs already"
    collects = gc.isenabled()
    gc.disable()  # it would end unreferenced tasks at a different moment in each run
    try:
        with contextlib.ExitStack() as stack:
            for where, name, value in patches:
                stack.enter_context(mock.patch.object(where, name, value))
            asyncio.set_event_loop(loop)
            yield
    finally:
        asyncio.set_event_loop(None)
        loop.over = True
        if collects:
            gc.enable()


def _no_sleep(_: float) -> None:
    raise AssertionError("nobody may sleep in a simulation")
