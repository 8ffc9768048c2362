"""The state machine of one partition: ``fold(queue log, markers log)``.

    ingest ──► delayed ──(time)──► ready ──start──► in flight ──end──► done (acked, dead, expired, purged, poison)
                  ▲                  ▲ ▲                │
                  │                  │ └──(deadline)────┤
                  └──release, delay──┴─────release──────┘

The state does not depend on how the reading of the two logs interleaves. The fold needs no settings and no clock: time
is what the broker stamped on the records. The end of a lease or a delay follows from time, and makes a message ready.
Only a marker makes it done, or a hole in the log: compaction, aborted and control records.

Reservations, the order hints of the backlogs, and which payloads are in memory are not part of the fold: a crash
forgets them.
"""

from __future__ import annotations

from marq.core.checkpoints import Checkpoints


class Partition(Checkpoints):
    """State of partition ``number``.

    Args:
        queue_id: topic mode: all records belong to this queue, whatever their keys.
        origin_keys: only origins of copies that are sealed with one of these keys count; (): any counts.
        load: reads a messages row by its key, and raises :exc:`RowError` if it is not there.
    """
