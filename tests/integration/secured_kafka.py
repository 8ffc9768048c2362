"""A real Kafka with TLS, users with SCRAM passwords, and access control lists.

Its plain listener is only for the test, which is the super user there; all others have to use `address`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import trustme
from cryptography.hazmat.primitives import serialization

from app.kafka.broker import LOOPBACK, EmbeddedBroker, free_port, install_kafka, java_command

MECHANISM = "SCRAM-SHA-512"


class SecuredKafka:
    """One broker; to be used as a context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"{LOOPBACK}:{free_port()}"
        self.ca_file = folder / "ca.pem"
        self.other_ca_file = folder / "other-ca.pem"
        key_store = folder / "broker.pem"
        authority = trustme.CA(key_type=trustme.KeyType.RSA)
        authority.cert_pem.write_to_path(str(self.ca_file))
        trustme.CA().cert_pem.write_to_path(str(self.other_ca_file))
        _write_key_store(key_store, authority.issue_cert(LOOPBACK, "localhost", key_type=trustme.KeyType.RSA))
        port, controller = free_port(), free_port()
        self.broker = EmbeddedBroker(
            folder / "data",
            port,
            config={
                "controller.quorum.voters": f"1@{LOOPBACK}:{controller}",
                "listeners": f"PLAINTEXT://{LOOPBACK}:{port},SECURE://{self.address},CONTROLLER://{LOOPBACK}:{controller}",
                "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port},SECURE://{self.address}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL,CONTROLLER:PLAINTEXT",
                "sasl.enabled.mechanisms": MECHANISM,
                "listener.name.secure.scram-sha-512.sasl.jaas.config": (
                    "org.apache.kafka.common.security.scram.ScramLoginModule required;"
                ),
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(key_store),
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:ANONYMOUS",
            },
        )

    @property
    def plain(self) -> str:
        """The listener of the super user."""
        return self.broker.bootstrap

    def __enter__(self) -> SecuredKafka:
        self.broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.stop()

    def settings(self, user: str, password: str, **values: Any) -> dict[str, Any]:
        """The settings with which a worker can log in."""
        return {
            "kafka": f"kafka://{self.address}",
            "kafka_username": user,
            "kafka_password": password,
            "kafka_ca_file": self.ca_file,
        } | values

    def add_user(self, name: str, password: str) -> None:
        self._run(
            "kafka.admin.ConfigCommand",
            *("--alter", "--entity-type", "users", "--entity-name", name),
            *("--add-config", f"{MECHANISM}=[password={password}]"),
        )

    def allow(
        self, user: str, operations: Iterable[str], *, topics: Iterable[str] = (), groups: Iterable[str] = ()
    ) -> None:
        """What `kafka-acls.sh --add` does."""
        self._change("--add", user, operations, topics, groups)

    def take_away(
        self, user: str, operations: Iterable[str], *, topics: Iterable[str] = (), groups: Iterable[str] = ()
    ) -> None:
        """What `kafka-acls.sh --remove` does."""
        self._change("--remove", user, operations, topics, groups, "--force")

    def _change(
        self, what: str, user: str, operations: Iterable[str], topics: Iterable[str], groups: Iterable[str], *more: str
    ) -> None:
        self._run(
            "org.apache.kafka.tools.AclCommand",
            *(what, "--allow-principal", f"User:{user}", *more),
            *(word for operation in operations for word in ("--operation", operation)),
            *(word for topic in topics for word in ("--topic", topic)),
            *(word for group in groups for word in ("--group", group)),
        )

    def _run(self, tool: str, *arguments: str) -> None:
        """One of Kafka's own command-line tools, as the super user."""
        command = [
            *java_command(install_kafka(), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
            *(tool, "--bootstrap-server", self.plain, *arguments),
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def _write_key_store(file: Path, certificate: trustme.LeafCert) -> None:
    # Kafka reads PKCS8 keys only
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + b"".join(part.bytes() for part in certificate.cert_chain_pems)
    )
