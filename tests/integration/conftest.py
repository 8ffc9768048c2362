"""Fixtures of the tests with real workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Cluster
from tests.ui.browser import opened
from tests.ui.cockpit import Cockpit, looking

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def shared_cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers without handlers on two partitions: one of them owns nothing."""
    with Cluster(kafka, tmp_path_factory.mktemp("shared_cluster"), partitions=2, handlers="") as cluster:
        cluster.start_many(3)
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def url(shared_cluster: Cluster) -> str:
    return shared_cluster.workers[0].url


@pytest.fixture
def cockpit(browser: Browser, url: str) -> Iterator[Cockpit]:
    with looking(browser, url) as found:
        yield found
