"""`python -m bench cycle`: send, process (durable start, no-op handler, durable end), redeliver, latency."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import struct
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from aiokafka import AIOKafkaProducer

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from bench.peers import floor, share

PARTITIONS = 4


def result(**values: Any) -> None:
    """Print a line that programs can read."""
    print("RESULT " + " ".join(f"{k}={v}" for k, v in values.items()), flush=True)


class Serving(Protocol):
    """A worker that serves at a URL."""

    url: str


class Bench:
    """A broker. Each phase gets topics with a name of their own."""

    def __init__(self, bootstrap: str, folder: Path, size: int) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        self.size = size
        self._names = iter(range(1000))

    @contextmanager
    def worker(self, name: str, **environment: str) -> Iterator[WorkerProcess]:
        """A worker on topics that begin with `name`, with these variables besides ours."""
        with self.start(name, **environment) as process:
            process.wait_ready()
            yield process

    @contextmanager
    def start(self, name: str, **environment: str) -> Iterator[WorkerProcess]:
        """As `worker`, without waiting until it is ready."""
        out = self.folder / name
        out.mkdir(exist_ok=True)
        env = {
            "MARQ_KAFKA": f"kafka://{self.bootstrap}",
            "MARQ_NAME": name,
            "MARQ_PARTITIONS": str(PARTITIONS),
            "MARQ_DATA_DIR": str(out / "data"),
            "MARQ_WEB_PORT": "0",
            "MARQ_HANDLERS": "bench.noop",
            "MARQ_RETENTION_HISTORY_MS": "86400000",
            "BENCH_OUT": str(out),
        } | environment
        os.environ.update(env)
        try:
            with WorkerProcess() as process:
                yield process
        finally:
            for key in env:
                os.environ.pop(key, None)

    def new_name(self, phase: str) -> str:
        return f"bench-{phase}-{next(self._names)}"

    async def create(self, name: str) -> str:
        """Create the topics of an installation. Returns its queue topic."""
        from app.kafka.topics import ensure_topics
        from app.settings import Settings

        settings = Settings(kafka=f"kafka://{self.bootstrap}", name=name, partitions=PARTITIONS)
        await ensure_topics(settings, name)
        return settings.queue_topic

    async def send(self, topic: str, total: int, queues: int = 1, *, names: list[str] | None = None) -> float:
        """Fill the topic with batches made by hand (aiokafka's send() would cap at 44,000/s). Returns seconds."""
        names = names or [f"q{i}" for i in range(queues)]
        producer = AIOKafkaProducer(
            bootstrap_servers=self.bootstrap, enable_idempotence=True, acks="all", max_batch_size=512 * 1024
        )
        await producer.start()
        rng = random.Random(1)
        keys = [name.encode() for name in names]
        weights = [1 / (i + 1) for i in range(len(keys))]
        payload = bytes(self.size)
        began = time.monotonic()
        waiting: set[asyncio.Future[Any]] = set()
        sent = 0
        partition = 0
        while sent < total:
            batch = producer.create_batch()
            chosen = rng.choices(keys, weights, k=2_000) if len(keys) > 1 else keys * 2_000
            for key in chosen:
                if sent >= total or batch.append(key=key, value=payload, timestamp=None) is None:
                    break
                sent += 1
            batch.close()
            waiting.add(await producer.send_batch(batch, topic, partition=partition))
            partition = (partition + 1) % PARTITIONS
            if len(waiting) >= 16:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await asyncio.wait(waiting)
        await producer.stop()
        return time.monotonic() - began

    async def send_at_rate(self, topic: str, rate: int, seconds: float) -> int:
        """Send single messages evenly over time, with the time in the payload. Returns their number."""
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, enable_idempotence=True, acks="all")
        await producer.start()
        total = int(rate * seconds)
        began = time.monotonic()
        for i in range(total):
            due = began + i / rate
            while (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await producer.send(
                topic, struct.pack("<q", time.time_ns()).ljust(self.size, b"."), key=b"q0", partition=i % PARTITIONS
            )
        await producer.stop()
        return total

    def state(self, worker: Serving) -> dict[str, Any]:
        with urllib.request.urlopen(f"{worker.url}/v1/partitions", timeout=10) as response:
            return json.load(response)  # type: ignore[no-any-return]

    def acked(self, worker: Serving) -> int:
        return sum(p["counters"].get("acked", 0) for p in self.state(worker)["partitions"])

    def wait_acked(self, worker: Serving, total: int, timeout_s: float = 300) -> float:
        """Wait until so many are acknowledged. Returns the time (seconds since 1970) when the last end was folded."""
        deadline = time.monotonic() + timeout_s
        while True:
            asked = time.monotonic()
            if self.acked(worker) >= total:
                return time.time()
            if asked > deadline:
                raise SystemExit(f"only {self.acked(worker)} of {total} acknowledged: {self.state(worker)}")
            time.sleep(max(0.05, 30 * (time.monotonic() - asked)))  # with many partitions the question is work

    def seen(self, name: str) -> dict[str, Any]:
        target = self.folder / name / "seen.json"
        target.unlink(missing_ok=True)
        (self.folder / name / "wanted").touch()
        while not target.exists():
            time.sleep(0.02)
        return json.loads(target.read_text())  # type: ignore[no-any-return]


def percentile(values: list[float], part: float) -> float:
    """The value of the nearest rank; NaN if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else float("nan")


def run(
    *,
    batch: int,
    messages: int,
    size: int,
    queues: int,
    phases: list[str],
    runs: int,
    rate: int,
    seconds: float,
    peers: list[str],
) -> None:
    """Run all phases `runs` times, and those of the peers; print the medians last."""
    folder = Path(tempfile.mkdtemp(prefix="marq-bench-"))
    measured: dict[tuple[str, str], list[float]] = {}
    try:
        with EmbeddedBroker(folder / "kafka", heap_mib=1024) as broker:
            bench = Bench(broker.bootstrap, folder, size)
            for _ in range(runs):
                for phase in phases:
                    if phase == "process":
                        value = _process(bench, batch, messages, queues)
                    elif phase == "redeliver":
                        value = _redeliver(bench, batch, messages)
                    elif phase == "latency":
                        value = _latency(bench, batch, rate, seconds)
                    else:
                        value = _memory(bench, phase, messages)
                    measured.setdefault(("marq", phase), []).append(value)
                for mode in peers:
                    if mode == "floor":
                        if "process" in phases:
                            value = _floor_process(bench, batch, messages)
                            measured.setdefault((mode, "process"), []).append(value)
                        if "latency" in phases:
                            value = _floor_latency(bench, rate, seconds)
                            measured.setdefault((mode, "latency"), []).append(value)
                        continue
                    found = share.run(
                        broker.bootstrap,
                        messages=messages,
                        mode=mode,
                        batch=batch,
                        rate=rate,
                        phases=phases,
                        size=size,
                    )
                    for phase, field in (("process", "rate"), ("latency", "p95_ms")):
                        if phase in found:
                            measured.setdefault((f"share-group/{mode}", phase), []).append(float(found[phase][field]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for (system, phase), values in measured.items():
        unit = {"latency": "p95_ms", "inflight": "peak_mib", "backlog": "peak_mib"}.get(phase, "rate")
        result(
            system=system,
            phase=phase,
            batch=batch,
            runs=runs,
            **{f"median_{unit}": round(statistics.median(values), 1)},
        )


def _process(bench: Bench, batch: int, messages: int, queues: int) -> float:
    name = bench.new_name("process")
    topic = asyncio.run(bench.create(name))
    took = asyncio.run(bench.send(topic, messages, queues))
    result(system="marq", phase="send", msgs=messages, secs=round(took, 2), rate=round(messages / took))
    with bench.worker(name, BENCH_BATCH=str(batch)) as worker:
        ended = bench.wait_acked(worker, messages)
        seen = bench.seen(name)
        took = ended - float(seen["first_ns"]) / 1e9
        peak = float(bench.state(worker)["peak_memory_bytes"]) / 2**20
    result(
        system="marq",
        phase="process",
        batch=batch,
        queues=queues,
        msgs=messages,
        secs=round(took, 2),
        rate=round(messages / took),
        calls=seen["calls"],
        duplicates=seen["messages"] - messages,
        peak_mib=round(peak),
    )
    return messages / took


def _redeliver(bench: Bench, batch: int, messages: int) -> float:
    name = bench.new_name("redeliver")
    topic = asyncio.run(bench.create(name))
    asyncio.run(bench.send(topic, messages))
    timeout_ms = 5000
    with bench.worker(name, BENCH_BATCH=str(batch), BENCH_DROP="0.1", BENCH_TIMEOUT_MS=str(timeout_ms)) as worker:
        ended = bench.wait_acked(worker, messages)
        seen = bench.seen(name)
        took = ended - float(seen["first_ns"]) / 1e9 - timeout_ms / 1000
        peak = float(bench.state(worker)["peak_memory_bytes"]) / 2**20
    late = seen["late_ms"]
    result(
        system="marq",
        phase="redeliver",
        batch=batch,
        msgs=messages,
        redelivered=seen["redelivered"],
        secs=round(took, 2),
        rate=round(messages / took),
        late_p50_ms=round(percentile(late, 0.5)),
        late_p95_ms=round(percentile(late, 0.95)),
        late_p99_ms=round(percentile(late, 0.99)),
        peak_mib=round(peak),
    )
    return messages / took


def _latency(bench: Bench, batch: int, rate: int, seconds: float) -> float:
    name = bench.new_name("latency")
    topic = asyncio.run(bench.create(name))
    with bench.worker(name, BENCH_BATCH=str(batch), BENCH_LATENCY="1") as worker:
        total = asyncio.run(bench.send_at_rate(topic, rate, seconds))
        bench.wait_acked(worker, total)
        seen = bench.seen(name)
    return _report_latency("marq", batch, rate, seen["latencies_ms"])


def _floor_process(bench: Bench, batch: int, messages: int) -> float:
    name = bench.new_name("floor")
    topic = asyncio.run(bench.create(name))
    asyncio.run(bench.send(topic, messages))
    [took] = floor.Floor(bench.bootstrap, topic, f"{name}.markers", batch).found(messages)
    rate = messages / took
    result(system="floor", phase="process", batch=batch, msgs=messages, secs=round(took, 2), rate=round(rate))
    return rate


def _floor_latency(bench: Bench, rate: int, seconds: float) -> float:
    name = bench.new_name("floor")
    topic = asyncio.run(bench.create(name))
    process = floor.Floor(bench.bootstrap, topic, f"{name}.markers")
    total = asyncio.run(bench.send_at_rate(topic, rate, seconds))
    return _report_latency("floor", 1, rate, process.found(total))


def _report_latency(system: str, batch: int, rate: int, latencies_ms: list[float]) -> float:
    # the first second only warms up connections and code
    values = latencies_ms[rate:]
    result(
        system=system,
        phase="latency",
        batch=batch,
        rate=rate,
        msgs=len(values),
        p50_ms=round(percentile(values, 0.5), 1),
        p95_ms=round(percentile(values, 0.95), 1),
        p99_ms=round(percentile(values, 0.99), 1),
    )
    return percentile(values, 0.95)


def _memory(bench: Bench, phase: str, messages: int) -> float:
    """Peak memory in MiB. `inflight`: all messages handed out, none acknowledged; `backlog`: there is no handler."""
    name = bench.new_name(phase)
    topic = asyncio.run(bench.create(name))
    asyncio.run(bench.send(topic, messages))
    environment = {"BENCH_DROP": "1", "BENCH_TIMEOUT_MS": "600000"} if phase == "inflight" else {"MARQ_HANDLERS": ""}
    with bench.worker(name, **environment) as worker:
        deadline = time.monotonic() + (120 if phase == "inflight" else 12)
        while time.monotonic() < deadline:
            partitions = bench.state(worker)["partitions"]
            if phase == "inflight" and sum(p["held"] for p in partitions) == messages:
                time.sleep(5)  # long enough for a checkpoint
                break
            time.sleep(0.2)
        state = bench.state(worker)
    peak = float(state["peak_memory_bytes"]) / 2**20
    result(
        system="marq",
        phase=phase,
        msgs=messages,
        held=sum(p["held"] for p in state["partitions"]),
        in_memory=sum(p["in_memory"] for p in state["partitions"]),
        peak_mib=round(peak),
    )
    return peak
