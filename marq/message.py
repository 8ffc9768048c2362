"""A message as its receiver sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from marq.core.policies import check_delay
from marq.protocol.headers import HEADER_KEY, RESERVED


class Message(Struct, eq=False):  # a handler of batches gets one for each record: a plain class takes twice as long
    """One delivery of a message.

    `(topic, partition, offset)` identifies the message for ever; `attempt` counts its deliveries from 1.
    """

    topic: str
    partition: int
    queue: str
    _record: Any
    attempt: int

    @property
    def offset(self) -> int:
        """Offset in the queue topic."""
        return self._record.offset  # type: ignore[no-any-return]

    @property
    def payload(self) -> bytes:
        """The bytes that were sent; empty for a record without value."""
        return self._record.value or b""

    @property
    def sent_ms(self) -> int:
        """When Kafka accepted the message, in milliseconds since 1970."""
        return self._record.timestamp  # type: ignore[no-any-return]

    @property
    def key(self) -> bytes | None:
        """The sender's own key."""
        return next((value for name, value in reversed(self._record.headers) if name == HEADER_KEY), None)

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The sender's headers; the last one of each name."""
        return {name: value for name, value in self._record.headers if not name.startswith(RESERVED)}

    def json(self) -> Any:
        """The payload, decoded from JSON. Raises `ValueError` if it is not JSON."""
        return json.loads(self.payload)

    def __repr__(self) -> str:
        return f"<Message {self.topic}:{self.partition}:{self.offset} of {self.queue!r}, attempt {self.attempt}>"


class ManualMessage(Message, eq=False):
    """A message of a handler with `manual=True`, which must acknowledge it."""

    _settle: Any

    def ack(self) -> None:
        """Finish the message: it is never delivered again once Kafka has the marker."""
        self._settle(self, None)

    def release(self, delay_ms: int = 0) -> None:
        """Give the message back: it is delivered again after `delay_ms`, at most a year. Raises `BadValueError`."""
        check_delay(delay_ms)
        self._settle(self, delay_ms)
