"""A Kafka that is older than supported. `make test-kafka VERSION=2.0.1` runs this on a real one."""

from __future__ import annotations

import os
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.kafka.probe import OLDEST
from tests.integration.cluster import ROOT
from tests.other_kafka import parsed, version_for_tests

#: The requests that Kafka 2.0 takes: number, lowest and highest version.
OF_2_0 = [(0, 0, 6), (1, 0, 8), (3, 0, 6), (11, 0, 3), (18, 0, 2), (19, 0, 3), (21, 0, 1), (22, 0, 1), (32, 0, 2)]

#: What the first one has that is not too old, and what 2.1 has already.
FETCH, PRODUCE = "Fetch of version 11", "Produce of version 7"


class _Old(socketserver.StreamRequestHandler):
    """Says what it takes, and then closes."""

    def handle(self) -> None:
        (size,) = struct.unpack(">i", self.rfile.read(4))
        _, _, correlation = struct.unpack(">hhi", self.rfile.read(size)[:8])
        listed = b"".join(struct.pack(">hhh", *one) for one in OF_2_0)
        body = struct.pack(">ihi", correlation, 0, len(OF_2_0)) + listed
        self.wfile.write(struct.pack(">i", len(body)) + body)


@pytest.fixture
def old_kafka(request: Any) -> Iterator[str]:
    """Its address. Without a real one, a server that takes the same requests."""
    if parsed(version_for_tests()) < parsed(OLDEST):
        yield request.getfixturevalue("kafka")
        return
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_it_is_refused_with_one_line(old_kafka: str, tmp_path: Path) -> None:
    ours = {"MARQ_KAFKA": f"kafka://{old_kafka}", "MARQ_DATA_DIR": str(tmp_path), "MARQ_WEB_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "app", "worker"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MARQ_")} | ours,
        capture_output=True,
        text=True,
        timeout=60,
    )
    there = parsed(version_for_tests())
    lacks = FETCH if (2, 1) <= there < parsed(OLDEST) else PRODUCE
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr
        == f"marq: can't use Kafka at {old_kafka}: it is too old: it has no {lacks}; use Kafka {OLDEST} or later\n"
    )
