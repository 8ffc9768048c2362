"""Other systems under the same faults: a Kafka share group (KIP-932), and a quorum queue of RabbitMQ.

Three brokers and three consumers, which take the faults of processes that marq's brokers and workers take. What is
counted is the same, as far as it can be seen from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from tests.chaos import check
from tests.chaos.check import Violation, Window
from tests.chaos.faults import FAULTS
from tests.chaos.history import History, WitnessReader
from tests.chaos.parts import FAILOVER, LEASE_S, PARTITIONS, RECOVERY_S, SESSION_S, isr_full
from tests.chaos.rabbitmq import Nodes, NoRabbit, Senders
from tests.chaos.run import SETTLE_S, WARM_S, Options, Result, fault_of
from tests.chaos.traffic import Traffic
from tests.faults.brokers import IDS, Brokers
from tests.faults.trio import NAMES

PEERS = ("share", "rabbitmq")
#: The faults that they can take: those of processes.
FAULTS_OF_PEERS = (
    *("none", "worker-kill", "worker-restart", "worker-pause", "worker-stall", "workers-rolling"),
    *("broker-kill", "broker-restart", "broker-pause", "broker-stall", "brokers-rolling"),
)
#: The same times as marq has here. A broker refuses shorter ones unless they are permitted.
_SHARE = FAILOVER | {
    f"group.share.{least}{name}": f"{round(1000 * seconds)}"
    for name, seconds in (
        ("session.timeout.ms", SESSION_S),
        ("heartbeat.interval.ms", SESSION_S / 3),
        ("record.lock.duration.ms", LEASE_S),
    )
    for least in ("", "min.")
}
QUEUE = "work"


class Consumer:
    """The process of a consumer."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.peer_worker", *arguments], stdout=out, stderr=out
            )

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float) -> None:
        self.signal(signal.SIGTERM)
        self.process.wait(timeout_s)


class PeerChapter:
    """What faults need of `tests.chaos.parts.Chapter`."""

    def __init__(self, kind: str, brokers: Brokers | Nodes, folder: Path, seed: int) -> None:
        self.kind, self.brokers, self.folder = kind, brokers, folder
        self.lab = self  # it chooses brokers
        self.random = random.Random(seed)
        self.history = History()
        self.witness = folder / "witness"
        self.witness.mkdir()
        self._witnessed = WitnessReader(self.witness, self.history)
        self._workers: dict[str, Consumer] = {}
        self.traffic: Traffic | Senders
        if kind == "share":
            self.traffic = Traffic(self.history, [], brokers.bootstrap, QUEUE, PARTITIONS, streams=())
        else:
            self.traffic = Senders(self.history, brokers.bootstrap, QUEUE)

    def __enter__(self) -> PeerChapter:
        until = time.monotonic() + RECOVERY_S
        while True:  # brokers that have just begun know each other only some seconds later
            try:
                asyncio.run(self._create()) if self.kind == "share" else self.traffic.declare()  # type: ignore[union-attr]
                break
            except Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(1)
        for name in NAMES:
            self.start_worker(name)
        if self.kind == "share":
            time.sleep(3 * SESSION_S)  # a share group begins at the end of the log
        return self

    def __exit__(self, *_: object) -> None:
        self.traffic.stop()
        for worker in self._workers.values():
            worker.kill()

    async def _create(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.brokers.bootstrap)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(QUEUE, PARTITIONS, 3)])
        finally:
            await admin.close()

    # -- what faults do

    def broker(self) -> int:
        return self.random.choice([n for n in IDS if self.brokers[n].is_running])

    def worker(self, name: str) -> Consumer:
        return self._workers[name]

    def start_worker(self, name: str) -> None:
        arguments = [self.kind, self.brokers.bootstrap, QUEUE, str(self.witness)]
        self._workers[name] = Consumer(arguments, self.folder / f"{name}.log")

    def restart_worker(self, name: str) -> None:
        self.worker(name).stop(60)
        self.start_worker(name)

    def wait_recovered(self) -> float:
        """Wait until all brokers are in sync, or answer. Seconds it took."""
        began = time.monotonic()
        while not self._recovered():
            assert time.monotonic() < began + RECOVERY_S, f"not recovered within {RECOVERY_S} s"
            time.sleep(0.3)
        return time.monotonic() - began

    def _recovered(self) -> bool:
        if isinstance(self.brokers, Nodes):
            return all(self.brokers[n].answers() for n in IDS)
        with contextlib.suppress(KafkaError, OSError, TimeoutError):
            return all(self.brokers[n].is_running for n in IDS) and asyncio.run(isr_full(self.brokers.bootstrap))
        return False

    # -- what came out

    def read_witness(self) -> None:
        self._witnessed.read()

    def wait_finished(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            self.read_witness()
            if not self.history.missing():
                break
            time.sleep(1)


def lacks(kind: str) -> str:
    """Why this machine can't run a system; empty if it can."""
    module = "confluent_kafka" if kind == "share" else "pika"
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed (requirements/peers.txt)"
    return ""


def run(kind: str, options: Options) -> Result:
    """Each fault once, or for some minutes; in one installation."""
    began = time.monotonic()
    result = Result()
    names = list(options.faults or FAULTS_OF_PEERS)
    for name in [name for name in names if name not in FAULTS_OF_PEERS]:
        result.left_out[name] = f"{kind} does not take it"
        names.remove(name)
    if why := lacks(kind):
        print(f"  left out: {kind}, {why}", flush=True)
        return result
    folder = Path(tempfile.mkdtemp(prefix=f"marq-chaos-{kind}-"))
    print(f"chaos: {kind}, --seed {options.seed}, artifacts in {folder}", flush=True)
    try:
        brokers: Any = Nodes(folder / "nodes") if kind == "rabbitmq" else Brokers(folder / "kafka", lambda *_: _SHARE)
        with brokers, PeerChapter(kind, brokers, folder, options.seed) as chapter:
            _faults(chapter, options, names, result)
    except NoRabbit as error:
        print(f"  left out: {kind}, {error}", flush=True)
    result.seconds = time.monotonic() - began
    if result.violations or options.keep:
        result.artifacts = folder
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _faults(chapter: PeerChapter, options: Options, names: list[str], result: Result) -> None:
    chapter.traffic.start(options.rate)
    windows: list[Window] = []
    rng, end = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    time.sleep(WARM_S)
    while True:
        for name in rng.sample(names, len(names)):
            try:
                windows.append(fault_of(chapter, [FAULTS[name]], options, result))  # type: ignore[arg-type]
            except Exception as error:
                result.violations.append(Violation("not recovered", f"{name}: {error!r}", time.time()))
                break
        if time.monotonic() >= end:
            break
    chapter.traffic.stop_sending()
    chapter.wait_finished()
    conclude(chapter.history, windows, result)


def conclude(history: History, windows: list[Window], result: Result) -> None:
    """The part of the check that is true of any queue."""
    if windows:
        windows[-1] = replace(windows[-1], ended_s=time.time())
    found = [one for one in check.violations(history) if one.rule in ("lost", "unknown")]

    def row_at(at_s: float) -> Any:
        return result.row(next((w.fault for w in windows if w.has(at_s)), "(between)"))

    for seen in check.done_twice(history).values():
        row_at(seen[-1].at_s).twice += len(seen) - 1
    for violation in found:
        row_at(violation.at_s).violations[violation.rule] += 1
    for window in windows:
        result.row(window.fault).add(check.figures(history, window))
    result.violations += found
