"""Permissions in Kafka: a missing one is reported at start, not when it is first needed.

From version 2.3 on, Kafka lists the operations that it allows on a topic or group. Where it does not, we assume that
all are allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError, IncompatibleBrokerVersion, KafkaError
from aiokafka.protocol.admin import DescribeGroupsRequest_v3, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Int16, Int32, Schema, String

from app.kafka.internals import ask

#: Numbers of the operations in Kafka's protocol.
OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Delete": 6, "Describe": 8, "DescribeConfigs": 10}
#: The permissions without which marq can be told to run (`MARQ_KAFKA_WITHOUT`), and what that costs.
DISPENSABLE = {
    "Delete": "no old record is deleted",
    "DescribeConfigs": "the settings of topics are not checked",
}
#: The value with which Kafka says that it does not list the operations.
_UNTOLD = -(2**31)
_TOPIC_AUTHORIZATION_FAILED = 29
_GROUP_AUTHORIZATION_FAILED = 30
#: Seconds to wait for the group's coordinator: a new Kafka has none yet.
COORDINATOR_S = 20.0


class _AccessResponse(Response):
    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            Array(("node_id", Int32), ("host", String("utf-8")), ("port", Int32), ("rack", String("utf-8"))),
        ),
        ("cluster_id", String("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("topic", String("utf-8")),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline_replicas", Array(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("cluster_authorized_operations", Int32),
    )


class _AccessRequestV8(RequestStruct):
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = _AccessResponse
    SCHEMA = Schema(
        ("topics", Array(String("utf-8"))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    )


class _AccessRequest(Request[_AccessRequestV8]):
    """A metadata request that asks for permissions. Those of aiokafka can't."""

    API_KEY: ClassVar[int] = 3

    def __init__(self, topics: list[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[_AccessRequestV8]) -> _AccessRequestV8:
        return request_struct_class(self._topics, False, False, True)


class _GroupAccessRequestV3(DescribeGroupsRequest_v3):
    # aiokafka leaves out the last field of the answer, the one that we need
    RESPONSE_TYPE = DescribeGroupsResponse_v3


class _GroupAccessRequest(Request[_GroupAccessRequestV3]):
    API_KEY: ClassVar[int] = 15

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: type[_GroupAccessRequestV3]) -> _GroupAccessRequestV3:
        return request_struct_class([self._group], True)


async def missing_rights(
    admin: AIOKafkaAdminClient, topics: Mapping[str, tuple[str, ...]], groups: Mapping[str, str]
) -> dict[tuple[str, str], list[str]]:
    """Operations that Kafka does not allow us, by kind and name of the resource; empty if all is allowed.

    Args:
        topics: the operations that are needed on each topic.
        groups: the operation that is needed on each consumer group.
    """
    missing: dict[tuple[str, str], list[str]] = {}
    for name, allowed in (await _allowed_on_topics(admin, list(topics))).items():
        if lacking := [operation for operation in topics[name] if not allowed >> OPERATIONS[operation] & 1]:
            missing["topic", name] = lacking
    for name, operation in groups.items():
        if not await _may_use_group(admin, name, operation):
            missing["group", name] = [operation]
    return missing


async def _allowed_on_topics(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, int]:
    """The allowed operations of each topic, as bits. Topics for which Kafka lists none are left out."""
    try:
        answer: Any = await ask(admin, _AccessRequest(names))
    except (NotImplementedError, IncompatibleBrokerVersion):
        return {}
    bits = {}
    for code, name, *_rest, allowed in answer.topics:
        if code == _TOPIC_AUTHORIZATION_FAILED:
            bits[name] = 0
        elif code == 0 and allowed != _UNTOLD:
            bits[name] = allowed
    return bits


async def _may_use_group(admin: AIOKafkaAdminClient, group: str, operation: str) -> bool:
    deadline = asyncio.get_running_loop().time() + COORDINATOR_S
    while True:
        try:
            coordinator = await admin.find_coordinator(group)
            answer: Any = await ask(admin, _GroupAccessRequest(group), coordinator)
        except GroupAuthorizationFailedError:
            return False
        except (NotImplementedError, IncompatibleBrokerVersion):
            return True
        except KafkaError as error:
            if not error.retriable or asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.2)
            continue
        ((code, *_rest, allowed),) = answer.groups
        if code == _GROUP_AUTHORIZATION_FAILED:
            return False
        return allowed == _UNTOLD or bool(allowed >> OPERATIONS[operation] & 1)


def as_lines(missing: Mapping[tuple[str, str], list[str]], user: str | None, bootstrap: str) -> Iterator[str]:
    """One line per resource: the missing permissions, and the command that grants them."""
    whom = f"user {user!r}" if user else "us"
    for (kind, name), operations in missing.items():
        options = " ".join(f"--operation {operation}" for operation in operations)
        yield (
            f"Kafka does not allow {whom} {', '.join(operations)} on {kind} {name}; mend: "
            f"kafka-acls.sh --bootstrap-server {bootstrap} --add --allow-principal User:{user or 'NAME'} {options} "
            f"--{kind} {name}{_alternative(operations)}"
        )


def _alternative(operations: list[str]) -> str:
    """How to go on without the permissions, if that is possible and nothing else is missing."""
    if not DISPENSABLE.keys() >= set(operations):
        return ""
    price = ", and ".join(DISPENSABLE[operation] for operation in operations)
    return f"; or set MARQ_KAFKA_WITHOUT={','.join(operations)}: {price}"
