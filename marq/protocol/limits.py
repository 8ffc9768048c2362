"""Sizes that clients, the service and Kafka's topics have to agree on."""

from __future__ import annotations

#: Payload, key and headers of a message. Kafka limits the compressed batch, so a larger one can get into the topic; its
#: row would not fit the changelog.
MESSAGE_MAX_BYTES = 4 * 1024 * 1024
#: Largest record: the largest message, and what Kafka's format, a row around it, or a copy of it adds.
RECORD_MAX_BYTES = MESSAGE_MAX_BYTES + 64 * 1024
#: Headers of a message.
HEADERS_MAX = 100
#: Messages or receipts in one request that the service takes …
BATCH_MAX = 10_000
#: … and that a client sends, with so many bytes of payload if they are several messages.
CLIENT_BATCH_MAX = 1_000
CLIENT_BATCH_BYTES = MESSAGE_MAX_BYTES
#: Messages that one receive takes, and that one request moves.
RECEIVE_MAX = 1_000
MOVE_MAX = 1_000
#: Longest wait of a receive.
WAIT_MAX_MS = 60_000
