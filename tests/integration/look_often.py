"""In the place of handlers: the worker looks at the partitions of its topics many times in a second."""

from __future__ import annotations

from app.engine import partition_counts

partition_counts.LOOK_S = 0.2
