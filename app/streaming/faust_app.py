"""The Faust app of marq: the settings it depends on, and the checks that Faust does not make.

`MarqApp` is `faust.App` with the transport of `transport` and the tables of `raw_table`, which say what they change in
Faust, and why. This file is about the app as a whole: the same worker must always own the queue, the markers and the
tables of a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import faust
from aiohttp.web import AppRunner
from aiokafka.errors import IllegalStateError
from faust.sensors import Monitor
from faust.tables.manager import TableManager
from faust.tables.recovery import RebalanceAgain, Recovery, ServiceStopped
from faust.types import TP
from faust.types.auth import CredentialsT
from faust.web.drivers import aiohttp as web_driver
from mode import Service

from app.folders import disk_error
from app.logs import calm_client, is_mendable
from app.streaming.assignor import StickyAssignor
from app.streaming.chunks import Chunk, ChunkQueue
from app.streaming.producer import IdempotentProducer
from app.streaming.raw_table import SegmentTable
from app.streaming.transport import ChunkConsumer, ChunkTransport, OffsetOutOfRange
from marq.errors import MarqError
from marq.protocol.limits import RECORD_MAX_BYTES

#: Bytes of a batch at most, unless one record is larger.
MAX_BATCH_BYTES = 256 * 1024
#: Bytes in one fetch of a partition: about one chunk of small records.
FETCH_BYTES = 512 * 1024
#: Changelog records that wait in memory during recovery; each may be a segment of 256 KiB.
RECOVERY_BUFFER = 64


class CopartitionError(MarqError):
    """Queue, markers and tables of a partition were not assigned to the same worker."""


class PromptTables(TableManager):
    """Faust's table manager, but without its wait of a second for agents to start: ours are declared before."""

    async def on_start(self) -> None:
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


class NoRecovery(Recovery):
    """Faust's recovery without reading: the take-over of a partition reads its tables.

    Faust would read the changelogs of all partitions before any partition could be used, and again at each rebalance.
    """

    def _add(self, table: Any, tp: TP, offsets: Any) -> None:
        # Faust's method asks the table for its offset, which would open its store in the middle of the rebalance
        self.tp_to_table[tp] = table
        offsets.setdefault(tp, None)

    @Service.task
    async def _restart_recovery(self) -> None:
        while not await self.wait_for_stopped(self.signal_recovery_start):  # type: ignore[arg-type]
            self.signal_recovery_start.clear()
            try:
                await self._resume_streams(generation_id=self._generation_id)
            except (RebalanceAgain, IllegalStateError):
                continue
            except ServiceStopped:
                break


class UnreadTables(PromptTables):
    """Tables that open as soon as they are assigned, with the rows of the local store, which may be old."""

    @property
    def recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = NoRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery


class BareWeb(web_driver.Web):
    """Faust's web server without Faust's pages: the one at `/`, which no setting turns off, would hide ours."""

    production_blueprints: ClassVar[list[tuple[str, Any]]] = []

    @property
    def runner(self) -> AppRunner:
        """The runner of the web application. May be replaced before the server starts."""
        return self._runner

    @runner.setter
    def runner(self, runner: AppRunner) -> None:
        self._runner = runner


