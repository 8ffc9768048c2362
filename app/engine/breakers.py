"""One circuit breaker for each queue: shared by the partitions of this worker, and told to the other workers.

The events of a breaker (a failure, opened, a probe is out, closed) are gathered for a moment and sent to all workers,
which apply them to their own breakers. So a run of failures counts in whichever partition it happens, and after the
pause only one message is tried. Other workers know some milliseconds later; until then more messages may fail. After
a pause, workers start their probes one after the other (`STAGGER_MS`), so that they learn of the first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from app.cluster.peers import Peers, peer_call
from marq.core.flow import Breaker
from marq.core.policies import SettingsOf

#: Seconds for which events are gathered into one request: short beside any pause.
GATHER_S = 0.01
#: Milliseconds between the probes of two workers after a pause.
STAGGER_MS = 250

#: Queue -> its events in order, each with a number of failures or milliseconds.
Events = dict[str, list[tuple[str, int]]]


class BreakerState(msgspec.Struct):
    """The state of a queue's breaker: failures in a row, and how long its pause will be."""

    state: str = "closed"
    failures: int = 0
    pause_ms: int = 0


class Breakers:
    """All breakers of this worker."""

    def __init__(
        self, settings_of: SettingsOf, now_ms: Callable[[], int], peers: Peers, spawn: Callable[[Any], Any]
    ) -> None:
        self._settings_of = settings_of
        self._now_ms = now_ms
        self._peers = peers
        self._spawn = spawn
        self._all: WeakValueDictionary[str, Breaker] = WeakValueDictionary()
        self._kept: dict[str, Breaker] = {}  # those that are not as new, though no partition has them now
        self._events: Events = {}
        peers.register(self)

    def of(self, queue: str) -> Breaker:
        """The breaker of a queue, for its owner in one partition."""
        breaker = self._all.get(queue)
        if breaker is None:
            breaker = self._all[queue] = Breaker(lambda *event: self._happened(queue, *event))
        return breaker

    def states(self) -> dict[str, BreakerState]:
        """The state of each breaker, by queue."""
        now = self._now_ms()
        return {
            queue: BreakerState(
                breaker.state,
                breaker.failures,
                max(0, breaker.open_until_ms - now) if breaker.open_until_ms is not None else 0,
            )
            for queue, breaker in sorted(self._all.items())
            if self._settings_of(queue).breaker_failures
        }

    def _happened(self, queue: str, breaker: Breaker, event: str, amount: int) -> None:
        if event == "opened":
            self._stagger(breaker)
        self._keep(queue, breaker)
        if not self._settings_of(queue).breaker_failures:
            return
        if not self._events:
            asyncio.get_running_loop().call_later(GATHER_S, self._send)
        events = self._events.setdefault(queue, [])
        if event in ("opened", "succeeded"):
            events.clear()  # earlier events make no difference any more
        if event == "failed" and events and events[-1][0] == event:
            amount += events.pop()[1]
        events.append((event, amount))

    def _stagger(self, breaker: Breaker) -> None:
        if breaker.open_until_ms is not None:
            breaker.open_until_ms += self._peers.rank() * STAGGER_MS

    def _keep(self, queue: str, breaker: Breaker) -> None:
        if breaker.failures or breaker.open_until_ms is not None:
            self._kept[queue] = breaker
        else:
            self._kept.pop(queue, None)

    def _send(self) -> None:
        events, self._events = self._events, {}
        self._spawn(self._peers.tell(self.on_told, events))

    @peer_call("breaker_states")
    async def states_here(self, _: None) -> dict[str, BreakerState]:
        """See `states`."""
        return self.states()

    @peer_call("breakers")
    async def on_told(self, events: Events) -> None:
        """Apply events of another worker."""
        now = self._now_ms()
        for queue, told in events.items():
            settings, breaker = self._settings_of(queue), self.of(queue)
            for event, amount in told:
                breaker.heard(event, amount, settings.breaker_failures, settings.breaker_pause_ms, now)
                if event == "opened":
                    self._stagger(breaker)
            self._keep(queue, breaker)
