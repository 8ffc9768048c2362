"""A row of the lifecycle walker agrees with the core on a message."""

from __future__ import annotations

import msgspec

from marq.core.history import Envelope
from marq.protocol.headers import H_GROUP
from pipeline.lifecycle_walker import LifecycleWalker, Plan


def test_of_several_group_headers_the_last_counts() -> None:
    walker = LifecycleWalker(0, msgspec.msgpack.encode(Plan(0, 3, 0, 0, queue_id=None, run=1)))
    walker.begin()
    headers: list[list[tuple[str, bytes | None]]] = [
        [(H_GROUP, b"first"), (H_GROUP, b"last")],
        [(H_GROUP, b"first"), (H_GROUP, None)],
        [],
    ]
    walker.read([Envelope(i, 1, b"q", None, found, 1) for i, found in enumerate(headers)], [None] * 3)
    walker.end()
    rows = [row for batch in walker.results() for row in batch.to_pylist() if row["state_key"] is None]
    assert {row["offset"]: row["group"] for row in rows} == {0: "last", 1: None, 2: None}
