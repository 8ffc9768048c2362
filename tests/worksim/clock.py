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
import threading
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


class _Soon(asyncio.Handle):
    """A callback. Its fields are asyncio's, which takes twice as long to make one."""

    __slots__ = ()
    _repr = _source_traceback = None

    def __init__(self, callback: Any, args: Any, context: Context) -> None:
        self._context = context
        self._cancelled = False
        self._callback = callback
        self._args = args

    def cancel(self) -> None:
        self._cancelled = True


class _Timer(asyncio.TimerHandle):
    __slots__ = ()
    _repr = _source_traceback = None
    _scheduled = False

    def __init__(self, when: float, callback: Any, args: Any, loop: VirtualLoop, context: Context) -> None:
        self._context = context
        self._loop = loop
        self._cancelled = False
        self._callback = callback
        self._args = args
        self._when = when

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]
            self._loop.cancelled += 1  # type: ignore[attr-defined]


class _Sleep:
    """What a task that sleeps waits for. It goes on in one step, where a future takes two more callbacks."""

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_delay_s", "_loop", "_timer", "_was_cancelled")

    def __init__(self, loop: VirtualLoop, delay_s: float) -> None:
        self._asyncio_future_blocking = True  # so a task knows that this is like a future
        self._loop = loop
        self._delay_s = delay_s
        self._timer: _Timer | None = None
        self._was_cancelled = False

    def __await__(self) -> Iterator[Any]:
        yield self
        self.result()

    def get_loop(self) -> VirtualLoop:
        return self._loop

    def add_done_callback(self, callback: Any, *, context: Context) -> None:
        self._callback, self._context = callback, context
        loop = self._loop
        self._timer = loop.call_at(loop.now + self._delay_s, callback, self, context=context)

    def cancel(self, msg: Any = None) -> bool:
        if self._was_cancelled or self._timer is None or self._timer._cancelled:
            return False
        self._was_cancelled = True
        self._timer.cancel()
        self._loop.call_soon(self._callback, self, context=self._context)
        return True

    def result(self) -> None:
        if self._was_cancelled:
            raise asyncio.CancelledError


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files, threads and real time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self._due: list[tuple[float, int, _Timer]] = []
        self._timers = 0
        self.cancelled = 0
        self.over = False
        #: Called with what a callback raised, which asyncio would only log.
        self.on_error: Callable[[BaseException, Process | None], None] = lambda exc, process: None
        #: What must live as long as the loop.
        self.kept: list[Any] = []
        self.outside = copy_context()
        self._selector = mock.Mock(spec=["close"])

    def time(self) -> float:
        return self.now

    #: False. Each future asks, and this is no Python code.
    get_debug = staticmethod(bool)  # type: ignore[assignment]

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = _Soon(callback, args, copy_context() if context is None else context)
        if not self.over:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> _Timer:
        timer = _Timer(when, callback, args, self, copy_context() if context is None else context)
        self._timers += 1
        heapq.heappush(self._due, (when, self._timers, timer))
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> _Timer:
        return self.call_at(self.now + delay, callback, *args, context=context)

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
        ready, due, runs = self._ready, self._due, Process.RUNS
        if self.cancelled > CANCELLED_MAX:
            due[:] = [entry for entry in due if not entry[2]._cancelled]
            heapq.heapify(due)
            self.cancelled = 0
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
            context = handle._context
            process = context.get(_current)
            if process is not None and process.state is not runs:
                if process.state is Process.STANDS:
                    process.kept.append(handle)
                continue
            self.now += STEP_S
            self.steps += 1
            try:
                context.run(handle._callback, *handle._args)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as exc:
                self.on_error(exc, process)


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

    def __init__(self, seed: int, salt: int = 0) -> None:
        self._name = f"{seed} {salt}"
        self._makes = Random(self._name if salt else seed)
        self.of_product = Random(self._makes.getrandbits(64))

    def stream(self, name: str) -> Random:
        """A separate random generator for one part, so that its draws do not depend on the others."""
        return Random(f"{name} {self._makes.getrandbits(64)}")

    def of(self, *names: object) -> Random:
        """A random generator for one event, whatever other events draw: so that any of them can be left out."""
        return Random(f"{self._name} {names}")


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
        (asyncio, "sleep", _sleep),
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


async def _sleep(delay: float, result: Any = None) -> Any:
    """In the place of `asyncio.sleep`."""
    if delay <= 0:
        await asyncio.tasks.__sleep0()  # type: ignore[attr-defined]
    else:
        await _Sleep(asyncio.get_running_loop(), delay)  # type: ignore[arg-type]
    return result


def _no_sleep(seconds: float) -> None:
    """In the place of `time.sleep`. Threads of other tests are not part of a simulation."""
    if threading.current_thread() is threading.main_thread():
        raise AssertionError("nobody may sleep in a simulation")
    threading.Event().wait(seconds)
