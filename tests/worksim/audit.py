"""The verdict of the audit (`pipeline.auditor`) on a partition at the end of a run: both logs, the tables, the worker.

The code is what runs in Spark, without Spark: another fold of the logs, and what a recovery would make of the tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from marq.core import rows
from marq.core.digest import digest_of, entries
from marq.core.history import Envelope
from pipeline.auditor import COUNTERS, Auditor, Plan
from pipeline.fingerprints import fingerprint, stripped
from pipeline.reference import Fault

if TYPE_CHECKING:
    from tests.worksim.world import World

#: Faults that say nothing about a worker: the simulated Kafka leaves offsets out, as if others wrote transactions.
OF_KAFKA = ("markers gone",)
#: Faults of a run that are told.
FAULTS_MAX = 10


class _Auditor(Auditor):
    def faults(self) -> list[Fault]:
        return [fault for fault in self._faults if fault.kind not in OF_KAFKA]


def faults_of(world: World, number: int) -> list[Fault]:
    """What the audit finds wrong with a partition, if the world is quiet."""
    topics = world.topics
    queue, markers = world.kafka.log(topics.queue, number), world.kafka.log(topics.markers, number)
    changelogs = dict(world.topics.changelogs)
    progress = _rows(world, changelogs.pop("progress"), number)
    manifests = [(rows.decode_manifest(value), value) for value in progress.values()]
    newest = max(manifests, key=lambda found: found[0].epoch, default=None)
    plan = Plan(
        queue_start=0,  # what was deleted is still here
        queue_stop=queue.end,
        markers_start=0,
        markers_stop=markers.end,
        queue_id=world.settings.queue_id,
        archived=0,
        tables=True,
        manifest=newest[1] if newest is not None else None,
        live=_live(world, number),
        faults_max=FAULTS_MAX,
        queue_end=queue.end,
        fifo=dict.fromkeys(world.clients.fifo, 0),
    )
    auditor = _Auditor(number, msgspec.msgpack.encode(plan))
    for topic in changelogs.values():
        for key, value in _rows(world, topic, number).items():
            auditor.row(key, stripped(key, value))
    auditor.begin()
    for record, is_marker in _in_time_order(queue.records, markers.records):
        if is_marker:
            auditor.fold(record.offset, record.timestamp, record.value)
        else:
            value = record.value
            envelope = Envelope(record.offset, record.timestamp, record.key, None, record.headers, len(value or b""))
            auditor.read([envelope], [fingerprint(record.timestamp, record.key, record.headers, value)])
    auditor.end()
    return auditor.faults()


def _rows(world: World, changelog: str, number: int) -> dict[str, bytes]:
    """The rows of a table, by its changelog."""
    last = {record.key: record.value for record in world.kafka.log(changelog, number).records}
    return {key.decode(): value for key, value in last.items() if value is not None}


def _in_time_order(queue: list[Any], markers: list[Any]) -> list[tuple[Any, bool]]:
    """As `pipeline.walk` sorts them: by the greatest timestamp in their log so far."""
    keyed = []
    for is_marker, records in ((False, queue), (True, markers)):
        top = -1
        for record in records:
            top = max(top, record.timestamp)
            keyed.append(((top, is_marker, record.offset), record, is_marker))
    return [(record, is_marker) for _, record, is_marker in sorted(keyed, key=lambda entry: entry[0])]


def _live(world: World, number: int) -> dict[str, Any] | None:
    """What the owner answers, if it is at the end of both logs."""
    topics = world.topics
    for worker in world.up():
        owned = worker.ownership.owned.get(number)
        if owned is None or not owned.serving:
            continue
        partition = owned.owner.partition
        ends = [world.kafka.log(topic, number).end for topic in (topics.queue, topics.markers)]
        if [partition.position, partition.markers_position] != ends:
            return None
        digest = digest_of(entries(partition))
        return {
            "digest": digest.digest,
            "queues": digest.queues,
            "counters": {name: partition.counters[name] for name in COUNTERS},
        }
    return None
