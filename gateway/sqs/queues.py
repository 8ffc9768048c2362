"""The actions on queues: make, find, set, list, tag, share, purge, delete."""

from __future__ import annotations

import time
from base64 import b64decode, urlsafe_b64encode
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from app.engine.queue_records import Draft, QueueRecord
from gateway.auth import may_see
from gateway.sqs import attributes as attribute
from gateway.sqs.attributes import BESIDE, Attributes
from gateway.sqs.call import Call
from gateway.sqs.errors import NO_QUEUE, SqsError, bad_value, missing
from gateway.sqs.limits import Limits
from gateway.sqs.urls import queue_of
from marq.core.policies import name_problem
from marq.errors import NotAllowedError

if TYPE_CHECKING:
    from app.service.census import Census
    from app.service.operations import QueueService

#: Queues on one page.
PAGE_MAX = 1_000
TAGS_MAX = 50
#: Most statements and actions of AddPermission.
ACTIONS_MAX = 7
#: Actions that can be allowed to others than the owner.
SHARED = frozenset(
    {
        "*",
        "ChangeMessageVisibility",
        "DeleteMessage",
        "GetQueueAttributes",
        "GetQueueUrl",
        "ListDeadLetterSourceQueues",
        "PurgeQueue",
        "ReceiveMessage",
        "SendMessage",
    }
)


