"""`python -m bench archive`: how fast a full topic gets into the tables."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.broker import EmbeddedBroker
from app.settings import Settings
from app.topics import ensure_topics
from bench.cycle import PARTITIONS, Bench, result
from marq.core.markers import End, Start, encode


def run_archive(messages: int, size: int, markers: int, conf: tuple[str, ...]) -> None:
    """Fill both topics, archive them with the job's own command, and again with nothing new to archive."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as name, EmbeddedBroker(Path(name)) as broker:
        folder = Path(name)
        bench = Bench(broker.bootstrap, folder, size)
        installation = bench.new_name("archive")
        settings = Settings(kafka=f"kafka://{broker.bootstrap}", name=installation, partitions=PARTITIONS)
        asyncio.run(ensure_topics(settings, installation))
        asyncio.run(bench.send(settings.queue_topic, messages))
        _mark(broker.bootstrap, settings.markers_topic, markers)
        empty_s, _ = _archive(settings, folder / "empty", conf, topics=f"{installation}-none")
        for run in ("all", "nothing"):
            seconds, peak = _archive(settings, folder / "tables", conf)
            records = messages + markers if run == "all" else 0
            result(
                bench="archive",
                run=run,
                records=records,
                seconds=round(seconds, 1),
                per_s=round(records / seconds),
                per_s_without_start=round(records / max(seconds - empty_s, 0.1)),
                peak_mib=peak,
            )
        files = list((folder / "tables" / "archive" / "messages").rglob("*.parquet"))
        result(bench="archive", files=len(files), mib=sum(f.stat().st_size for f in files) // 2**20)


def _mark(bootstrap: str, topic: str, count: int) -> None:
    """Markers as a busy worker writes them: each record starts and ends deliveries of a few messages."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for i in range(count):
        value = encode([Start(0, i, [i, i + 5, i + 7, i + 9], 30_000), End(0, [i, i + 3], "acked", i)], "bench", i)
        producer.produce(topic, value, partition=i % PARTITIONS)
        producer.poll(0)
    producer.flush()


def _archive(settings: Settings, data: Path, conf: tuple[str, ...], topics: str = "") -> tuple[float, int]:
    """Seconds and peak memory (MiB, of Java) of one run; with `topics`, of one on empty topics of that name."""
    name = settings.name
    if topics:
        name = topics
        asyncio.run(ensure_topics(Settings(kafka=settings.kafka, name=name, partitions=PARTITIONS), name))
    environment = os.environ | {"MARQ_KAFKA": settings.kafka or "", "MARQ_NAME": name}
    command = [sys.executable, "-m", "pipeline", "archive", "--once", "--data", str(data)]
    began = time.monotonic()
    process = subprocess.Popen([*command, *(part for pair in conf for part in ("--set", pair))], env=environment)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _java_peak_mib(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.monotonic() - began, peak


def _java_peak_mib(pid: int) -> int:
    """Highest resident memory so far of the Java that a job has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return max((_peak_kib(child) for child in children), default=0) // 1024
    except OSError:
        return 0


def _peak_kib(pid: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
