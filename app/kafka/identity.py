"""Which Kafka this is: the ids of the cluster and of topics, by which local stores and manifests know their logs.

Kafka gives ids to topics from version 2.8 on. A topic that is deleted and made anew has another one.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from aiokafka.errors import NodeNotReadyError, TopicAuthorizationFailedError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.metadata import MetadataRequest, MetadataRequest_v5
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from app.kafka.connection import admin_client
from app.kafka.topics import Topics
from app.settings import Settings
from marq.core.world import World

_NO_ID = bytes(16)


class _Uuid:
    """A type that aiokafka lacks: 16 bytes."""

    @staticmethod
    def encode(value: bytes) -> bytes:
        return value

    @staticmethod
    def decode(data: Any) -> bytes:
        return bytes(data.read(16))


class _IdentityResponse(Response):
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _IdentityRequestV10(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = _IdentityResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("topic_id", _Uuid),
                ("topic", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _IdentityRequest(Request[MetadataRequest_v5 | _IdentityRequestV10]):
    """A metadata request of the version that has ids of topics, or of one that has the cluster's alone."""

    API_KEY: ClassVar[int] = 3

    def __init__(self, topics: list[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[Any]) -> Any:
        if request_struct_class is _IdentityRequestV10:
            return _IdentityRequestV10([(_NO_ID, name, {}) for name in self._topics], False, False, False, {})
        return MetadataRequest_v5(self._topics, False)


MetadataRequest.register(_IdentityRequest)  # an answer is waited for as long as theirs: `internals`


class Identity(NamedTuple):
    """The ids of a cluster and of topics, by name. An empty id: Kafka gives none."""

    cluster: str
    topics: Mapping[str, str]

    def world(self, topics: Topics) -> World:
        """The world of both logs."""
        return World(self.cluster, self.topics[topics.queue], self.topics[topics.markers])

    def of_store(self, topics: Topics, changelog: str) -> str:
        """The world of a local store, as text."""
        return " ".join((self.cluster, *(self.topics[name] for name in (changelog, topics.queue, topics.markers))))


async def identify(client: Any, names: Iterable[str]) -> Identity:
    """Ask any broker for the ids.

    Args:
        client: an `AIOKafkaClient`.
        names: of topics, which have to exist.

    Raises:
        KafkaError: no answer, or a topic does not exist.
    """
    node = client.get_random_node()
    if node is None:
        raise NodeNotReadyError("no broker is known")
    answer = await client.send(node, _IdentityRequest(list(names)))
    ids = {}
    for code, name, *rest in answer.topics:
        if code and code != TopicAuthorizationFailedError.errno:
            raise for_code(code)(name)
        topic_id = rest[0] if answer.API_VERSION >= 10 else _NO_ID
        ids[name] = "" if topic_id == _NO_ID else urlsafe_b64encode(topic_id).rstrip(b"=").decode()
    return Identity(answer.cluster_id or "", ids)


async def cluster_id(settings: Settings) -> str:
    """The id of the Kafka that the settings name; empty if it gives none.

    Raises:
        BrokerError: Kafka can't be reached, or refuses us.
    """
    async with admin_client(settings) as admin:
        return (await identify(admin._client, ())).cluster
