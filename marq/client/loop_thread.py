"""Runs coroutines for programs that block: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from marq.client.operations import Operations
from marq.errors import ClosedError

T = TypeVar("T")

#: Most seconds for closing a service.
CLOSE_TIMEOUT_S = 10.0
THREAD_NAME = "marq-client"


class LoopThread:
    """An event loop in a thread of its own, started when first needed."""

    def __init__(self) -> None:
        self.closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. Raises `ClosedError`."""
        loop = self._loop
        if loop is None or self.closed or self._process != os.getpid():
            loop = self._started()
        return loop

    def _started(self) -> asyncio.AbstractEventLoop:
        if self.closed:
            raise ClosedError("this service was closed; make a new Service")
        if self._process != os.getpid():
            raise ClosedError("this service was made before a fork; make a new Service in each process")
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=_run_forever, args=(loop,), name=THREAD_NAME, daemon=True).start()
                self._loop = loop
            return self._loop

    def stop(self, operations: Operations) -> None:
        """Close what runs in the loop, then stop it."""
        was_closed, self.closed = self.closed, True
        loop = self._loop
        if was_closed or loop is None or self._process != os.getpid():
            return

        async def last() -> None:
            try:
                await operations.close()
            finally:
                # after this task has returned its result
                loop.call_later(0.01, loop.stop)

        future = asyncio.run_coroutine_threadsafe(last(), loop)
        if threading.current_thread().name != THREAD_NAME:
            future.result(CLOSE_TIMEOUT_S)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


class Runner:
    """Runs the requests of one service. When the last object that uses it is gone, or the interpreter ends, it is
    closed as if by hand: acknowledgements in progress are still sent.
    """

    def __init__(self, operations: Operations) -> None:
        self._thread = LoopThread()
        self.close = weakref.finalize(self, self._thread.stop, operations)

    @property
    def closed(self) -> bool:
        """True once nothing can run here any more."""
        return self._thread.closed

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. Raises `ClosedError`."""
        return self._thread.loop

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run in the loop, without waiting."""
        try:
            loop = self.loop
        except ClosedError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the loop, and wait for the result. Ctrl-C cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
