"""Ids of the cluster and of topics, as brokers of different versions tell them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import NodeNotReadyError, UnknownTopicOrPartitionError
from aiokafka.protocol.metadata import MetadataRequest, MetadataResponse_v5

from app.kafka.identity import Identity, _IdentityResponse, identify

ID = bytes(range(16))
TEXT = "AAECAwQFBgcICQoLDA0ODw"
TOPICS: Any = SimpleNamespace(queue="q", markers="m")
REFUSED, UNKNOWN = 29, 3


class Broker:
    """Answers metadata requests of one version."""

    def __init__(self, version: int, *topics: tuple[int, str, bytes]) -> None:
        self.version = version
        self.topics = topics

    def get_random_node(self) -> int:
        return 1

    async def send(self, node: int, request: Any) -> Any:
        assert isinstance(request, MetadataRequest), "its answer is waited for as for metadata"
        asked = request.prepare({3: (0, self.version)})
        asked.encode()
        if self.version < 10:
            answer: Any = MetadataResponse_v5(
                0, [(1, "host", 9092, None)], "cluster", 1, [(code, name, False, []) for code, name, _ in self.topics]
            )
        else:
            partition = (0, 0, 1, 5, [1, 2], [1], [], {})
            topics = [(code, name, id, False, [partition] * 3, 0, {}) for code, name, id in self.topics]
            answer = _IdentityResponse(0, [(1, "host", 9092, None, {})], "cluster", 1, topics, 0, {})
        return type(answer).decode(answer.encode())


def identity(broker: Broker) -> Identity:
    return asyncio.run(identify(broker, ("q", "m")))


def test_ids_are_told_as_the_tools_of_kafka_show_them() -> None:
    found = identity(Broker(13, (0, "q", ID), (0, "m", ID[::-1])))
    assert (found.cluster, found.topics["q"]) == ("cluster", TEXT)
    assert found.topics["m"] not in ("", TEXT)
    world = found.world(TOPICS)
    assert (world.queue, world.markers) == (TEXT, found.topics["m"])


@pytest.mark.parametrize(
    "broker", [Broker(9, (0, "q", ID), (0, "m", ID)), Broker(10, (0, "q", bytes(16)), (REFUSED, "m", ID))]
)
def test_a_kafka_that_tells_no_ids_of_topics_tells_the_cluster(broker: Broker) -> None:
    found = identity(broker)
    assert found.cluster == "cluster" and not found.topics["q"]


def test_a_topic_that_is_not_there_has_no_identity() -> None:
    with pytest.raises(UnknownTopicOrPartitionError):
        identity(Broker(10, (UNKNOWN, "q", bytes(16)), (0, "m", ID)))


def test_without_a_broker_it_can_be_tried_again() -> None:
    with pytest.raises(NodeNotReadyError):
        asyncio.run(identify(SimpleNamespace(get_random_node=lambda: None), ("q",)))
