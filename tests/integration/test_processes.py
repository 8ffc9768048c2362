"""How the processes of marq start, wait, and end, and what they log."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from app.kafka.broker import EmbeddedBroker, free_port
from app.kafka.broker_file import bootstrap_of
from app.kafka.datadir import running_workers
from tests.integration.cluster import ROOT, Cluster, Worker, until
from tests.kafka import unique

HANDLERS = """
import time
from marq.handlers import handler

@handler("long-*")
def long(message):
    print("long:", message.payload.decode())
    time.sleep(120)

@handler("talk-*")
async def talk(message):
    print("talk:", message.payload.decode())
"""


@pytest.fixture
def cluster(kafka: str, tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "shop_handlers.py").write_text(HANDLERS)
    with Cluster(kafka, tmp_path, partitions=2, handlers="shop_handlers") as cluster:
        cluster.environment["PYTHONPATH"] = str(tmp_path)
        yield cluster


def complaints(worker: Worker) -> list[str]:
    """Lines of its log that are no information."""
    return [line for line in worker.log.splitlines() if any(word in line for word in ("WARN", "ERROR", "CRITICAL"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_ends_in_order_though_a_call_in_a_thread_does_not_return(
    cluster: Cluster, number: signal.Signals
) -> None:
    worker = cluster.start()
    cluster.send("long-a", 1)
    until(lambda: "long:" in worker.log, "the call is under way")
    worker.ending = True
    worker.process.send_signal(number)
    assert worker.process.wait(30) == 0, worker.log[-2000:]
    assert "did not stop within" not in worker.log
    assert "ended while 1 calls had not returned, their messages are given back: long" in worker.log
    assert "-INT-" not in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.slow
def test_a_worker_that_may_stop_slowly_finishes_its_calls_and_nobody_makes_them_again(
    kafka: str, tmp_path: Path
) -> None:
    """As in a deploy: another worker is there, and the leases are shorter than the calls."""
    settings = {"WITNESS_WORK_S": 6, "visibility_timeout_ms": 1000, "stop_ms": 20_000}
    with Cluster(kafka, tmp_path, partitions=1, **settings) as cluster:
        first, second = cluster.start_many(2)
        cluster.send("work-a", 3)
        begun = cluster.wait_begun("work-a", 3)
        for worker in (first, second):
            if worker.pid in {seen.pid for seen in begun}:
                worker.stop(30)
                assert worker.process.returncode == 0
                assert "did not stop within" not in worker.log
        until(lambda: not cluster.unsettled(), "all are settled", 30)
        assert cluster.total().redelivered == cluster.total().duplicates == 0


def test_what_a_handler_prints_is_written_as_it_is(cluster: Cluster) -> None:
    worker = cluster.start()
    cluster.send("talk-a", 1)
    until(lambda: "talk:" in worker.log, "it has printed")
    (line,) = [line for line in worker.log.splitlines() if "talk:" in line]
    assert line.startswith('talk: {"id"')


def test_an_ordinary_rebalance_is_no_warning(cluster: Cluster) -> None:
    first, second = cluster.start_many(2)
    third = cluster.start("w2")
    cluster.wait_served()
    second.stop()
    cluster.wait_served()
    third.stop()
    cluster.wait_served()
    for worker in (first, second, third):
        assert complaints(worker) == []


# -- code of handlers that ends, and workers that can't start ---------------------------------------------

ENDING = """
import asyncio, os, sys
from marq.handlers import handler

class Panic(BaseException):
    pass

async def task():
    sys.exit(2)

async def in_task(message):
    await asyncio.create_task(task())

def exits(message):
    sys.exit("no such option")

def panics(message):
    raise Panic("as from Rust")

def stops(message):
    next(iter(()))

async def cancelled(message):
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task

for function in (in_task, exits, panics, stops, cancelled):
    handler(function.__name__, max_receives=2, backoff_ms=10, backoff_max_ms=10)(function)

@handler("kills")
def kills(message):
    if message.attempt == 1:
        os._exit(2)
