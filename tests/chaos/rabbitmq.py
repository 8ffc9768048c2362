"""Three nodes of RabbitMQ on this machine, with their own ports, data and cookie, and a sender to a quorum queue."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.kafka.broker import LOOPBACK, free_port
from tests.chaos.history import Asked, History, Name
from tests.chaos.peer_worker import HEARTBEAT_S
from tests.chaos.traffic import PATIENCE_S, PAUSE_S, body_of
from tests.faults.brokers import IDS

START_TIMEOUT_S = 120.0
#: Threads of the sender: a client waits for the confirmation of each message.
SENDERS = 8


class NoRabbit(Exception):
    """There is no RabbitMQ on this machine."""


def program(name: str) -> str:
    """A program of RabbitMQ itself: those in the path of Debian become another user. Raises `NoRabbit`."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob(f"*/sbin/{name}"))
    if not found:
        raise NoRabbit("RabbitMQ is not installed (Debian: apt-get install rabbitmq-server)")
    return str(found[-1])


class Node:
    """One node. It is a group of processes."""

    def __init__(self, folder: Path, n: int, port: int, more: dict[str, str], config: str) -> None:
        folder.mkdir(parents=True)
        (folder / "rabbitmq.conf").write_text(config)
        self.port = port
        self._log = folder / "out.log"
        self._pid_file = folder / "pid"
        self._process: subprocess.Popen[bytes] | None = None
        self._variables = os.environ | more | {
            "RABBITMQ_NODENAME": f"marq{n}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(self._pid_file),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }  # fmt: skip

    @property
    def pid(self) -> int | None:
        """That of the runtime, which is started by a script."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._pid_file.read_text())
        return None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when clients can connect."""
        self._pid_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program("rabbitmq-server")],
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.answers():
            assert self.is_running, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"no answer within {START_TIMEOUT_S} s: {self._log}"
            time.sleep(0.2)

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=2) as connection:
            connection.sendall(b"AMQP\0\0\x09\1")
            return connection.recv(1) == b"\1"
        return False

    def stop(self) -> None:
        if self.is_running and self._process is not None:
            os.kill(self.pid or self._process.pid, signal.SIGTERM)
            self._process.wait(60)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Nodes:
    """A cluster of three."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._home = folder
        cookie = folder / ".erlang.cookie"
        cookie.write_text("".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=20)))
        cookie.chmod(0o400)
        self._more = {"HOME": str(folder), "ERL_EPMD_PORT": str(free_port()), "ERL_EPMD_ADDRESS": LOOPBACK}
        config = "cluster_formation.peer_discovery_backend = classic_config\nloopback_users = none\n"
        config += "".join(f"cluster_formation.classic_config.nodes.{n} = marq{n}@localhost\n" for n in IDS)
        config += "cluster_formation.randomized_startup_delay_range.min = 0\n"
        config += "cluster_formation.randomized_startup_delay_range.max = 3\n"
        # a node that is paused for longer counts as gone; the default is a minute
        self._nodes = {n: Node(folder / f"node-{n}", n, free_port(), self._more, config) for n in IDS}
        self._names: subprocess.Popen[bytes] | None = None
        self.bootstrap = ",".join(f"{LOOPBACK}:{node.port}" for node in self._nodes.values())

    def __getitem__(self, n: int) -> Node:
        return self._nodes[n]

    def __enter__(self) -> Nodes:
        program("rabbitmq-server")
        epmd = shutil.which("epmd")
        if epmd is None:
            raise NoRabbit("epmd, a part of Erlang, is not installed")
        self._names = subprocess.Popen([epmd], env=os.environ | self._more)  # ours ends with us
        try:
            with ThreadPoolExecutor(len(IDS)) as threads:
                list(threads.map(Node.start, self._nodes.values()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes.values():
            node.kill()
        if self._names is not None:
            self._names.kill()
            self._names.wait()


class Senders:
    """Sends messages to a quorum queue, each of which is confirmed before the next one of its thread."""

    def __init__(self, history: History, addresses: str, queue: str) -> None:
        self.errors: list[BaseException] = []
        self._history, self._queue = history, queue
        self._ports = [int(address.rpartition(":")[2]) for address in addresses.split(",")]
        self._numbers = itertools.count()
        self._sending = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def _channel(self, port: int) -> Iterator[object]:
        import pika

        parameters = pika.ConnectionParameters(
            LOOPBACK, port, heartbeat=HEARTBEAT_S, socket_timeout=PATIENCE_S, blocked_connection_timeout=PATIENCE_S
        )
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            yield channel

    def declare(self) -> None:
        """Make the queue. Raises an error of AMQP as long as the nodes have not found each other."""
        with self._channel(self._ports[0]) as channel:
            channel.queue_declare(  # type: ignore[attr-defined]
                self._queue, durable=True, arguments={"x-queue-type": "quorum", "x-quorum-initial-group-size": 3}
            )

    def start(self, rate: float) -> None:
        self._sending.set()
        for i in range(SENDERS):
            thread = threading.Thread(target=self._guarded, args=(i, rate / SENDERS), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guarded(self, i: int, rate: float) -> None:
        try:
            self._send(i, rate)
        except BaseException as error:
            self.errors.append(error)

    def _send(self, i: int, rate: float) -> None:
        from pika.exceptions import AMQPError

        ports, at_s = itertools.cycle(self._ports[i % 3 :] + self._ports[: i % 3]), time.monotonic()
        while self._sending.is_set():
            began_s = time.time()
            try:
                with self._channel(next(ports)) as channel:
                    while self._sending.is_set():
                        began_s = time.time()
                        self._send_one(i, channel)
                        at_s = max(at_s + 1 / rate, time.monotonic() - 1.0)
                        time.sleep(max(0.0, at_s - time.monotonic()))
            except (AMQPError, OSError):
                self._asked(i, began_s, False)
                time.sleep(PAUSE_S)

    def _send_one(self, i: int, channel: object) -> None:
        import pika

        name, began_s = Name("rabbitmq", "", next(self._numbers)), time.time()
        with self._history.lock:
            self._history.tried.add(str(name))
        channel.basic_publish(  # type: ignore[attr-defined]
            "", self._queue, body_of(name).encode(), pika.BasicProperties(delivery_mode=2), mandatory=True
        )
        with self._history.lock:
            self._history.confirmed[str(name)] = (began_s, time.time())
        self._asked(i, began_s, True)

    def _asked(self, i: int, began_s: float, answered: bool) -> None:
        with self._history.lock:
            self._history.asked.append(Asked(f"rabbitmq {i}", "send", began_s, time.time(), answered))

    def stop_sending(self) -> None:
        self._sending.clear()
        for thread in self._threads:
            thread.join(60)

    stop = stop_sending
