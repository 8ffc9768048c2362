"""What version 0.1 left in Kafka, in Delta tables and with receivers is read (docs/decisions/023-formats.md)."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from app.engine import queue_records
from app.engine.secrets import derived
from app.service.receipts import Receipts
from marq.core import rows
from marq.core.digest import digest_of, entries
from marq.core.history import Envelope, Histories
from marq.core.markers import decode
from marq.core.partition import Partition
from marq.core.rows import Record
from marq.errors import BadReceiptError
from pipeline.records import SCHEMA_VERSION
from pipeline.reference import Fault, ReferenceFold
from pipeline.tables import VERSION

FOLDER = Path(__file__).parents[1] / "golden" / "0.1"
TOLD: dict[str, Any] = json.loads((FOLDER / "partition.json").read_text())
#: Of 13 messages, three were acknowledged.
MESSAGES, ACKED = 13, 3


def raw(value: str | None) -> bytes | None:
    return None if value is None else b64decode(value)


def records(topic: str) -> list[Record]:
    return [
        Record(r["offset"], r["timestamp"], raw(r["key"]), raw(r["value"]), tuple((n, raw(v)) for n, v in r["headers"]))
        for r in TOLD["topics"][f"golden{topic}"]
    ]


def folded() -> Partition:
    """By both logs alone."""
    partition = Partition(0)
    queue = records(".queue")
    assert partition.ingest(0, queue[-1].offset + 1, queue)
    for record in records(".markers"):
        partition.fold(record.offset, record.timestamp, decode(record.value).markers)
    return partition


def recovered() -> Partition:
    """By the newest manifest, the rows that it names, and what follows in the logs."""
    table = {(r.key or b"").decode(): r.value for t in ("messages", "markers") for r in records(f"-{t}-changelog")}
    manifests = [rows.decode_manifest(r.value) for r in records("-progress-changelog") if r.value]
    newest = max(manifests, key=lambda m: (m.epoch, m.markers_position))
    assert newest.v == 1 and newest.rows
    partition = Partition.restore(0, newest, lambda key: table[key] or b"")
    queue = [record for record in records(".queue") if record.offset >= partition.position]
    partition.ingest(partition.position, MESSAGES, queue)
    for record in records(".markers"):
        if record.offset >= partition.markers_position:
            partition.fold(record.offset, record.timestamp, decode(record.value).markers)
    return partition


def test_its_logs_are_folded() -> None:
    partition = folded()
    assert partition.counters["acked"] == ACKED
    assert len(partition.messages) == MESSAGES - ACKED


def test_its_tables_come_to_the_same_state_as_its_logs() -> None:
    assert sorted(entries(recovered())) == sorted(entries(folded()))
    assert digest_of(entries(recovered())) == digest_of(entries(folded()))


def test_the_reference_finds_nothing_wrong_with_it() -> None:
    faults: list[Fault] = []
    reference = ReferenceFold(
        first=0, own=-1, queue_of=Histories().queue_of, report=faults.append, compacted=False, fifo={"ordered": 0}
    )
    reference.read([Envelope(*record[:3], None, record.headers, 1) for record in records(".queue")])
    for record in records(".markers"):
        reference.fold(record.offset, record.timestamp, decode(record.value))
    assert faults == []
    assert sum(reference.done.values()) == ACKED


def test_its_queues_have_their_settings() -> None:
    found = {r.key: queue_records.decode(r.value) for r in records(".queues") if r.value and r.key == b"ordered"}
    assert found[b"ordered"].settings.fifo and found[b"ordered"].active


def test_its_receipts_are_refused_in_one_line() -> None:
    """Their messages are delivered again."""
    for receipt in TOLD["receipts"]:
        with pytest.raises(BadReceiptError, match="as those of this version"):
            Receipts(lambda: derived(TOLD["secret"], TOLD["name"])).read(receipt)


@pytest.mark.parametrize(("table", "count"), [("messages", MESSAGES), ("markers", len(records(".markers")))])
def test_its_delta_tables_say_their_version_and_have_all_rows(table: str, count: int) -> None:
    import pyarrow.parquet as pq

    folder = FOLDER / "tables" / "archive" / table
    log = [json.loads(line) for file in sorted(folder.glob("_delta_log/*.json")) for line in file.open()]
    versions = [entry["metaData"]["configuration"][VERSION] for entry in log if "metaData" in entry]
    assert 1 <= int(versions[-1]) <= SCHEMA_VERSION
    files = [folder / entry["add"]["path"].replace("%3D", "=") for entry in log if "add" in entry]
    offsets = [o for file in files for o in pq.ParquetFile(file).read(["offset"]).column("offset").to_pylist()]
    assert sorted(offsets) == list(range(count))
