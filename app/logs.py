"""Formats of the log, and filters for what libraries log.

Kafka's client logs an error for each attempt that it repeats by itself: a few at every start, hundreds a second while a
broker is away. Faust logs each step of each service.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faust
import mode

from app.folders import disk_error
from marq.errors import InternalError, MarqError
from marq.text import cleaned

#: Loggers that repeat themselves; a filter acts only on records of the very logger that it is added to.
_REPEATING = (
    "aiokafka",
    "aiokafka.cluster",
    "aiokafka.conn",
    "aiokafka.consumer.consumer",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.producer",
    "aiokafka.producer.sender",
    "app.streaming.sender",
    "mode.timers",
)
#: Errors that are over within a moment: a leader or coordinator was just chosen, or has moved.
_PASSING = (
    "NotLeaderForPartitionError",
    "LeaderNotAvailableError",
    "GroupCoordinatorNotAvailableError",
    "CoordinatorLoadInProgressError",
    "NotCoordinatorForGroupError",
    "UnknownTopicOrPartitionError",
    "RebalanceInProgressError",
    "NodeNotReadyError",
)
#: The error by which members of a group learn that another has come or gone.
_ORDINARY = ("Heartbeat failed for group %s because it is rebalancing",)
#: Seconds for which a passing error is not worth a line.
PASSING_S = 5.0
#: Seconds between two lines of one kind.
REPEAT_S = 10.0


class Calm(logging.Filter):
    """One line of a kind per `REPEAT_S`, with the number left out; none for errors that are over within `PASSING_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._bursts: dict[object, _Burst] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg in _ORDINARY:
            return False
        now = self._clock()
        # the text before formatting names the kind
        burst = self._bursts.get(record.msg)
        if burst is None or now > burst.last_s + REPEAT_S:
            passing = any(name in record.getMessage() for name in _PASSING)
            burst = self._bursts[record.msg] = _Burst(now + PASSING_S if passing else now)
        burst.last_s = now
        if now < burst.next_s:
            burst.left_out += 1
            return False
        if burst.left_out:
            record.msg, record.args = f"{record.getMessage()} (and {burst.left_out} times before)", ()
        burst.next_s, burst.left_out = now + REPEAT_S, 0
        return True


class _Burst:
    """Records of one kind that follow each other."""

    __slots__ = ("last_s", "left_out", "next_s")

    def __init__(self, next_s: float) -> None:
        self.next_s = next_s  # when a line may be written
        self.last_s = 0.0
        self.left_out = 0


#: Loggers whose records are made one line: ours, and those of libraries that may repeat what a stranger sent. Records
#: of users' handlers stay as they are.
_CLEAN = ("agents", "aiohttp", "aiokafka", "app", "asyncio", "faust", "gateway", "marq", "mode", "pipeline", "tables")


class CleanRecord(logging.LogRecord):
    """A record whose text is one line without control characters, for any arguments.

    A traceback has several lines; each begins with blanks, so none looks like a record of its own.
    """

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__(name, *args, **options)
        if self.exc_info and self.exc_info[0] is not None and self._is_cleaned:
            lines = "".join(traceback.format_exception(*self.exc_info)).rstrip("\n").split("\n")
            self.exc_text = "\n".join("  " + cleaned(line) for line in lines)

    @property
    def _is_cleaned(self) -> bool:
        return self.name.partition(".")[0] in _CLEAN

    def getMessage(self) -> str:
        text = super().getMessage()
        return cleaned(text) if self._is_cleaned else text


def clean_records() -> None:
    """Make all records of this process clean."""
    logging.setLogRecordFactory(CleanRecord)


def calm_client() -> None:
    """Quieten the Kafka client of this process."""
    calm = Calm()
    # it builds a record per request at DEBUG, which costs more than the request
    logging.getLogger("aiokafka").setLevel(logging.WARNING)
    for name in _REPEATING:
        logger = logging.getLogger(name)
        if not any(isinstance(f, Calm) for f in logger.filters):
            logger.addFilter(calm)


#: What mode puts before the text of a service: how deep it is, and its name.
_LABEL = re.compile(r"\[\^-*[^\]]*\]: ")
#: Packages whose steps are left out.
_STEPS = tuple(f"{Path(one.__file__ or '').parent}/" for one in (faust, mode))
#: Their last line for an error: our own last line has it too.
_TWICE = ("We experienced a crash! Reraising original exception...",)
#: Their line for the error that ends them.
_CRASHED = "Crashed reason=%r"


def is_mendable(error: object) -> bool:
    """True for an error that a user can mend. Its text says how, and a traceback says nothing more."""
    if isinstance(error, MarqError):
        return not isinstance(error, InternalError)
    return isinstance(error, BaseException) and disk_error(error) is not None


class OurSteps(logging.Filter):
    """Leaves out the steps of Faust's services, for any class that logs them, and errors that our lines have."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.INFO and record.pathname.startswith(_STEPS):
            return False
        if str(record.msg).endswith(_CRASHED) and record.args:
            # without a current exception, `MarqApp.fail` has logged the traceback
            return record.exc_info is not None and record.exc_info[0] is not None and not is_mendable(record.args[0])  # type: ignore[index]
        return not str(record.msg).endswith(_TWICE)


class Lines(logging.Formatter):
    """A record as a line: time, level, text."""

    default_msec_format = "%s.%03d"

    def __init__(self, *, with_process: bool = False) -> None:
        process = "[%(process)d] " if with_process else ""
        super().__init__(f"[%(asctime)s] {process}[%(levelname)s] %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _LABEL.sub("", record.message, count=1)
        return super().formatMessage(record).rstrip(" ")


class Objects(logging.Formatter):
    """A record as JSON, on a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": _LABEL.sub("", record.getMessage(), count=1).rstrip(" "),
        }
        if record.exc_info and record.exc_info[0] is not None:
            found["error"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(found)


def set_up(level: str, form: str, *, is_one_of_several: bool = False) -> None:
    """Let this process log to its standard error, as `text` or `json`.

    Args:
        is_one_of_several: other processes write to the same place, so each line names its process.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Objects() if form == "json" else Lines(with_process=is_one_of_several))
    if level != "DEBUG":
        handler.addFilter(OurSteps())
    root = logging.getLogger()
    for other in list(root.handlers):
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level)


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    """Silence a logger in the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def quiet_steps() -> None:
    """Leave out Faust's lines for each step of each service. Call this before services are made."""
    mode.Service.mundane_level = "debug"
    for name in ("faust", "mode", "app.streaming.raw_table"):  # a store says "opening partition" as its subclass
        logging.getLogger(name).setLevel(logging.WARNING)
