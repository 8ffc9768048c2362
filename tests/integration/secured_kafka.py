"""A real Kafka with TLS, users with SCRAM passwords, access control lists, and settings that managed Kafkas force: all
topics have the broker's time, and none is created by being named.

Its plain listener is only for the test, which is the super user there; all others have to use `address`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509 import load_pem_x509_certificate

from app.kafka.broker import LOOPBACK, free_port
from tests.integration.cluster import until
from tests.other_kafka import broker_for_tests

MECHANISM = "SCRAM-SHA-512"
KEY_STORE_PASSWORD = "of-the-broker"
#: Kafka's names of the operations, and librdkafka's.
OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}
#: Seconds until an answer to the super user.
ANSWER_S = 30


class SecuredKafka:
    """One broker; to be used as a context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"{LOOPBACK}:{free_port()}"
        self.ca_file = folder / "ca.pem"
        self.other_ca_file = folder / "other-ca.pem"
        key_store = folder / "broker.p12"
        authority = trustme.CA(key_type=trustme.KeyType.RSA)
        authority.cert_pem.write_to_path(str(self.ca_file))
        trustme.CA().cert_pem.write_to_path(str(self.other_ca_file))
        _write_key_store(key_store, authority.issue_cert(LOOPBACK, "localhost", key_type=trustme.KeyType.RSA))
        port, controller = free_port(), free_port()
        self.broker = broker_for_tests(
            folder / "data",
            port,
            scram=True,
            config={
                "controller.quorum.voters": f"1@{LOOPBACK}:{controller}",
                "listeners": f"PLAINTEXT://{LOOPBACK}:{port},SECURE://{self.address},CONTROLLER://{LOOPBACK}:{controller}",
                "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port},SECURE://{self.address}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL,CONTROLLER:PLAINTEXT",
                "sasl.enabled.mechanisms": MECHANISM,
                "listener.name.secure.scram-sha-512.sasl.jaas.config": (
                    "org.apache.kafka.common.security.scram.ScramLoginModule required;"
                ),
                # as some providers force upon all topics
                "log.message.timestamp.type": "LogAppendTime",
                "ssl.keystore.type": "PKCS12",
                "ssl.keystore.password": KEY_STORE_PASSWORD,
                "ssl.key.password": KEY_STORE_PASSWORD,
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
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        change = UserScramCredentialUpsertion(name, info, password.encode())
        for future in self._admin.alter_user_scram_credentials([change]).values():
            future.result(ANSWER_S)

    def allow(
        self, user: str, operations: Iterable[str], *, topics: Iterable[str] = (), groups: Iterable[str] = ()
    ) -> None:
        """What `kafka-acls.sh --add` does."""
        rules = [AclBinding(*rule) for rule in _rules(user, operations, topics, groups)]
        for future in self._admin.create_acls(rules).values():
            future.result(ANSWER_S)
        until(lambda: set(rules) <= self._rules_of(user), "the broker knows them")

    def set_config(self, topic: str, **values: str) -> None:
        """What `kafka-configs.sh --add-config` does to a topic; `_` in names stands for a dot."""
        set_ = AlterConfigOpType.SET
        entries = [ConfigEntry(k.replace("_", "."), v, incremental_operation=set_) for k, v in values.items()]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        for future in self._admin.incremental_alter_configs([resource]).values():
            future.result(ANSWER_S)

    def take_away(
        self, user: str, operations: Iterable[str], *, topics: Iterable[str] = (), groups: Iterable[str] = ()
    ) -> None:
        """What `kafka-acls.sh --remove` does."""
        rules = [AclBindingFilter(*rule) for rule in _rules(user, operations, topics, groups)]
        for future in self._admin.delete_acls(rules).values():
            assert len(future.result(ANSWER_S)) == 1, "there was such a rule"
        gone = {AclBinding(*rule) for rule in _rules(user, operations, topics, groups)}
        until(lambda: not gone & self._rules_of(user), "the broker has forgotten them")

    def _rules_of(self, user: str) -> set[AclBinding]:
        every: tuple[Any, ...] = (ResourceType.ANY, None, ResourcePatternType.ANY)
        rest: tuple[Any, ...] = (f"User:{user}", None, AclOperation.ANY, AclPermissionType.ANY)
        asked = AclBindingFilter(*every, *rest)
        return set(self._admin.describe_acls(asked).result(ANSWER_S))

    @cached_property  # its requests end with it
    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.plain, "log_level": 0})


def _rules(user: str, operations: Iterable[str], topics: Iterable[str], groups: Iterable[str]) -> list[tuple[Any, ...]]:
    resources = [(ResourceType.TOPIC, name) for name in topics] + [(ResourceType.GROUP, name) for name in groups]
    return [
        (kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*", OPERATIONS[operation], AclPermissionType.ALLOW)
        for operation in operations
        for kind, name in resources
    ]


def _write_key_store(file: Path, certificate: trustme.LeafCert) -> None:
    # of the kinds of key stores, all versions of Kafka read this one
    key: Any = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    own, *others = [load_pem_x509_certificate(part.bytes()) for part in certificate.cert_chain_pems]
    encryption = serialization.BestAvailableEncryption(KEY_STORE_PASSWORD.encode())
    file.write_bytes(pkcs12.serialize_key_and_certificates(b"broker", key, own, others, encryption))
