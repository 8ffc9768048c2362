"""Queue attributes <-> settings of the queue. Attributes that only SQS has are kept beside the settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from app.engine.queue_records import Draft, QueueRecord
from gateway.sqs.errors import SqsError, bad_value, missing
from gateway.sqs.limits import KIB, Limits
from gateway.sqs.model import enum_of
from gateway.sqs.urls import Place, queue_of_arn
from marq.core.policies import QueueSettings

COUNTS = {
    "ApproximateNumberOfMessages": "ready",
    "ApproximateNumberOfMessagesNotVisible": "in_flight",
    "ApproximateNumberOfMessagesDelayed": "delayed",
}
_COMPUTED = frozenset({"All", "QueueArn", "CreatedTimestamp", "LastModifiedTimestamp", *COUNTS})
#: Names in the queue's record of attributes that are no settings.
BESIDE = "sqs."
_FIFO_ONLY = ("ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit")
_SCOPES = {"queue": "queue", "messageGroup": "group"}
_SOURCES_MAX = 10
#: Characters of a policy, as in AWS: every worker keeps it in memory.
POLICY_MAX = 8_192
_ALLOW = "RedriveAllowPolicy"

_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
_FIFO_NAME = re.compile(r"[A-Za-z0-9_-]{1,75}\.fifo")

_to_json = msgspec.json.Encoder().encode


class Number(NamedTuple):
    """An attribute that is a number: its setting, its unit and its bounds."""

    setting: str | None  # None: kept beside the settings
    factor: int
    default: Callable[[Limits], int]
    bounds: Callable[[Limits], tuple[int, int]]


NUMBERS: dict[str, Number] = {
    "VisibilityTimeout": Number("visibility_timeout_ms", 1000, lambda _: 30, lambda its: (0, its.visibility_s)),
    "DelaySeconds": Number("delay_ms", 1000, lambda _: 0, lambda its: (0, its.delay_s)),
    "MessageRetentionPeriod": Number("ttl_ms", 1000, lambda _: 345_600, lambda its: its.retention_s),
    "MaximumMessageSize": Number(
        "max_message_bytes", 1, lambda its: its.message_bytes, lambda its: (KIB, its.message_bytes)
    ),
    "ReceiveMessageWaitTimeSeconds": Number(None, 1, lambda _: 0, lambda its: (0, its.wait_s)),
    "KmsDataKeyReusePeriodSeconds": Number(None, 1, lambda _: 300, lambda _: (60, 86_400)),
}


def check_new_name(name: str, fifo: bool) -> None:
    """Raise `SqsError` for an invalid name of a queue."""
    if not name:
        raise missing("QueueName")
    if fifo:
        if _FIFO_NAME.fullmatch(name) is None:
            raise SqsError(
                "InvalidParameterValue",
                "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end "
                "with .fifo suffix and be 1 to 80 in length",
            )
    elif _NAME.fullmatch(name) is None:
        raise SqsError(
            "InvalidParameterValue",
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
        )


class Queues(NamedTuple):
    """Looks up other queues: `record_of` returns None for a queue that does not exist."""

    exists: Callable[[str], bool]
    record_of: Callable[[str], QueueRecord | None]


class Attributes:
    """Reads and writes attributes, within limits."""

    def __init__(self, limits: Limits, queues: Queues) -> None:
        self._limits = limits
        self._queues = queues

    # ------------------------------------------------------------------ given

    def new(self, queue: str, given: dict[str, str], tags: dict[str, str]) -> Draft:
        """The values for a new queue. Raises `SqsError`."""
        fifo = "FifoQueue" in given
        if fifo and not _flag("FifoQueue", given["FifoQueue"]):
            raise _unknown("FifoQueue")
        check_new_name(queue, fifo)
        values: dict[str, Any] = {
            number.setting: number.default(self._limits) * number.factor
            for number in NUMBERS.values()
            if number.setting is not None
        }
        settings = QueueSettings(fifo=fifo, **values)
        return self._changed(queue, Draft(settings, {}, tags), given)

    def changed(self, queue: str, old: Draft, given: dict[str, str]) -> Draft:
        """The values of a queue after some of its attributes are set. Raises `SqsError`."""
        if "FifoQueue" in given:
            if not old.settings.fifo:
                raise _unknown("FifoQueue")
            if not _flag("FifoQueue", given["FifoQueue"]):
                raise _invalid("FifoQueue", "Modifying queue type is not supported.")
        return self._changed(queue, old, given)

    def _changed(self, queue: str, old: Draft, given: dict[str, str]) -> Draft:
        settings, beside = msgspec.structs.asdict(old.settings), dict(old.attributes)
        known = enum_of("QueueAttributeName") - _COMPUTED
        if "KmsMasterKeyId" in given:  # other values count as they are
            beside.pop(BESIDE + "SqsManagedSseEnabled", None)
            if not given["KmsMasterKeyId"]:
                beside.pop(BESIDE + "KmsDataKeyReusePeriodSeconds", None)
                beside[BESIDE + "SqsManagedSseEnabled"] = "false"
        for name, text in given.items():
            if name not in known:
                raise _unknown(name)
            if name in _FIFO_ONLY and not old.settings.fifo:
                if name == "ContentBasedDeduplication":
                    raise _unknown(name)
                raise SqsError(
                    "InvalidAttributeName", f"You can specify the {name} only when FifoQueue is set to true."
                )
            if name in NUMBERS:
                self._set_number(settings, beside, name, text)
            elif name == "RedrivePolicy":
                settings |= self._redrive(queue, old.settings.fifo, text)
            elif name == "ContentBasedDeduplication":
                settings["content_deduplication"] = _flag(name, text)
            elif name == "DeduplicationScope":
                settings["deduplication_scope"] = _one_of(name, text, _SCOPES)
            elif name != "FifoQueue":
                _keep(beside, name, _checked(name, text))
                if name == _ALLOW:
                    settings["dead_letters_from"] = _sources_of(text)
        if beside.get(BESIDE + "FifoThroughputLimit") == "perMessageGroupId" and (
            settings["deduplication_scope"] != "group"
        ):
            raise _invalid("FifoThroughputLimit", "DeduplicationScope has to be messageGroup.")
        return Draft(msgspec.convert(settings, QueueSettings), beside, old.tags, old.moves)

    def _set_number(self, settings: dict[str, Any], beside: dict[str, str], name: str, text: str) -> None:
        number = NUMBERS[name]
        low, high = number.bounds(self._limits)
        if not text.isascii() or not text.isdigit() or len(text) > 12 or not low <= int(text) <= high:
            raise _invalid(name)
        if number.setting is None:
            beside[BESIDE + name] = str(int(text))
        else:
            value = int(text) * number.factor
            settings[number.setting] = value

    def _redrive(self, queue: str, fifo: bool, text: str) -> dict[str, Any]:
        if not text.strip():
            return {"max_receives": 0, "dead_letter_queue": ""}
        policy = _json_map("RedrivePolicy", text)
        if not policy:
            return {"max_receives": 0, "dead_letter_queue": ""}

        def wrong(reason: str) -> SqsError:
            return bad_value(text, "RedrivePolicy", reason)

        for name in ("deadLetterTargetArn", "maxReceiveCount"):
            if name not in policy:
                raise wrong(f"Redrive policy does not contain mandatory attribute: {name}.")
        count, most = policy["maxReceiveCount"], self._limits.max_receives
        if isinstance(count, bool) or not re.fullmatch(r"\d{1,9}", str(count)) or not 1 <= int(count) <= most:
            raise wrong(f"Invalid value for maxReceiveCount: {count}, valid values are from 1 to {most}.")
        target = queue_of_arn(str(policy["deadLetterTargetArn"]), "deadLetterTargetArn")
        if not self._queues.exists(target):
            raise wrong("Dead letter target does not exist.")
        record = self._queues.record_of(target)
        if (record is not None and record.settings.fifo) != fifo:
            raise wrong("Dead-letter queue must be same type of queue as the source.")
        if record is not None and not record.settings.takes_dead_letters_of(queue):
            raise wrong(f"Queue {target} does not allow to be the dead-letter queue of {queue}.")
        return {"max_receives": int(count), "dead_letter_queue": target}

    # ------------------------------------------------------------------ told

    def told(self, queue: str, record: QueueRecord | None, settings: QueueSettings, place: Place) -> dict[str, str]:
        """All attributes of a queue except the counts."""
        found = self._values(settings, record.attributes if record is not None else {}, place)
        found["QueueArn"] = place.arn_of(queue)
        if record is not None:
            found["CreatedTimestamp"] = str(record.created_ms // 1000)
            found["LastModifiedTimestamp"] = str(record.changed_ms // 1000)
        else:
            found["CreatedTimestamp"] = found["LastModifiedTimestamp"] = "0"
        return found

    def difference(self, queue: str, old: Draft, given: dict[str, str], place: Place) -> str | None:
        """The first of these attributes whose value differs from that of the queue; None if none differs."""
        drafts = (old, self._changed(queue, old, given))
        before, after = (self._values(draft.settings, draft.attributes, place) for draft in drafts)
        return next((name for name in given if before.get(name) != after.get(name)), None)

    def _values(self, settings: QueueSettings, beside: dict[str, str], place: Place) -> dict[str, str]:
        """The attributes that can be set."""
        found: dict[str, str] = {}
        for name, number in NUMBERS.items():
            if number.setting is not None:
                value = getattr(settings, number.setting)
                found[name] = str(
                    value // number.factor
                    if value or name in ("DelaySeconds", "VisibilityTimeout")
                    else self._unset(name)
                )
            elif name != "KmsDataKeyReusePeriodSeconds":
                found[name] = beside.get(BESIDE + name, str(number.default(self._limits)))
        if settings.max_receives and settings.dead_letter_queue:
            policy = {
                "deadLetterTargetArn": place.arn_of(settings.dead_letter_queue),
                "maxReceiveCount": settings.max_receives,
            }
            found["RedrivePolicy"] = _to_json(policy).decode()
        if settings.fifo:
            found["FifoQueue"] = "true"
            found["ContentBasedDeduplication"] = "true" if settings.content_deduplication else "false"
            found["DeduplicationScope"] = "messageGroup" if settings.deduplication_scope == "group" else "queue"
            found["FifoThroughputLimit"] = beside.get(BESIDE + "FifoThroughputLimit", "perQueue")
        if BESIDE + "KmsMasterKeyId" in beside:
            found["KmsDataKeyReusePeriodSeconds"] = "300"
        found["SqsManagedSseEnabled"] = "false" if BESIDE + "KmsMasterKeyId" in beside else "true"
        found.update({name.removeprefix(BESIDE): value for name, value in beside.items() if name.startswith(BESIDE)})
        if "KmsMasterKeyId" not in found:
            found.pop("KmsDataKeyReusePeriodSeconds", None)
        sources = settings.dead_letters_from
        if sources != _sources_of(found.get(_ALLOW, "")):  # it was set through another API since
            found[_ALLOW] = _to_json(_policy_of(sources, place)).decode()
        return found

    def _unset(self, name: str) -> int:
        """The value of an attribute whose setting has no limit: the greatest possible."""
        return NUMBERS[name].bounds(self._limits)[1]


def target_in(given: dict[str, str]) -> str:
    """The dead-letter queue that attributes name; empty if they name none. Raises `SqsError`."""
    text = given.get("RedrivePolicy", "")
    policy = _json_map("RedrivePolicy", text) if text.strip() else {}
    if "deadLetterTargetArn" not in policy:
        return ""
    return queue_of_arn(str(policy["deadLetterTargetArn"]), "deadLetterTargetArn")


def check_names(names: list[str]) -> None:
    """Raise `SqsError` for an unknown attribute."""
    known = enum_of("QueueAttributeName")
    for name in names:
        if name not in known:
            raise _unknown(name)


def wait_s_of(record: QueueRecord | None) -> int:
    """Milliseconds that a receive waits if its request does not say how long."""
    return int(record.attributes.get(BESIDE + "ReceiveMessageWaitTimeSeconds", "0")) if record is not None else 0


def _policy_of(sources: tuple[str, ...] | None, place: Place) -> dict[str, Any]:
    """The policy by which only these queues may use its queue as their dead-letter queue."""
    if not sources:
        return {"redrivePermission": "allowAll" if sources is None else "denyAll"}
    return {"redrivePermission": "byQueue", "sourceQueueArns": [place.arn_of(source) for source in sources]}


def _sources_of(text: str) -> tuple[str, ...] | None:
    """The queues that may use a policy's queue as their dead-letter queue; None: all may."""
    policy = _json_map(_ALLOW, text) if text.strip() else {}
    permission = policy.get("redrivePermission", "allowAll")
    if permission == "byQueue":
        return tuple(queue_of_arn(str(arn), "sourceQueueArns") for arn in policy.get("sourceQueueArns", ()))
    return None if permission == "allowAll" else ()


