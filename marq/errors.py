"""The one exception hierarchy. Protocols map these errors and don't invent their own.

Every message is one line that says what was wrong, the value, and what to do about it.
"""

from __future__ import annotations

from marq.text import cleaned


class MarqError(Exception):
    """Base of all errors that marq raises on purpose; its text can be shown to users unchanged.

    Each argument is a line of its own, for errors that name several things to fix at once.
    """

    @property
    def lines(self) -> list[str]:
        """The lines to show. Control characters in quoted text can't add lines."""
        return [cleaned(str(line)) for line in self.args]

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class SettingError(MarqError):
    """A setting has a value that is not allowed, or a name that does not exist."""


class BrokerError(MarqError):
    """Kafka can't be reached, refuses us, or the embedded broker can't start."""


class TopicError(MarqError):
    """A topic is missing, or is not as marq needs it."""


class DataDirError(MarqError):
    """The data folder can't be used: it is not writable, or something that we need in it is taken."""


class DownloadError(MarqError):
    """A file can't be downloaded, differs from the expected one, or others could have changed it."""


class MarkerError(MarqError):
    """A record of the markers topic can't be read. It only advances the clock."""


class NewerVersionError(MarkerError):
    """A record of markers or of a queue of a later version. If the installation has sealed it, its reader must stop."""


class RowError(MarqError):
    """A row or manifest of a table can't be read, or its key is not of a table."""


class NewerRowError(RowError):
    """A row or manifest of a later version of its format. Only a worker of a later version can own the partition."""


class DeletedError(RowError):
    """A log begins beyond the position up to which it was read: records were deleted unread."""


class UnreadableError(RowError):
    """No replica has a part of the markers log or of a changelog whole: nobody can know what happened there."""


class RewrittenError(RowError):
    """A log ends before the position up to which it was read, or other records have these offsets now."""


class InternalError(MarqError):
    """One of our own rules is broken. The worker stops before it can do harm."""


class StepTimeoutError(InternalError):
    """A step of a checkpoint was not confirmed in time."""


class HandlerError(MarqError):
    """A handler has options that make no sense, or its module can't be imported."""


class RequestError(MarqError):
    """The request can't be carried out; another attempt with the same values would fail too."""


class BadValueError(RequestError):
    """A value in a request is malformed, missing or out of range."""


class BadReceiptError(RequestError):
    """A receipt that was never issued, or not by this installation."""


class UnknownQueueError(RequestError):
    """The queue does not exist, and is not created by sending to it."""


class NotFoundError(RequestError):
    """The thing that was asked for does not exist."""


class TooLargeError(RequestError):
    """A message or a request is larger than allowed."""


class NotPossibleError(RequestError):
    """The installation is configured in a way that excludes this."""


class LeaseOverError(RequestError):
    """The receipt is of a delivery that is no longer the current one of its message."""


class NotAuthenticatedError(RequestError):
    """The request has no key that is known here."""


class NotAllowedError(RequestError):
    """The key is known, but does not permit this."""


class UnavailableError(MarqError):
    """Not possible now: Kafka is slow or away, or too much waits already. Try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnreachableError(UnavailableError):
    """None of the service's addresses answers."""


class ServiceError(MarqError):
    """The service answered that it failed, or its answer is not one of marq's."""


class ClosedError(MarqError):
    """A client was used after it was closed."""


class PipelineError(MarqError):
    """A Spark job can't be run: its tables, checkpoint or input are not as they must be."""
