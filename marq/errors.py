"""The one exception hierarchy. Protocols map these errors, they don't invent their own.

Every message is one line that says what was wrong, the value, and what to do about it.
"""

from __future__ import annotations

from marq.text import cleaned


class MarqError(Exception):
    """Base of all errors that marq raises on purpose; its text is meant to be shown to a user as it is.

    Each argument is a line of its own, for errors that name several things to mend at once.
    """

    @property
    def lines(self) -> list[str]:
        """What to show, a line each; what an argument quotes can't add lines."""
        return [cleaned(str(line)) for line in self.args]

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class SettingError(MarqError):
    """A setting has a value that is not allowed, or a name that does not exist."""


class BrokerError(MarqError):
    """Kafka can't be reached, refuses us, or the embedded broker can't start."""


class TopicError(MarqError):
    """A topic is missing, or is not what marq needs it to be."""


class DataDirError(MarqError):
    """The data folder can't be used: not writable, or what we need in it is taken."""


class DownloadError(MarqError):
    """A file that is fetched once can't be fetched, is not the one that was expected, or could be somebody else's."""


class MarkerError(MarqError):
    """A record of the markers topic can't be read: it changes nothing but the clock."""


class NewerVersionError(MarkerError):
    """A marker record of a later version of the protocol: nobody can tell what it changes, so its reader must stop."""


class RowError(MarqError):
    """A row or manifest of a table can't be read, or its key names no table."""


class DeletedError(RowError):
    """A log begins beyond what was read of it: records were deleted unread."""


class InternalError(MarqError):
    """A rule of our own is broken: the worker stops before it can do harm."""


class StepTimeoutError(InternalError):
    """A step of a checkpoint was not confirmed in time."""


class HandlerError(MarqError):
    """A handler is declared in a way that makes no sense, or its module can't be imported."""


class RequestError(MarqError):
    """A request that can't be carried out as it was made; another attempt with the same values would fail too."""


class BadValueError(RequestError):
    """A value of a request is malformed, missing or out of range."""


class BadReceiptError(RequestError):
    """A receipt that was never given out, or not by this installation."""


class UnknownQueueError(RequestError):
    """A queue that does not exist, where queues are not made by sending to them."""


class NotFoundError(RequestError):
    """What was asked for is not there."""


class TooLargeError(RequestError):
    """A message or a request is larger than is allowed."""


class NotPossibleError(RequestError):
    """The installation, as it is set up, does not do this."""


class LeaseOverError(RequestError):
    """A receipt of a delivery that is not the current one of its message any more."""


class NotAuthenticatedError(RequestError):
    """A request without a key that is known here."""


class NotAllowedError(RequestError):
    """A key that is known, but may not do this."""


class UnavailableError(MarqError):
    """Not now: Kafka is slow or away, or too much waits already. Try again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnreachableError(UnavailableError):
    """None of the service's addresses answers."""


class ServiceError(MarqError):
    """The service answered that it failed, or with something that is no answer of marq's."""


class ClosedError(MarqError):
    """A client was used after it was closed."""


class PipelineError(MarqError):
    """A Spark job can't be run: its tables, checkpoint or input are not what they must be."""
