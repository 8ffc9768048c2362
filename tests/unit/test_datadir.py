"""Each worker process gets a folder and a port of its own; the broker is found through the data folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.kafka import datadir
from app.kafka.datadir import Worker, claim_worker, resolve_bootstrap, running_workers
from app.settings import Settings
from marq.errors import BrokerError, DataDirError, SettingError


@pytest.fixture(autouse=True)
def _release_after_test() -> Iterator[None]:
    yield
    for lock in datadir._held:
        lock.release()
    datadir._held.clear()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def claim_in_another_process(data_dir: Path) -> subprocess.Popen[str]:
    """A process that claims a worker folder, and keeps it until its standard input ends."""
    code = "from app.kafka.datadir import *; w = claim_worker(Settings()); print(w.index, flush=True); input()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "MARQ_DATA_DIR": str(data_dir)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_workers_take_the_next_free_folder_and_port(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    first, second = claim_worker(settings), claim_worker(settings)
    assert (first.folder, second.folder) == (tmp_path / "worker-0", tmp_path / "worker-1")
    assert second.web_port > first.web_port >= 9324
    assert running_workers(tmp_path) == [first, second]


def test_a_folder_is_free_again_when_its_process_was_killed(tmp_path: Path) -> None:
    other = claim_in_another_process(tmp_path)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "0\n"
        assert claim_worker(Settings(data_dir=tmp_path)).index == 1
    finally:
        other.kill()
        other.communicate()
    assert [worker.index for worker in running_workers(tmp_path)] == [1]
    assert claim_worker(Settings(data_dir=tmp_path)).index == 0


def test_a_port_that_was_set_and_is_in_use_is_an_error(tmp_path: Path, taken_port: int) -> None:
    with pytest.raises(SettingError, match=f"MARQ_WEB_PORT={taken_port} is in use"):
        claim_worker(Settings(data_dir=tmp_path, web_port=taken_port))
    assert running_workers(tmp_path) == []


def test_port_0_takes_any_free_port(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, web_port=0)
    ports = {claim_worker(settings).web_port for _ in range(2)}
    assert len(ports) == 2
    assert 0 not in ports


def test_a_host_that_is_not_ours_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="MARQ_WEB_HOST"):
        claim_worker(Settings(data_dir=tmp_path, web_host="192.0.2.1"))


def test_a_data_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.touch()
    with pytest.raises(DataDirError, match="MARQ_DATA_DIR"):
        claim_worker(Settings(data_dir=file))


def test_no_workers_run_on_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    none: list[Worker] = []
    assert running_workers(tmp_path / "nothing") == none


def test_kafka_from_the_settings_comes_before_the_data_folder(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, kafka="kafka://one:9092,two:9093")
    assert resolve_bootstrap(settings) == ["one:9092", "two:9093"]


def test_without_any_kafka_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"python -m app broker.*MARQ_KAFKA"):
        resolve_bootstrap(Settings(data_dir=tmp_path))


def test_a_broker_file_left_by_a_dead_process_counts_as_none(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "broker.json").write_text(json.dumps({"bootstrap": "127.0.0.1:1", "pid": gone.pid}))
    with pytest.raises(BrokerError):
        resolve_bootstrap(Settings(data_dir=tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
def test_a_damaged_broker_file_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "broker.json").write_text(content)
    with pytest.raises(BrokerError):
        resolve_bootstrap(Settings(data_dir=tmp_path))
