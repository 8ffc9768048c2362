"""Makes the golden files of a version: `python -m tests.golden.make CHECKOUT VERSION`.

A worker of that version serves a standard and a FIFO queue on an embedded Kafka; a job of that version archives them.
What they leave goes to `tests/golden/VERSION`: `partition.json` has both logs, the changelogs, the records of queues
and the receipts, `tables/` the Delta tables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

from app.kafka.broker import EmbeddedBroker
from tests.integration.cluster import until
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import read

HERE = Path(__file__).parent
#: Of the installation; receipts are made with it.
SECRET = "the secret of the golden files, with 32 characters"
LEASE_MS = 600_000


def main(code: Path, version: str) -> None:
    folder = HERE / version
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch, EmbeddedBroker(Path(scratch) / "kafka") as broker:
        here = Installation(broker.bootstrap, Path(scratch), partitions=1, name="golden")
        told = serve(here, code)
        (folder / "partition.json").write_text(json.dumps(told, indent=1) + "\n")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_")} | here.environment
        subprocess.run([sys.executable, "-m", "pipeline", "archive", "--once"], cwd=code, env=environment, check=True)
        for table in ("archive/messages", "archive/markers"):
            ignored = shutil.ignore_patterns("*.crc")
            shutil.copytree(Path(here.data) / table, folder / "tables" / table, ignore=ignored)


def serve(here: Installation, code: Path) -> dict[str, Any]:
    """All that a worker wrote: some of its messages are done, some in flight, given back, waiting or delayed."""
    with here.cluster(handlers="", checkpoint_ms=200, secret=SECRET) as cluster:
        persist = "hold_ms" if "hold_ms" in (code / "app/settings.py").read_text() else "persist_after_ms"
        settings: dict[str, Any] = {persist: 100}
        worker = cluster.start(code=code, **settings)

        def call(path: str, **body: Any) -> Any:
            data = json.dumps(body).encode()
            request = urllib.request.Request(worker.url + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)

        def send(queue: str, *messages: dict[str, Any]) -> None:
            for message in messages:
                payload = b64encode(b"payload of a message").decode()
                call(f"/v1/queues/{queue}/messages", messages=[{"payload": payload} | message])

        def receive(queue: str, count: int) -> list[str]:
            body = {"max": count, "wait_ms": 5_000, "visibility_timeout_ms": LEASE_MS}
            return [m["receipt"] for m in call(f"/v1/queues/{queue}/receive", **body)["messages"]]

        put = urllib.request.Request(
            f"{worker.url}/v1/queues/ordered", b'{"fifo": true}', {"Content-Type": "application/json"}, method="PUT"
        )
        urllib.request.urlopen(put, timeout=20).close()
        send("orders", *[{} for _ in range(8)], {"delay_ms": 3_600_000}, {"ttl_ms": 86_400_000})
        receipts = receive("orders", 6)
        call("/v1/ack", receipts=receipts[:2])
        call("/v1/release", receipts=receipts[2:3])
        call("/v1/extend", receipts=receipts[3:4], visibility_timeout_ms=2 * LEASE_MS)
        send("ordered", *[{"group": "g", "deduplication_id": f"{i}"} for i in range(3)])
        call("/v1/ack", receipts=receive("ordered", 1))

        def manifest() -> bool:
            found = read(here, "golden-progress-changelog", 0)
            ends = here.kafka.bounds(here.settings.markers_topic)[0][1]
            return bool(found) and ends > 12 and len(found) > 2

        until(manifest, "a manifest")
        assert worker.stop() < 20
    topics = [here.settings.queue_topic, here.settings.markers_topic, here.settings.queues_topic]
    topics += [f"golden-{table}-changelog" for table in ("messages", "markers", "progress")]
    return {
        "topics": {topic: [_record(record) for record in read(here, topic, 0)] for topic in topics},
        "receipts": receipts,
        "secret": SECRET,
        "name": "golden",
    }


def _record(record: Any) -> dict[str, Any]:
    def text(value: bytes | None) -> str | None:
        return None if value is None else b64encode(value).decode()

    return {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": text(record.key),
        "value": text(record.value),
        "headers": [[name, text(value)] for name, value in record.headers],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
