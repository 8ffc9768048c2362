"""Fixtures of the tests with faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.trio import NAMES, Trio


@pytest.fixture
def trio(kafka: str, tmp_path: Path) -> Iterator[Trio]:
    """Three workers without handlers, for clients over HTTP."""
    settings = {"handlers": "", "session_timeout_ms": 6000, "checkpoint_ms": 300, "visibility_timeout_ms": 5000}
    trio = Trio(kafka, tmp_path, partitions=6, **settings)
    with trio:
        trio.start_up(*NAMES)
        yield trio
