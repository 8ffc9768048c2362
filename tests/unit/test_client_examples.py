"""The examples of the client's documentation run unchanged."""

from __future__ import annotations

import asyncio
import doctest
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marq.client import AsyncService, Outgoing, Service, blocking, connection, wire
from tests.unit.fake_service import FakeService

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "client.md"


@pytest.mark.parametrize("module", [blocking, connection, wire])
def test_examples_in_the_modules_are_true(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted and not outcome.failed


def test_examples_in_the_guide_run() -> None:
    for example in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        with FakeService() as fake, Service(fake.url) as service:
            fake.put("test-queue", *[b"x"] * 3)
            fake.put("q", *[b"x"] * 3)
            queue = service.queue("q")
            names: dict[str, Any] = {
                "service": service,
                "queue": queue,
                "message": queue.receive(timeout=1),
                "Outgoing": Outgoing,
                "AsyncService": AsyncService,
                "work": _work,
                "pool": _Pool,
                "handle": lambda message: message.ack(),
            }
            code = example.replace("http://localhost:9324", fake.url)
            if "await" in code:
                code = code.replace("await work(", "work(")
                exec(f"async def run():\n{textwrap.indent(code, '    ')}", names)
                with pytest.raises(_EnoughError):
                    asyncio.run(names["run"]())
            elif "consume(" in code:
                with pytest.raises(_EnoughError):
                    exec(code, names)
            else:
                exec(code, names)


class _EnoughError(Exception):
    """Ends a loop that would go on for ever."""


class _Pool:
    @staticmethod
    def submit(function: Any, message: Any) -> None:
        function(message)
        _work(b"")


def _work(payload: bytes) -> None:
    _calls.append(payload)
    if len(_calls) % 2 == 0:
        raise _EnoughError


_calls: list[bytes] = []
