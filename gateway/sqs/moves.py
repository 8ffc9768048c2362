"""The actions on message move tasks: start, list, cancel."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import msgspec

from app.engine.queue_records import MoveTask
from app.service.move_tasks import KEPT, NO_TARGET, OtherTypeError, SameQueueError, UnderWayError
from gateway.sqs.call import Call
from gateway.sqs.errors import KINDS, SqsError, bad_value
from gateway.sqs.urls import queue_of_arn

if TYPE_CHECKING:
    from app.service.move_tasks import MoveTasks
    from gateway.sqs.queues import Queues

#: The highest rate of a task that moves messages, as in AWS: messages a second.
PER_SECOND_MAX = 500


class Moves:
    """The actions, named as in the service model."""

    def __init__(self, queues: Queues, tasks: MoveTasks) -> None:
        self._queues = queues
        self._tasks = tasks

    async def _queue(self, call: Call, arn: str, parameter: str, permission: str) -> str:
        try:
            return await self._queues.require_name(call, queue_of_arn(arn, parameter), permission)
        except SqsError as exc:
            if exc.name != "QueueDoesNotExist":
                raise
            raise _not_found(f"The resource that you specified for the {parameter} parameter doesn't exist.") from None

    async def StartMessageMoveTask(self, call: Call, request: Any) -> dict[str, Any]:
        queue = await self._queue(call, request.SourceArn, "SourceArn", "receive")
        per_second = request.MaxNumberOfMessagesPerSecond
        if per_second is not None and not 1 <= per_second <= PER_SECOND_MAX:
            raise bad_value(
                per_second, "MaxNumberOfMessagesPerSecond", f"Must be between 1 and {PER_SECOND_MAX}, if provided."
            )
        if not self._queues.sources_of(queue):
            raise SqsError("InvalidParameterValue", "Source queue must be configured as a Dead Letter Queue.")
        to = ""
        if request.DestinationArn:
            to = await self._queue(call, request.DestinationArn, "DestinationArn", "send")
        else:
            call.grants.require("send", None, everywhere=True)  # each message goes back to the queue it came from
        try:
            task = await self._tasks.begin(queue, to, per_second or 0)
        except SameQueueError:
            raise SqsError(
                "InvalidParameterValue", "Source queue arn and destination queue arn cannot be the same."
            ) from None
        except OtherTypeError:
            raise SqsError(
                "UnsupportedOperation", "Source and destination have to be queues of the same type."
            ) from None
        except UnderWayError:
            raise _already() from None
        return {"TaskHandle": _handle(request.SourceArn, task)}

    async def ListMessageMoveTasks(self, call: Call, request: Any) -> dict[str, Any]:
        queue = await self._queue(call, request.SourceArn, "SourceArn", "manage")
        limit = request.MaxResults if request.MaxResults is not None else 1
        if not 1 <= limit <= KEPT:
            raise bad_value(limit, "MaxResults", f"Value must be between 1 and {KEPT}.")
        await self._tasks.settle(queue)
        tasks = self._tasks.tasks_of(queue)
        return {"Results": [_told(call, request.SourceArn, task) for task in tasks[:limit]]}

    async def CancelMessageMoveTask(self, call: Call, request: Any) -> dict[str, Any]:
        task_id, arn = _read_handle(request.TaskHandle)
        queue = await self._queue(call, arn, "SourceArn", "receive")
        task = next((task for task in self._tasks.tasks_of(queue) if task.id == task_id), None)
        if task is None:
            raise _not_found("Task does not exist.")
        if task.state != "running":
            raise SqsError("UnsupportedOperation", "Only active tasks can be cancelled.")
        await self._tasks.cancel(queue, task_id)
        return {"ApproximateNumberOfMessagesMoved": task.moved}


def _told(call: Call, arn: str, task: MoveTask) -> dict[str, Any]:
    told: dict[str, Any] = {
        "Status": task.state.upper(),
        "SourceArn": arn,
        "ApproximateNumberOfMessagesMoved": task.moved,
        "ApproximateNumberOfMessagesToMove": task.total,
        "StartedTimestamp": task.started_ms,
    }
    if task.state == "running":
        told["TaskHandle"] = _handle(arn, task)
    if task.to:
        told["DestinationArn"] = call.place.arn_of(task.to)
    if task.per_second:
        told["MaxNumberOfMessagesPerSecond"] = task.per_second
    if task.reason:
        told["FailureReason"] = KINDS["QueueDoesNotExist"].code if task.reason == NO_TARGET else task.reason
    return told


def _handle(arn: str, task: MoveTask) -> str:
    return b64encode(msgspec.json.encode({"taskId": task.id, "sourceArn": arn})).decode()


def _read_handle(handle: str) -> tuple[str, str]:
    try:
        found = msgspec.json.decode(b64decode(handle, validate=True), type=dict[str, str])
        return found["taskId"], found["sourceArn"]
    except (ValueError, KeyError):
        raise SqsError("InvalidParameterValue", "Value for parameter TaskHandle is invalid.") from None


def _already() -> SqsError:
    return SqsError(
        "InvalidParameterValue",
        "There is already a task running. Only one active task is allowed for a source queue arn at a given time.",
    )


def _not_found(message: str) -> SqsError:
    return SqsError("ResourceNotFoundException", message)
