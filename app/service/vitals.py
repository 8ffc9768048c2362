"""Facts about a worker by which `doctor` finds what is wrong: version, clock, disk, limits, settings."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

import marq
from app.engine.ownership import Ownership
from app.settings import Settings

#: Settings that must be the same in all workers: otherwise the result depends on the worker that is asked.
SHARED = (
    "name",
    "queue_id",
    "dead_letter_topic",
    "deleted_unread",
    "auto_create",
    "visibility_timeout_ms",
    "max_receives",
    "backoff_ms",
    "backoff_max_ms",
    "retention_history_ms",
    "max_body_bytes",
    "sqs_limits",
    "sqs_account",
    "queues",
)


class Vitals(msgspec.Struct):
    """Facts about a worker. Sizes are bytes, times milliseconds since 1970."""

    version: str
    clock_ms: int
    broker_ms: int | None  # the time of the broker that stamped last; None: not known yet
    partitions: int
    disk_free_bytes: int
    disk_total_bytes: int
    memory_bytes: int  # that payloads may have
    open_files: int  # that the system allows
    max_connections: int
    keys: str  # the same in workers with the same keys; empty: it has none
    settings: dict[str, str]  # those that have to be the same in all workers, as JSON
    topics: list[str] = []  # what is wrong with the partitions of topics
    brokers_ms: dict[int, int] = {}  # the time of each broker whose clock is known, by its id
    cluster: str = ""  # the id of its Kafka; empty: not known yet


def vitals_of(ownership: Ownership, folder: Path) -> Vitals:
    """The vitals of this worker. `folder`: where its tables are."""
    settings, secret = ownership.settings, ownership.catalog.keys_for(b"vitals")[0]
    free = total = 0
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(folder)
        free, total = disk.free, disk.total
    return Vitals(
        version=marq.__version__,
        clock_ms=round(time.time() * 1000),
        broker_ms=ownership.broker_time.now_ms,
        brokers_ms=ownership.broker_time.by_id(),
        partitions=ownership.topics.partitions,
        disk_free_bytes=free,
        disk_total_bytes=total,
        memory_bytes=settings.memory_bytes,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        max_connections=settings.max_connections,
        keys=_keys_of(settings, secret),
        settings={name: _shown(name, getattr(settings, name), secret) for name in SHARED},
        topics=ownership.topic_lines,
        cluster=ownership.changelogs.cluster,
    )


def _shown(name: str, value: Any, secret: bytes) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    # a key that may inspect some queues must not learn the names of others
    return f"of fingerprint {_fingerprint(text, secret)}" if name == "queues" else text


def _keys_of(settings: Settings, secret: bytes) -> str:
    """A fingerprint of the keys, in any order."""
    if settings.keys is None:
        return ""
    entries = sorted(filter(None, (entry.strip() for entry in settings.keys.get_secret_value().split(","))))
    return _fingerprint("\n".join(entries), secret)


def _fingerprint(text: str, secret: bytes) -> str:
    """A keyed hash: guessing the text with it would need the installation's secret."""
    return blake2b(text.encode(), key=secret, digest_size=8).hexdigest()