class Queues:
    """The actions, named as in the service model."""

    def __init__(self, operations: QueueService, census: Census, limits: Limits) -> None:
        self.operations = operations
        self.catalog = operations.catalog
        self._census = census
        self._limits = limits
        self._attributes = Attributes(limits, attribute.Queues(self.catalog.exists, self.catalog.records.get))

    # ------------------------------------------------------------------ which queue

    async def require(self, call: Call, url: str, permission: str | None) -> str:
        """The queue that a URL names. Without a `permission`, any one for the queue is enough. Raises `SqsError`."""
        return await self.require_name(call, queue_of(url), permission)

    async def require_name(self, call: Call, queue: str, permission: str | None) -> str:
        """Check that a queue exists, and that the caller has the permission. Raises `SqsError`, `NotAllowedError`."""
        self._require_permission(call, queue, permission)
        if not self.catalog.exists(queue):
            # another worker may have made it a moment ago
            await self.catalog.catch_up()
            if not self.catalog.exists(queue):
                raise SqsError("QueueDoesNotExist", NO_QUEUE)
        return queue

    @staticmethod
    def _require_permission(call: Call, queue: str, permission: str | None) -> None:
        if permission is not None:
            call.grants.require(permission, queue)
        elif not may_see(call.grants, queue):
            raise NotAllowedError(f"this key has no permission for queue {queue!r}")

    def _active(self, queue: str) -> QueueRecord | None:
        record = self.catalog.records.get(queue)
        return record if record is not None and record.active else None

    def draft(self, base: QueueRecord | None) -> Draft:
        if base is None:
            return Draft(self.catalog.default, {}, {})
        return Draft(base.settings, base.attributes, base.tags, base.moves)

    # ------------------------------------------------------------------ make, find, delete

    async def CreateQueue(self, call: Call, request: Any) -> dict[str, Any]:
        queue, given, tags = request.QueueName, request.Attributes or {}, request.tags or {}
        call.grants.require("manage", queue)
        _check_tags(queue, tags)
        self._require_target(call, queue, given)
        draft = self._attributes.new(queue, given, tags)
        if not self.catalog.exists(queue):
            call.grants.make_queue()
        await self._check_deleted_recently(queue)
        await self.catalog.until_deleted(queue)

        def made(base: QueueRecord | None) -> Draft | None:
            if base is None:
                _require_dead_letters(call, None, draft)
                return draft
            name = self._attributes.difference(queue, self.draft(base), given, call.place)
            if name is not None:
                raise SqsError(
                    "QueueNameExists",
                    f"A queue already exists with the same name and a different value for attribute {name}",
                )
            return None

        await self.catalog.edit(queue, made)
        return {"QueueUrl": call.place.url_of(queue)}

    def _require_target(self, call: Call, queue: str, given: dict[str, str]) -> None:
        """Refuse another dead-letter queue that the caller may not send to, before an error tells anything about it."""
        target = attribute.target_in(given)
        if target and target != self.operations.dead_letter_queue_of(queue):
            call.grants.require("send", target)

    async def _check_deleted_recently(self, queue: str) -> None:
        if not self._limits.again_s:
            return
        if not self.catalog.exists(queue):
            await self.catalog.catch_up()
        record = self.catalog.records.get(queue)
        if record is not None and not record.active and _since_s(record.changed_ms) < self._limits.again_s:
            raise SqsError(
                "QueueDeletedRecently",
                f"You must wait {self._limits.again_s} seconds after deleting a queue before you can create another "
                "with the same name.",
            )

    async def DeleteQueue(self, call: Call, request: Any) -> None:
        await self.operations.delete_queue(await self.require(call, request.QueueUrl, "manage"))

    async def PurgeQueue(self, call: Call, request: Any) -> None:
        queue = await self.require(call, request.QueueUrl, "manage")
        record = self.catalog.records.get(queue)
        if record is not None and self._limits.again_s and _since_s(record.purged_ms) < self._limits.again_s:
            raise SqsError(
                "PurgeQueueInProgress",
                f"Only one PurgeQueue operation on {queue} is allowed every {self._limits.again_s} seconds.",
            )
        await self.operations.purge_queue(queue)

    async def GetQueueUrl(self, call: Call, request: Any) -> dict[str, Any]:
        if not request.QueueName:
            raise missing("QueueName")
        queue = await self.require_name(call, request.QueueName, None)
        return {"QueueUrl": call.place.url_of(queue, request.QueueOwnerAWSAccountId or None)}

    async def ListQueues(self, call: Call, request: Any) -> dict[str, Any]:
        limit, after = _page_of(request)
        prefix, visible = request.QueueNamePrefix or "", partial(may_see, call.grants)
        names, more = await self.operations.names(prefix, after, limit, visible)
        return _told(call, names, more, request, "QueueUrls")

    async def ListDeadLetterSourceQueues(self, call: Call, request: Any) -> dict[str, Any]:
        target = await self.require(call, request.QueueUrl, None)
        names = [name for name in self.sources_of(target) if may_see(call.grants, name)]
        limit, after = _page_of(request)
        names = [name for name in names if name > after]
        more = names[limit - 1] if len(names) > limit else ""
        return {"queueUrls": [], **_told(call, names[:limit], more, request, "queueUrls")}

    def sources_of(self, target: str) -> list[str]:
        """The queues whose dead letters go to `target`, in order."""
        return sorted(
            name
            for name, record in self.catalog.records.items()
            if record.active and record.settings.max_receives and record.settings.dead_letters_of(name) == target
        )

    # ------------------------------------------------------------------ attributes

    async def GetQueueAttributes(self, call: Call, request: Any) -> dict[str, Any]:
        names = request.AttributeNames or []
        attribute.check_names(names)
        queue = await self.require(call, request.QueueUrl, None)
        if not names:
            return {}
        settings = self.catalog.settings_of(queue)
        told = self._attributes.told(queue, self._active(queue), settings, call.place)
        if "All" in names or any(name in names for name in attribute.COUNTS):
            counts = await self.counts_of(queue)
            told.update({name: str(counts.get(state, 0)) for name, state in attribute.COUNTS.items()})
        chosen = told if "All" in names else {name: told[name] for name in names if name in told}
        return {"Attributes": chosen} if chosen else {}

    async def SetQueueAttributes(self, call: Call, request: Any) -> None:
        queue = await self.require(call, request.QueueUrl, "manage")
        if not request.Attributes:
            raise missing("Attribute.Name")
        self._require_target(call, queue, request.Attributes)

        def changed(old: Draft) -> Draft:
            new = self._attributes.changed(queue, old, request.Attributes)
            _require_dead_letters(call, old, new)
            return new

        await self.edit(queue, changed)

    async def edit(self, queue: str, change: Any) -> None:
        def changed(base: QueueRecord | None) -> Draft | None:
            old = self.draft(base)
            new: Draft = change(old)
            return None if new == old else new

        await self.catalog.edit(queue, changed)

    async def counts_of(self, queue: str) -> dict[str, int]:
        """Messages of a queue by state."""
        return await self._census.counts_of(queue)

    # ------------------------------------------------------------------ tags

    async def TagQueue(self, call: Call, request: Any) -> None:
        queue = await self.require(call, request.QueueUrl, "manage")
        if not request.Tags:
            raise missing("Tags")

        def tagged(old: Draft) -> Draft:
            tags = {**old.tags, **request.Tags}
            _check_tags(queue, tags)
            return old._replace(tags=tags)

        await self.edit(queue, tagged)

    async def UntagQueue(self, call: Call, request: Any) -> None:
        queue = await self.require(call, request.QueueUrl, "manage")
        if not request.TagKeys:
            raise SqsError("InvalidParameterValue", "Tag keys must be between 1 and 128 characters in length.")
        gone = set(request.TagKeys)
        await self.edit(queue, lambda old: old._replace(tags={k: v for k, v in old.tags.items() if k not in gone}))

    async def ListQueueTags(self, call: Call, request: Any) -> dict[str, Any]:
        queue = await self.require(call, request.QueueUrl, None)
        record = self._active(queue)
        return {"Tags": record.tags} if record is not None and record.tags else {}

    # ------------------------------------------------------------------ permissions

    async def AddPermission(self, call: Call, request: Any) -> None:
        queue = await self.require(call, request.QueueUrl, "manage")
        label, accounts, actions = request.Label, request.AWSAccountIds, request.Actions
        _check_label(label)
        if not actions:
            raise missing("Actions")
        if not accounts:
            raise bad_value("[]", "PrincipalId", "Unable to verify.")
        if len(actions) > ACTIONS_MAX:
            raise SqsError("OverLimit", f"{len(actions)} Actions were found, maximum allowed is {ACTIONS_MAX}.")
        for action in actions:
            if action not in SHARED:
                raise bad_value(f"SQS:{action}", "ActionName", "Only the queue owner is allowed to invoke this action.")
        principals = [account if account.startswith("arn:") else f"arn:aws:iam::{account}:root" for account in accounts]
        statement = {
            "Sid": label,
            "Effect": "Allow",
            "Principal": {"AWS": _one_or_many(principals)},
            "Action": _one_or_many([f"SQS:{action}" for action in actions]),
            "Resource": call.place.arn_of(queue),
        }

        def added(statements: list[Any]) -> list[Any]:
            if any(one.get("Sid") == label for one in statements):
                raise bad_value(label, "Label", "Already exists.")
            return [*statements, statement]

        await self._edit_policy(call, queue, added)

    async def RemovePermission(self, call: Call, request: Any) -> None:
        queue = await self.require(call, request.QueueUrl, "manage")
        _check_label(request.Label)

        def removed(statements: list[Any]) -> list[Any]:
            kept = [one for one in statements if one.get("Sid") != request.Label]
            if len(kept) == len(statements):
                raise bad_value(request.Label, "Label", "can't find label.")
            return kept

        await self._edit_policy(call, queue, removed)

    async def _edit_policy(self, call: Call, queue: str, change: Any) -> None:
        name = BESIDE + "Policy"

        def changed(old: Draft) -> Draft:
            policy: dict[str, Any] = {
                "Version": "2008-10-17",
                "Id": f"{call.place.arn_of(queue)}/SQSDefaultPolicy",
                "Statement": [],
            }
            if name in old.attributes:
                policy |= msgspec.json.decode(old.attributes[name])
            statements = policy["Statement"]
            listed = statements if isinstance(statements, list) else [statements]
            policy["Statement"] = change([one for one in listed if isinstance(one, dict)])
            attributes = {k: v for k, v in old.attributes.items() if k != name}
            if policy["Statement"]:
                text = attributes[name] = msgspec.json.encode(policy).decode()
                if len(text) > attribute.POLICY_MAX:
                    raise SqsError("OverLimit", f"The policy has more than {attribute.POLICY_MAX} characters.")
            return old._replace(attributes=attributes)

        await self.edit(queue, changed)


