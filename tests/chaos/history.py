"""What clients and handlers saw: the input of the check.

All times are seconds of one clock, `time.time()` of this machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Place = tuple[int, int]
"""Partition and offset of a message."""

#: Streams whose messages have groups and deduplication ids.
FIFO = ("client-fifo", "sqs-fifo", "handler-fifo")


class Name(NamedTuple):
    """What the id of a message says: its stream, its group (empty: none), its number in the group or stream."""

    stream: str
    group: str
    number: int

    def __str__(self) -> str:
        return f"{self.stream}:{self.group}:{self.number}"

    @classmethod
    def of(cls, message_id: str) -> Name:
        stream, group, number = message_id.split(":")
        return cls(stream, group, int(number))


class Seen(NamedTuple):
    """A receiver or handler begins with a delivery, or has finished it."""

    id: str
    place: Place
    attempt: int
    at_s: float
    pid: int = 0  # of the worker of a handler; 0: a client
    asked_s: float | None = None  # when a client's receive was sent


class Asked(NamedTuple):
    """One request of a client."""

    client: str  # protocol and number
    action: str  # send, receive, ack
    began_s: float
    ended_s: float
    answered: bool


@dataclass
class History:
    """Everything, in no particular order. Several threads write it."""

    tried: set[str] = field(default_factory=set)
    #: id -> when the first attempt to send it began, and when it was confirmed.
    confirmed: dict[str, tuple[float, float]] = field(default_factory=dict)
    begun: list[Seen] = field(default_factory=list)
    finished: list[Seen] = field(default_factory=list)
    #: Messages whose acknowledgement was confirmed, and when.
    acked: dict[Place, float] = field(default_factory=dict)
    #: Messages whose receiver got an error for its acknowledgement.
    refused: set[Place] = field(default_factory=set)
    asked: list[Asked] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finished_ids(self) -> set[str]:
        with self.lock:
            return {one.id for one in self.finished}

    def missing(self) -> set[str]:
        """Messages that were confirmed, and that nobody has finished so far."""
        finished = self.finished_ids()
        with self.lock:
            return self.confirmed.keys() - finished


class WitnessReader:
    """Reads what handlers write down (`tests.integration.witness`), each line once."""

    def __init__(self, folder: Path, history: History) -> None:
        self._folder = folder
        self._history = history
        self._read: dict[Path, int] = {}

    def read(self) -> None:
        """Take over the lines that have come since the last time."""
        for file in sorted(self._folder.glob("*.log")):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                new = lines.read()
            whole = new[: new.rfind(b"\n") + 1]  # the last line of a killed process may be cut
            self._read[file] = self._read.get(file, 0) + len(whole)
            self._take(int(file.stem), whole.splitlines())

    def _take(self, pid: int, lines: Iterable[bytes]) -> None:
        begun, finished = [], []
        for line in lines:
            event, messages = json.loads(line)
            into = begun if event == "begin" else finished
            for _, partition, offset, attempt, message_id, at_s, *_ in messages:
                into.append(Seen(message_id, (partition, offset), attempt, at_s, pid))
        with self._history.lock:
            self._history.begun += begun
            self._history.finished += finished
