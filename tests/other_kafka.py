"""Brokers of other versions of Kafka than the embedded one: `MARQ_TEST_KAFKA=2.8.2 pytest …`, `make test-kafka`.

Each version has a lock of its jars (`requirements/kafka-<version>-jars.txt`). Versions without KRaft, or whose KRaft
lacks what a test needs, run with a ZooKeeper of their own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.kafka.broker import KAFKA_VERSION, LOOPBACK, EmbeddedBroker, free_port, install_kafka, java_command

ROOT = Path(__file__).resolve().parents[1]
#: Seconds that a ZooKeeper may take until it listens.
ZOOKEEPER_S = 30.0
#: Seconds that a broker may take from its first answer until it is in its own metadata.
REGISTRATION_S = 30.0
#: The first version whose KRaft is meant for production, and the first one whose KRaft knows SCRAM.
KRAFT, KRAFT_WITH_SCRAM = (3, 3), (3, 5)

LOG4J_1 = """\
log4j.rootLogger=WARN, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %-5p %m (%c{1})%n
"""

Version = tuple[int, ...]


def parsed(version: str) -> Version:
    return tuple(int(part) for part in version.split("."))


def locked_versions() -> list[str]:
    """The versions that tests can run on, by age."""
    locks = (ROOT / "requirements").glob("kafka-*-jars.txt")
    return sorted(
        [KAFKA_VERSION, *(lock.name.split("-")[1] for lock in locks if lock.name.count("-") == 2)], key=parsed
    )


def version_for_tests() -> str:
    """The version of the brokers that tests start: the one in `MARQ_TEST_KAFKA`, else ours."""
    given = os.environ.get("MARQ_TEST_KAFKA", "")
    return given if given and ":" not in given else KAFKA_VERSION


def broker_for_tests(
    folder: str | Path, port: int | None = None, *, scram: bool = False, **options: Any
) -> EmbeddedBroker:
    """A broker, not started yet, of the version for tests.

    Parameters:
        scram: users with SCRAM passwords are to be made on it.
        options: of `EmbeddedBroker`.
    """
    version = version_for_tests()
    if version == KAFKA_VERSION:
        return EmbeddedBroker(folder, port, **options)
    zookeeper = parsed(version) < (KRAFT_WITH_SCRAM if scram else KRAFT)
    return OtherKafka(version, folder, port, zookeeper=zookeeper, **options)


class OtherKafka(EmbeddedBroker):
    """As `EmbeddedBroker`, of another version."""

    def __init__(
        self, version: str, folder: str | Path, port: int | None = None, *, zookeeper: bool, **options: Any
    ) -> None:
        super().__init__(folder, port, **options)
        self.version = version
        self._zookeeper = _ZooKeeper(self) if zookeeper else None

    def start(self) -> str:
        if self._zookeeper is not None:
            self._zookeeper.start()
        try:
            bootstrap = super().start()
            if self._zookeeper is not None:
                _await_registration(bootstrap)
        except BaseException:
            self.kill()
            raise
        return bootstrap

    def stop(self) -> None:
        super().stop()
        self._end_zookeeper()

    def kill(self) -> None:
        super().kill()
        self._end_zookeeper()

    def _end_zookeeper(self) -> None:
        if self._zookeeper is not None:
            self._zookeeper.stop()

    def _install(self) -> list[Path]:
        return install_kafka(self._cache_dir, self.version)

    def _java(self, jars: Sequence[Path], *jvm_options: str) -> list[str]:
        config = self.home / "log4j.properties"
        config.write_text(LOG4J_1)
        return java_command(jars, *jvm_options, f"-Dlog4j.configuration=file:{config}")

    def _format(self, jars: Sequence[Path]) -> None:
        if self._zookeeper is None:
            super()._format(jars)

    def _properties(self, port: int) -> dict[str, str]:
        properties = super()._properties(port)
        return properties if self._zookeeper is None else _with_zookeeper(properties, self._zookeeper.address)


def _with_zookeeper(properties: Mapping[str, str], address: str) -> dict[str, str]:
    """The same broker without KRaft."""
    found = {key: value for key, value in properties.items() if not key.startswith(("controller.", "process."))}
    for listed in ("listeners", "listener.security.protocol.map"):
        found[listed] = ",".join(part for part in found[listed].split(",") if not part.startswith("CONTROLLER:"))
    if "authorizer.class.name" in found:
        found["authorizer.class.name"] = "kafka.security.authorizer.AclAuthorizer"
    return found | {
        "broker.id": found.pop("node.id"),
        "zookeeper.connect": address,
        # the next broker of this number can't begin before the session of a killed one is over
        "zookeeper.session.timeout.ms": "4000",
    }


def _await_registration(bootstrap: str) -> None:
    """With ZooKeeper, a broker answers before it knows of any broker, itself included."""
    from confluent_kafka.admin import AdminClient

    admin, deadline = AdminClient({"bootstrap.servers": bootstrap}), time.monotonic() + REGISTRATION_S
    while not admin.list_topics(timeout=REGISTRATION_S).brokers:
        assert time.monotonic() < deadline, "the broker has not registered"
        time.sleep(0.05)


class _ZooKeeper:
    """The ZooKeeper of one broker, a process that ends with it."""

    def __init__(self, broker: OtherKafka) -> None:
        self._broker = broker
        self._home = broker.data_dir / "zookeeper"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._port}"

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._home.mkdir(parents=True, exist_ok=True)
        self._broker.home.mkdir(parents=True, exist_ok=True)
        config = self._home / "zoo.cfg"
        config.write_text(
            f"dataDir={self._home / 'data'}\nclientPort={self._port}\nclientPortAddress={LOOPBACK}\n"
            "tickTime=1000\nmaxClientCnxns=0\nadmin.enableServer=false\n"
        )
        command = self._broker._java(
            self._broker._install(),
            "-Xmx128m",
            "-XX:+UseSerialGC",
            "-XX:-UsePerfData",
            "-Dzookeeper.jmx.log4j.disable=true",
        )
        with (self._home / "log").open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + ZOOKEEPER_S
        while True:
            try:
                socket.create_connection((LOOPBACK, self._port), timeout=1).close()
            except OSError:
                said = (self._home / "log").read_text(errors="replace")[-2000:]
                assert self._process.poll() is None, f"ZooKeeper has ended: {said}"
                assert time.monotonic() < deadline, f"ZooKeeper does not listen: {said}"
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # what it has confirmed is on disk
            self._process.wait()
