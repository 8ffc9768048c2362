"""A message as its receiver sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from marq.core.policies import check_delay
from marq.protocol.headers import DEAD, H_GROUP, HEADER_KEY, RESERVED


class Message(Struct, eq=False):  # a handler of batches gets one for each record: a plain class takes twice as long
    """One delivery of a message.

    `(topic, partition, offset)` identifies the message for ever; `attempt` counts its deliveries from 1. It tells all
    that a message of `marq.client` tells, except for the receipt.
    """

    topic: str
    partition: int
    queue: str
    _record: Any
    attempt: int
    _is_key_own: bool = False  # the record's key is the sender's, not the queue: in topic mode

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
        return self._record.key if self._is_key_own else self._header(HEADER_KEY)

    @property
    def group(self) -> str | None:
        """The group that the message was sent with."""
        value = self._header(H_GROUP)
        return None if value is None else value.decode(errors="replace")

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The sender's headers, the last one of each name; in a dead letter also `marq-dead-…`."""
        return {
            name: value or b""
            for name, value in self._record.headers
            if not name.startswith(RESERVED) or name.startswith(DEAD)
        }

    def _header(self, header: str) -> bytes | None:
        return next((value for name, value in reversed(self._record.headers) if name == header), None)

    def json(self) -> Any:
        """The payload, decoded from JSON. Raises `ValueError` if it is not JSON."""
        return json.loads(self.payload)

    def __repr__(self) -> str:
        return f"<Message {self.topic}:{self.partition}:{self.offset} of {self.queue!r}, attempt {self.attempt}>"


class ManualMessage(Message, eq=False):
    """A message of a handler with `manual=True`, which must acknowledge it."""

    _settle: Any = None

    def ack(self) -> None:
        """Finish the message: it is never delivered again once Kafka has the marker."""
        self._settle(self, None)

    def release(self, delay_ms: int = 0) -> None:
        """Give the message back: it is delivered again after `delay_ms`, at most a year. Raises `BadValueError`."""
        check_delay(delay_ms)
        self._settle(self, delay_ms)
