"""The actions that send messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from app.service.fifo import UnfitError, deduplication_id_of
from app.service.sends import FromProtocol
from gateway.sqs import batches, messages
from gateway.sqs.call import Call
from gateway.sqs.errors import SqsError, bad_value, error_of, missing
from gateway.sqs.limits import Limits
from gateway.sqs.memory import Sends
from gateway.sqs.messages import Attribute, MessageIds, md5_of, md5_of_attributes
from marq.core.policies import QueueSettings
from marq.errors import MarqError, TooLargeError
from marq.protocol.headers import H_SQS_SENDER, H_SQS_TRACE
from marq.protocol.messages import Entry, Sent

if TYPE_CHECKING:
    from gateway.sqs.queues import Queues


_NO_DEDUPLICATION = (
    "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided explicitly"
)


class Sending:
    """The actions, named as in the service model."""

    def __init__(self, queues: Queues, limits: Limits, ids: MessageIds) -> None:
        self._queues = queues
        self._operations = queues.operations
        self._limits = limits
        self._ids = ids
        self._sends = Sends()

    async def SendMessage(self, call: Call, request: Any) -> dict[str, Any]:
        queue, settings = await self._sendable(call, request.QueueUrl)
        prepared = self._prepare(call, request, settings)
        (result,) = await self._operations.send(queue, [prepared[0]])
        if isinstance(result, MarqError):
            raise self._send_error(result, request, settings, "are invalid")
        return self._sent(queue, settings, prepared, result)

    async def SendMessageBatch(self, call: Call, request: Any) -> dict[str, Any]:
        entries = request.Entries
        batches.check_entries(entries, "SendMessageBatchRequestEntry", self._limits.entries)
        queue, settings = await self._sendable(call, request.QueueUrl)
        self._check_batch_size(entries)
        if settings.fifo:
            _check_fifo_entries(entries, settings)
        failed: list[dict[str, Any]] = []
        prepared, chosen = [], []
        for entry in entries:
            try:
                prepared.append(self._prepare(call, entry, settings))
                chosen.append(entry)
            except SqsError as exc:
                failed.append(batches.failure(entry.Id, exc))
        results = await self._operations.send(queue, [p[0] for p in prepared]) if prepared else []
        successful = []
        for entry, one, result in zip(chosen, prepared, results, strict=True):
            if isinstance(result, MarqError):
                failed.append(
                    batches.failure(entry.Id, self._send_error(result, entry, settings, "cannot be validated"))
                )
            else:
                successful.append({"Id": entry.Id, **self._sent(queue, settings, one, result)})
        return batches.answer(successful, failed)

    async def _sendable(self, call: Call, url: str) -> tuple[str, QueueSettings]:
        queue = await self._queues.require(call, url, "send")
        return queue, self._operations.catalog.settings_of(queue)

    def _prepare(
        self, call: Call, entry: Any, settings: QueueSettings
    ) -> tuple[Entry, list[Attribute] | None, Attribute | None]:
        """The message to send, its attributes and its trace."""
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
        added: dict[str, bytes] = {}
        attributes: list[Attribute] | None = None
        if entry.MessageAttributes:
            attributes = messages.attributes_of(entry.MessageAttributes, self._limits.attributes)
            headers, added = messages.headers_of(attributes)
        trace: Attribute | None = None
        if entry.MessageSystemAttributes:
            trace = messages.trace_of(entry.MessageSystemAttributes)
            added[H_SQS_TRACE] = trace.value
        elif call.trace is not None:
            added[H_SQS_TRACE] = call.trace
        if call.sender is not None:
            added[H_SQS_SENDER] = call.sender.encode()
        kind: Any = Entry
        if added or attributes:
            size = messages.size_of(payload, attributes or ())
            kind = partial(FromProtocol, protocol_headers=added, size_bytes=size)
        outgoing: Entry = kind(
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
        size = sum(_size_of(entry.MessageBody) for entry in entries)
        for entry in entries:
            for name, value in (entry.MessageAttributes or {}).items():
                size += len(name.encode(errors="replace")) + len(value.DataType.encode(errors="replace"))
                size += len((value.StringValue or "").encode(errors="replace")) + len(value.BinaryValue or b"")
        if size > limit:
            raise SqsError(
                "BatchRequestTooLong",
                f"Batch requests cannot be longer than {limit} bytes. You have sent {size} bytes.",
            )

    def _send_error(self, error: MarqError, entry: Any, settings: QueueSettings, parameters: str) -> SqsError:
        """AWS's error for a message that was not sent. `parameters`: the text for a message that is too large."""
        if isinstance(error, TooLargeError):
            limit = settings.max_message_bytes or self._limits.message_bytes
            return SqsError(
                "InvalidParameterValue",
                f"One or more parameters {parameters}. Reason: Message must be shorter than {limit} bytes.",
            )
        if isinstance(error, UnfitError):
            if error.field == "group":
                return missing("MessageGroupId")
            if error.field == "delay_ms":
                return _not_of_this_type(entry.DelaySeconds, "DelaySeconds")
            if not settings.fifo:
                return _not_of_this_type(entry.MessageDeduplicationId, "MessageDeduplicationId")
            return SqsError("InvalidParameterValue", _NO_DEDUPLICATION)
        return error_of(error)

    def _sent(
        self,
        queue: str,
        settings: QueueSettings,
        prepared: tuple[Entry, list[Attribute] | None, Attribute | None],
        sent: Sent,
    ) -> dict[str, Any]:
        outgoing, attributes, trace = prepared
        if settings.fifo:
            group = outgoing.group if settings.id_scope == "group" else None
            generation = self._operations.catalog.generation_of(queue)
            sent = self._sends.first((queue, generation, group, deduplication_id_of(outgoing)), sent)
        result = {"MessageId": self._ids.of(sent.partition, sent.offset), "MD5OfMessageBody": md5_of(outgoing.payload)}
        if attributes:
            result["MD5OfMessageAttributes"] = md5_of_attributes(attributes)
        if trace is not None:
            result["MD5OfMessageSystemAttributes"] = md5_of_attributes([trace])
        if settings.fifo:
            result["SequenceNumber"] = self._ids.sequence_number(sent.partition, sent.offset)
        return result


def _size_of(text: str) -> int:
    """Bytes of a text; of most, none has to be made for that."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _check_fifo_entries(entries: Sequence[Any], settings: QueueSettings) -> None:
    """Raise `SqsError` if an entry has no group, or no deduplication id: that fails the whole batch."""
    for entry in entries:
        if entry.MessageGroupId is None:
            raise SqsError("InvalidParameterValue", str(missing("MessageGroupId")))
        if entry.MessageDeduplicationId is None and not settings.content_deduplication:
            raise SqsError("InvalidParameterValue", _NO_DEDUPLICATION)


def _not_of_this_type(value: object, parameter: str) -> SqsError:
    return bad_value(value, parameter, "The request include parameter that is not valid for this queue type.")
