"""The demo and the examples, as a user runs them: real processes, real Kafka."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from app.processes import WorkerProcess
from tests.kafka import unique

ROOT = Path(__file__).parents[2]


class Place(NamedTuple):
    """An installation of its own: topics, data folder, free ports."""

    folder: Path
    settings: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=os.environ | self.settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def place(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("demo")
    return Place(
        folder,
        {
            "MARQ_KAFKA": f"kafka://{kafka}",
            "MARQ_NAME": unique("demo"),
            "MARQ_PARTITIONS": "4",
            "MARQ_DATA_DIR": str(folder),
            "MARQ_WEB_PORT": "0",
        },
    )


@pytest.fixture(scope="module")
def worker(place: Place) -> Iterator[WorkerProcess]:
    """A plain worker, without handlers."""
    with WorkerProcess(**place.settings) as process:  # type: ignore[arg-type]
        process.wait_ready()
        yield process


def finish(process: subprocess.Popen[str], timeout_s: float = 90) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        pytest.fail(f"{process.args!r} did not end within {timeout_s} s:\n{out[-3000:]}")
    return process.returncode, out


def last_line(out: str) -> dict[str, Any]:
    line = out.strip().splitlines()[-1]
    return json.loads(line[line.index("{") :])  # type: ignore[no-any-return]


def test_a_part_without_a_demo_says_what_to_do(place: Place) -> None:
    status, out = finish(place.start("app", "demo", "watch"), 30)
    assert status == 2
    assert "demo send" in out


def test_demo_starts_what_it_needs_loses_nothing_and_brings_back_what_was_dropped(place: Place) -> None:
    status, out = finish(place.start("app", "demo", "--messages", "3000", "--drop", "0.1", "--timeout", "1"))
    assert status == 0, out[-3000:]
    result = last_line(out)
    assert result["sent"] == result["acked"] == 3000
    assert result["lost"] == 0
    assert result["redelivered"] > 0
    assert set(result) == {
        *("sent", "processed", "acked", "redelivered", "duplicates", "lost", "seconds", "rate"),
        *("send_rate", "process_rate", "unfinished"),
    }
    assert min(result["send_rate"], result["process_rate"], result["rate"]) > 0
    assert "in a browser, or run: marq top --url http" in out
    assert f"{result['redelivered']:,} redelivered, {result['duplicates']:,} done twice, 0 lost" in out


def test_demo_goes_on_with_what_was_left_after_ctrl_c(place: Place, worker: WorkerProcess) -> None:
    # most messages are dropped, so that the first run is certainly not through
    first = place.start("app", "demo", "--messages", "2000", "--drop", "0.8", "--timeout", "2")
    ledger = place.folder / "demo" / "acked"
    deadline = time.monotonic() + 60
    while not (ledger.exists() and ledger.stat().st_size == 2000 and any(ledger.read_bytes())):
        assert first.poll() is None and time.monotonic() < deadline, finish(first)[1][-3000:]
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    status, out = finish(first, 30)
    left_at = last_line(out)
    assert status == 1
    assert 0 < left_at["acked"] < 2000

    status, out = finish(place.start("app", "demo", "--messages", "2000", "--drop", "0", "--timeout", "2"))

    assert status == 0, out[-3000:]
    result = last_line(out)
    assert result["sent"] == result["acked"] == 2000
    assert result["lost"] == 0


def test_parts_of_the_demo_run_as_processes_of_their_own(place: Place, worker: WorkerProcess) -> None:
    sender = place.start("app", "demo", "send", "--messages", "1000")
    assert finish(sender)[0] == 0
    watcher = place.start("app", "demo", "watch")
    processors = [place.start("app", "demo", "process", "--drop", "0.2", "--timeout", "1") for _ in range(2)]
    for process in (*processors, watcher):
        status, out = finish(process)
        assert status == 0, out[-3000:]
    result = last_line(out)
    assert (result["sent"], result["acked"], result["lost"]) == (1000, 1000, 0)


def test_standalone_examples_send_with_kafka_and_receive_over_http(place: Place, worker: WorkerProcess) -> None:
    assert finish(place.start("examples.standalone.sender", "200"))[0] == 0
    status, out = finish(place.start("examples.standalone.receiver", worker.url))
    assert status == 0, out[-3000:]
    assert f"received 200, sum {sum(range(200))}" in out


def test_example_in_one_program_gets_the_forgotten_message_again() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MARQ_")}
    process = subprocess.run(
        [sys.executable, "-m", "examples.embedded"],
        cwd=ROOT,
        env=environment | {"MARQ_LOG_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "forgot hello 3" in process.stdout
    assert "got hello 3, attempt 2" in process.stdout
