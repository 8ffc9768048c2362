"""`/metrics`: the figures of this worker, for Prometheus.

Labels are bounded: routes, actions, kinds of errors, partitions, handlers, the largest queues.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from app.engine.ownership import Ownership
from app.engine.second_looks import unreadable_in
from app.service.census import Census
from app.service.inspection import Inspection
from app.service.meters import DURATIONS_S, HandlerMeter, Meters
from app.service.receives import Receives
from app.service.watches import Receivers
from gateway.connection_limits import Connections
from gateway.routes import secured

#: How many queues have a label of their own: those with the most messages. The others are summed up under "".
QUEUES_MAX = 100
#: Key of a request with the name of its action, for protocols with one route for all actions. There is a fixed set.
ACTION = web.RequestKey("action", str)


class Collector:
    """Figures that are read when Prometheus asks."""

    def __init__(
        self,
        ownership: Ownership,
        meters: Meters,
        receives: Receives,
        receivers: Receivers,
        connections: Connections,
    ) -> None:
        self.ownership = ownership
        self.meters = meters
        self.receives = receives
        self.receivers = receivers
        self.connections = connections
        self.counts: dict[str, dict[str, int]] = {}
        self.lags: dict[int, int] = {}  # by partition, as Kafka says now
        self.uncounted_ms: dict[int, int] = {}  # for how long messages of a partition were not counted
        self.ages: dict[str, int] = {}  # of the oldest message of each queue, milliseconds

    def collect(self) -> Iterator[Metric]:
        ownership, app = self.ownership, self.ownership.app
        owned = [h for _, h in sorted(ownership.owned.items())]
        gauges: dict[str, tuple[str, Any]] = {
            "epoch": ("Offset of the own marker under which it is served.", lambda h: h.owner.epoch),
            "serving": ("1 if it is served.", lambda h: int(h.serving)),
            "position": ("Next offset of the queue topic.", lambda h: h.owner.partition.position),
            "lag": ("Offsets of the queue topic beyond the position.", lambda h: self.lags.get(h.number)),
            "unfinished": (
                "Messages read and not finished.",
                lambda h: len(h.owner.partition.messages) + h.owner.partition.segments.parked_total(),
            ),
            "payload_bytes": ("Payload in memory.", lambda h: h.owner.partition.bytes),
            "segments": ("Rows of payloads in the messages table.", lambda h: len(h.owner.partition.segments)),
            "clock_behind_seconds": (
                "How far the clock that stamps its messages is behind that of the leader of its markers.",
                lambda h: None if (ms := h.owner.ticker.behind_ms) is None else ms / 1000,
            ),
            "manifest_bytes": ("Size of the newest manifest.", lambda h: h.manifest_bytes),
            "checkpoint_age_seconds": (
                "Time since the last complete checkpoint.",
                lambda h: None if h.checkpoint_s is None else time.monotonic() - h.checkpoint_s,
            ),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(f"marq_partition_{name}", text, labels=["partition"])
            for one in owned:
                number = value(one)
                if number is not None:
                    family.add_metric([str(one.number)], number)
            yield family
        clocks = GaugeMetricFamily(
            "marq_broker_clock_offset_seconds",
            "How far a broker's clock is ahead of this worker's, by the timestamps of records.",
            labels=["broker"],
        )
        now_s = time.time()
        for broker, at_ms in ownership.broker_time.by_id().items():
            clocks.add_metric([str(broker)], at_ms / 1000 - now_s)
        yield clocks
        unserved = GaugeMetricFamily(
            "marq_partition_unserved", "1: assigned to this worker, which can't serve it.", labels=["partition"]
        )
        for number in sorted(ownership.unserved.keys() - ownership.owned.keys()):
            unserved.add_metric([str(number)], 1)
        yield unserved
        uncounted = GaugeMetricFamily(
            "marq_partition_uncounted_seconds",
            "For how long messages were not counted, so that figures of queues are too low; of such partitions only.",
            labels=["partition"],
        )
        for number, ms in self.uncounted_ms.items():
            uncounted.add_metric([str(number)], ms / 1000)
        yield uncounted
        stalled = GaugeMetricFamily(
            "marq_partition_stalled_seconds",
            "How long a partition has waited for Kafka: records unconfirmed, refused or hidden; of such ones only.",
            labels=["partition"],
        )
        for number, stall in ownership.stalls.now().items():
            stalled.add_metric([str(number)], stall.seconds)
        yield stalled
        hidden = GaugeMetricFamily(
            "marq_partition_hidden_offsets",
            "Offsets that can't be read because of an open transaction; of partitions that wait for one only.",
            labels=["partition"],
        )
        for number, stall in ownership.stalls.now().items():
            if stall.hidden:
                hidden.add_metric([str(number)], stall.hidden)
        yield hidden
        unreadable = GaugeMetricFamily(
            "marq_partition_unreadable_offsets",
            "Offsets of the queue topic that no replica has whole; only of partitions that have some.",
            labels=["partition"],
        )
        for number, count in unreadable_in(ownership.owned).items():
            unreadable.add_metric([str(number)], count)
        yield unreadable
        counted = CounterMetricFamily(
            "marq_partition_messages", "What became of deliveries and messages.", labels=["partition", "what"]
        )
        for one in owned:
            for what, count in one.owner.partition.counters.items():
                counted.add_metric([str(one.number), what], count)
        yield counted
        not_decoded = CounterMetricFamily(
            "marq_unreadable_offsets", "Offsets that could not be decoded, each time they were read.", labels=["topic"]
        )
        for topic, count in app.consumer.unreadable.items():
            not_decoded.add_metric([topic], count)
        yield not_decoded
        yield CounterMetricFamily(
            "marq_poison_without_copy",
            "Records that ended as poison without a copy, because the poison topic took none.",
            value=ownership.copies.poison.uncopied,
        )
        yield from self._handlers()
        yield GaugeMetricFamily("marq_connections", "Connections of clients.", value=self.connections.open)
        refused = CounterMetricFamily(
            "marq_refused_connections", "Connections that were refused or ended, by the reason.", labels=["reason"]
        )
        for reason, count in self.connections.refused.items():
            refused.add_metric([reason], count)
        yield refused
        answers = self.connections.answers
        yield GaugeMetricFamily(
            "marq_unread_answer_bytes", "Bytes of large answers that clients have not read.", value=answers.used_bytes
        )
        yield CounterMetricFamily(
            "marq_refused_answers", "Receives and large answers refused because of those.", value=answers.refused
        )
        yield GaugeMetricFamily(
            "marq_waiting_receives", "Receives that wait at this worker.", value=self.receives.count
        )
        yield GaugeMetricFamily(
            "marq_loop_lag_seconds",
            "How late this worker's timers fire; seen at once, fading.",
            value=ownership.throttle.lateness.lag_ms / 1000,
        )
        yield GaugeMetricFamily(
            "marq_oldest_ack_seconds",
            "How long the oldest ack, extension or release has waited for Kafka.",
            value=ownership.ack_age_s,
        )
        yield CounterMetricFamily(
            "marq_withheld_receives",
            "Times that nothing was handed out, though it was there, because acks would have been late.",
            value=ownership.throttle.withheld,
        )
        yield CounterMetricFamily(
            "marq_late_reads",
            "Times that an empty answer was given before all was read that Kafka had, because that took too long.",
            value=ownership.read_up.late,
        )
        yield CounterMetricFamily(
            "marq_stalls",
            "Times that this worker stood still for a second or more.",
            value=ownership.throttle.lateness.stalls,
        )
        yield GaugeMetricFamily(
            "marq_pending_bytes", "Bytes that Kafka has not confirmed yet.", value=app.producer.unconfirmed_bytes
        )
        yield self._queues()
        yield self._dead_letters()
        yield self._ages()
        yield self._breakers()
        yield self._without_receiver()

    def _handlers(self) -> Iterator[Metric]:
        labels = ["handler", "queues"]
        took = HistogramMetricFamily("marq_handler_call_seconds", "Time that a call of a handler took.", labels=labels)
        failures = CounterMetricFamily("marq_handler_failures", "Calls that raised an error.", labels=labels)
        broken = GaugeMetricFamily(
            "marq_handler_breaker_open",
            "1 if the circuit breaker of the handler is open here.",
            labels=labels,
        )
        bounds = [*(str(float(bound)) for bound in DURATIONS_S), "+Inf"]
        same: dict[tuple[str, str], list[HandlerMeter]] = {}  # functions that were made in a loop have one name
        for handler in self.meters.handlers:
            same.setdefault((handler.name, ",".join(handler.queues)), []).append(handler)
        for names, handlers in same.items():
            durations = map(sum, zip(*(handler.durations for handler in handlers), strict=True))
            buckets = zip(bounds, itertools.accumulate(durations), strict=True)
            took.add_metric(names, list(buckets), sum(handler.seconds for handler in handlers))
            failures.add_metric(names, sum(handler.failures for handler in handlers))
            broken.add_metric(names, int(any(handler.breaker.state != "closed" for handler in handlers)))
        yield took
        yield broken
        yield failures

    def _queues(self) -> Metric:
        family = GaugeMetricFamily(
            "marq_queue_messages",
            f"Messages of this worker's partitions, without dead letters; queues beyond the {QUEUES_MAX} largest are "
            "summed up.",
            labels=["queue", "state"],
        )
        takes_dead_letters = self.ownership.catalog.takes_dead_letters
        counts = {queue: states for queue, states in self.counts.items() if not takes_dead_letters(queue)}
        sizes = {queue: sum(states.values()) for queue, states in counts.items()}
        largest = set(heapq.nlargest(QUEUES_MAX, sizes, key=sizes.__getitem__))
        rest: dict[str, int] = {}
        for queue, states in counts.items():
            for state, count in states.items():
                if queue in largest:
                    family.add_metric([queue, state], count)
                else:
                    rest[state] = rest.get(state, 0) + count
        for state, count in rest.items():
            family.add_metric(["", state], count)
        return family

    def _dead_letters(self) -> Metric:
        family = GaugeMetricFamily(
            "marq_dead_letters",
            f"Messages in dead-letter queues, of this worker's partitions; those beyond the {QUEUES_MAX} largest are "
            "summed up.",
            labels=["queue"],
        )
        takes_dead_letters = self.ownership.catalog.takes_dead_letters
        dead = {queue: sum(states.values()) for queue, states in self.counts.items() if takes_dead_letters(queue)}
        largest = heapq.nlargest(len(dead), dead, key=dead.__getitem__)
        for queue in largest[:QUEUES_MAX]:
            family.add_metric([queue], dead[queue])
        if len(largest) > QUEUES_MAX:
            family.add_metric([""], sum(dead[queue] for queue in largest[QUEUES_MAX:]))
        return family

    def _ages(self) -> Metric:
        family = GaugeMetricFamily(
            "marq_queue_oldest_seconds",
            f"Age of the oldest unfinished message in this worker's partitions, without dead letters; of queues beyond "
            f"the {QUEUES_MAX} with the oldest, the greatest.",
            labels=["queue"],
        )
        takes_dead_letters = self.ownership.catalog.takes_dead_letters
        ages = (q for q in self.ages if q and not takes_dead_letters(q))
        oldest = heapq.nlargest(QUEUES_MAX + 1, ages, key=self.ages.__getitem__)
        for queue in oldest[:QUEUES_MAX]:
            family.add_metric([queue], self.ages[queue] / 1000)
        for queue in oldest[QUEUES_MAX:]:
            family.add_metric([""], self.ages[queue] / 1000)
        return family

    def _breakers(self) -> Metric:
        family = GaugeMetricFamily(
            "marq_queue_breaker_open",
            f"1 if the circuit breaker of the queue is open or tries one message; at most {QUEUES_MAX} queues, open "
            "ones first.",
            labels=["queue"],
        )
        states = self.ownership.breakers.states()
        for queue in heapq.nsmallest(QUEUES_MAX, states, key=lambda q: states[q].state == "closed"):
            family.add_metric([queue], int(states[queue].state != "closed"))
        return family

    def _without_receiver(self) -> Metric:
        family = GaugeMetricFamily(
            "marq_queue_without_receiver",
            "Ready messages of queues that nobody in any worker receives from, of this worker's partitions; queues "
            f"beyond the {QUEUES_MAX} largest are summed up.",
            labels=["queue"],
        )
        without = self.receivers.without
        largest = heapq.nlargest(len(without), without, key=without.__getitem__)
        for queue in largest[:QUEUES_MAX]:
            family.add_metric([queue], without[queue])
        if len(largest) > QUEUES_MAX:
            family.add_metric([""], sum(without[queue] for queue in largest[QUEUES_MAX:]))
        return family


def measured(meters: Meters) -> Any:
    """Middleware that measures the time of each request."""
    children: dict[tuple[str, str, str, int], Any] = {}

    @web.middleware
    async def measure(request: web.Request, handler: Any) -> Any:
        began = time.perf_counter()
        response = await handler(request)
        resource = request.match_info.route.resource
        key = ("", "", "", response.status)
        if resource is not None:
            key = (resource.canonical, request.get(ACTION, ""), request.method, response.status)
        child = children.get(key)
        if child is None:
            child = children[key] = meters.requests.labels(*key[:3], str(key[3]))
        child.observe(time.perf_counter() - began)
        return response

    return measure


def define(router: web.UrlDispatcher, collector: Collector, census: Census, inspection: Inspection) -> None:
    """Register the route."""
    registry = collector.meters.registry
    registry.register(collector)

    async def metrics(request: web.Request) -> web.Response:
        partitions = (await inspection.partitions_here(None)).partitions
        collector.lags = {one.partition: one.lag for one in partitions if isinstance(one.lag, int)}
        collector.uncounted_ms = (await census.uncounted_here([])).since_ms
        collector.counts = census.counts()
        collector.ages = await census.ages()
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    router.add_get("/metrics", secured("inspect", metrics, everywhere=True))
