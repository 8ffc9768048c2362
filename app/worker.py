"""Puts the worker together: Faust app, tables, agents, ownership, handlers, health.

`build()` makes it from the settings, without Kafka or the disk. `WorkerApp.prepare()`, called once when a worker really
starts, finds the broker, claims a worker folder and a port, and creates and checks the topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp.web_runner import BaseSite
from faust.exceptions import AlreadyConfiguredWarning
from faust.types import TP
from yarl import URL

from agents import handlers, markers, queue
from agents.guard import stop_on_error
from agents.housekeeping import Housekeeping
from agents.redelivery import Redelivery
from app import bodies
from app.cluster.members import GroupMembers
from app.cluster.peers import PATH as PEER_PATH
from app.cluster.peers import Peers
from app.engine.catalog import READ_UP_S, Catalog
from app.engine.ownership import Ownership
from app.engine.partition_counts import PartitionCounts
from app.faust_worker import FaustWorker, PreparedApp
from app.kafka.connection import (
    await_kafka,
    faust_broker,
    faust_credentials,
    is_kafka_here,
    until_kafka_takes_it,
)
from app.kafka.datadir import Worker, claim_worker, resolve_bootstrap
from app.kafka.topics import Topics, ensure_topics
from app.logs import clean_records, quiet_steps
from app.processes import say
from app.service.census import Census
from app.service.inspection import Inspection, memory_bytes
from app.service.meters import Meters
from app.service.move_tasks import MoveTasks
from app.service.operations import QueueService
from app.service.takers import Takers
from app.service.timelines import Timelines
from app.service.trends import Trends
from app.service.watches import Receivers
from app.settings import Settings, load
from app.step_log import StepLog
from app.streaming.chunks import Chunk
from app.streaming.faults import stop_on_faults
from app.streaming.faust_app import BareWeb, UnreadTables, create_app
from gateway import garbage, health, json_api, listening, metrics, routes, views
from gateway.auth import Keys, is_loopback
from gateway.connection_limits import Connections, connections_for, raise_file_limit
from gateway.sqs import server as sqs
from gateway.ui import api as cockpit
from gateway.ui import pages
from gateway.ui.login import SessionApi
from gateway.ui.sessions import Sessions
from marq.errors import SettingError
from tables import markers as markers_table
from tables import messages as messages_table
from tables import progress as progress_table

log = logging.getLogger(__name__)

#: Version of the Faust app, which is part of its changelogs' names. Workers that share partitions have the same.
APP_VERSION = 1
#: When the worker stops: seconds for requests in progress to be answered, and again as many to end.
ANSWERS_S = 1.0
#: Most bytes of all request bodies in progress, or twice the largest body that is allowed, if that is more.
BODIES_BYTES = 64 * 1024 * 1024
#: Seconds for which a worker that has left the group goes on serving, until others have taken its partitions over:
#: they learn that it left by their next heartbeat.
TAKEN_S = 2.5
#: Seconds between two looks whether a worker that starts is ready, so that it may listen on the shared port.
OPEN_S = 0.05
#: Most seconds that a leaving worker waits until its last acknowledgements are durable.
HAND_OVER_S = 2.0


def app_id(settings: Settings) -> str:
    """The consumer group, and prefix of the changelogs."""
    return settings.name


class WorkerWeb(BareWeb):
    """The web server of a worker. It listens as marq's settings say, and ignores Faust's."""

    app: WorkerApp
    _shared: BaseSite | None = None

    async def start_server(self) -> None:
        assert self.app.place is not None
        await self.runner.setup()
        await self._listen(self.app.place.web_port)

    async def open_to_all(self, port: int) -> None:
        """Listen on a port that other workers of this machine listen on as well."""
        self._shared = await self._listen(port, shared=True)

    async def close_to_all(self) -> None:
        """New connections to the shared port go to the other workers; those that are open stay."""
        if self._shared is not None:
            shared, self._shared = self._shared, None
            await shared.stop()

    async def _listen(self, port: int, *, shared: bool = False) -> BaseSite:
        app, runner = self.app, self.runner
        assert isinstance(runner, listening.Runner)
        return await listening.listen(
            runner,
            app.settings.web_host,
            port,
            app.conf.web_ssl_context,
            only_loopback=not app.keys,
            shared=shared,
        )


class WorkerApp(PreparedApp):
    """The Faust app of a marq worker."""

    web: WorkerWeb
    settings: Settings
    keys: Keys
    meters: Meters
    ownership: Ownership
    step_log: StepLog
    catalog: Catalog
    handlers: handlers.Handlers
    operations: QueueService
    peers: Peers
    housekeeping: Housekeeping
    partition_counts: PartitionCounts
    move_tasks: MoveTasks
    census: Census
    receivers: Receivers
    inspection: Inspection
    trends: Trends
    timelines: Timelines
    takers: Takers
    sessions: Sessions
    redelivery: Redelivery
    room: bodies.Room
    place: Worker | None = None
    connections: Connections
    _topics: Topics | None = None
    _flush_s: float | None = None

    def set_up(self, settings: Settings) -> None:
        """Declare agents, tables and the services that run beside them."""
        self.settings = settings
        # a topic of the user's may be compacted
        self.contiguous_topics = self.chunked_topics - ({settings.queue_topic} if settings.queue_id else frozenset())
        tables = {
            # of progress, a partition has one manifest
            table.NAME: self.segment_table(
                table.NAME, partitions=settings.partitions, small=table is progress_table, help=table.HELP
            )
            for table in (messages_table, markers_table, progress_table)
        }
        self.catalog = Catalog(settings, lambda: settings.queues_topic, beacon=self.beacon)
        self.peers = Peers(
            settings,
            self.catalog.keys_for,
            GroupMembers(self, tables[progress_table.NAME]),
            beacon=self.beacon,
        )
        self.ownership = Ownership(
            self, settings, lambda: self.topics_in_use, tables, self.catalog, self.peers, beacon=self.beacon
        )
        handlers.import_modules(settings.handlers)
        self.handlers = handlers.Handlers(self.ownership, settings, self.meters, self.peers, beacon=self.beacon)
        self.operations = QueueService(self.ownership, settings, self.meters, self.peers, beacon=self.beacon)
        self.partition_counts = PartitionCounts(self.ownership, self.use_partitions, beacon=self.beacon)
        self.housekeeping = Housekeeping(self.ownership, settings, self.operations.purges, beacon=self.beacon)
        self.census = Census(self.ownership, self.peers)
        self.move_tasks = MoveTasks(self.operations, self.census, beacon=self.beacon)
        self.receivers = Receivers(
            self.catalog,
            self.census,
            self.peers,
            takers=(self.handlers.is_handled, self.operations.is_received),
            beacon=self.beacon,
        )
        self.inspection = Inspection(self.ownership, self.operations.receives, self.census, self.receivers, self.peers)
        self.trends = Trends(
            self.ownership,
            self.census,
            self.receivers,
            self.peers,
            waiting_receives=lambda: self.operations.receives.count,
            memory_bytes=memory_bytes,
            beacon=self.beacon,
        )
        self.timelines = Timelines(self.ownership, settings)
        self.takers = Takers(self.ownership, self.operations, self.meters, self.peers, self.handlers.is_handled)
        self.redelivery = Redelivery(self.ownership, beacon=self.beacon)
        self.step_log = StepLog(self.ownership.log.info)
        self.ownership.on_settled = lambda number, serving: self.step_log.settled(
            number, self.topics_in_use.partitions, serving=serving
        )
        queue.define(self.ownership, self.topic(settings.queue_topic))
        markers.define(self.ownership, self.topic(settings.markers_topic))
        health.define(self, self.ownership, self.keys)

    @property
    def topics_in_use(self) -> Topics:
        """Names of the topics, and their number of partitions. Only after `prepare`."""
        assert self._topics is not None
        return self._topics

    def prepare(self) -> None:
        """Find Kafka, claim a folder and a port, create and check topics. Must not be called in an event loop.

        Raises `MarqError`, which says what is wrong and what to do.
        """
        settings = self.settings
        if not self.keys:
            listening.require_loopback(settings.web_host)
        resolve_bootstrap(settings, wait_s=10)
        wait_s = settings.kafka_wait_ms / 1000
        asyncio.run(await_kafka(settings, wait_s, say))
        self._topics = asyncio.run(until_kafka_takes_it(lambda: ensure_topics(settings, app_id(settings)), wait_s, say))
        self.place = claim_worker(settings)
        conf = self.conf
        brokers = [URL(url) for url in faust_broker(settings)]
        # the transports got their address when the agents were declared: this setting is only for the banner
        self.transport.url = self.producer_transport.url = brokers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AlreadyConfiguredWarning)
            conf.broker = brokers
            conf.broker_credentials = faust_credentials(settings)  # an embedded broker may have its own
        conf.datadir = self.place.folder
        conf.tabledir = Path("tables")
        conf.web_port = self.place.web_port
        scheme = "http"
        if settings.web_tls_certificate_file is not None:
            conf.web_ssl_context = listening.tls_context(settings)
            scheme = "https"
        url = URL(settings.web_url or f"{scheme}://{settings.url_host}:{self.place.web_port}")
        # of several at one address, the others have to reach just this one
        conf.canonical_url = url if settings.web_shared_port is None else url.with_port(self.place.web_port)
        if (is_loopback(url.host or "") or url.host in ("0.0.0.0", "::")) and not is_kafka_here(settings):
            say(
                f"other workers are to reach this one at {url}, which leads nowhere from another machine, and Kafka is "
                "on another machine: set MARQ_WEB_URL if there is a worker elsewhere"
            )
        self.use_partitions(self._topics.partitions)
        self.connections.total = connections_for(raise_file_limit(), settings.max_connections)
        if self.connections.total < settings.max_connections:
            say(f"the system's limit of open files leaves room for {self.connections.total} connections of clients")
        self.web.runner = listening.Runner(self.web.web_app, self.connections, shutdown_timeout=ANSWERS_S)
        self.define_routes()
        (self.place.folder / "pid").write_text(f"{os.getpid()}\n")
        self.ownership.worker_name = f"{socket.gethostname()}:{os.getpid()}/{self.place.index}"

    def use_partitions(self, count: int) -> None:
        """Use so many partitions from now on: all topics have them."""
        self._topics = replace(self.topics_in_use, partitions=count)
        for table in self.tables.values():
            table.partitions = count
        for owned in self.ownership.owned.values():
            owned.owner.spread_over(count)

    def partitions_among(self, counts: Collection[int]) -> int:
        # a topic that was deleted, or has fewer: the workers say of each partition why it is not served
        return max(self.topics_in_use.partitions, super().partitions_among(counts))

    def banner(self) -> str:
        """What a worker says of itself when it starts."""
        assert self.place is not None
        return (
            f"marq worker {self.place.index}: {self.conf.canonical_url}, SQS account {self.settings.sqs_account}, "
            f"data in {self.place.folder}"
        )

    def _new_web(self) -> WorkerWeb:
        return WorkerWeb(self)

    def define_routes(self) -> None:
        """Define what is served over HTTP, besides the health checks."""
        router = self.web.web_app.router
        operations = json_api.define(
            router, self.operations, self.settings.max_body_bytes, self.room, self.connections.answers
        )
        operations += views.define(router, self.inspection, self.catalog)
        views.define_document(router, operations)
        collector = metrics.Collector(
            self.ownership, self.meters, self.operations.receives, self.receivers, self.connections
        )
        metrics.define(router, collector, self.census, self.inspection)
        of_sqs = sqs.define(
            router,
            sqs.Server(
                self.operations,
                self.census,
                self.move_tasks,
                self.keys,
                self.settings,
                self.room,
                self.connections.answers,
            ),
        )
        cockpit.define(
            router,
            cockpit.Api(
                self.operations, self.trends, self.timelines, self.takers, self.census, self.move_tasks, self.room
            ),
            SessionApi(self.sessions, self.keys, self.operations, self.room),
        )
        pages.define(router, self.keys, of_sqs)
        router.add_post(PEER_PATH + "{name}", self.peers.serve)

    # -- life

    async def on_start(self) -> None:
        stop_on_faults(asyncio.get_running_loop(), self.fail)
        await super().on_start()
        # acks wait neither behind messages nor behind the rows of a checkpoint
        await self.producer.divide(
            [self.topics_in_use.markers], [table.changelog_topic_name for table in self.tables.values()]
        )
        await self.start_parts()
        await self.partition_counts.start()

    async def start_parts(self) -> None:
        """Start what `set_up` has made."""
        await self.catalog.start()
        async with asyncio.timeout(READ_UP_S):
            await self.catalog.read_up.wait()
        async with asyncio.timeout(READ_UP_S):
            await self.catalog.share_secret()
        # before this worker joins the group: its address proves that it knows the secret
        self.address = self.peers.announce(str(self.conf.canonical_url), self.ownership.worker_name)
        await self.catalog.declare(self.settings.queues)
        await self.ownership.start()
        tables = self.ownership.tables.values()
        self.ownership.spawn(self.ownership.changelogs.warm(tables, self.topics_in_use))
        await self.peers.start()
        await self.handlers.start()
        await self.operations.start()
        await self.housekeeping.start()
        await self.move_tasks.start()
        await self.receivers.start()
        await self.trends.start()
        await self.redelivery.start()
        if self.settings.web_shared_port is not None:
            self.ownership.spawn(self._open_when_ready(self.settings.web_shared_port))

    async def _open_when_ready(self, port: int) -> None:
        while not self.ownership.ready:
            await asyncio.sleep(OPEN_S)
        await self.web.open_to_all(port)

    async def leave(self) -> None:
        """Leave the group if there are other workers, and serve until they have taken the partitions over."""
        await self.web.close_to_all()
        if self.failure is None and self.ownership.owned and len(self.peers.members()) > 1:
            self.consumer.leave_group()
            await self.ownership.serve_until_taken(TAKEN_S)

    async def on_stop(self) -> None:
        await self.partition_counts.stop()
        await self.stop_parts()
        await super().on_stop()
        await asyncio.gather(self.ownership.stop(), self.catalog.stop())

    async def stop_parts(self) -> None:
        """Hand over, and stop all but what others still need."""
        await asyncio.gather(self.operations.receives.close(), self.handlers.close())
        self._flush_s = HAND_OVER_S if await self.ownership.hand_over(HAND_OVER_S) else 0.0
        await self.redelivery.stop()
        await self.handlers.stop()
        await self.trends.stop()
        await self.receivers.stop()
        await self.move_tasks.stop()
        await self.housekeeping.stop()
        await self.operations.stop()
        await self.peers.stop()

    async def _producer_flush(self, logger: Any) -> None:
        if not self.should_stop:
            return  # a rebalance: callers that need a confirmation wait for it themselves
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._flush_s):
                await super()._producer_flush(logger)

    def admits(self, url: str) -> bool:
        return self.peers.admits(url)

    async def _on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        if self.assignor.is_refused:
            self.fail(
                SettingError(
                    f"the workers of the group {self.conf.id} have another secret than this one; set MARQ_SECRET to "
                    "theirs (MARQ_SECRET_PREVIOUS while it is replaced)"
                )
            )
            return
        numbers = {tp.partition for tp in assigned if tp.topic == self.topics_in_use.markers}
        if max(numbers, default=0) >= self.topics_in_use.partitions:  # the leader knows of more
            self.use_partitions(max(numbers) + 1)
        self.ownership.on_assignment(numbers)
        await super()._on_partitions_assigned(assigned, generation_id)

    def on_chunk_aside(self, chunk: Chunk) -> None:
        with stop_on_error(self.ownership):
            if chunk.topic == self.topics_in_use.queue:
                self.ownership.on_queue_chunk(chunk)
            else:
                self.ownership.on_markers_chunk(chunk)

    def on_offset_out_of_range(self, tp: TP, position: int) -> None:
        self.ownership.on_offset_out_of_range(tp.partition, tp.topic, position)

    def on_rebalance_end(self) -> None:
        super().on_rebalance_end()
        assigned = {tp.partition for tp in self.consumer.assignment() if tp.topic == self.topics_in_use.markers}
        self.step_log.assigned(assigned, self.topics_in_use.partitions)
        self.ownership.on_assigned(self.consumer_generation_id)
        self.peers.members_changed()
        self.operations.receives.polling.members_changed()
        self.handlers.elsewhere.renew_soon()


def build(settings: Settings | None = None) -> WorkerApp:
    """Make the worker's app. Raises `MarqError` for wrong settings or handlers."""
    settings = settings or load()
    clean_records()
    if settings.log_level != "DEBUG":
        quiet_steps()
    meters = Meters()
    keys = Keys(settings.keys.get_secret_value() if settings.keys is not None else None)
    room = bodies.Room(max(2 * settings.max_body_bytes, BODIES_BYTES))
    app = create_app(
        cls=WorkerApp,
        app_id=app_id(settings),
        bootstrap="127.0.0.1:1",  # prepare() sets it
        chunked_topics={settings.queue_topic, settings.markers_topic},
        datadir=str(settings.data_dir),
        web_host=settings.web_host,
        web_port=settings.web_port or 9324,
        canonical_url="http://127.0.0.1:1",  # prepare() sets it
        session_timeout_s=settings.session_timeout_ms / 1000,
        credentials=faust_credentials(settings),
        version=APP_VERSION,
        TableManager=UnreadTables,
        Worker=FaustWorker,
        web_application_options={
            "client_max_size": settings.max_body_bytes,
            "middlewares": [
                garbage.collected(),
                metrics.measured(meters),
                routes.guard(keys, lambda headers: app.sessions.grants_of(headers)),
            ],
        },
        web_tables_enabled=False,
        web_router_enabled=False,
        web_graph_enabled=False,
        web_stats_enabled=False,
    )
    app.keys = keys
    app.meters = meters
    app.room = room
    answers = bodies.Room(settings.memory_bytes)
    app.connections = Connections(settings.max_connections, settings.max_connections_per_address, answers)
    app.set_up(settings)
    app.ownership.read_ahead.unread_bytes = lambda: answers.used_bytes
    app.sessions = Sessions(keys, app.catalog.keys_for, settings.name)
    return app
