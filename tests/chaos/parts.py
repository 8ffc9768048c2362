"""The parts: three brokers and three workers, the proxies between them, and what is asked of them from outside."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from app.kafka.broker import LOOPBACK, port_is_free
from tests.chaos.history import History, Name, WitnessReader
from tests.chaos.network import Network
from tests.chaos.traffic import Traffic, create_queues
from tests.faults.brokers import IDS, Brokers
from tests.faults.trio import NAMES
from tests.integration.cluster import Cluster, Worker, until

PARTITIONS = 6
#: Session time-out of the workers (the shortest that a broker permits), and of the brokers.
SESSION_S = 6.0
BROKER_SESSION_S = 4.0
#: Visibility timeout of all queues.
LEASE_S = 10.0
#: Seconds for everything to be in order again after a fault.
RECOVERY_S = 180.0
SETTINGS = {
    "session_timeout_ms": round(1000 * SESSION_S),
    "visibility_timeout_ms": round(1000 * LEASE_S),
    "checkpoint_ms": 500,
    "persist_after_ms": 2_000,
    "log_level": "INFO",
    "WITNESS_WORK_S": 0.01,  # so that some are at work when the fault comes
}
#: A dead broker or controller is noticed within seconds; Kafka's defaults are about three times as long.
FAILOVER = {
    "broker.session.timeout.ms": str(round(1000 * BROKER_SESSION_S)),
    "broker.heartbeat.interval.ms": "500",
    "replica.lag.time.max.ms": "5000",
    "min.insync.replicas": "2",
    "offsets.topic.num.partitions": "3",
    "controlled.shutdown.enable": "true",
}
#: Ports that the kernel gives to nobody who asks for any: a worker or broker that is killed finds its own again.
LASTING_PORTS = range(20_000, 32_000)
#: Kafka's numbers of these requests.
_ELECT_LEADERS, _DESCRIBE_QUORUM = 43, 55


def lasting_port() -> int:
    """A port that is free, and that no connection takes meanwhile."""
    return next(port for _ in itertools.count() if port_is_free(port := random.choice(LASTING_PORTS)))


class Lab:
    """The brokers and the network of a run. `chapter()` makes workers and traffic on them."""

    def __init__(self, folder: Path, network: Network | None, seed: int) -> None:
        self.folder = folder
        self.network = network
        self.random = random.Random(seed)
        self._worker_ports: dict[tuple[str, int], int] = {}
        self.brokers = Brokers(folder / "kafka", self._properties)

    def _properties(self, n: int, port: int, controller: int) -> Mapping[str, str]:
        """With a network, each worker has a listener of its own at each broker, and reaches it through a proxy.

        Brokers reach each other through proxies, too, except as controllers.
        """
        if self.network is None:
            return FAILOVER
        listening = {"PLAINTEXT": port, "CONTROLLER": controller}
        advertised = {"PLAINTEXT": port}
        for name in ("REPLICA", *(name.upper() for name in NAMES)):
            listening[name] = lasting_port()
            link = self.network.link(f"{name.lower()}-broker-{n}", listening[name])
            advertised[name] = link.port
            self._worker_ports[name.lower(), n] = link.port
        return FAILOVER | {
            "listeners": ",".join(f"{name}://{LOOPBACK}:{at}" for name, at in listening.items()),
            "advertised.listeners": ",".join(f"{name}://{LOOPBACK}:{at}" for name, at in advertised.items()),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listening),
            "inter.broker.listener.name": "REPLICA",
        }

    def bootstrap_of(self, worker: str) -> str:
        """Addresses at which a worker finds Kafka."""
        if self.network is None:
            return self.brokers.bootstrap
        return ",".join(f"{LOOPBACK}:{self._worker_ports[worker, n]}" for n in IDS)

    def broker(self) -> int:
        """One that runs, at random."""
        return self.random.choice([n for n in IDS if self.brokers[n].is_running])

    def mend(self) -> None:
        """Whatever a fault has left behind: all brokers run, and all links are healed."""
        for n in IDS:
            broker = self.brokers[n]
            if broker.is_running and broker.pid is not None:
                os.kill(broker.pid, signal.SIGCONT)
            else:
                broker.start()
        for link in self.network.links.values() if self.network is not None else ():
            link.heal()

    def controller(self) -> int:
        """The broker that leads the quorum of controllers now."""
        return int(until(self._leader, "there is a controller", 60))

    def _leader(self) -> int | None:
        topic = _compact("__cluster_metadata")
        for n in IDS:
            if not self.brokers[n].is_running:
                continue
            with contextlib.suppress(OSError, struct.error):
                # one topic with one partition, each with tags
                answer = self._ask(n, _DESCRIBE_QUORUM, 0, b"\2" + topic + b"\2" + struct.pack(">i", 0) + b"\0\0\0")
                # error; topics; name; partitions; number, error, leader
                _, error, leader = struct.unpack_from(">ihi", answer, 2 + 1 + len(topic) + 1)
                if error == 0 and leader in IDS:
                    return int(leader)
        return None

    def elect_preferred(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """Let the first replica of each partition be its leader."""
        body = struct.pack(">b", 0) + _compact_count(len(partitions))
        for topic, numbers in partitions.items():
            listed = b"".join(struct.pack(">i", n) for n in numbers)
            body += _compact(topic) + _compact_count(len(numbers)) + listed + b"\0"
        with contextlib.suppress(OSError, struct.error):
            self._ask(self.broker(), _ELECT_LEADERS, 2, body + struct.pack(">i", 5_000) + b"\0")

    def _ask(self, n: int, api: int, version: int, body: bytes) -> bytes:
        """One request that no client library here knows, with flexible headers. The answer without its header."""
        host, _, port = self.brokers[n].bootstrap.partition(":")
        request = struct.pack(">hhih", api, version, 1, -1) + b"\0" + body
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                return stream.read(struct.unpack(">i", stream.read(4))[0])[5:]


def _compact_count(count: int) -> bytes:
    assert count < 127
    return bytes([count + 1])


def _compact(text: str) -> bytes:
    return _compact_count(len(text)) + text.encode()


class Exit(NamedTuple):
    """A worker ended that nobody had stopped."""

    name: str
    code: int
    at_s: float
    log: str

    def __str__(self) -> str:
        return f"worker {self.name} ended by itself, status {self.code}: {self.log}"


class Chapter(Cluster):
    """Three workers of an installation of their own, under load. A worker that ends by itself is started again."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        folder.mkdir()
        super().__init__(lab.brokers.bootstrap, folder, partitions=PARTITIONS, **SETTINGS)
        self.lab = lab
        self.brokers = lab.brokers
        self.random = lab.random
        self.history = History()
        self.exits: list[Exit] = []
        self._floods = itertools.count()
        self._ports = {name: lasting_port() for name in NAMES}
        self._witnessed = WitnessReader(self.witness, self.history)
        self._one_starts = threading.Lock()
        self._closed = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        urls = [f"http://{LOOPBACK}:{port}" for port in self._ports.values()]
        self.traffic = Traffic(self.history, urls, lab.brokers.bootstrap, self.queue_topic, PARTITIONS)
        if lab.network is not None:
            links = {name: lab.network.link(f"client-{name}-{self.number}", port) for name, port in self._ports.items()}
            self.traffic.urls = [f"http://{LOOPBACK}:{link.port}" for link in links.values()]
            for name, port in self._ports.items():
                lab.network.link(f"peer-{name}-{self.number}", port)

    @property
    def number(self) -> str:
        """Part of the names of its links."""
        return self.name.rpartition("-")[2]

    @property
    def network(self) -> Network:
        assert self.lab.network is not None
        return self.lab.network

    def __enter__(self) -> Chapter:
        super().__enter__()
        try:
            for name in NAMES:
                self.start_worker(name)
            self.wait_recovered()
            create_queues(self.traffic.urls, LEASE_S)
        except BaseException:
            self.__exit__()
            raise
        self._supervisor.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._closed.set()
        if self._supervisor.is_alive():
            self._supervisor.join(10)
        self.traffic.stop()
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
        super().__exit__(*details)

    # -- workers

    def worker(self, name: str) -> Worker:
        """The process that runs under a name, or ran last."""
        return [w for w in self.workers if w.folder.name == name][-1]

    @property
    def running(self) -> list[Worker]:
        """Those that run now: one that ended by itself is about to be started again."""
        return [w for w in map(self.worker, NAMES) if not w.ending and w.running]

    def start_worker(self, name: str) -> Worker:
        with self._one_starts:
            settings: dict[str, Any] = {
                "web_port": self._ports[name],
                "kafka": f"kafka://{self.lab.bootstrap_of(name)}",
            }
            if self.lab.network is not None:
                link = self.network.links[f"peer-{name}-{self.number}"]
                settings["web_url"] = f"http://{LOOPBACK}:{link.port}"
            return self.start(name, ready=False, **settings)

    def restart_worker(self, name: str) -> None:
        """As a deploy does."""
        self.worker(name).stop(30)
        self.start_worker(name)

    def _supervise(self) -> None:
        while not self._closed.wait(0.5):
            for name in NAMES:
                worker = self.worker(name)
                if not worker.ending and not worker.running:
                    last = [line for line in worker.log.splitlines() if line][-1:]
                    self.exits.append(Exit(name, worker.process.returncode, time.time(), "".join(last)[-300:]))
                    worker.ending = True
                    time.sleep(1)
                    if not self._closed.is_set():
                        self.start_worker(name)

    # -- after a fault

    def wait_recovered(self) -> float:
        """Wait until all replicas are in sync, and all workers ready with all partitions served. Seconds it took."""
        began = time.monotonic()
        _wait(self._in_sync, "all replicas are in sync")
        _wait(self._served, "all partitions are served once, by workers that are ready")
        return time.monotonic() - began

    def _in_sync(self) -> bool:
        if not all(self.brokers[n].is_running for n in IDS):
            return False
        with contextlib.suppress(KafkaError, OSError, TimeoutError):
            return bool(self.run(isr_full(self.bootstrap), 30))
        return False

    def _served(self) -> bool:
        running = self.running
        if len(running) < len(NAMES) or not all(w.get("/health/ready")[0] == 200 for w in running):
            return False
        return sorted(n for w in running for n in w.serving()) == list(range(PARTITIONS))

    def flood(self, count: int, size: int) -> None:
        """Send large messages, with the plain producer."""
        names = [str(Name("flood", "", next(self._floods))) for _ in range(count)]
        began_s = time.time()
        with self.history.lock:
            self.history.tried.update(names)
        sent = self.run(self._send("bulk-flood", names, size=size))
        with self.history.lock:
            self.history.confirmed.update((one.id, (began_s, time.time())) for one in sent)

    def read_witness(self) -> None:
        self._witnessed.read()

    def wait_finished(self, timeout_s: float) -> None:
        """Wait until all that was confirmed is finished, and nothing is left in the queues, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.read_witness()
            if not self.history.missing() and not self._left():
                break
            time.sleep(1)
        time.sleep(0.5)  # the last lines of the handlers
        self.read_witness()

    def _left(self) -> str:
        try:
            return self.unsettled()
        except (KafkaError, TimeoutError) as error:
            return repr(error)

    def markers(self) -> dict[int, list[Any]]:
        """All records of the markers topic, by partition."""
        found: dict[int, list[Any]] = {n: [] for n in range(PARTITIONS)}
        for record in self.read(f"{self.name}.markers", PARTITIONS):
            found[record.partition].append(record)
        assert all(records and records[0].offset == 0 for records in found.values()), "the logs were trimmed"
        return found

    @property
    def killed(self) -> set[int]:
        """Processes of workers that ended by a signal that they did not handle."""
        return {w.pid for w in self.workers if (w.process.poll() or 0) < 0}


async def isr_full(bootstrap: str) -> bool:
    """Whether all replicas of all topics are in sync."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5_000)
    await admin.start()
    try:
        described = await admin.describe_topics()
    finally:
        await admin.close()
    return all(len(p["isr"]) == len(p["replicas"]) for topic in described for p in topic["partitions"])


def _wait(condition: Callable[[], bool], what: str) -> None:
    """Like `until`, but what is asked costs the parts something, so it is asked only from time to time."""
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {RECOVERY_S} s: {what}"
        time.sleep(0.3)


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """The environment has these variables during the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
