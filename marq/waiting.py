"""When messages count as forsaken, and how that is said: the same in the log, on the page and in `doctor`."""

from __future__ import annotations

#: Milliseconds for which messages may be ready in a queue from which no worker's handlers or receives take any.
FORSAKEN_MS = 60_000
#: Seconds after its begin for which a receive over HTTP counts.
RECENT_S = 60.0


def is_forsaken(ready: int, oldest_ms: int | None, has_receiver: bool | None, takes_dead_letters: bool) -> bool:
    """True if nobody receives from a queue whose messages wait. Dead letters wait to be looked at.

    Args:
        ready: messages that are ready.
        oldest_ms: age of the oldest message; None: there is none, or it is not known.
        has_receiver: None: it is not known, because a worker did not answer.
        takes_dead_letters: it is a dead-letter queue.
    """
    return bool(ready) and has_receiver is False and not takes_dead_letters and (oldest_ms or 0) >= FORSAKEN_MS


def forsaken(queues: str) -> str:
    """The sentence. ``queues``: names, with the number of messages each."""
    return f"nobody receives from {queues}: no worker has a handler for it, and no receive came in the last minute"