def _keep(beside: dict[str, str], name: str, value: str) -> None:
    if value:
        beside[BESIDE + name] = value
    else:
        beside.pop(BESIDE + name, None)


def _checked(name: str, text: str) -> str:
    if name in ("Policy", "RedriveAllowPolicy"):
        if not text.strip():
            return ""
        if len(text) > POLICY_MAX:
            raise _invalid(name, f"It has more than {POLICY_MAX} characters.")
        policy = _json_map(name, text)
        if name == "RedriveAllowPolicy":
            _check_allow_policy(text, policy)
    elif name == "SqsManagedSseEnabled":
        return "true" if _flag(name, text) else "false"
    elif name == "FifoThroughputLimit":
        return _one_of(name, text, {"perQueue": "perQueue", "perMessageGroupId": "perMessageGroupId"})
    elif len(text) > 2048:
        raise _invalid(name)
    return text


def _check_allow_policy(text: str, policy: dict[str, Any]) -> None:
    def wrong(reason: str) -> SqsError:
        return bad_value(text, "RedriveAllowPolicy", reason)

    permission, sources = policy.get("redrivePermission", "allowAll"), policy.get("sourceQueueArns")
    if permission not in ("allowAll", "denyAll", "byQueue"):
        raise wrong("Invalid redrivePermission: use allowAll, denyAll or byQueue.")
    if (permission == "byQueue") != (sources is not None):
        raise wrong("sourceQueueArns has to be there with redrivePermission byQueue, and only then.")
    if sources is not None:
        if not isinstance(sources, list) or not 1 <= len(sources) <= _SOURCES_MAX:
            raise wrong(f"sourceQueueArns is a list of 1 to {_SOURCES_MAX} ARNs.")
        for arn in sources:
            queue_of_arn(str(arn), "sourceQueueArns")


def _json_map(name: str, text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        what = {"RedrivePolicy": "Redrive policy", "RedriveAllowPolicy": "Redrive allow policy"}.get(name, name)
        raise bad_value(text, name, f"{what} is not a valid JSON map.")
    return found


def _flag(name: str, text: str) -> bool:
    """Read a boolean. Python's `str(True)` is accepted too, as AWS does."""
    if text not in ("true", "false", "True", "False"):
        raise _invalid(name)
    return text in ("true", "True")


def _one_of(name: str, text: str, values: dict[str, str]) -> str:
    if text not in values:
        raise _invalid(name)
    return values[text]


def _unknown(name: str) -> SqsError:
    return SqsError("InvalidAttributeName", f"Unknown Attribute {name[:300]}.")


def _invalid(name: str, reason: str = "") -> SqsError:
    why = f" Reason: {reason}" if reason else ""
    return SqsError("InvalidAttributeValue", f"Invalid value for the parameter {name}.{why}")
