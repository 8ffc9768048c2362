"""Writes the checkpoints of partitions: the steps that `marq.core.checkpoint_cycle` asks for, in the tables.

A row that Kafka refuses puts off the checkpoint of its partition, and nothing else. The partition is served from memory
meanwhile, and listed as stalled with the reason. Its rows are written again from time to time, until Kafka takes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from aiokafka.errors import (
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)
from faust.types import TP
from mode.utils.logging import CompositeLogger

from app.engine.changelogs import Changelogs
from app.engine.owned_partition import OwnedPartition
from app.engine.stalls import Stall
from app.engine.turns import Turns
from app.kafka.topics import Topics
from app.streaming.faults import is_expected
from app.streaming.faust_app import MarqApp
from app.streaming.producer import ProducerFull
from app.streaming.raw_table import SegmentTable
from marq.core.checkpoint_cycle import Retire, WriteManifest, WriteRows
from marq.core.rows import table_of
from marq.errors import InternalError
from marq.protocol.limits import RECORD_MAX_BYTES
from marq.text import reason_of

#: Bytes of a manifest above which we log a warning: far more than usual, and far below the limit of a record.
MANIFEST_WARN_BYTES = 512 * 1024
#: Seconds before rows of a checkpoint that Kafka did not confirm are written again.
WRITE_AGAIN_S = 1.0
#: Seconds before rows that Kafka refused are written again: somebody has to change something first.
REFUSED_AGAIN_S = 5.0

#: A row of a checkpoint: table, key, value.
_Row = tuple[SegmentTable, bytes, bytes]


class Partitions(Protocol):
    """What checkpoints need of the ownership."""

    app: MarqApp
    tables: dict[str, SegmentTable]
    owned: dict[int, OwnedPartition]
    changelogs: Changelogs

    @property
    def topics(self) -> Topics:
        """The topics in use."""

    @property
    def log(self) -> CompositeLogger:
        """The log of the worker."""

    def drain(self, owned: OwnedPartition) -> None:
        """Carry out the effects of an owner."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        """Run a side task of the worker."""

    def recover_again(self, owned: OwnedPartition, reason: str) -> None:
        """Let go of a partition, and take it over anew."""


class CheckpointWriter:
    """Carries out the steps of checkpoints. Partitions take turns, so that not all write at once."""

    def __init__(self, ownership: Partitions, now_ms: Callable[[], int]) -> None:
        self._ownership = ownership
        self._now_ms = now_ms
        self._turns = Turns()
        #: By partition: the topic that refuses rows of its checkpoint, since when (milliseconds of `now_ms`), and why.
        self._refusals: dict[int, tuple[str, int, str]] = {}

    def refusals(self) -> dict[int, Stall]:
        """The partitions whose checkpoints Kafka refuses."""
        now = self._now_ms()
        return {
            n: Stall(topic, (now - since) / 1000, f"makes no checkpoint: {why}")
            for n, (topic, since, why) in self._refusals.items()
        }

    def may_begin(self, owned: OwnedPartition, now: int) -> bool:
        """False if a partition wants to begin a checkpoint, but others come first: it was put off.

        Call this before a tick is appended for a checkpoint: a thousand partitions that wait must not append any.
        """
        owner = owned.owner
        if owner.checkpoint_is_urgent or not owner.wants_checkpoint(now):
            return True
        wait_ms = self._turns.ask(owned.number, now)
        if wait_ms:
            owner.put_off_checkpoint(now + wait_ms)
        return not wait_ms

    def step(self, owned: OwnedPartition) -> None:
        """Make the next step of a partition's checkpoint, if there is one to make now."""
        owner, now = owned.owner, self._now_ms()
        begins = owner.wants_checkpoint(now)
        if begins:
            if not self.may_begin(owned, now):
                return
            if wait_ms := self._turns.begin(owned.number, now):
                owner.put_off_checkpoint(now + wait_ms)
                return
        try:
            step = owner.step(now)
        except InternalError as exc:
            self._ownership.recover_again(owned, str(exc))
            return
        if begins and not isinstance(step, WriteRows):
            self._turns.end(owned.number, now)
        if isinstance(step, WriteRows):
            rows = [(self._ownership.tables[table_of(key)], key.encode(), value) for key, value in step.rows]
        elif isinstance(step, WriteManifest):
            rows = [(self._ownership.tables["progress"], step.key.encode(), step.value)]
            self._weigh(owned, len(step.value))
        else:
            if isinstance(step, Retire):
                self.retire(owned, step)
            return
        self.when_written(owned, rows, [table.write(key, value) for table, key, value in rows])

    def _weigh(self, owned: OwnedPartition, manifest_bytes: int) -> None:
        """Warn long before a manifest is too large for a record."""
        if owned.manifest_bytes <= MANIFEST_WARN_BYTES < manifest_bytes:
            self._ownership.log.warning(
                "The manifest of partition %s has %s bytes, of at most %s: %s messages in segments, %s queues purged "
                "ahead of reading, %s ids of messages",
                owned.number,
                manifest_bytes,
                RECORD_MAX_BYTES,
                owned.owner.partition.segments.parked_total(),
                len(owned.owner.partition.purges),
                len(owned.owner.partition.recent),
            )
        owned.manifest_bytes = manifest_bytes

    def let_go(self, number: int) -> None:
        """Called when a partition is no longer served: others may begin a checkpoint."""
        self._turns.end(number, self._now_ms())
        self._refusals.pop(number, None)

    def when_written(self, owned: OwnedPartition, rows: list[_Row], futures: list[asyncio.Future[Any]]) -> None:
        """Go on with the checkpoint once Kafka has confirmed these rows."""
        done = asyncio.gather(*futures, return_exceptions=True)
        done.add_done_callback(lambda done: None if done.cancelled() else self._written(owned, rows, done.result()))

    def _written(self, owned: OwnedPartition, rows: list[_Row], results: list[Any]) -> None:
        if self._ownership.owned.get(owned.number) is not owned or not owned.serving:
            return
        failed = [(row, error) for row, error in zip(rows, results, strict=True) if isinstance(error, BaseException)]
        now = self._now_ms()
        if not failed:
            self._turns.end(owned.number, now)
            self._refusals.pop(owned.number, None)
            owned.owner.written(now)
            self._ownership.drain(owned)
            return
        refused = False
        for row, error in failed:
            if isinstance(error, (KafkaTimeoutError, TimeoutError, ProducerFull)):
                continue
            if not is_expected(error):
                self._ownership.app.fail(
                    InternalError(f"partition {owned.number}: row {row[1]!r} was not written: {error!r}")
                )
                return
            if not refused:
                self._note_refusal(owned, row, error, now)
            refused = True
        again = [row for row, _ in failed]
        if refused:
            self._ownership.spawn(self._write_refused_again(owned, again))
            return
        self._ownership.log.warning(
            "Partition %s: Kafka has not confirmed %s rows, writing them again", owned.number, len(failed)
        )
        self._ownership.spawn(self._write_again(owned, again))

    async def _write_again(self, owned: OwnedPartition, rows: list[_Row]) -> None:
        """Kafka was away. A row that is written twice is the same row; the next ones wait for it."""
        await asyncio.sleep(WRITE_AGAIN_S)
        if self._ownership.owned.get(owned.number) is owned and owned.serving:
            self.when_written(owned, rows, [t.write_again(owned.number, key, value) for t, key, value in rows])

    def _note_refusal(self, owned: OwnedPartition, row: _Row, error: BaseException, now: int) -> None:
        """Put off the rest of the checkpoint until its rows are written again. `Stalls` logs why."""
        self._turns.end(owned.number, now)
        owned.owner.checkpoints.stood_still(now + round(REFUSED_AGAIN_S * 1000))
        table, key, value = row
        topic = table.changelog_topic_name
        _, since, _ = self._refusals.get(owned.number, (topic, now, ""))
        size = len(key) + len(value)
        why = f"{topic} refuses a row of its checkpoint ({reason_of(error)}): {_mend(error, topic, size)}"
        self._refusals[owned.number] = (topic, since, why)

    async def _write_refused_again(self, owned: OwnedPartition, rows: list[_Row]) -> None:
        """Write rows again, each in a batch of its own: Kafka may have refused a batch that was too large together."""
        await asyncio.sleep(REFUSED_AGAIN_S)
        results: list[Any] = []
        for table, key, value in rows:
            if self._ownership.owned.get(owned.number) is not owned or not owned.serving:
                return
            results += await asyncio.gather(table.write_again(owned.number, key, value), return_exceptions=True)
            if isinstance(results[-1], BaseException):
                break  # the others are most likely refused as well
        results += [results[-1]] * (len(rows) - len(results))
        self._written(owned, rows, results)

    def retire(self, owned: OwnedPartition, step: Retire) -> None:
        """A checkpoint is complete: delete what it replaces, and commit its positions."""
        owned.checkpoint_s = time.monotonic()
        tables = [(self._ownership.tables[table_of(key)], key.encode()) for key in step.rows]
        tables += [(self._ownership.tables["progress"], key.encode()) for key in step.manifests]
        deleted = [(table, key, table.write(key, None)) for table, key in tables]
        self._ownership.spawn(self._see_deleted(owned, deleted))
        consumer, topics = self._ownership.app.consumer, self._ownership.topics
        consumer.set_commit_position(TP(topics.queue, owned.number), step.position, owned.generation)
        consumer.set_commit_position(TP(topics.markers, owned.number), step.markers_position, owned.generation)
        trimming = self._ownership.changelogs.trim(owned, topics, step.position, step.markers_position)
        self._ownership.spawn(trimming)

    async def _see_deleted(
        self, owned: OwnedPartition, deleted: list[tuple[SegmentTable, bytes, asyncio.Future[Any]]]
    ) -> None:
        """Delete again what Kafka did not confirm: nothing names these rows, and they would stay for ever."""
        while deleted:
            results = await asyncio.gather(*(future for _, _, future in deleted), return_exceptions=True)
            failed = [d for d, result in zip(deleted, results, strict=True) if isinstance(result, BaseException)]
            if not failed:
                return
            await asyncio.sleep(WRITE_AGAIN_S)
            if self._ownership.owned.get(owned.number) is not owned:
                return  # the next owner finds them
            deleted = [(table, key, table.write_again(owned.number, key, None)) for table, key, _ in failed]


def _mend(error: BaseException, topic: str, row_bytes: int) -> str:
    """What to do about a row that Kafka refuses."""
    if isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError):
        return f"set max.message.bytes of the topic to {RECORD_MAX_BYTES} (the row has {row_bytes} bytes)"
    if isinstance(error, TopicAuthorizationFailedError):
        return "grant Write on the topic"
    return "see the log of the broker"
