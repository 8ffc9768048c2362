"""A real Kafka for the tests, and names that no other test uses."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from app.kafka.broker import LOOPBACK, free_port
from app.settings import Settings
from tests.other_kafka import broker_for_tests

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

IMAGE = "marq-kafka:4.3.0"
#: marq itself, from the Dockerfile.
MARQ_IMAGE = "marq:test"


def unique(prefix: str = "t") -> str:
    """A name for topics, groups and queues that no other test or run uses."""
    return f"{prefix}-{uuid.uuid4().hex[:10]}"


def settings_for(bootstrap: str, **values: Any) -> Settings:
    """Settings of a separate installation on the Kafka under test."""
    return Settings(**{"kafka": f"kafka://{bootstrap}", "name": unique(), **values})


@contextlib.contextmanager
def kafka_for_tests() -> Iterator[str]:
    """Address of a Kafka: the one in `MARQ_TEST_KAFKA`, else a container if its image is there, else embedded.

    If `MARQ_TEST_KAFKA` is the number of a version, that one is started.
    """
    given = os.environ.get("MARQ_TEST_KAFKA", "")
    if ":" in given:
        yield given.removeprefix("kafka://")
    elif not given and docker_has_image():
        with kafka_container() as bootstrap:
            yield bootstrap
    else:
        with tempfile.TemporaryDirectory(prefix="marq-kafka-") as folder, broker_for_tests(folder) as broker:
            yield broker.bootstrap


def docker_has_image(image: str = IMAGE) -> bool:
    """Whether a Docker engine answers and has an image of ours."""
    import docker

    try:
        client = docker.from_env(timeout=5)  # type: ignore[attr-defined]
    except docker.errors.DockerException:
        return False
    try:
        client.images.get(image)
    except (docker.errors.DockerException, OSError):
        return False
    else:
        return True
    finally:
        client.close()


def local_container(image: str) -> DockerContainer:
    """A container, not started yet, of an image that was built locally."""
    # Read when testcontainers is imported. Its reaper is an image that may not be there, and the
    # container's own address may not be reachable.
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    os.environ.setdefault("TESTCONTAINERS_CONNECTION_MODE", "docker_host")
    os.environ.setdefault("TESTCONTAINERS_HOST_OVERRIDE", LOOPBACK)
    from testcontainers.core.container import DockerContainer

    return DockerContainer(image)


@contextlib.contextmanager
def kafka_container() -> Iterator[str]:
    """Address of a Kafka in a container of its own, which ends with the block."""
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    port = free_port()
    container = (
        local_container(IMAGE)
        .with_env("KAFKA_PORT", str(port))
        .with_bind_ports(port, port)
        .waiting_for(LogMessageWaitStrategy("Kafka Server started").with_startup_timeout(90))
    )
    with container:
        yield f"{LOOPBACK}:{port}"
