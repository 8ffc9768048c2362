"""marq's own image, as "Deploy" in the README has it: on a Kafka elsewhere, with keys, and no rights beyond that."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.kafka.broker import LOOPBACK, free_port
from marq.client import Service
from tests.kafka import MARQ_IMAGE, docker_has_image, kafka_container, local_container, unique

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

pytestmark = pytest.mark.containers

KEY = "a-key-for-the-tests-of-the-image"

HANDLERS = """
from marq.handlers import handler

@handler("orders")
async def on_order(message):
    print("handled", message.payload.decode(), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    if not docker_has_image(MARQ_IMAGE):
        pytest.skip("no Docker engine with the image; `make test-containers` builds it")


@pytest.fixture(scope="module")
def kafka_in_container(image: None) -> Iterator[str]:
    with kafka_container() as bootstrap:
        yield bootstrap


def container(image: str, **settings: str) -> DockerContainer:
    # The host's network, because Kafka advertises a loopback address.
    made = local_container(image).with_tmpfs_mount("/tmp")
    made = made.with_kwargs(network_mode="host", read_only=True, cap_drop=["ALL"], security_opt=["no-new-privileges"])
    for name, value in settings.items():
        made = made.with_env(name, value)
    return made


@contextmanager
def worker(kafka: str, image: str = MARQ_IMAGE, handlers: Path | None = None, **settings: str) -> Iterator[tuple]:
    """A worker that its own health check calls healthy, and the address of its HTTP."""
    from testcontainers.core.wait_strategies import HealthcheckWaitStrategy

    port = str(free_port())
    made = container(
        image,
        MARQ_KAFKA=f"kafka://{kafka}",
        MARQ_NAME=unique("image"),
        MARQ_PARTITIONS="2",
        MARQ_KEYS=KEY,
        MARQ_WEB_PORT=port,
        **settings,
    )
    if handlers is not None:
        made = made.with_volume_mapping(str(handlers), "/handlers", "ro")
    with made.waiting_for(HealthcheckWaitStrategy().with_startup_timeout(120)) as running:
        yield running, f"http://{LOOPBACK}:{port}"


def log(running: DockerContainer) -> str:
    return b"".join(running.get_logs()).decode()


def test_a_message_is_sent_received_and_acknowledged_by_a_worker_without_rights(kafka_in_container: str) -> None:
    with worker(kafka_in_container) as (running, url):
        with Service(url, key=KEY) as service:
            queue = service.queue("orders")
            queue.send(b"one book")
            message = queue.receive(timeout=10)
            assert message is not None
            assert message.payload == b"one book"
            message.ack()
            assert queue.receive(timeout=0.2) is None
        status, out = running.exec(["python", "-c", "import os; print(os.getuid(), os.access('/opt/marq', os.W_OK))"])
        assert (status, out.decode().split()) == (0, ["10001", "False"])
        status, out = running.exec(["faust", "-A", "app", "tables"])
        assert (status, b"progress" in out) == (0, True), out
        inner = running.get_wrapped_container()
        inner.stop(timeout=30)
        assert inner.wait()["StatusCode"] == 0, log(running)


def test_handlers_come_from_a_volume(kafka_in_container: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(HANDLERS)
    tmp_path.chmod(0o755)
    with worker(kafka_in_container, handlers=tmp_path, MARQ_HANDLERS="shop") as (running, url):
        assert_handled(running, url)


def test_handlers_come_from_a_child_image(kafka_in_container: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(HANDLERS)
    (tmp_path / "Dockerfile").write_text(f"FROM {MARQ_IMAGE}\nCOPY shop.py /handlers/\nENV MARQ_HANDLERS=shop\n")
    subprocess.run(["docker", "build", "--quiet", "-t", "marq-shop:test", str(tmp_path)], check=True)
    with worker(kafka_in_container, "marq-shop:test") as (running, url):
        assert_handled(running, url)


def assert_handled(running: DockerContainer, url: str) -> None:
    from testcontainers.core.waiting_utils import wait_for_logs

    with Service(url, key=KEY) as service:
        service.queue("orders").send(b"one book")
    wait_for_logs(running, "handled one book", timeout=30)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"MARQ_KAFKA": f"kafka://{LOOPBACK}:1", "MARQ_KAFKA_WAIT_MS": "0"}, "MARQ_WEB_HOST='0.0.0.0' lets others in"),
        ({"MARQ_KEYS": KEY}, "no Kafka to use"),
    ],
    ids=["no-keys", "no-kafka"],
)
def test_what_has_to_be_set_is_named_in_one_line(settings: dict[str, str], line: str) -> None:
    with container(MARQ_IMAGE, **settings) as running:
        assert running.get_wrapped_container().wait(timeout=60)["StatusCode"] == 2
        lines = [text for text in log(running).splitlines() if text.startswith("marq: ")]
        assert len(lines) == 1 and line in lines[0], log(running)