"""


#: What each handler raises in the end, as a traceback has it.
ENDS = {
    "in_task": "SystemExit: 2",
    "exits": "SystemExit: no such option",
    "panics": "ending_handlers.Panic: as from Rust",
    "stops": "StopIteration",
    "cancelled": "asyncio.exceptions.CancelledError",
}


@pytest.fixture
def ending(kafka: str, tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "ending_handlers.py").write_text(ENDING)
    with Cluster(kafka, tmp_path, partitions=1, handlers="ending_handlers") as cluster:
        cluster.environment["PYTHONPATH"] = str(tmp_path)
        yield cluster


def test_calls_that_end_in_any_way_become_dead_letters_and_the_worker_lives_on(ending: Cluster) -> None:
    worker = ending.start()
    for queue in ENDS:
        ending.send(queue, 1)
    for queue, said in ENDS.items():
        until(lambda q=queue: worker.get(f"/v1/queues/{q}/stats")[1].get("dead") == 1, f"{queue}: a dead letter")  # type: ignore[misc]
        assert f"ending_handlers.{queue} failed on <Message" in worker.log
        assert said in worker.log, "with the traceback"
    assert "SystemExit(2) in a task or callback of a handler does not end the worker" in worker.log
    worker.stop()
    assert worker.process.returncode == 0


@pytest.mark.slow
def test_a_worker_that_user_code_ends_with_status_2_is_started_again(ending: Cluster) -> None:
    supervisor = ending.start(ready=False, command=(sys.executable, "-m", "app", "worker", "--processes", "2"))
    until(lambda: "marq is ready" in supervisor.log, "both are up", 60)
    ending.send("kills", 1)
    until(lambda: supervisor.log.count("marq is ready") == 2, "it is up again", 60)
    assert "ended with status 2" in supervisor.log
    assert supervisor.log.count("starting it again (1 of 5)") == 1
    supervisor.stop()
    assert supervisor.process.returncode == 0


def test_a_worker_that_can_not_start_is_not_started_again(ending: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ending_handlers.py").write_text("import sys; sys.exit(1)")
    supervisor = ending.start(ready=False, command=(sys.executable, "-m", "app", "worker", "--processes", "2"))
    supervisor.ending = True
    assert supervisor.process.wait(60) == 2
    assert "MARQ_HANDLERS names 'ending_handlers', which failed when it was imported" in supervisor.log
    assert "starting it again" not in supervisor.log


# -- Faust's console script ------------------------------------------------------------------------------

#: The command `faust` beside this Python, which has no current folder on its path.
FAUST = str(Path(sys.executable).with_name("faust"))


def test_workers_that_the_console_script_starts_share_the_work_and_show_their_tables(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Cluster(kafka, tmp_path, partitions=2) as cluster:
        workers = [cluster.start(ready=False, command=(FAUST, "-A", "app", "worker")) for _ in range(2)]
        cluster.wait_served()
        until(lambda: all(len(worker.serving()) == 1 for worker in workers), "each serves a partition")
        cluster.send("work-a", 60)
        cluster.send("nobody", 10)
        until(lambda: len({seen.id for seen in cluster.finished("work-a")}) == 60, "all are handled")
        assert {seen.pid for seen in cluster.finished("work-a")} <= {worker.pid for worker in workers}
        for worker in workers:
            until(lambda w=worker: w.get("/v1/queues/nobody/stats")[1].get("ready") == 10, "both count all")  # type: ignore[misc]
            (number,) = worker.serving()
            until(lambda w=worker, n=number: w.get(f"/v1/tables/progress/{n}")[1]["rows"], "its manifest is shown")  # type: ignore[misc]
            for table in ("messages", "markers"):
                status, page = worker.get(f"/v1/tables/{table}/{number}")
                assert (status, list(page)) == (200, ["rows", "after"])
        for worker in workers:
            worker.stop()
            assert worker.process.returncode == 0


def test_the_console_script_has_the_commands_of_faust_in_the_checkout() -> None:
    environment = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [FAUST, "-A", "app", "tables"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "progress" in done.stdout) == (0, True), done.stdout + done.stderr


# -- the log of an ordinary life ------------------------------------------------------------------------


def said_by(worker: Worker) -> list[str]:
    """What its log says, without times."""
    return [re.sub(r"^\[[^]]*\] ", "", line) for line in worker.log.splitlines()]


def test_the_log_of_an_ordinary_life_is_a_few_lines_and_the_last_says_why_it_ended(cluster: Cluster) -> None:
    first, second = cluster.start_many(2)
    second.stop()
    cluster.wait_served()
    first.stop()
    said = said_by(first)
    first_line = r"\[INFO\] marq worker 0: http://127.0.0.1:\d+, .*data in .*, version [\w.]+, process \d+"
    assert any(re.fullmatch(first_line, line) for line in said), said
    assert any(re.fullmatch(r"\[INFO\] serving 2 of 2 partitions, \d+\.\d s", line) for line in said), said
    assert any(line.startswith("[INFO] rebalance: ") for line in said), said
    assert said[-2:] == ["[INFO] stopping: SIGTERM", "[INFO] ended: SIGTERM"]
    assert len(said) < 20, said
    assert not any("ƒ" in line or "[^-" in line for line in said), said


def test_a_log_of_json_is_an_object_a_line(cluster: Cluster) -> None:
    worker = cluster.start(log_format="json")
    worker.stop()
    found = [json.loads(line) for line in worker.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= one.keys() for one in found)
    assert found[-1]["message"] == "ended: SIGTERM"


# -- a Kafka that is away -----------------------------------------------------------------------------


def test_a_worker_waits_for_a_kafka_that_starts_after_it(tmp_path: Path) -> None:
    port = free_port()
    with (
        Cluster(f"127.0.0.1:{port}", tmp_path / "c", partitions=1, handlers="") as cluster,
        EmbeddedBroker(tmp_path / "kafka", port) as broker,
    ):
        broker.stop()
        worker = cluster.start(ready=False)
        until(lambda: f"marq: waiting up to 60 s for Kafka at 127.0.0.1:{port}: " in worker.log, "it says so", 30)
        broker.start()
        worker.wait_ready()
        assert worker.log.count("waiting up to") == 1


def test_a_worker_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    port = free_port()
    with Cluster(f"127.0.0.1:{port}", tmp_path, handlers="", kafka_wait_ms=1500) as cluster:
        worker = cluster.start(ready=False)
        worker.ending = True
        assert worker.process.wait(30) == 2
        waiting, said = worker.log.splitlines()
        assert waiting.startswith(f"marq: waiting up to 2 s for Kafka at 127.0.0.1:{port}: ")
        assert said.startswith(f"marq: can't use Kafka at 127.0.0.1:{port}: ")
        assert said.endswith("; check that it runs, and MARQ_KAFKA")


# -- `up` ---------------------------------------------------------------------------------------------


def own_environment(**settings: str) -> dict[str, str]:
    """The environment, with only these settings of marq."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") or k == "MARQ_CACHE_DIR"} | settings


