"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kafka import kafka_for_tests


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """Address ("host:port") of a real Kafka that all tests of the run share."""
    with kafka_for_tests() as bootstrap:
        yield bootstrap


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment of whoever runs the tests don't reach them."""
    for name in list(os.environ):
        if name.startswith("MARQ_") and not name.startswith(("MARQ_TEST_", "MARQ_CACHE_DIR")):
            monkeypatch.delenv(name)
