"""The actions on messages: send, receive, delete, change the visibility timeout."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from app.letters import H_FIRST, H_FROM, H_RECEIVES
from gateway.door import Outgoing, Sent
from gateway.leases import Lease
from gateway.placing import H_DEDUPLICATION, H_GROUP, UnfitError, deduplication_id_of
from gateway.receipts import queue_crc
from gateway.receiving import Received
from gateway.sqs import messages
from gateway.sqs.attributes import wait_s_of
from gateway.sqs.call import Call
from gateway.sqs.errors import SqsError, bad_value, error_of, missing
from gateway.sqs.limits import Limits
from gateway.sqs.memory import Attempts, FirstReceives, Sends
from gateway.sqs.messages import H_SENDER, H_TRACE, Attribute, MessageIds, md5_of, md5_of_attributes
from gateway.sqs.model import enum_of
from marq.core.partition import H_ORIGIN
from marq.core.policies import LEASE_MIN_MS, QueueSettings
from marq.errors import LeaseOverError, MarqError, TooLargeError, UnavailableError

if TYPE_CHECKING:
    from gateway.sqs.queues import Queues

_ENTRY_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")


class Deliveries:
    """The actions, named as in the service model."""

    def __init__(self, queues: Queues, limits: Limits) -> None:
        self._queues = queues
        self._door = queues.door
        self._limits = limits
        self._ids: MessageIds | None = None
        self._sends = Sends()
        self._first = FirstReceives()
        self._attempts = Attempts()
        self._crcs: dict[str, int] = {}

    @property
    def ids(self) -> MessageIds:
        """Makes the ids of messages."""
        if self._ids is None:
            self._ids = MessageIds(self._door.catalog.secret)
        return self._ids

    # ------------------------------------------------------------------ send

    async def SendMessage(self, call: Call, request: Any) -> dict[str, Any]:
        queue, settings = await self._sendable(call, request.QueueUrl)
        prepared = self._prepare(call, request, settings)
        (result,) = await self._door.send(queue, [prepared[0]])
        if isinstance(result, MarqError):
            raise self._send_error(result, request, settings)
        return self._sent(queue, settings, prepared, result)

    async def SendMessageBatch(self, call: Call, request: Any) -> dict[str, Any]:
        entries = request.Entries
        self._check_entries(entries, "SendMessageBatchRequestEntry")
        queue, settings = await self._sendable(call, request.QueueUrl)
        self._check_batch_size(entries)
        failed: list[dict[str, Any]] = []
        prepared, chosen = [], []
        for entry in entries:
            try:
                prepared.append(self._prepare(call, entry, settings))
                chosen.append(entry)
            except SqsError as exc:
                failed.append(_failure(entry.Id, exc))
        results = await self._door.send(queue, [p[0] for p in prepared]) if prepared else []
        successful = []
        for entry, one, result in zip(chosen, prepared, results, strict=True):
            if isinstance(result, MarqError):
                failed.append(_failure(entry.Id, self._send_error(result, entry, settings)))
            else:
                successful.append({"Id": entry.Id, **self._sent(queue, settings, one, result)})
        return _batch(successful, failed)

    async def _sendable(self, call: Call, url: str) -> tuple[str, QueueSettings]:
        queue = await self._queues.require(call, url, "send")
        return queue, self._door.catalog.settings_of(queue)

    def _prepare(
        self, call: Call, entry: Any, settings: QueueSettings
    ) -> tuple[Outgoing, list[Attribute] | None, Attribute | None]:
        """A message, its attributes and its trace."""
        payload = messages.body_of(entry.MessageBody)
        delay_s = entry.DelaySeconds
        if delay_s is not None and not 0 <= delay_s <= self._limits.delay_s:
            raise bad_value(delay_s, "DelaySeconds", f"DelaySeconds must be >= 0 and <= {self._limits.delay_s}.")
        if delay_s == 0 and settings.fifo:
            delay_s = None
        group, name = entry.MessageGroupId, entry.MessageDeduplicationId
        if group is not None:
            messages.check_id(group, "MessageGroupId")
        if name is not None:
            messages.check_id(name, "MessageDeduplicationId")
        headers: dict[str, bytes] = {}
        attributes: list[Attribute] | None = None
        if entry.MessageAttributes:
            attributes = messages.attributes_of(entry.MessageAttributes, self._limits.attributes)
            headers = messages.headers_of(attributes)
        trace: Attribute | None = None
        if entry.MessageSystemAttributes:
            trace = messages.trace_of(entry.MessageSystemAttributes)
            headers[H_TRACE] = trace.value
        if call.sender is not None:
            headers[H_SENDER] = call.sender.encode()
        outgoing = Outgoing(
            payload=payload,
            headers=headers,
            delay_ms=delay_s * 1000 if delay_s is not None else None,
            group=group,
            deduplication_id=name,
        )
        return outgoing, attributes, trace

    def _check_batch_size(self, entries: Sequence[Any]) -> None:
        limit = self._limits.batch_bytes
        if limit is None:
            return
        size = sum(len(entry.MessageBody.encode(errors="replace")) for entry in entries)
        for entry in entries:
            for name, value in (entry.MessageAttributes or {}).items():
                size += len(name.encode(errors="replace")) + len(value.DataType.encode(errors="replace"))
                size += len((value.StringValue or "").encode(errors="replace")) + len(value.BinaryValue or b"")
        if size > limit:
            raise SqsError(
                "BatchRequestTooLong",
                f"Batch requests cannot be longer than {limit} bytes. You have sent {size} bytes.",
            )

    def _send_error(self, error: MarqError, entry: Any, settings: QueueSettings) -> SqsError:
        if isinstance(error, TooLargeError):
            limit = settings.max_message_bytes or self._limits.message_bytes
            return SqsError(
                "InvalidParameterValue",
                f"One or more parameters are invalid. Reason: Message must be shorter than {limit} bytes.",
            )
        if isinstance(error, UnfitError):
            if error.field == "group":
                return missing("MessageGroupId")
            if error.field == "delay_ms":
                return _not_of_this_type(entry.DelaySeconds, "DelaySeconds")
            if not settings.fifo:
                return _not_of_this_type(entry.MessageDeduplicationId, "MessageDeduplicationId")
            return SqsError(
                "InvalidParameterValue",
                "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided "
                "explicitly",
            )
        return error_of(error)

    def _sent(
        self,
        queue: str,
        settings: QueueSettings,
        prepared: tuple[Outgoing, list[Attribute] | None, Attribute | None],
        sent: Sent,
    ) -> dict[str, Any]:
        outgoing, attributes, trace = prepared
        if settings.fifo:
            group = outgoing.group if settings.deduplication_scope == "group" else None
            sent = self._sends.first(queue, group, deduplication_id_of(outgoing), sent)
        result = {"MessageId": self.ids.of(sent.partition, sent.offset), "MD5OfMessageBody": md5_of(outgoing.payload)}
        if attributes:
            result["MD5OfMessageAttributes"] = md5_of_attributes(attributes)
        if trace is not None:
            result["MD5OfMessageSystemAttributes"] = md5_of_attributes([trace])
        if settings.fifo:
            result["SequenceNumber"] = messages.sequence_number(sent.offset)
        return result

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
            wait_s = wait_s_of(self._door.catalog.records.get(queue))
        settings = self._door.catalog.settings_of(queue)
        lease_ms = settings.visibility_timeout_ms if lease_s is None else max(lease_s * 1000, LEASE_MIN_MS)
        attempt = request.ReceiveRequestAttemptId if settings.fifo else None
        received: list[Received] = []
        if attempt is not None:
            messages.check_id(attempt, "ReceiveRequestAttemptId")
            received = await self._again(queue, attempt, lease_ms)
        if not received:
            received = await self._door.receive(
                queue, limit=limit, wait_ms=wait_s * 1000, lease_ms=lease_ms, gone=call.gone, whole=True
            )
            if attempt is not None and received:
                self._attempts.keep(queue, attempt, received)
        if not received:
            return {}
        names = request.MessageAttributeNames
        return {"Messages": [self._told(call, settings, one, system, names) for one in received]}

    async def _again(self, queue: str, attempt: str, lease_ms: int) -> list[Received]:
        """What an earlier attempt of the same receive was given, if all of it is still in work."""
        received = self._attempts.given(queue, attempt)
        if not received:
            return []
        receipts = [one.receipt for one in received]
        if any(state is not Lease.HELD for state in await self._door.leases.states(receipts)):
            return []
        if any(await self._door.extend(receipts, lease_ms)):
            return []
        return received

    def _told(
        self, call: Call, settings: QueueSettings, one: Received, system: set[str], names: list[str] | None
    ) -> dict[str, Any]:
        """A message as its receiver sees it."""
        headers, origin = one.headers, (one.partition, one.offset)
        if H_FROM in headers:
            origin = _origin_of(headers, origin)
        payload, encoded = messages.text_of(one.payload)
        told: dict[str, Any] = {
            "MessageId": self.ids.of(*origin),
            "ReceiptHandle": one.receipt,
            "MD5OfBody": md5_of(one.payload if not encoded else payload.encode()),
            "Body": payload,
        }
        first_ms = self._first.of(one, int(time.time() * 1000))
        if system:
            told["Attributes"] = self._system(call, settings, one, system, first_ms)
        if names and (headers or encoded):
            attributes = messages.select(messages.attributes_in(headers), names)
            if encoded and messages.select([messages.ENCODED], names):
                attributes.append(messages.ENCODED)
            if attributes:
                told["MD5OfMessageAttributes"] = md5_of_attributes(attributes)
                told["MessageAttributes"] = {a.name: a.as_value() for a in attributes}
        return told

    def _system(
        self, call: Call, settings: QueueSettings, one: Received, names: set[str], first_ms: int
    ) -> dict[str, str]:
        headers, everything = one.headers, "All" in names
        sent_ms, receives = one.sent_ms, one.attempt
        source = headers.get(H_FROM)
        if source is not None:
            receives += _number(headers.get(H_RECEIVES), 0)
            if not settings.fifo:
                sent_ms = _number(headers.get(H_FIRST), sent_ms)
        found = {
            "SenderId": headers[H_SENDER].decode(errors="replace") if H_SENDER in headers else call.place.account,
            "SentTimestamp": str(sent_ms),
            "ApproximateReceiveCount": str(receives),
            "ApproximateFirstReceiveTimestamp": str(first_ms),
        }
        if H_GROUP in headers:
            found["MessageGroupId"] = headers[H_GROUP].decode(errors="replace")
        if settings.fifo:
            found["SequenceNumber"] = messages.sequence_number(one.offset)
            if H_DEDUPLICATION in headers:
                name = headers[H_DEDUPLICATION].rpartition(b"\0")[2]
                found["MessageDeduplicationId"] = name.decode(errors="replace")
        if H_TRACE in headers:
            found["AWSTraceHeader"] = headers[H_TRACE].decode(errors="replace")
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
        self._check_entries(entries, "DeleteMessageBatchRequestEntry")
        queue = await self._queues.require(call, request.QueueUrl, "receive")
        errors = await self._delete(queue, [entry.ReceiptHandle for entry in entries])
        return _outcomes(entries, errors)

    async def _delete(self, queue: str, receipts: list[str]) -> list[SqsError | None]:
        async def settle(good: list[str]) -> Sequence[MarqError | None]:
            if not self._door.catalog.settings_of(queue).fifo:
                return await self._door.ack(good)
            # where order counts, a receiver whose time is over has lost the message
            states = await self._door.leases.states(good)
            errors = iter(await self._door.ack([r for r, s in zip(good, states, strict=True) if s is not Lease.OVER]))
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
        self._check_entries(entries, "ChangeMessageVisibilityBatchRequestEntry")
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
        return _outcomes(entries, errors)

    def _check_visibility(self, lease_s: int) -> None:
        if not 0 <= lease_s <= self._limits.visibility_s:
            raise bad_value(
                lease_s, "VisibilityTimeout", f"Must be between 0 and {self._limits.visibility_s}, if provided."
            )

    async def _change(self, queue: str, receipts: list[str], lease_s: int) -> list[SqsError | None]:
        async def settle(good: list[str]) -> Sequence[MarqError | None]:
            states = await self._door.leases.states(good)
            held = [r for r, s in zip(good, states, strict=True) if s is Lease.HELD]
            if lease_s:
                errors = iter(await self._door.extend(held, lease_s * 1000))
            else:
                errors = iter(await self._door.release(held, 0))
            return [
                next(errors) if s is Lease.HELD else _not_in_flight(r, s) for r, s in zip(good, states, strict=True)
            ]

        return await self._settled(queue, receipts, settle)

    # ------------------------------------------------------------------ what batches share

    async def _settled(
        self, queue: str, receipts: list[str], settle: Callable[[list[str]], Any]
    ) -> list[SqsError | None]:
        """Do something with those receipts that are of this queue; for each its error."""
        errors: list[SqsError | None] = [None] * len(receipts)
        good: list[int] = []
        crc, read = self._crc(queue), self._door.receipts.read
        for i, receipt in enumerate(receipts):
            try:
                if read(receipt)[5] != crc:
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

    def _crc(self, queue: str) -> int:
        crc = self._crcs.get(queue)
        if crc is None:
            if len(self._crcs) > 100_000:
                self._crcs.clear()
            crc = self._crcs[queue] = queue_crc(queue)
        return crc

    def _check_entries(self, entries: Sequence[Any], name: str) -> None:
        most = self._limits.entries
        if not entries:
            raise SqsError("EmptyBatchRequest", f"There should be at least one {name} in the request.")
        if len(entries) > most:
            raise SqsError(
                "TooManyEntriesInBatchRequest",
                f"Maximum number of entries per request are {most}. You have sent {len(entries)}.",
            )
        seen = set()
        for entry in entries:
            if _ENTRY_ID.fullmatch(entry.Id) is None:
                raise SqsError(
                    "InvalidBatchEntryId",
                    "A batch entry id can only contain alphanumeric characters, hyphens and underscores. It can be at "
                    "most 80 letters long.",
                )
            if entry.Id in seen:
                raise SqsError("BatchEntryIdsNotDistinct", f"Id {entry.Id} repeated.")
            seen.add(entry.Id)


def _system_names() -> frozenset[str]:
    return enum_of("MessageSystemAttributeName")


def _origin_of(headers: dict[str, bytes], here: tuple[int, int]) -> tuple[int, int]:
    """Where the message was that a dead letter is the copy of: it keeps its id."""
    number, _, offset = headers.get(H_ORIGIN, b"").partition(b":")
    try:
        return int(number), int(offset)
    except ValueError:
        return here


def _number(text: bytes | None, otherwise: int) -> int:
    try:
        return int(text) if text is not None else otherwise
    except ValueError:
        return otherwise


def _failure(entry: str, error: SqsError) -> dict[str, Any]:
    return {
        "Id": entry,
        "SenderFault": error.kind.fault == "Sender",
        "Code": error.kind.code,
        "Message": str(error),
    }


def _outcomes(entries: Sequence[Any], errors: Sequence[SqsError | None]) -> dict[str, Any]:
    successful, failed = [], []
    for entry, error in zip(entries, errors, strict=True):
        if error is None:
            successful.append({"Id": entry.Id})
        else:
            failed.append(_failure(entry.Id, error))
    return _batch(successful, failed)


def _batch(successful: list[dict[str, Any]], failed: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer to a batch; where the service could do none of it, an error that SDKs try again after."""
    if not successful and failed and all(f["Code"] == "ServiceUnavailable" for f in failed):
        raise UnavailableError(failed[0]["Message"])
    return {"Successful": successful, "Failed": failed} if failed else {"Successful": successful}


def _not_of_this_type(value: object, parameter: str) -> SqsError:
    return bad_value(value, parameter, "The request includes a parameter that is not valid for this queue type.")


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