def run_up(folder: Path, output: IO[bytes], **settings: str) -> subprocess.Popen[bytes]:
    """`up` with only these settings of marq."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") or k == "MARQ_CACHE_DIR"}
    environment |= {"MARQ_DATA_DIR": str(folder), "MARQ_WEB_PORT": "0", **settings}
    return subprocess.Popen(
        [sys.executable, "-m", "app", "up"], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
    )


@pytest.fixture
def up(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "log").open("wb") as log:
        process = run_up(tmp_path, log, MARQ_NAME=unique(), MARQ_PARTITIONS="1")
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
def test_up_says_that_its_broker_has_died_and_stops(up: subprocess.Popen[bytes], tmp_path: Path) -> None:
    def log() -> str:
        return (tmp_path / "log").read_text()

    until(lambda: "marq is ready" in log(), "it is up", 60)
    pid = int((tmp_path / "broker.json").read_text().split('"pid": ')[1].split("}")[0])
    os.kill(pid, signal.SIGKILL)
    assert up.wait(60) == 1
    assert "marq: the embedded broker ended by itself, with status -9" in log()
    assert running_workers(tmp_path) == []


def test_up_says_how_its_worker_died_and_starts_it_again(up: subprocess.Popen[bytes], tmp_path: Path) -> None:
    def log() -> str:
        return (tmp_path / "log").read_text()

    until(lambda: "marq is ready" in log(), "it is up", 60)
    os.kill(int((tmp_path / "worker-0" / "pid").read_text()), signal.SIGKILL)
    until(lambda: log().count("marq is ready") == 2, "it is up again", 60)
    assert "marq: the worker ended by signal SIGKILL, maybe for want of memory; starting it again (1 of 5)" in log()


def test_a_busy_port_is_noticed_before_kafka_is_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as busy, log.open("wb") as output:
        port = busy.getsockname()[1]
        assert run_up(tmp_path / "data", output, MARQ_WEB_PORT=str(port)).wait(60) == 2
    assert log.read_text() == f"marq: MARQ_WEB_PORT={port} is in use on 127.0.0.1; set another, or 0 for any free one\n"
    assert not (tmp_path / "data").exists()


def test_a_second_up_says_that_it_joins_the_first(cluster: Cluster, tmp_path: Path) -> None:
    data, log = cluster.start().folder / "data", tmp_path / "log"
    line = "already has 1 worker: adding to it. For a separate one, set MARQ_DATA_DIR to another folder."
    with log.open("wb") as output:
        second = run_up(data, output, MARQ_KAFKA=f"kafka://{cluster.bootstrap}", MARQ_NAME=cluster.name)
        try:
            until(lambda: line in log.read_text(), "it says so", 60)
        finally:
            second.terminate()
            second.wait(60)


def test_ctrl_c_ends_up_and_all_that_it_started(up: subprocess.Popen[bytes], tmp_path: Path) -> None:
    log = tmp_path / "log"
    until(lambda: "marq is ready" in log.read_text(), "it is up", 60)
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    assert running_workers(tmp_path) == []
    assert bootstrap_of(tmp_path) is None
    said = log.read_text().split("marq is ready", 1)[1]
    assert not any(word in said for word in ("Traceback", "-INT-", "WARN", "ERROR")), said
