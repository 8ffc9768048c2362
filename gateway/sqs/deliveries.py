"""The actions on existing messages: receive, delete, change the visibility timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from app.bodies import Room
from app.service.leases import Lease
from app.service.receipts import queue_id
from gateway.replies import UNREAD
from gateway.sqs import batches, messages
from gateway.sqs.attributes import wait_s_of
from gateway.sqs.call import Call
from gateway.sqs.errors import SqsError, bad_value, error_of, missing
from gateway.sqs.limits import Limits
from gateway.sqs.memory import Attempts, FirstReceives
from gateway.sqs.messages import MessageIds, md5_of, md5_of_attributes
from gateway.sqs.model import enum_of
from marq.core.dedup import ORIGINS, is_sealed
from marq.core.policies import QueueSettings
from marq.errors import LeaseOverError, MarqError
from marq.protocol.headers import (
    H_DEAD_QUEUE,
    H_DEAD_RECEIVES,
    H_DEAD_SENT_MS,
    H_DEDUP,
    H_DEDUP_WAS,
    H_GROUP,
    H_ORIGIN,
    H_ORIGIN_SEAL,
    H_SQS_SENDER,
    H_SQS_TRACE,
)
from marq.protocol.messages import Received

if TYPE_CHECKING:
    from gateway.sqs.queues import Queues


#: Digits of a number in a header. Python converts longer ones slowly, or not at all.
DIGITS_MAX = 18


class Deliveries:
    """The actions, named as in the service model."""

    def __init__(self, queues: Queues, limits: Limits, ids: MessageIds, answers: Room) -> None:
        self._queues = queues
        self._operations = queues.operations
        self._limits = limits
        self._ids = ids
        self._answers = answers
        self._first = FirstReceives()
        self._attempts = Attempts()

    # ------------------------------------------------------------------ receive

    async def ReceiveMessage(self, call: Call, request: Any) -> dict[str, Any]:
        limits = self._limits
        limit = 1 if request.MaxNumberOfMessages is None else request.MaxNumberOfMessages
        if not 1 <= limit <= limits.receive:
            raise bad_value(limit, "MaxNumberOfMessages", f"Must be between 1 and {limits.receive}, if provided.")
        wait_s, lease_s = request.WaitTimeSeconds, request.VisibilityTimeout
        if wait_s is not None and not 0 <= wait_s <= limits.wait_s:
            raise bad_value(wait_s, "WaitTimeSeconds", f"Must be >= 0 and <= {limits.wait_s}, if provided.")
        if lease_s is not None:
            self._check_visibility(lease_s)
        system = {*(request.AttributeNames or ()), *(request.MessageSystemAttributeNames or ())}
        if system and not system <= _system_names():
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {min(system - _system_names())[:300]}.")
        queue = await self._queues.require(call, request.QueueUrl, "receive")
        if wait_s is None:
            wait_s = wait_s_of(self._operations.catalog.records.get(queue))
        settings = self._operations.catalog.settings_of(queue)
        lease_ms = settings.visibility_timeout_ms if lease_s is None else lease_s * 1000
        attempt = request.ReceiveRequestAttemptId if settings.fifo else None
        received: list[Received] = []
        if attempt is not None:
            messages.check_id(attempt, "ReceiveRequestAttemptId")
            received = await self._again(queue, attempt, lease_ms)
        if not received:
            self._answers.require_for_answer(call.request)
            with call.grants.wait(wait_s):
                received = await self._operations.receive(
                    queue, limit=limit, wait_ms=wait_s * 1000, lease_ms=lease_ms, gone=call.gone, whole=True
                )
            if attempt is not None and received:
                self._attempts.keep(queue, attempt, received)
        if not received:
            return {}
        call.request[UNREAD] = partial(self._operations.give_back, received)
        names = request.MessageAttributeNames
        return {"Messages": [self._told(call, settings, one, system, names) for one in received]}

    async def _again(self, queue: str, attempt: str, lease_ms: int) -> list[Received]:
        """The messages of an earlier attempt of the same receive, if all of them are still in flight."""
        received = self._attempts.given(queue, attempt)
        if not received:
            return []
        receipts = [one.receipt for one in received]
        if any(state is not Lease.HELD for state in await self._operations.leases.states(receipts)):
            return []
        if any(await self._operations.extend(receipts, lease_ms)):
            return []
        return received

    def _told(
        self, call: Call, settings: QueueSettings, one: Received, system: set[str], names: list[str] | None
    ) -> dict[str, Any]:
        """A message as its receiver sees it."""
        headers, origin = one.headers, self._origin_of(one.headers)
        payload, encoded = messages.text_of(one.payload)
        told: dict[str, Any] = {
            "MessageId": self._ids.of(*(origin or (one.partition, one.offset))),
            "ReceiptHandle": one.receipt,
            "MD5OfBody": md5_of(one.payload if not encoded else payload.encode()),
            "Body": payload,
        }
        first_ms = self._first.of(one, int(time.time() * 1000))
        if system:
            told["Attributes"] = self._system(call, settings, one, system, first_ms, is_dead=origin is not None)
        if names and (headers or encoded or one.key):
            attributes = messages.select(messages.attributes_in(headers, one.key), names)
            if encoded and messages.select([messages.ENCODED], names):
                attributes.append(messages.ENCODED)
            if attributes:
                told["MD5OfMessageAttributes"] = md5_of_attributes(attributes)
                told["MessageAttributes"] = {a.name: a.as_value() for a in attributes}
        return told

    def _origin_of(self, headers: dict[str, bytes]) -> tuple[int, int] | None:
        """The place of the message whose dead letter this is, and whose id it keeps. None if it is no dead letter.

        Whoever may write to the queue topic can write these headers; only marq can seal an origin.
        """
        if H_DEAD_QUEUE not in headers:
            return None
        origin = headers.get(H_ORIGIN, b"").decode(errors="replace")
        if not is_sealed(origin, headers.get(H_ORIGIN_SEAL), self._operations.catalog.keys_for(ORIGINS)):
            return None
        number, _, offset = origin.partition(":")
        return int(number), int(offset)

    def _system(
        self, call: Call, settings: QueueSettings, one: Received, names: set[str], first_ms: int, *, is_dead: bool
    ) -> dict[str, str]:
        headers, everything = one.headers, "All" in names
        sent_ms, receives = one.sent_ms, one.attempt
        source = headers[H_DEAD_QUEUE] if is_dead else None
        if source is not None:
            receives += _number(headers.get(H_DEAD_RECEIVES), 0)
            if not settings.fifo:
                sent_ms = _number(headers.get(H_DEAD_SENT_MS), sent_ms)
        found = {
            "SenderId": headers[H_SQS_SENDER].decode(errors="replace")
            if H_SQS_SENDER in headers
            else call.place.account,
            "SentTimestamp": str(sent_ms),
            "ApproximateReceiveCount": str(receives),
            "ApproximateFirstReceiveTimestamp": str(first_ms),
        }
        if H_GROUP in headers:
            found["MessageGroupId"] = headers[H_GROUP].decode(errors="replace")
        if settings.fifo:
            found["SequenceNumber"] = self._ids.sequence_number(one.partition, one.offset)
            name = headers.get(H_DEDUP, headers.get(H_DEDUP_WAS))
            if name is not None:
                found["MessageDeduplicationId"] = name.rpartition(b"\0")[2].decode(errors="replace")
        if H_SQS_TRACE in headers:
            found["AWSTraceHeader"] = headers[H_SQS_TRACE].decode(errors="replace")
        if source is not None:
            found["DeadLetterQueueSourceArn"] = call.place.arn_of(source.decode(errors="replace"))
        return found if everything else {name: value for name, value in found.items() if name in names}

    # ------------------------------------------------------------------ delete

    async def DeleteMessage(self, call: Call, request: Any) -> None:
        queue = await self._queues.require(call, request.QueueUrl, "receive")
        (error,) = await self._delete(queue, [request.ReceiptHandle])
        if error is not None:
            raise error

    async def DeleteMessageBatch(self, call: Call, request: Any) -> dict[str, Any]:
        entries = request.Entries
        batches.check_entries(entries, "DeleteMessageBatchRequestEntry", self._limits.entries)
        queue = await self._queues.require(call, request.QueueUrl, "receive")
        errors = await self._delete(queue, [entry.ReceiptHandle for entry in entries])
        return batches.outcomes(entries, errors)

    async def _delete(self, queue: str, receipts: list[str]) -> list[SqsError | None]:
        async def settle(good: list[str]) -> Sequence[MarqError | None]:
            if not self._operations.catalog.settings_of(queue).fifo:
                return await self._operations.ack(good)
            # in a FIFO queue, a receiver whose lease is over has lost the message
            states = await self._operations.leases.states(good)
            errors = iter(
                await self._operations.ack([r for r, s in zip(good, states, strict=True) if s is not Lease.OVER])
            )
            return [_expired(r) if s is Lease.OVER else next(errors) for r, s in zip(good, states, strict=True)]

        return await self._settled(queue, receipts, settle)

    # ------------------------------------------------------------------ change the visibility timeout

    async def ChangeMessageVisibility(self, call: Call, request: Any) -> None:
        self._check_visibility(request.VisibilityTimeout)
        queue = await self._queues.require(call, request.QueueUrl, "receive")
        (error,) = await self._change(queue, [request.ReceiptHandle], request.VisibilityTimeout)
        if error is not None:
            raise error

    async def ChangeMessageVisibilityBatch(self, call: Call, request: Any) -> dict[str, Any]:
        entries = request.Entries
        batches.check_entries(entries, "ChangeMessageVisibilityBatchRequestEntry", self._limits.entries)
        queue = await self._queues.require(call, request.QueueUrl, "receive")
        errors: list[SqsError | None] = [None] * len(entries)
        by_time: dict[int, list[int]] = {}
        for i, entry in enumerate(entries):
            try:
                if entry.VisibilityTimeout is None:
                    raise missing("VisibilityTimeout")
                self._check_visibility(entry.VisibilityTimeout)
                by_time.setdefault(entry.VisibilityTimeout, []).append(i)
            except SqsError as exc:
                errors[i] = exc
        for lease_s, places in by_time.items():
            found = await self._change(queue, [entries[i].ReceiptHandle for i in places], lease_s)
            for i, error in zip(places, found, strict=True):
                errors[i] = error
        return batches.outcomes(entries, errors)

    def _check_visibility(self, lease_s: int) -> None:
        if not 0 <= lease_s <= self._limits.visibility_s:
            raise bad_value(
                lease_s, "VisibilityTimeout", f"Must be between 0 and {self._limits.visibility_s}, if provided."
            )

    async def _change(self, queue: str, receipts: list[str], lease_s: int) -> list[SqsError | None]:
        async def settle(good: list[str]) -> Sequence[MarqError | None]:
            states: Sequence[Lease | MarqError]
            if self._operations.catalog.settings_of(queue).fifo:
                held, states = good, await self._operations.leases.states(good)
            else:
                held, states = await self._latest(good)
            held = [r for r, s in zip(held, states, strict=True) if s is Lease.HELD]
            if lease_s:
                errors = iter(await self._operations.extend(held, lease_s * 1000))
            else:
                errors = iter(await self._operations.release(held, 0))
            return [
                next(errors) if s is Lease.HELD else _not_in_flight(r, s) for r, s in zip(good, states, strict=True)
            ]

        return await self._settled(queue, receipts, settle)

    async def _latest(self, receipts: list[str]) -> tuple[list[str], list[Lease | MarqError]]:
        """The receipts of the last deliveries of these messages, and their states.

        A late heartbeat keeps its message, unless the message was given back since.
        """
        read, make = self._operations.receipts.read, self._operations.receipts.make
        latest = list(receipts)
        states: list[Lease | MarqError] = []
        for i, found in enumerate(await self._operations.leases.latest(receipts)):
            if isinstance(found, MarqError):
                states.append(found)
                continue
            states.append(found.lease)
            if found.lease is Lease.HELD:
                number, _, _, offset, attempt, named = read(receipts[i])
                latest[i] = make(number, found.epoch, found.delivery, offset, attempt, named)
        return latest, states

    # ------------------------------------------------------------------ what batches share

    async def _settled(
        self, queue: str, receipts: list[str], settle: Callable[[list[str]], Any]
    ) -> list[SqsError | None]:
        """Apply an operation to the receipts of this queue. Returns the error of each receipt that failed."""
        errors: list[SqsError | None] = [None] * len(receipts)
        good: list[int] = []
        named, read = queue_id(queue), self._operations.receipts.read
        for i, receipt in enumerate(receipts):
            try:
                if read(receipt)[5] != named:
                    raise _bad_receipt(receipt)
                good.append(i)
            except SqsError as exc:
                errors[i] = exc
            except MarqError:
                errors[i] = _bad_receipt(receipt)
        if good:
            outcomes = await settle([receipts[i] for i in good])
            for i, outcome in zip(good, outcomes, strict=True):
                if outcome is not None:
                    errors[i] = error_of(outcome)
        return errors


def _system_names() -> frozenset[str]:
    return enum_of("MessageSystemAttributeName")


def _number(text: bytes | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdigit() and len(text) <= DIGITS_MAX else otherwise


def _bad_receipt(receipt: str) -> SqsError:
    return SqsError(
        "ReceiptHandleIsInvalid", f'The input receipt handle "{receipt[:1024]}" is not a valid receipt handle.'
    )


def _expired(receipt: str) -> SqsError:
    return bad_value(receipt, "ReceiptHandle", "The receipt handle has expired.")


def _not_in_flight(receipt: str, state: Lease | MarqError) -> MarqError:
    if isinstance(state, MarqError):
        return state
    if state is Lease.DONE:
        return bad_value(
            receipt,
            "ReceiptHandle",
            "Message does not exist or is not available for visibility timeout change.",
        )
    return LeaseOverError("The specified message isn't in flight.")
