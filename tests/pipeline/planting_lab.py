"""The logs and tables of a real worker, copied into another installation's topics, with a change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from confluent_kafka import TIMESTAMP_CREATE_TIME, Producer
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from marq.core import rows
from marq.core.markers import Batch, Marker, Tick, decode, encode
from marq.core.rows import Manifest, Record
from tests.integration.cluster import until
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import read

#: In the place of records that get lost: each two are a transaction that is aborted, and the record of its end.
LOST = None
#: A message that is in flight.
IN_FLIGHT = 15


@dataclass
class Copy:
    """All that one partition has in Kafka. Offsets are indices."""

    queue: list[Record | None]
    markers: list[tuple[int, bytes | None]]  # timestamp, value
    rows: dict[str, bytes]
    manifest: Manifest | None
    strays: list[tuple[str, str, bytes]] = field(default_factory=list)  # table, key (@: this partition), value
    trim: int = 0  # records of the queue topic below it are deleted

    def tables(self, number: int) -> Iterator[tuple[str, str, bytes]]:
        """All that goes to the changelogs of a partition: table, key, value."""

        def key_of(key: str) -> str:
            return f"{number}/{key.partition('/')[2]}"

        for table, key, value in self.strays:
            yield table, key_of(key) if key.startswith("@") else key, value
        for key, value in self.rows.items():
            yield rows.table_of(key), key_of(key), value
        if self.manifest is not None:
            manifest = copy.copy(self.manifest)
            manifest.rows = {key_of(key): checksum for key, checksum in manifest.rows.items()}
            yield "progress", rows.manifest_key(number, manifest.epoch), rows.encode_manifest(manifest)

    def without_tables(self) -> Copy:
        """Without rows and manifest: what is wrong is wrong with the logs alone."""
        self.rows, self.manifest = {}, None
        return self

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """The records of markers, decoded, with their offsets."""
        for offset, (_, value) in enumerate(self.markers):
            assert value is not None
            yield offset, decode(value)

    def put(self, offset: int, markers: list[Marker]) -> None:
        """Replace the markers of a record."""
        at_ms, value = self.markers[offset]
        assert value is not None
        batch = decode(value)
        self.markers[offset] = at_ms, encode(markers, batch.by, batch.seq)

    def append(self, *markers: Marker) -> None:
        """Append a record of markers by the last owner."""
        at_ms, value = self.markers[-1]
        assert value is not None
        batch = decode(value)
        self.markers.append((at_ms, encode(list(markers), batch.by, batch.seq + 1)))

    def swap(self, kind: type[Marker], change: Callable[[Any], Marker | None]) -> int:
        """Change the first marker of a kind that `change` has something for; the offset of its record."""
        for offset, batch in self.batches():
            for i, marker in enumerate(batch.markers):
                new = change(marker) if isinstance(marker, kind) else None
                if new is not None:
                    self.put(offset, [*batch.markers[:i], new, *batch.markers[i + 1 :]])
                    return offset
        raise AssertionError(f"no {kind.__name__} to change")

    def _has(self, key: str) -> bool:
        return any(message[0] == IN_FLIGHT for message in rows.decode_messages(self.rows[key]).messages)

    def change_row(self, kind: str, change: Callable[[Any], Any]) -> None:
        """Change a row, of messages that of `IN_FLIGHT`, and every checksum that names it, as if it was written so."""
        keys = [key for key in self.rows if rows.kind_of(key) == kind]
        key = next(key for key in keys if kind != "messages" or self._has(key))
        before = rows.checksum(self.rows[key])
        decoded = rows.decode_messages(self.rows[key]) if kind == "messages" else msgspec.msgpack.decode(self.rows[key])
        self.rows[key] = msgspec.msgpack.encode(change(decoded))
        new = {before: rows.checksum(self.rows[key])}
        assert self.manifest is not None
        for name, value in self.rows.items():
            if kind != "pages" and rows.kind_of(name) == "pages":
                page = rows.decode_page(value)
                for s in page.segments:
                    s.checksum = new.get(s.checksum, s.checksum)
                    s.index_checksum = new.get(s.index_checksum, s.index_checksum)
                self.rows[name] = rows.encode(page)
                new[self.manifest.rows[name]] = rows.checksum(self.rows[name])
        self.manifest.rows = {name: new.get(checksum, checksum) for name, checksum in self.manifest.rows.items()}


def original(here: Installation, number: int = 0) -> Copy:
    """What a worker has left of a partition."""
    settings = here.settings
    tables = {name: read(here, f"{settings.name}-{name}-changelog", number) for name in ("messages", "markers")}
    stored = {(r.key or b"").decode(): r.value for found in tables.values() for r in found}
    manifests = [
        rows.decode_manifest(r.value) for r in read(here, f"{settings.name}-progress-changelog", number) if r.value
    ]
    manifest = max(manifests, key=lambda m: (m.epoch, m.markers_position))
    named = dict(rows.named_rows(number, manifest, lambda key: stored[key] or b""))
    return Copy(
        list(read(here, settings.queue_topic, number)),
        [(record.timestamp, record.value) for record in read(here, settings.markers_topic, number)],
        {key: stored[key] or b"" for key in named},
        manifest,
    )


def keep_times(here: Installation) -> None:
    """Let producers say when something was written to either log. The last partition is written to."""
    entry = ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
    for topic in (here.settings.queue_topic, here.settings.markers_topic):
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        for future in here.kafka.admin.incremental_alter_configs([resource]).values():
            future.result(20)
        until(lambda topic=topic: _keeps_times(here, topic), f"{topic} takes the times of producers")


def _keeps_times(here: Installation, topic: str) -> bool:
    written: list[int] = []
    producer = Producer(here.kafka.client_config())
    value = encode([Tick()])
    number = here.settings.partitions - 1
    producer.produce(topic, value, b"q", number, on_delivery=lambda _, message: written.append(message.timestamp()[0]))
    assert producer.flush(20) == 0
    return written == [TIMESTAMP_CREATE_TIME]


def write(here: Installation, copies: Sequence[Copy]) -> None:
    """Write a copy to each partition; rows and manifests get its number."""
    settings = here.settings
    plain = Producer(here.kafka.client_config() | {"enable.idempotence": True, "linger.ms": 5})
    for number, what in enumerate(copies):
        _log(here, plain, settings.queue_topic, number, what.queue)
        markers = [
            None if value is LOST else Record(i, at_ms, None, value) for i, (at_ms, value) in enumerate(what.markers)
        ]
        _log(here, plain, settings.markers_topic, number, markers)
        for table, key, value in what.tables(number):
            plain.produce(f"{settings.name}-{table}-changelog", value, key, number)
    assert plain.flush(30) == 0
    for number, what in enumerate(copies):
        for topic, log in ((settings.queue_topic, what.queue), (settings.markers_topic, what.markers)):
            assert here.kafka.bounds(topic)[number][1] == len(log), f"{topic} partition {number}"
        if what.trim:
            here.delete_before({settings.queue_topic: what.trim}, number)


def _log(here: Installation, plain: Producer, topic: str, number: int, records: Iterable[Record | None]) -> None:
    lost = 0
    for i, record in enumerate(records):
        if record is not LOST:
            assert not lost % 2, "records are lost in pairs"
            headers: Any = [(name, value) for name, value in record.headers]
            plain.produce(topic, record.value, record.key, number, timestamp=record.timestamp, headers=headers)
            continue
        lost += 1
        if lost % 2:
            assert plain.flush(20) == 0
            producer = Producer(here.kafka.client_config() | {"transactional.id": f"{topic}-{number}"})
            producer.init_transactions(20)
            producer.begin_transaction()
            producer.produce(topic, b"lost", b"lost", number)
            producer.flush(20)
            producer.abort_transaction(20)
            # its record may come later than the answer
            until(lambda stop=i + 2: here.kafka.bounds(topic)[number][1] == stop, "the end of a transaction")
