"""Fixtures of the tests with clients that are not ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.sdks.programs import CLIENTS, Client


@pytest.fixture(scope="session")
def commands() -> dict[str, list[str]]:
    """Of the clients that were built in this run."""
    return {}


@pytest.fixture(params=sorted(CLIENTS))
def client(request: pytest.FixtureRequest, commands: dict[str, list[str]], tmp_path: Path) -> Iterator[Client]:
    """A client that is built."""
    name = request.param
    if name not in commands:
        commands[name] = CLIENTS[name]()
    made = Client(name, commands[name], tmp_path)
    yield made
    made.stop()


@pytest.fixture
def sdk(client: Client) -> Client:
    """A client of SQS itself; kombu has an envelope and actions of its own."""
    if client.name == "kombu":
        pytest.skip("kombu has no such thing")
    return client


@pytest.fixture(scope="session")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers without handlers on four partitions."""
    with Cluster(kafka, tmp_path_factory.mktemp("sdks"), partitions=4, handlers="") as cluster:
        cluster.start_many(2)
        yield cluster
