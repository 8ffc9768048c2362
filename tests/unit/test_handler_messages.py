"""A handler's message has all that a client's message has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agents.handlers import Handlers
from agents.remote_handlers import Taken
from marq.client.wire import Delivery
from marq.core.rows import Record
from marq.message import ManualMessage, Message
from tests.unit.core_helpers import Worker

HEADERS = [
    ("colour", b"red"),
    ("empty", None),
    ("colour", b"blue"),
    ("marq-key", b"own"),
    ("marq-group", b"customer-7"),
    ("marq-delay-ms", b"0"),
    ("marq-dead-queue", b"orders"),
    ("marq-dead-reason", b"max-receives"),
]


@pytest.mark.parametrize("kind", [Message, ManualMessage])
def test_all_that_a_clients_message_tells_a_handlers_message_tells(kind: type[Message]) -> None:
    message = kind("t", 1, "q", Record(5, 1_000, b"q", b'{"a": 1}', HEADERS), 2)
    told = {name: getattr(message, name) for name in set(Delivery.__struct_fields__) - {"receipt"}}
    assert told == {
        "queue": "q",
        "topic": "t",
        "partition": 1,
        "offset": 5,
        "attempt": 2,
        "sent_ms": 1_000,
        "payload": b'{"a": 1}',
        "key": b"own",
        "group": "customer-7",
        "headers": {
            "colour": b"blue",
            "empty": b"",
            "marq-dead-queue": b"orders",
            "marq-dead-reason": b"max-receives",
        },
    }
    assert message.json() == {"a": 1}
    plain = kind("t", 1, "q", Record(5, 1_000, b"q", None, []), 1)
    assert (plain.key, plain.group, plain.headers, plain.payload) == (None, None, {}, b"")


@pytest.mark.parametrize("settle", [None, lambda message, delay_ms: None])
@pytest.mark.parametrize(("queue_id", "key"), [(None, None), ("q", b"customer-7")])
def test_in_topic_mode_the_key_of_the_record_is_the_senders(
    queue_id: str | None, key: bytes | None, settle: Any
) -> None:
    """Here and in a delivery of another worker."""
    settings = SimpleNamespace(queue_id=queue_id)
    handlers: Any = SimpleNamespace(
        settings=settings, _names={}, ownership=SimpleNamespace(topics=SimpleNamespace(queue="t"))
    )
    worker = Worker().serve()
    worker.send(queue="customer-7")
    (handout,) = worker.receive(queue="customer-7")
    owned: Any = SimpleNamespace(number=0, owner=worker.owner)
    (here,) = Handlers.messages(handlers, owned, handout.offsets, settle)
    record = worker.owner.partition.messages[0]
    (taken,) = Handlers.messages_taken(handlers, Taken(0, 1, 1, 1_000, [(record, "q", 1)]), settle)
    assert here.key == taken.key == key
