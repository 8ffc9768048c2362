"""`python -m bench partitions`: one worker with many partitions: its start, what it costs while idle, and its rate.

start     from the start of the process until it is ready, split by what it waits for; with empty tables, and again
idle      processor time and memory with nothing to do
traffic   messages in all partitions at once, and the same with 8 partitions
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer

from app.kafka.broker import EmbeddedBroker
from app.kafka.connection import until_kafka_takes_it
from app.kafka.topics import ensure_topics
from app.processes import WorkerProcess
from app.settings import Settings
from bench.cycle import Bench, result
from bench.service import _cpu_s

#: Seconds after a start before an idle worker is measured: first checkpoints are over then.
SETTLE_S = 60.0
#: Seconds after the warm-up, in which the worker writes checkpoints.
WARM_S = 10.0
#: Partitions that the rate is compared with.
FEW = 8
#: Messages that are sent at the same time: a broker takes no request of more than 100 MB.
UNDER_WAY = 400_000
#: Seconds of a start that are profiled.
PROFILED_S = 20


def run(*, count: int, seconds: float, messages: int, warm_up: int, phases: list[str], profile: Path | None) -> None:
    """Measure the phases with `count` partitions."""
    with (
        tempfile.TemporaryDirectory(prefix="marq-bench-") as folder,
        EmbeddedBroker(Path(folder) / "kafka", heap_mib=1536) as broker,
    ):
        bench = Bench(broker.bootstrap, Path(folder), 100)
        if "start" in phases or "idle" in phases:
            name = bench.new_name("partitions")
            began = time.monotonic()
            asyncio.run(create(bench, name, count))
            result(phase="topics", partitions=count, secs=round(time.monotonic() - began, 1))
            starts = ["empty", "again"] if "start" in phases else ["empty"]
            for start in starts:
                _idle(bench, name, count, start, seconds if start == starts[-1] and "idle" in phases else 0.0, profile)
        if "traffic" in phases:
            rates = {n: _traffic(bench, n, messages, warm_up, profile) for n in (FEW, count)}
            result(phase="traffic", partitions=count, ratio=round(rates[count] / rates[FEW], 2))


async def create(bench: Bench, name: str, count: int) -> str:
    settings = Settings(kafka=f"kafka://{bench.bootstrap}", name=name, partitions=count)
    await until_kafka_takes_it(lambda: ensure_topics(settings, name), 60, print)
    return settings.queue_topic


def _idle(bench: Bench, name: str, count: int, start: str, seconds: float, profile: Path | None) -> None:
    began = time.monotonic()
    with bench.start(name, MARQ_HANDLERS="bench.phases", MARQ_PARTITIONS=str(count)) as worker:
        spy = _spy(worker, profile, f"start-{start}", PROFILED_S)
        worker.wait_ready()
        ready = time.monotonic()
        pid = worker.process.pid
        lines = (bench.folder / name / f"{pid}.phases").read_text().splitlines()
        at = {phase: float(when) - began for phase, when in map(str.split, lines)} | {"ready": ready - began}
        result(
            phase=f"start:{start}",
            partitions=count,
            cpu_s=round(_cpu_s(pid), 1),
            rss_mib=rss_mib(pid),
            load=os.getloadavg()[0],
            **{f"{step}_s": round(when, 2) for step, when in sorted(at.items(), key=lambda item: item[1])},
        )
        if spy is not None:
            spy.wait()
        if seconds:
            time.sleep(SETTLE_S)
            before_s, since = _cpu_s(pid), time.monotonic()
            time.sleep(seconds)
            used = (_cpu_s(pid) - before_s) / (time.monotonic() - since)
            result(
                phase="idle",
                partitions=count,
                secs=round(seconds),
                core_percent=round(100 * used, 2),
                rss_mib=rss_mib(pid),
                load=os.getloadavg()[0],
            )
            spy = _spy(worker, profile, "idle", seconds)  # afterwards, because it costs the worker something
            if spy is not None:
                spy.wait()


def _spy(worker: WorkerProcess, profile: Path | None, name: str, seconds: float) -> subprocess.Popen[bytes] | None:
    """Record where a worker's time goes, if py-spy is there and wanted."""
    if profile is None:
        return None
    target = ["-f", "raw", "-o", str(profile / f"{name}.txt")]
    command = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    return subprocess.Popen([command, "record", "-p", str(worker.process.pid), "-d", str(round(seconds)), *target])


def rss_mib(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return round(int(fields[0]) / 1024)


def _traffic(bench: Bench, count: int, messages: int, warm_up: int, profile: Path | None) -> float:
    """Messages a second, from the first send to the last acknowledgement. The worker is ready before."""
    name = bench.new_name("traffic")
    topic = asyncio.run(create(bench, name, count))
    environment: dict[str, Any] = {"MARQ_PARTITIONS": str(count), "BENCH_BATCH": "500"}
    with bench.worker(name, **environment) as worker:
        if warm_up:  # the first entry of the index of each of Kafka's logs allocates a page of a file
            asyncio.run(spread(bench, topic, count, warm_up))
            bench.wait_acked(worker, warm_up)
            time.sleep(WARM_S)
        spy = _spy(worker, profile, f"traffic-{count}", PROFILED_S)
        began, cpu_s = time.time(), _cpu_s(worker.process.pid)
        asyncio.run(spread(bench, topic, count, messages))
        sent_s = time.time() - began
        took = bench.wait_acked(worker, warm_up + messages) - began
        cpu_s = _cpu_s(worker.process.pid) - cpu_s
        if spy is not None:
            spy.wait()
        calls = bench.seen(name)["calls"]
    result(
        phase="traffic",
        partitions=count,
        msgs=messages,
        secs=round(took, 2),
        sent_s=round(sent_s, 2),
        rate=round(messages / took),
        calls=calls,
        us_a_message=round(1e6 * cpu_s / messages, 1),
    )
    return messages / took


async def spread(bench: Bench, topic: str, count: int, messages: int) -> None:
    """The same number of messages in each partition."""
    producer = AIOKafkaProducer(bootstrap_servers=bench.bootstrap, acks="all", max_batch_size=512 * 1024)
    await producer.start()
    left, payload, sent, under_way = messages, bytes(bench.size), [], 0
    for partition in range(count):
        share = left // (count - partition)
        left -= share
        under_way += share
        while share:
            batch = producer.create_batch()
            while share and batch.append(key=b"q0", value=payload, timestamp=None) is not None:
                share -= 1
            batch.close()
            sent.append(await producer.send_batch(batch, topic, partition=partition))
        if under_way >= UNDER_WAY:
            await asyncio.gather(*sent)
            sent.clear()
            under_way = 0
    await asyncio.gather(*sent)
    await producer.stop()
