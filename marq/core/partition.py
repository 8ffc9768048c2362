"""The state machine of one partition: ``fold(queue log, markers log)``.

    ingest ──► delayed ──(time)──► ready ──start──► in flight ──end──► done (acked, dead, expired, purged, poison)
                  ▲                  ▲ ▲                │
                  │                  │ └──(deadline)────┤
                  └──release, delay──┴─────release──────┘

Both logs are read independently, so the state is the same in whatever order the two interleave. It needs no settings
and no clock: time is what the broker stamped on the records. Expiry of leases and delays is derived and only makes a
message ready; done happens only through a marker (or a hole in the log: compaction, aborted and control records).

What is not part of the fold, because it is forgotten in a crash: reservations, the order hints of the backlogs, and
which payloads are in memory.
"""

from __future__ import annotations

from marq.core.checkpoints import Checkpoint, Checkpoints
from marq.core.deliveries import Due
from marq.core.policies import QUEUE_NAME_MAX
from marq.core.reading import Unreadable
from marq.core.state import DeliveryState
from marq.protocol.headers import H_DEDUP, H_DELAY, H_GROUP, H_ORIGIN, H_POISON, H_TTL
from marq.protocol.limits import MESSAGE_MAX_BYTES

__all__ = [
    "H_DEDUP",
    "H_DELAY",
    "H_GROUP",
    "H_ORIGIN",
    "H_POISON",
    "H_TTL",
    "MESSAGE_MAX_BYTES",
    "QUEUE_NAME_MAX",
    "Checkpoint",
    "DeliveryState",
    "Due",
    "Partition",
    "Unreadable",
]


class Partition(Checkpoints):
    """State of partition ``number``.

    Parameters: ``queue_id``: topic mode, all records belong to this queue whatever their keys; ``origin_keys``: with
    which origins of copies are sealed that count, none: any counts; ``load``: reads a
    messages row by its key (from the local RocksDB), raising :exc:`RowError` if it is not there.
    """
