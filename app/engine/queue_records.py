"""The record of a queue in the queues topic. Its version grows with each change."""

from __future__ import annotations

import time
import uuid
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from marq.core.policies import QueueSettings
from marq.core.settings import RECORD_VERSION, QueueSettingsError, check_record_version, placed_as

#: In records of version 0.1, the attribute with a policy that is now a setting.
OLD_POLICY = "sqs.RedriveAllowPolicy"


#: Bytes of a queue's id in receipts. Anyone who may make queues can find two names with one CRC-32.
QUEUE_ID_BYTES = 10


def id_of_queue(queue: str) -> bytes:
    """What stands for the name of a queue in receipts."""
    return blake2b(queue.encode(), digest_size=QUEUE_ID_BYTES, person=b"marq-queue").digest()


class MoveTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """The task to move messages of a queue to other queues, at a limited rate."""

    id: str
    to: str  # "": each to the queue of which it is a dead letter
    started_ms: int
    before: tuple[int, ...]  # those below these offsets, one per partition
    per_second: int = 0  # 0: as fast as can be
    total: int = 0  # about how many there were
    moved: int = 0
    state: Literal["running", "cancelling", "cancelled", "completed", "failed"] = "running"
    reason: str = ""  # why it failed

    @property
    def active(self) -> bool:
        """True if it is not over."""
        return self.state in ("running", "cancelling")


class QueueRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The state and the settings of one queue. Nothing in it is changed: records share what is equal."""

    v: int
    version: int  # grows with each change
    by: str  # names the change; "": forgotten, because it is needed for a purge only
    settings: QueueSettings
    state: Literal["active", "deleting", "deleted"] = "active"
    purge: tuple[int, ...] = ()  # a purge drops all below these offsets, one per partition; (): no purge
    created_ms: int = 0
    changed_ms: int = 0
    purged_ms: int = 0  # when a purge was last asked for; 0: never
    attributes: dict[str, str] = {}  # attributes of protocols, beside the settings
    tags: dict[str, str] = {}
    moves: tuple[MoveTask, ...] = ()  # the last ones, the newest first
    #: The number of earlier queues of this name, plus the purges of all of them and of this one.
    generation: int = msgspec.field(default=0, name="life")

    @property
    def active(self) -> bool:
        """True if the queue is there for its users."""
        return self.state == "active"


class _OldPolicy(msgspec.Struct):
    redrivePermission: str = "allowAll"
    sourceQueueArns: tuple[str, ...] = ()


class Draft(NamedTuple):
    """New values for a queue."""

    settings: QueueSettings
    attributes: dict[str, str]
    tags: dict[str, str]
    moves: tuple[MoveTask, ...] = ()


#: Settings that are shared between records.
SETTINGS_KEPT = 1_000
_settings: dict[QueueSettings, QueueSettings] = {}
_NONE: dict[str, str] = {}

_decoder = msgspec.json.Decoder(QueueRecord)
encode = msgspec.json.Encoder().encode


def decode(value: bytes) -> QueueRecord:
    """Decode a record.

    Raises:
        QueueSettingsError: it is none. Everybody passes over it.
        NewerVersionError: it says that it is of a later version.
    """
    try:
        record = _decoder.decode(value)
    except msgspec.MsgspecError as exc:
        check_record_version(value)
        raise QueueSettingsError(f"not the record of a queue: {exc}") from None
    if record.v > RECORD_VERSION:
        check_record_version(value)
    return _slim(_with_policy(record))


def _slim(record: QueueRecord) -> QueueRecord:
    """The same record, with parts that others have as well: there may be 100,000 queues, most of them alike."""
    settings = record.settings
    known = _settings.get(settings)
    if known is None:
        if len(_settings) >= SETTINGS_KEPT:
            _settings.clear()
        known = _settings[settings] = settings
    return msgspec.structs.replace(
        record,
        settings=known,
        changed_ms=record.created_ms if record.changed_ms == record.created_ms else record.changed_ms,
        attributes=record.attributes or _NONE,
        tags=record.tags or _NONE,
    )


def _with_policy(record: QueueRecord) -> QueueRecord:
    """The record with the redrive allow policy of SQS as a setting. Version 0.1 kept it as an attribute."""
    text = record.attributes.get(OLD_POLICY)
    if text is None or record.settings.dead_letters_from is not None:
        return record
    try:
        policy = msgspec.json.decode(text, type=_OldPolicy)
    except msgspec.MsgspecError:
        return record
    if policy.redrivePermission == "allowAll":
        return record
    sources = tuple(arn.rpartition(":")[2] for arn in policy.sourceQueueArns) if policy.sourceQueueArns else ()
    return msgspec.structs.replace(record, settings=msgspec.structs.replace(record.settings, dead_letters_from=sources))


def next_record(
    old: QueueRecord | None,
    *,
    settings: QueueSettings,
    state: Literal["active", "deleting", "deleted"],
    purge: tuple[int, ...] | None = None,
    attributes: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
    moves: tuple[MoveTask, ...] | None = None,
) -> QueueRecord:
    """The record after `old`, with a new version. Arguments that are None keep the value of an active queue."""
    now_ms = int(time.time() * 1000)
    kept = old.purge if old is not None else ()
    before = old if old is not None and old.active else None
    if attributes is None:
        attributes = before.attributes if before is not None else {}
    if tags is None:
        tags = before.tags if before is not None else {}
    if moves is None:
        moves = before.moves if before is not None else ()
    purged_ms = before.purged_ms if before is not None else 0
    generation = old.generation if old is not None else 0
    if old is not None and state == "active" and (purge or not old.active):
        generation += 1
    return QueueRecord(
        v=RECORD_VERSION,
        version=(old.version if old is not None else 0) + 1,
        by=uuid.uuid4().hex,
        settings=placed_as(before.settings if before is not None else None, settings),
        state=state,
        purge=kept if purge is None else purge,
        created_ms=before.created_ms if before is not None else now_ms,
        changed_ms=now_ms,
        purged_ms=now_ms if purge else purged_ms,
        attributes=attributes,
        tags=tags,
        moves=moves,
        generation=generation,
    )
