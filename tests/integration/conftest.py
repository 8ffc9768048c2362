"""Fixtures of the tests with real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cluster import Cluster


@pytest.fixture(scope="session")
def shared_cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers without handlers on two partitions: one of them owns nothing."""
    with Cluster(kafka, tmp_path_factory.mktemp("shared_cluster"), partitions=2, handlers="") as cluster:
        cluster.start_many(3)
        yield cluster
