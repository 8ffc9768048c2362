"""Cost of a partition with millions of parked messages: only the core, with its rows in a RocksDB of its own.

Pauses are processor time: how long a worker's other partitions wait, whatever else the machine does.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rocksdict
from rich.console import Console
from rich.table import Table

from marq.core import rows
from marq.core.checkpoints import Checkpoint
from marq.core.markers import End, Own
from marq.core.partition import Partition
from marq.core.rows import Record

CHUNK = 5_000
MILLION = 1_000_000
STAMP_MS = 1_700_000_000_000


class Store:
    """Rows in RocksDB, as in a worker, and the number of bytes written."""

    def __init__(self, path: Path) -> None:
        self.db = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))
        self.manifest = b""
        self.written_bytes = 0
        self.rows = 0

    def load(self, key: str) -> bytes:
        value: bytes = self.db[key.encode()]  # type: ignore[assignment]
        return value

    def take(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            return
        for key, value in checkpoint.rows:
            self.db[key.encode()] = value
            self.written_bytes += len(value)
        for key in checkpoint.obsolete:
            del self.db[key.encode()]
        self.rows += len(checkpoint.rows) - len(checkpoint.obsolete)
        self.manifest = checkpoint.manifest
        self.written_bytes += len(checkpoint.manifest)


@contextmanager
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="marq-growth-") as path:
        yield Store(Path(path) / "db")


def rss_mib() -> float:
    """Resident memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run(*, messages: int, size: int, queues: int, checkpoints: int) -> None:
    """Park `messages`, restore them, then let some come and go for `checkpoints` checkpoints; print the figures."""
    gc.collect()  # like workers, see `app.worker`
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    payload = bytes(size)
    keys = [b"queue-%d" % i for i in range(queues)]
    with store() as kept:
        before_mib = rss_mib()
        partition, parked_s, parking = fill(kept, messages, keys, payload)
        memory_mib = rss_mib() - before_mib
        restored, restored_s, longest_s = restore(kept)
        assert restored.segments.parked_total() == partition.segments.parked_total() == messages
        manifest_bytes, pages = len(kept.manifest), len(restored.segments.pages)
        amplification, checkpoint_s, pauses = steady(kept, restored, keys, payload, checkpoints)
    table = Table(title=f"{messages:,} parked messages of {size} bytes in {queues:,} queues, one partition")
    table.add_column("figure")
    table.add_column("value", justify="right")
    figures = {
        "memory for a million": f"{memory_mib * MILLION / messages:,.0f} MiB",
        "parking a million": f"{parked_s * MILLION / messages:,.1f} s",
        "restoring a million": f"{restored_s * MILLION / messages:,.2f} s",
        "longest slice of it": f"{longest_s * 1000:,.0f} ms",
        "manifest": f"{manifest_bytes:,} bytes, {pages} pages",
        "bytes written per byte that came, steady": f"{amplification:,.1f}",
        "a steady checkpoint, RocksDB with it": f"{checkpoint_s * 1000:,.0f} ms",
        "pause of it, median and longest": f"{statistics.median(pauses) * 1000:,.0f}, {max(pauses) * 1000:,.0f} ms",
        "longest pause while parking": f"{max(parking) * 1000:,.0f} ms",
    }
    for name, value in figures.items():
        table.add_row(name, value)
    Console().print(table)
    print(
        f"RESULT growth messages={messages} memory_mib={memory_mib:.0f} restore_s={restored_s:.2f} "
        f"slice_ms={longest_s * 1000:.0f} manifest_bytes={manifest_bytes} amplification={amplification:.1f} "
        f"pause_ms={max(pauses) * 1000:.0f}"
    )


def fill(kept: Store, messages: int, keys: list[bytes], payload: bytes) -> tuple[Partition, float, list[float]]:
    """Park messages that nobody receives. Returns the partition, seconds, and the pause of each checkpoint."""
    partition = Partition(0, load=kept.load)
    partition.start_at(0, 0)
    partition.fold(0, STAMP_MS, [Own("bench", "bench")])
    began = time.monotonic()
    pauses: list[float] = []
    for start in range(0, messages, CHUNK):
        send(partition, min(CHUNK, messages - start), keys, payload)
        pauses += park(kept, partition)
    return partition, time.monotonic() - began, pauses


def send(partition: Partition, count: int, keys: list[bytes], payload: bytes) -> None:
    start = partition.position
    records = [Record(o, STAMP_MS, keys[o % len(keys)], payload) for o in range(start, start + count)]
    partition.ingest(start, start + count, records)


def park(kept: Store, partition: Partition) -> list[float]:
    """Write checkpoints until all is written, then drop it from memory. Returns how long each took the core."""
    pauses = []
    partial = True
    while partial:
        began = time.thread_time()
        checkpoint = partition.checkpoint(0, 0, 0, 0)
        pauses.append(time.thread_time() - began)
        kept.take(checkpoint)
        partial = checkpoint is not None and checkpoint.partial
    partition.shed(1 << 50)
    return pauses


def restore(kept: Store) -> tuple[Partition, float, float]:
    """Restore as another owner would. Returns the partition, seconds, and the longest slice in seconds."""
    steps = Partition.restoring(0, rows.decode_manifest(kept.manifest), kept.load)
    began, before = time.monotonic(), time.thread_time()
    longest_s = 0.0
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            restored: Partition = stop.value
            return restored, time.monotonic() - began, max(longest_s, time.thread_time() - before)
        longest_s = max(longest_s, time.thread_time() - before)
        before = time.thread_time()


def steady(
    kept: Store, partition: Partition, keys: list[bytes], payload: bytes, checkpoints: int
) -> tuple[float, float, list[float]]:
    """Send and finish equal numbers of messages: 1,000 between two checkpoints, finished ones at random.

    Returns bytes written per byte sent, seconds per checkpoint, and the pause of each.
    """
    chosen = random.Random(1)
    kept.written_bytes = came = 0
    pauses: list[float] = []
    began = time.monotonic()
    for _ in range(checkpoints):
        gone = sorted({chosen.randrange(partition.position) for _ in range(1_000)})
        ranges = [bound for offset in gone for bound in (offset, offset + 1)]
        partition.fold(partition.markers_position, STAMP_MS, [End(partition.own, ranges, "dead")])
        send(partition, 1_000, keys, payload)
        came += 1_000 * len(payload)
        pauses += park(kept, partition)
    return kept.written_bytes / came, (time.monotonic() - began) / checkpoints, pauses
