"""With keys, no other user of the machine can read the embedded broker's data, over its ports or in its files."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from app.kafka.broker_file import running_broker
from app.kafka.connection import kafka_client_args
from app.kafka.datadir import kafka_login
from app.settings import Settings
from marq.errors import BrokerError
from pipeline.kafka import Kafka
from tests.integration.cluster import ROOT, until
from tests.integration.json_client import Client

KEY = "a-key-of-enough-length"


def start(folder: Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
    """A command of ours, begun by a user whose files are readable by all."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") or k == "MARQ_CACHE_DIR"}
    return subprocess.Popen(
        ["/bin/sh", "-c", 'umask 022; exec "$@"', "sh", sys.executable, "-m", "app", *command],
        cwd=ROOT,
        env=variables | {"MARQ_DATA_DIR": str(folder), "MARQ_WEB_PORT": "0"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data folder of `python -m app up` with keys, which is ready."""
    folder = tmp_path_factory.mktemp("data")
    folder.chmod(0o755)
    process = start(folder, "up", MARQ_KEYS=KEY, MARQ_PARTITIONS="1")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.decode())
        if "marq is ready" in lines[-1]:
            break
    else:
        raise AssertionError("".join(lines))
    yield folder
    process.terminate()
    process.communicate(timeout=60)


def settings(folder: Path, **values: Any) -> Settings:
    return Settings(data_dir=folder, **values)


async def _try(client: Any) -> None:
    try:
        await asyncio.wait_for(client.start(), 15)
    finally:
        await (client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())


@pytest.mark.parametrize(
    "login", [{}, {"sasl_plain_username": "marq", "sasl_plain_password": "guess"}], ids=["none", "guess"]
)
@pytest.mark.parametrize("kind", [AIOKafkaConsumer, AIOKafkaProducer, AIOKafkaAdminClient])
def test_without_the_password_nobody_gets_in(installation: Path, kind: type, login: dict[str, str]) -> None:
    running = running_broker(installation)
    assert running is not None
    protocol = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"} if login else {}

    async def attack() -> None:
        with pytest.raises((KafkaError, TimeoutError)):
            await _try(kind(bootstrap_servers=running.bootstrap, request_timeout_ms=3000, **protocol, **login))

    asyncio.run(attack())


def test_the_controllers_port_asks_for_it_too(installation: Path) -> None:
    properties = (installation / "kafka" / "server.properties").read_text()
    (port,) = re.findall(r"CONTROLLER://127\.0\.0\.1:(\d+)", properties)

    async def attack() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        # DescribeCluster, version 0: every logged-in user gets an answer
        body = b"\x00\x3c\x00\x00\x00\x00\x00\x01\x00\x01x\x00\x00\x00"
        writer.write(len(body).to_bytes(4, "big") + body)
        answer = await asyncio.wait_for(reader.read(), 15)
        assert answer == b""

    asyncio.run(attack())


def test_no_file_is_for_other_users(installation: Path) -> None:
    found = [installation, *installation.rglob("*")]
    assert any(path.name == "password" for path in found)
    assert any(path.suffix == ".log" and "marq.queue" in str(path) for path in found)
    open_to_others = [str(path) for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert not open_to_others


def test_workers_and_jobs_of_the_same_user_log_in_by_themselves(installation: Path) -> None:
    ours = settings(installation, keys=KEY)
    login = kafka_login(ours)
    assert login is not None
    assert len(login.password) > 40

    async def read() -> set[str]:
        consumer = AIOKafkaConsumer(**kafka_client_args(ours))
        await consumer.start()
        try:
            return set(await consumer.topics())
        finally:
            await consumer.stop()

    assert "marq.queue" in asyncio.run(read())
    assert "marq.queue" in Kafka(ours).topics()
    (port,) = (int(file.read_text()) for file in installation.glob("worker-*/web_port"))
    client = Client(f"http://127.0.0.1:{port}", KEY)
    client.send("q", b"secret")
    assert [m["payload"] for m in client.receive("q", 1, 5000)] == [b"secret"]


def test_a_worker_with_keys_uses_no_broker_that_is_open_to_all(tmp_path: Path) -> None:
    process = start(tmp_path, "broker")
    try:
        until(lambda: running_broker(tmp_path), "the broker runs", 60)
        with pytest.raises(BrokerError, match="was started without MARQ_KEYS"):
            kafka_client_args(settings(tmp_path, keys=KEY))
        assert kafka_client_args(settings(tmp_path))["security_protocol"] == "PLAINTEXT"
    finally:
        process.terminate()
        process.communicate(timeout=60)
