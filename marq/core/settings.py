"""Checks the settings of queues and their changes. Settings come from users, so each error is an answer to a user."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec.structs import replace

from marq.core.policies import LEASE_MIN_MS, MESSAGE_LIMIT_MIN_BYTES, QueueSettings, name_problem
from marq.errors import BadValueError, NewerVersionError
from marq.text import invalid_value

#: Version of the records of queues in the queues topic.
RECORD_VERSION = 1


class QueueSettingsError(BadValueError):
    """Invalid settings of a queue."""


def settings_with(queue: str, base: QueueSettings, values: dict[str, Any]) -> QueueSettings:
    """`base` with some values changed. Raises `QueueSettingsError` for a name or value that a queue can't have."""
    current = told(base)
    unknown = sorted(set(values) - set(current))
    if unknown:
        close = get_close_matches(unknown[0].lower(), current, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(current)}"
        raise QueueSettingsError(f"queue {queue!r} can't have a setting {unknown[0]!r}; {hint}")
    if values.get("deduplication_scope", "queue") not in ("queue", "group"):
        raise QueueSettingsError(f"queue {queue!r}: deduplication_scope must be queue or group")
    try:
        changed = msgspec.convert(current | values, QueueSettings)
    except msgspec.ValidationError as exc:
        raise QueueSettingsError(f"queue {queue!r}: {invalid_value(exc)}") from None
    if changed.dead_letter_queue:
        check_name(changed.dead_letter_queue)
        if changed.dead_letter_queue == queue:
            raise QueueSettingsError(f"queue {queue!r} can't be its own dead-letter queue")
    if 0 < changed.visibility_timeout_ms < LEASE_MIN_MS:
        raise QueueSettingsError(
            f"queue {queue!r}: visibility_timeout_ms must be 0 (ready again at once), or at least {LEASE_MIN_MS}"
        )
    if 0 < changed.max_message_bytes < MESSAGE_LIMIT_MIN_BYTES:
        raise QueueSettingsError(
            f"queue {queue!r}: max_message_bytes must be 0 (the topic's limit), or at least {MESSAGE_LIMIT_MIN_BYTES}"
        )
    if changed.backoff_max_ms and changed.backoff_max_ms < changed.backoff_ms:
        raise QueueSettingsError(f"queue {queue!r}: backoff_max_ms must be 0, or at least backoff_ms")
    return changed


def told(settings: QueueSettings) -> dict[str, Any]:
    """The settings that users know."""
    values = msgspec.structs.asdict(settings)
    del values["placed_by"]
    return values


def check_kind(queue: str, old: QueueSettings, new: QueueSettings) -> None:
    """Raises `QueueSettingsError` if ``new`` would make it another kind of queue: groups would lose their order."""
    if old.fifo != new.fifo:
        kind = "FIFO" if old.fifo else "standard"
        raise QueueSettingsError(
            f"queue {queue!r} is a {kind} queue for good: delete it and make it anew to change fifo"
        )


def placed_as(old: QueueSettings | None, new: QueueSettings) -> QueueSettings:
    """The settings ``new`` of a queue that has ``old`` ones: groups stay in the partitions that they are in."""
    placement = old.placement if old is not None and old.fifo else new.deduplication_scope
    return replace(new, placed_by="" if placement == new.deduplication_scope else placement)


def check_name(queue: str) -> None:
    """Raises `QueueSettingsError` for a name that a queue can't have."""
    problem = name_problem(queue)
    if problem is not None:
        raise QueueSettingsError(problem)


def check_declared(queues: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raises `QueueSettingsError` for invalid declarations of queues."""
    for queue, values in queues:
        check_name(queue)
        settings_with(queue, QueueSettings(), values)


class _Version(msgspec.Struct):
    v: int


_version_decoder = msgspec.json.Decoder(_Version)


def check_record_version(value: bytes) -> None:
    """Raises `NewerVersionError` for a record of a queue of a later version; all else of it may be different then.

    Without a seal of the installation it does not count (`marq.core.versions.is_of_installation`).
    """
    try:
        version = _version_decoder.decode(value).v
    except msgspec.MsgspecError:
        return
    if version > RECORD_VERSION:
        raise NewerVersionError(
            f"a queue's record of version {version}, and this marq reads up to version {RECORD_VERSION}: "
            f"run a marq that knows version {version}"
        )
