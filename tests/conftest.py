"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kafka import kafka_for_tests

#: Property of a test whose value is printed at the end of the run. What a test prints by itself is lost where processes
#: share the tests (`make test`).
SAID = "said"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # in the background, a shell makes us ignore Ctrl-C, and with us the processes that the tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests had to say."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    if name == SAID:
                        terminalreporter.write_line(str(value))


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """Address ("host:port") of a real Kafka that all tests of the run share."""
    with kafka_for_tests() as bootstrap:
        yield bootstrap


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes settings in the environment of the person who runs the tests."""
    for name in list(os.environ):
        if name.startswith("MARQ_") and not name.startswith(("MARQ_TEST_", "MARQ_CACHE_DIR")):
            monkeypatch.delenv(name)