class MarqApp(faust.App):
    """A Faust app in which some topics are read in chunks.

    Attributes:
        chunked_topics: names of the topics whose events are chunks. All of them are co-partitioned with the tables.
        contiguous_topics: those of them that are never compacted, so that each offset has a record, or had one.
    """

    consumer: ChunkConsumer
    assignor: StickyAssignor
    web: BareWeb
    producer: IdempotentProducer
    _address: str | None = None

    def __init__(self, id: str, *, chunked_topics: Iterable[str] = (), **options: Any) -> None:
        self.chunked_topics = frozenset(chunked_topics)
        self.contiguous_topics: frozenset[str] = frozenset()
        #: Why this worker is stopping, if it is for an error.
        self.failure: BaseException | None = None
        self._crashing: asyncio.Task[None] | None = None
        super().__init__(id, **options)

    # -- parts

    def _new_transport(self) -> ChunkTransport:
        return ChunkTransport(self.conf.broker_consumer, self)

    def _new_producer_transport(self) -> ChunkTransport:
        return ChunkTransport(self.conf.broker_producer, self)

    def _new_web(self) -> BareWeb:
        return BareWeb(self)

    def FlowControlQueue(self, maxsize: int | None = None, *, clear_on_resume: bool = False) -> ChunkQueue:
        return ChunkQueue(maxsize=maxsize, flow_control=self.flow_control, clear_on_resume=clear_on_resume)

    def topic(self, *topics: str, **options: Any) -> Any:
        if self.chunked_topics.intersection(topics):
            # Without acks Faust neither tracks these events nor commits them.
            options["acks"] = False
        return super().topic(*topics, **options)

    def segment_table(
        self, name: str, *, partitions: int, small: bool = False, help: str | None = None
    ) -> SegmentTable:
        """Declare a table of raw rows; its changelog is `<app id>-<name>-changelog`."""
        table = SegmentTable(self, name=name, partitions=partitions, small=small, help=help)
        self.tables.add(table)
        return table

    # -- the group

    @property
    def address(self) -> str:
        """What this worker tells the other members of itself: its URL, or what was set."""
        return self._address or str(self.conf.canonical_url)

    @address.setter
    def address(self, address: str) -> None:
        self._address = address

    # -- checks

    def partitions_among(self, counts: Collection[int]) -> int:
        """How many partitions are assigned, where topics that stay together have so many. 0: the topic is missing."""
        return min(filter(None, counts), default=0)

    def admits(self, url: str) -> bool:
        """Called by the leader of the group: may the member with this address get partitions?"""
        return True

    def fail(self, exc: BaseException) -> None:
        """Stop the worker because of an error that it can't go on with.

        One that a user can mend is only the last line of the log; any other is logged with its traceback.
        """
        if self.failure is None:
            self.failure = self._reason(exc)
            if not is_mendable(self.failure):
                self.log.error("Stopping: %s", exc, exc_info=exc)
            self._crashing = asyncio.ensure_future(self.crash(self.failure))

    def _crash(self, reason: BaseException) -> None:
        # it ended a task of a service, ours or Faust's
        if self.failure is None:
            self.failure = self._reason(reason)
        super()._crash(reason)

    def _reason(self, exc: BaseException) -> BaseException:
        folder = Path(self.conf.datadir)
        return disk_error(exc, folder) or (exc.__cause__ and disk_error(exc.__cause__, folder)) or exc

    def on_chunk_aside(self, chunk: Chunk) -> None:
        """Called with a chunk that came while the group rejoins, when agents stand still and there is no current event.
        Drops it: its reader finds that the next one is not contiguous."""

    def on_offset_out_of_range(self, tp: TP, position: int) -> None:
        """Called when a log no longer has `position`. Nothing more is read from it until `start_from`. Stops the
        worker; replace this attribute to do something else."""
        self.fail(OffsetOutOfRange(f"{tp.topic}:{tp.partition} does not hold offset {position} (any more)"))

    def on_read_error(self, tp: TP, position: int, exc: Exception) -> None:
        """A chunked partition can't be read at `position` (a corrupt record, a refused authorization)."""
        self.fail(exc)

    async def _on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        try:
            self._check_copartitioned(assigned)
        except CopartitionError as exc:
            await self.crash(exc)
        else:
            await super()._on_partitions_assigned(assigned, generation_id)

    def _check_copartitioned(self, assigned: set[TP]) -> None:
        partitions: dict[str, set[int]] = {name: set() for name in self.chunked_topics & self._subscribed_topics()}
        partitions.update((name, set()) for name in self.tables.changelog_topics)
        actives = self.assignor.assigned_actives()
        for tp in assigned:
            if tp.topic in self.chunked_topics or (tp.topic in partitions and tp in actives):
                partitions[tp.topic].add(tp.partition)
        if len({frozenset(p) for p in partitions.values()}) > 1:
            found = ", ".join(f"{name}: {sorted(p)}" for name, p in sorted(partitions.items()))
            raise CopartitionError(
                f"partitions of one number are with different workers ({found}); all these topics must have the same "
                "number of partitions, and all workers of the group the same version"
            )

    def _subscribed_topics(self) -> set[str]:
        return {name for topic in self.topics for name in topic.topics}

    def on_rebalance_end(self) -> None:
        super().on_rebalance_end()
        self.consumer.on_rebalance_end()


