"""Attacks on a real worker, over raw sockets: docs/security.md names these tests."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.integration.attacks import ADMIN, ask, dial
from tests.integration.cluster import Cluster, until

#: Connections of one address that the worker under attack takes.
PER_ADDRESS = 40


@pytest.fixture(scope="module")
def target(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker with keys."""
    folder = tmp_path_factory.mktemp("security")
    with Cluster(
        kafka, folder, partitions=2, handlers="", keys=ADMIN, max_connections_per_address=PER_ADDRESS
    ) as cluster:
        cluster.start()
        yield cluster


def metric(url: str, name: str) -> float:
    """The value of a series, with its labels as they are exported."""
    _, body = ask(url, "GET", "/metrics", Authorization=f"Bearer {ADMIN}")
    found = re.search(rf"^{re.escape(name)} (\S+)$", body.decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def test_half_sent_requests_of_one_address_shut_nobody_out_and_are_closed(target: Cluster) -> None:
    url = target.workers[0].url
    held = [dial(url, "127.0.0.2") for _ in range(2 * PER_ADDRESS)]
    began = time.monotonic()
    for connection in held:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")

    assert ask(url, "GET", "/health/live")[0] == 200
    until(lambda: metric(url, "marq_connections") <= 1, "all half-sent requests are closed", 25)
    assert time.monotonic() - began > 9
    assert metric(url, 'marq_refused_connections_total{reason="address"}') >= PER_ADDRESS
    assert metric(url, 'marq_refused_connections_total{reason="head"}') == PER_ADDRESS
    assert "A connection from 127.0.0.2 was refused" in target.workers[0].log
    for connection in held:
        connection.close()
