"""The one exception hierarchy. Protocols map these errors, they don't invent their own.

Every message is one line that says what was wrong, the value, and what to do about it.
"""

from __future__ import annotations


class MarqError(Exception):
    """Base of all errors that marq raises on purpose; its text is meant to be shown to a user as it is."""


class SettingError(MarqError):
    """A setting has a value that is not allowed, or a name that does not exist."""


class BrokerError(MarqError):
    """Kafka can't be reached, refuses us, or the embedded broker can't start."""


class TopicError(MarqError):
    """A topic is missing, or is not what marq needs it to be."""


class DataDirError(MarqError):
    """The data folder can't be used: not writable, or what we need in it is taken."""


class MarkerError(MarqError):
    """A record of the markers topic can't be read: it changes nothing but the clock."""


class RowError(MarqError):
    """A row or manifest of a table can't be read, or its key names no table."""


class InternalError(MarqError):
    """A rule of our own is broken: the worker stops before it can do harm."""


class HandlerError(MarqError):
    """A handler is declared in a way that makes no sense, or its module can't be imported."""
