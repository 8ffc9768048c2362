"""Logs that messages became dead letters: a line for each queue, at most one a minute."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from mode.utils.logging import CompositeLogger

from marq.text import cleaned, plural

#: Seconds between two lines about one queue. Dead letters in between are in the next one.
PAUSE_S = 60.0
#: Queues that are told apart; dead letters of others are logged under the name of one more.
QUEUES_MAX = 1_000
OTHERS = "other queues"


@dataclass
class _Untold:
    """Dead letters of a queue since its last line."""

    count: int = 0
    target: str = ""
    reason: str = ""


class DeadLetterLog:
    """Counts dead letters by queue until the next line is due."""

    def __init__(self, log: logging.Logger | CompositeLogger) -> None:
        self._log = log
        self._untold: dict[str, _Untold] = {}  # queues with a line in the last minute

    def note(self, queue: str, target: str, count: int, reason: str) -> None:
        """Messages of a queue became dead letters. ``reason``: of the last one."""
        if queue not in self._untold and len(self._untold) >= QUEUES_MAX:
            queue = OTHERS
        is_first = queue not in self._untold
        untold = self._untold.setdefault(queue, _Untold())
        untold.count += count
        untold.target, untold.reason = target, reason
        if is_first:
            self._tell(queue)

    def _tell(self, queue: str) -> None:
        untold = self._untold.pop(queue)
        if not untold.count:
            return
        self._log.warning(
            "%s of %r became %s in %r, the last one because of: %s",
            plural(untold.count, "message"),
            queue,
            "a dead letter" if untold.count == 1 else "dead letters",
            untold.target,
            cleaned(untold.reason),
        )
        self._untold[queue] = _Untold()
        asyncio.get_running_loop().call_later(PAUSE_S, self._tell, queue)