AppType = TypeVar("AppType", bound=MarqApp)


class Unwatched(Monitor):
    """Faust's monitor without the times of each event: they are not used, and cost more than the event."""

    def on_message_in(self, *_: Any) -> None:
        pass

    def on_stream_event_in(self, *_: Any) -> None:
        pass

    def on_stream_event_out(self, *_: Any) -> None:
        pass

    def on_message_out(self, *_: Any) -> None:
        pass


def create_app(
    *,
    app_id: str,
    bootstrap: str,
    chunked_topics: Iterable[str],
    datadir: str,
    web_host: str = "127.0.0.1",
    web_port: int | None = None,
    session_timeout_s: float = 10.0,
    credentials: CredentialsT | None = None,
    cls: type[AppType] = MarqApp,  # type: ignore[assignment]
    **extra: Any,
) -> AppType:
    """Make the app. All its topics, changelogs included, have to exist before it starts.

    Args:
        app_id: consumer group, and prefix of the changelogs.
        bootstrap: `host:port` of one or more brokers, separated by commas.
        chunked_topics: topics whose agents get chunks; all with as many partitions as the tables.
        datadir: folder of the RocksDB files; one per worker.
        web_host: the only address that the web server listens on.
        web_port: its port; None for no web server.
        session_timeout_s: seconds after which a dead worker's partitions move.
        cls: the class to make.
        extra: further Faust settings; they win.
    """
    calm_client()
    settings: dict[str, Any] = {
        "env": {},  # Faust's own variables, such as WEB_BIND, might contradict our settings
        "broker": ";".join(f"kafka://{address.strip()}" for address in bootstrap.split(",")),
        "broker_credentials": credentials,
        "broker_session_timeout": session_timeout_s,
        # A member learns of a rebalance by its next heartbeat, and no checkpoints are made until all know.
        "broker_heartbeat_interval": min(0.5, session_timeout_s / 3),
        "broker_rebalance_timeout": 30.0,
        "broker_request_timeout": max(30.0, session_timeout_s),
        "broker_max_poll_interval": 60.0,
        "broker_commit_interval": 1.0,
        "consumer_auto_offset_reset": "earliest",
        "consumer_max_fetch_size": FETCH_BYTES,
        "producer_acks": -1,
        "producer_linger": 0,
        "producer_max_batch_size": MAX_BATCH_BYTES,
        "producer_max_request_size": RECORD_MAX_BYTES,
        "producer_request_timeout": 10.0,
        "processing_guarantee": "at_least_once",
        "store": "rocksdb://",
        "TableManager": PromptTables,
        "PartitionAssignor": StickyAssignor,
        "Monitor": Unwatched,
        "datadir": datadir,
        "table_standby_replicas": 0,
        # Topics are made and checked before Faust starts; Faust would make them with its own defaults.
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "stream_buffer_maxsize": RECOVERY_BUFFER,
        "stream_recovery_delay": 0.0,
        # Makes Faust commit when partitions are revoked, without waiting for events of chunked topics.
        "stream_wait_empty": True,
        "web_enabled": web_port is not None,
        "web_host": web_host,
        "web_bind": web_host,
        "web_port": web_port or 6066,
        "web_in_thread": False,
    }
    return cls(app_id, chunked_topics=chunked_topics, **settings | extra)