def _require_dead_letters(call: Call, old: Draft | None, new: Draft) -> None:
    """Naming another dead-letter queue needs the permission to send to it. Raises `NotAllowedError`."""
    target = new.settings.dead_letter_queue
    if target and (old is None or old.settings.dead_letter_queue != target):
        call.grants.require("send", target)


def _since_s(at_ms: int) -> float:
    return time.time() - at_ms / 1000


def _one_or_many(values: list[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else values


def _check_label(label: str) -> None:
    if not label:
        raise missing("Label")
    if len(label) > 80 or not label.replace("-", "").replace("_", "").isalnum():
        raise bad_value(
            label[:300],
            "Label",
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length.",
        )


def _check_tags(queue: str, tags: dict[str, str]) -> None:
    if len(tags) > TAGS_MAX:
        raise SqsError("InvalidParameterValue", f"Too many tags added for queue {queue}.")
    for key, value in tags.items():
        if not 1 <= len(key) <= 128:
            raise SqsError("InvalidParameterValue", "Tag keys must be between 1 and 128 characters in length.")
        if len(value) > 256:
            raise SqsError("InvalidParameterValue", "Tag values must be between 0 and 256 characters in length.")


def _page_of(request: Any) -> tuple[int, str]:
    """The size of the page that a request wants, and the name after which it begins. Raises `SqsError`."""
    limit = request.MaxResults
    if limit is not None and not 1 <= limit <= PAGE_MAX:
        raise bad_value(limit, "MaxResults", f"Value must be between 1 and {PAGE_MAX}.")
    if request.NextToken is None:
        return limit or PAGE_MAX, ""
    if limit is None:
        raise SqsError("InvalidParameterValue", "NextToken needs MaxResults to be set.")
    try:
        after = b64decode(request.NextToken.encode(), altchars=b"-_", validate=True).decode()
    except ValueError:
        after = ""
    # the token of a later version must not be taken for a name: such tokens begin with a character that no name has
    if name_problem(after) is not None:
        raise SqsError("InvalidParameterValue", "Invalid or expired next token.")
    return limit, after


def _told(call: Call, names: list[str], more: str, request: Any, member: str) -> dict[str, Any]:
    """A page of queue URLs. The token is the last name of the previous page."""
    result: dict[str, Any] = {member: [call.place.url_of(name) for name in names]} if names else {}
    if request.MaxResults is not None and more:
        result["NextToken"] = urlsafe_b64encode(more.encode()).decode()
    return result
