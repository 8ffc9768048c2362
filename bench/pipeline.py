"""`python -m bench archive`: how fast a full topic gets into the tables; `audit`: time and memory of an audit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.kafka.broker import EmbeddedBroker
from app.kafka.topics import ensure_topics
from app.settings import Settings
from bench.cycle import PARTITIONS, Bench, result
from marq.core.markers import End, Start, encode

#: Messages by which the audit's sender is ahead of the worker.
PORTION = 50_000


def run_archive(messages: int, size: int, markers: int, conf: tuple[str, ...]) -> None:
    """Fill both topics, archive them with the job's own command, then once more with nothing new."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as name, EmbeddedBroker(Path(name)) as broker:
        folder = Path(name)
        bench = Bench(broker.bootstrap, folder, size)
        installation = bench.new_name("archive")
        settings = Settings(kafka=f"kafka://{broker.bootstrap}", name=installation, partitions=PARTITIONS)
        asyncio.run(ensure_topics(settings, installation))
        asyncio.run(bench.send(settings.queue_topic, messages))
        _mark(broker.bootstrap, settings.markers_topic, markers)
        empty_s, _, _ = _archive(settings, folder / "empty", conf, topics=f"{installation}-none")
        for run in ("all", "nothing"):
            seconds, peak, cpu_s = _archive(settings, folder / "tables", conf)
            records = messages + markers if run == "all" else 0
            result(
                bench="archive",
                run=run,
                records=records,
                seconds=round(seconds, 1),
                per_s=round(records / seconds),
                per_s_without_start=round(records / max(seconds - empty_s, 0.1)),
                peak_mib=peak,
                java_cpu_s=round(cpu_s, 1),
            )
        files = list((folder / "tables" / "archive" / "messages").rglob("*.parquet"))
        result(bench="archive", files=len(files), mib=sum(f.stat().st_size for f in files) // 2**20)


def _mark(bootstrap: str, topic: str, count: int) -> None:
    """Write markers as a busy worker does: each record starts and ends deliveries of a few messages."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for i in range(count):
        value = encode([Start(0, i, [i, i + 5, i + 7, i + 9], 30_000), End(0, [i, i + 3], "acked", i)], "bench", i)
        producer.produce(topic, value, partition=i % PARTITIONS)
        producer.poll(0)
    producer.flush()


def _archive(settings: Settings, data: Path, conf: tuple[str, ...], topics: str = "") -> tuple[float, int, float]:
    """Seconds, peak memory (MiB) and Java processor seconds of an archive; `topics`: archive empty ones so named."""
    name = settings.name
    if topics:
        name = topics
        asyncio.run(ensure_topics(Settings(kafka=settings.kafka, name=name, partitions=PARTITIONS), name))
    environment = os.environ | {"MARQ_KAFKA": settings.kafka or "", "MARQ_NAME": name}
    command = [sys.executable, "-m", "pipeline", "archive", "--once", "--data", str(data)]
    began = time.monotonic()
    process = subprocess.Popen([*command, *(part for pair in conf for part in ("--set", pair))], env=environment)
    peak, cpu_s = 0, 0.0
    while process.poll() is None:
        peak = max(peak, _java_peak_mib(process.pid))
        cpu_s = max(cpu_s, _java_cpu_s(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.monotonic() - began, peak, cpu_s


def _java_cpu_s(pid: int) -> float:
    """Processor time so far of a job's Java: the figure that other load on the machine hardly changes."""
    try:
        child, *_ = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _java_peak_mib(pid: int) -> int:
    """Peak resident memory so far of a job's Java, in MiB."""
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


# ------------------------------------------------------------------ audit


def run_audit(messages: int, size: int, queues: int, drop: float, conf: tuple[str, ...]) -> None:
    """Let a worker process messages as they come, a share of them not acknowledged at first; then audit the worker."""
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as name, EmbeddedBroker(Path(name), heap_mib=1024) as broker:
        bench = Bench(broker.bootstrap, Path(name), size)
        installation = bench.new_name("audit")
        topic = asyncio.run(bench.create(installation))
        with bench.worker(installation, BENCH_DROP=str(drop), BENCH_TIMEOUT_MS="5000") as worker:
            for sent in range(0, messages, PORTION):
                # the backlog does not grow with the number of messages: unfinished ones take memory
                bench.wait_acked(worker, round(max(0, sent - PORTION) * (1 - drop)))
                asyncio.run(bench.send(topic, min(PORTION, messages - sent), queues))
            bench.wait_acked(worker, messages)
            arguments = ["audit", "--worker", worker.url, "--json", "-", *(p for pair in conf for p in ("--set", pair))]
            seconds, java, python, out = _watched([sys.executable, "-m", "pipeline", *arguments])
    found = json.loads(out)
    result(
        bench="audit",
        msgs=found["messages"],
        deliveries=found["deliveries"],
        again=found["redeliveries"],
        markers=sum(p["markers"][1] - p["markers"][0] for p in found["partitions"]),
        proven=found["proven"],
        partitions_agree=sum(p["live"] == "agrees" for p in found["partitions"]),
        secs=round(seconds, 1),
        secs_without_start=found["seconds"],
        java_peak_mib=java,
        python_peak_mib=python,
    )


def _watched(command: list[str]) -> tuple[float, int, int, str]:
    """Seconds, peak memory of Java and of all Pythons together (MiB, shared pages once), and output of a command."""
    java = python = 0
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out)
        while process.poll() is None:
            alive = [pid for pid in _family(str(process.pid)) if _name(pid) != "java"]
            java = max(java, _java_peak_mib(process.pid))
            python = max(python, sum(map(_proportional_kib, alive)) // 1024)
            time.sleep(0.2)
        seconds = time.monotonic() - began
        if process.returncode not in (0, 1):
            raise SystemExit(process.returncode)
        out.seek(0)
        return seconds, java, python, out.read()


def _family(pid: str) -> list[str]:
    """A process and its descendants that still run."""
    found = [pid]
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += _family(child)
    except OSError:
        pass
    return found


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _proportional_kib(pid: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
