"""Counters of this worker that are updated as things happen. `gateway.metrics` shows them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

from marq.core.flow import Breaker
from marq.core.stamps import is_believable
from marq.errors import MarqError
from marq.protocol.problems import kind_of

#: Upper bounds of the buckets for durations of handler calls.
DURATIONS_S = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_AGE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15, 60, 300, 1800, 3600, 21_600, 86_400)


class Delivered(Protocol):
    """A message that was given to a receiver or a handler."""

    @property
    def attempt(self) -> int:
        """The number of its delivery, from 1."""

    @property
    def sent_ms(self) -> int:
        """When it was sent, by Kafka's timestamp."""


class HandlerMeter:
    """Calls of one handler.

    Plain numbers: a histogram with its locks would cost too much for calls with a single message.
    """

    def __init__(self, name: str, queues: Sequence[str], breaker: Breaker) -> None:
        self.name = name
        self.queues = queues
        self.breaker = breaker
        self.calls = 0
        self.failures = 0
        self.durations = [0] * (len(DURATIONS_S) + 1)  # calls in each bucket, the last one without a bound
        self.seconds = 0.0

    def took(self, seconds: float) -> None:
        """Note a call that has ended."""
        self.durations[bisect_left(DURATIONS_S, seconds)] += 1
        self.seconds += seconds


class Meters:
    """All of these counters."""

    def __init__(self) -> None:
        self.handlers: list[HandlerMeter] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Histogram(
            "marq_http_request_seconds",
            "Time to answer a request; receives include their wait.",
            ["route", "action", "method", "status"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.sent = Counter(
            "marq_sent_messages", "Messages that were sent through this worker.", registry=self.registry
        )
        self.sent_bytes = Counter("marq_sent_bytes", "Bytes of their payloads.", registry=self.registry)
        self.received = Counter(
            "marq_received_messages", "Messages that were handed to receivers by this worker.", registry=self.registry
        )
        self.settled = Counter(
            "marq_settled_receipts",
            "Deliveries that receivers of this worker settled or extended; those of its handlers as they are written.",
            ["action", "result"],
            registry=self.registry,
        )
        self._settled: dict[tuple[str, str], Counter] = {}
        self.age = Histogram(
            "marq_first_delivery_seconds",
            "From Kafka's time stamp of a message to its first delivery, by the clock of the worker.",
            buckets=_AGE_SECONDS,
            registry=self.registry,
        )

    def handed(self, messages: Sequence[Delivered]) -> None:
        """Note that a receiver was given the messages of one delivery."""
        self.received.inc(len(messages))
        first = messages[0]
        if first.attempt == 1 and is_believable(first.sent_ms):
            # the first one is enough: a delivery is read at once
            self.age.observe(max(0.0, time.time() - first.sent_ms / 1000))

    def settle(self, action: str, count: int, result: str = "ok") -> None:
        """Note that `action` was applied to `count` deliveries."""
        child = self._settled.get((action, result))
        if child is None:
            child = self._settled[action, result] = self.settled.labels(action, result)
        child.inc(count)

    def settle_all(self, action: str, results: Sequence[MarqError | None]) -> None:
        """Note the result of an action for each receipt: None, or an error."""
        done = results.count(None)
        if done:
            self.settle(action, done)
        if done < len(results):
            for error in results:
                if error is not None:
                    self.settle(action, 1, kind_of(error)[1])
