"""`up --workers` and `worker --processes`: several workers, one address, one Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.kafka.broker import free_port
from app.kafka.datadir import running_workers
from tests.integration.cluster import ROOT, until
from tests.integration.json_client import Client
from tests.kafka import unique


class Several:
    """A command that runs several workers."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self.data_dir = folder / "data"
        self.log_file = folder / "log"
        variables = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_")}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app", *command],
                cwd=ROOT,
                env=variables | {"MARQ_DATA_DIR": str(self.data_dir)} | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def pids(self) -> set[int]:
        """Of the workers that live."""
        return {int((place.folder / "pid").read_text()) for place in running_workers(self.data_dir)}

    @property
    def own_urls(self) -> list[str]:
        """Of each worker alone."""
        return [f"http://127.0.0.1:{place.web_port}" for place in running_workers(self.data_dir)]

    def wait_ready(self, times: int = 1) -> str:
        """The address, once it was printed so many times."""
        found: list[str] = []

        def told() -> bool:
            assert self.process.poll() is None, self.log[-4000:]
            found[:] = re.findall(r"marq is ready: (\S+), \d of \d workers", self.log)
            return len(found) >= times

        until(told, f"it is ready, {times} times", 120)
        return found[-1]

    def end(self) -> int:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture
def environment(kafka: str) -> dict[str, str]:
    return {
        "MARQ_KAFKA": f"kafka://{kafka}",
        "MARQ_NAME": unique("several"),
        "MARQ_PARTITIONS": "4",
        "MARQ_WEB_PORT": str(free_port()),
        "MARQ_WEB_URL": "http://127.0.0.1:1",  # its port can't be that of both
    }


@pytest.fixture
def several(environment: dict[str, str], tmp_path: Path) -> Iterator[Several]:
    running = Several(tmp_path, "worker", "--processes", "2", **environment)
    yield running
    running.process.kill() if running.process.poll() is None and running.end() else None


def asked(url: str) -> int:
    """Requests of clients that a worker has answered."""
    text = Client(url).request("GET", "/metrics").body.decode()
    counts = re.findall(r"^marq_http_request_seconds_count\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


def received(url: str, queue: str, count: int) -> list[bytes]:
    """The messages of a queue, each request over a new connection, so that any worker may answer it."""
    found: list[bytes] = []

    def all_there() -> bool:
        client = Client(url)
        messages: list[dict[str, Any]] = client.receive(queue, 10, 500)
        client.ack(*messages)
        found.extend(message["payload"] for message in messages)
        return len(found) >= count

    until(all_there, f"{count} messages have come", 60)
    return found


def test_several_workers_have_one_address_and_one_that_dies_is_replaced(several: Several) -> None:
    url = several.wait_ready()
    assert len(several.pids) == len(several.own_urls) == 2
    sent = [b"%d" % i for i in range(60)]
    for payload in sent:
        Client(url).send("orders", payload)
    assert sorted(received(url, "orders", 60)) == sorted(sent)
    assert all(asked(own) > 0 for own in several.own_urls)  # the system dealt the connections out

    killed, kept = sorted(several.pids)
    os.kill(killed, signal.SIGKILL)
    until(lambda: "of 2 ended by signal SIGKILL" in several.log, "it is told", 30)
    Client(url).send("orders", b"meanwhile")
    assert several.wait_ready(times=2) == url
    assert kept in several.pids
    assert len(several.pids) == 2
    assert received(url, "orders", 1) == [b"meanwhile"]

    pids = several.pids
    assert several.end() == 0
    assert several.log.rstrip().count("ended: SIGTERM") == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_port_that_is_taken_is_said_before_any_worker_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        several = Several(tmp_path, "worker", "--processes", "2", MARQ_WEB_PORT=str(port))
        assert several.process.wait(60) == 2
    assert several.log.strip() == (
        f"marq: MARQ_WEB_PORT={port} is in use on 127.0.0.1; set another, or 0 for any free one"
    )


def test_options_of_faust_do_not_go_with_several_processes(tmp_path: Path) -> None:
    process = Several(tmp_path, "worker", "--processes", "2", "--without-web")
    assert process.process.wait(60) == 2
    assert "--processes does not go with options of Faust's: --without-web" in process.log
