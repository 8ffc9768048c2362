"""AWS's names of errors: the exception in the service model, the code in the query protocol, the status."""

from __future__ import annotations

from typing import NamedTuple

from marq import errors
from marq.errors import MarqError, RequestError

_SQS = "com.amazonaws.sqs#"
_COMMON = "com.amazon.coral.service#"
_PREFIX = "AWS.SimpleQueueService."


class Kind(NamedTuple):
    """The names and the status of an error."""

    type: str  # in the JSON protocol
    code: str  # in the query protocol, and in `x-amzn-query-error`
    status: int = 400
    fault: str = "Sender"
    json_status: int | None = None  # in the JSON protocol, where it differs


#: Errors by their names in this package: the name of the shape, where the service model has one.
KINDS: dict[str, Kind] = {
    **{
        name: Kind(_SQS + name, _PREFIX + name)
        for name in (
            "BatchEntryIdsNotDistinct",
            "BatchRequestTooLong",
            "EmptyBatchRequest",
            "InvalidBatchEntryId",
            "MessageNotInflight",
            "QueueDeletedRecently",
            "TooManyEntriesInBatchRequest",
            "UnsupportedOperation",
        )
    },
    **{
        name: Kind(_SQS + name, name)
        for name in ("InvalidAttributeName", "InvalidAttributeValue", "InvalidMessageContents")
    },
    "InvalidAddress": Kind(_SQS + "InvalidAddress", "InvalidAddress", 404),
    "OverLimit": Kind(_SQS + "OverLimit", "OverLimit", 403),
    "PurgeQueueInProgress": Kind(_SQS + "PurgeQueueInProgress", _PREFIX + "PurgeQueueInProgress", 403),
    "QueueDoesNotExist": Kind(_SQS + "QueueDoesNotExist", _PREFIX + "NonExistentQueue"),
    "QueueNameExists": Kind(_SQS + "QueueNameExists", "QueueAlreadyExists"),
    "ReceiptHandleIsInvalid": Kind(_SQS + "ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid", 404),
    "ResourceNotFoundException": Kind(_SQS + "ResourceNotFoundException", "ResourceNotFoundException", 404),
    "InvalidParameterValue": Kind(_COMMON + "InvalidParameterValueException", "InvalidParameterValue"),
    "MissingParameter": Kind(_COMMON + "MissingRequiredParameterException", "MissingParameter"),
    "Serialization": Kind(_COMMON + "SerializationException", "MalformedInput"),
    "UnknownOperation": Kind(_COMMON + "UnknownOperationException", "InvalidAction", json_status=404),
    "MissingAction": Kind(_COMMON + "MissingActionException", "MissingAction"),
    "RequestTooLarge": Kind(_COMMON + "RequestEntityTooLargeException", "RequestEntityTooLarge", 413),
    "RequestTimeout": Kind(_COMMON + "RequestTimeoutException", "RequestTimeout", 408),
    "MissingAuthenticationToken": Kind(
        _COMMON + "MissingAuthenticationTokenException", "MissingAuthenticationToken", 403
    ),
    "IncompleteSignature": Kind(_COMMON + "IncompleteSignatureException", "IncompleteSignature", 403),
    "InvalidClientTokenId": Kind(_COMMON + "UnrecognizedClientException", "InvalidClientTokenId", 403),
    "SignatureDoesNotMatch": Kind(_COMMON + "InvalidSignatureException", "SignatureDoesNotMatch", 403),
    "RequestExpired": Kind(_COMMON + "RequestExpiredException", "RequestExpired", 403),
    "AccessDenied": Kind(_COMMON + "AccessDeniedException", "AccessDenied", 403),
    "ServiceUnavailable": Kind(_COMMON + "ServiceUnavailableException", "ServiceUnavailable", 503, "Receiver"),
    "InternalFailure": Kind(_COMMON + "InternalFailure", "InternalFailure", 500, "Receiver"),
}

#: Characters of an error's text: it may repeat megabytes of a request.
TEXT_MAX = 2_000
NO_QUEUE = "The specified queue does not exist."
#: The same in the query protocol.
NO_QUEUE_QUERY = "The specified queue does not exist for this wsdl version."


class SqsError(RequestError):
    """An error with a name of AWS's."""

    def __init__(self, name: str, message: str) -> None:
        text = message if len(message) <= TEXT_MAX else message[:TEXT_MAX] + "…"
        super().__init__(text if text.isascii() else text.encode(errors="backslashreplace").decode())
        self.name = name
        self.kind = KINDS[name]


#: Names of the errors that the service and the core raise; the first one that fits counts.
_NAMES: tuple[tuple[type[MarqError], str], ...] = (
    (errors.UnknownQueueError, "QueueDoesNotExist"),
    (errors.BadReceiptError, "ReceiptHandleIsInvalid"),
    (errors.LeaseOverError, "MessageNotInflight"),
    (errors.NotPossibleError, "UnsupportedOperation"),
    (errors.NotAllowedError, "AccessDenied"),
    (errors.NotAuthenticatedError, "MissingAuthenticationToken"),
    (errors.NotFoundError, "ResourceNotFoundException"),
    (errors.RequestError, "InvalidParameterValue"),
    (errors.UnavailableError, "ServiceUnavailable"),
    (errors.BrokerError, "ServiceUnavailable"),
)


def error_of(error: BaseException) -> SqsError:
    """AWS's error for one of ours; `InternalFailure` for errors that should never happen."""
    if isinstance(error, SqsError):
        return error
    for kind, name in _NAMES:
        if isinstance(error, kind):
            if name == "QueueDoesNotExist":
                return SqsError(name, NO_QUEUE)
            if name == "ReceiptHandleIsInvalid":
                return SqsError(name, f"The input receipt handle is invalid: {error}")
            return SqsError(name, str(error))
    return SqsError("InternalFailure", "An internal error occurred; the worker's log says more.")


def bad_value(value: object, parameter: str, reason: str) -> SqsError:
    """The error for an invalid value of a parameter."""
    return SqsError("InvalidParameterValue", f"Value {value} for parameter {parameter} is invalid. Reason: {reason}")


def missing(parameter: str) -> SqsError:
    """The error for a missing parameter."""
    return SqsError("MissingParameter", f"The request must contain the parameter {parameter}.")
