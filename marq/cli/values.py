"""What is given on the command line, and how numbers are shown.

>>> seconds_of("1.5"), seconds_of("500ms"), seconds_of("2h")
(1.5, 0.5, 7200.0)
>>> duration(7_260_000), duration(250), duration(None)
('2 h 1 min', '250 ms', '-')
>>> size(1536), size(12)
('1.5 KiB', '12 B')
>>> place_of("3:1042")
Place(partition=3, offset=1042)
>>> settings_of(["max_receives=5", "fifo=true", "dead_letter_queue=bad"])
{'max_receives': 5, 'fifo': True, 'dead_letter_queue': 'bad'}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import click

from marq.core.policies import DELAY_MAX_MS, LEASE_MAX_MS, LEASE_MIN_MS
from marq.errors import BadValueError

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|min|h|d)?", re.ASCII)
_PLACE = re.compile(r"(\d{1,9}):(\d{1,18})", re.ASCII)
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


class Place(NamedTuple):
    """Where a message is, for its whole life."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


def place_of(text: str) -> Place:
    """A place as it is shown: `3:1042`. Raises `BadValueError`."""
    found = _PLACE.fullmatch(text)
    if found is None:
        raise BadValueError(
            f"{text!r} is no place of a message; it is PARTITION:OFFSET, as in 3:1042, without the name of its queue"
        )
    return Place(int(found[1]), int(found[2]))


def seconds_of(text: str) -> float:
    """A duration: `90`, `1.5s`, `500ms`, `10m`, `2h`, `7d`. Raises `BadValueError`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise BadValueError(f"{text!r} is no duration; give seconds, or a unit: 500ms, 90s, 10m, 2h, 7d")
    return float(found[1]) * _UNITS[found[2] or ""]


class Duration(click.ParamType):
    """A duration on the command line, as seconds; at least and at most so many milliseconds."""

    name = "duration"

    def __init__(self, least_ms: int = 0, most_ms: int | None = None) -> None:
        self._least_ms = least_ms
        self._most_ms = most_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = seconds_of(value)
        except BadValueError as error:
            self.fail(str(error), param, ctx)
        if seconds * 1000 < self._least_ms:
            self.fail(f"{value!r} is too short; at least {duration(self._least_ms)}", param, ctx)
        if self._most_ms is not None and seconds * 1000 > self._most_ms:
            self.fail(f"{value!r} is too long; at most {duration(self._most_ms)}", param, ctx)
        return seconds


class PlaceType(click.ParamType):
    """A place on the command line."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        """The place."""
        if isinstance(value, Place):
            return value
        try:
            return place_of(value)
        except BadValueError as error:
            self.fail(str(error), param, ctx)


DURATION = Duration()
#: How long a message is a receiver's, and how long it can be delayed or kept.
LEASE = Duration(LEASE_MIN_MS, LEASE_MAX_MS)
DELAY = Duration(0, DELAY_MAX_MS)
PLACE = PlaceType()


def value_of(text: str) -> Any:
    """A value as it is written in JSON: a number, true, false, null, a list; anything else is text."""
    if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) or text in ("true", "false", "null") or text.startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def settings_of(assignments: Iterable[str]) -> dict[str, Any]:
    """Settings given as NAME=VALUE. Raises `BadValueError`."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if not sign or not name:
            raise BadValueError(f"{assignment!r} is not of the form NAME=VALUE, such as max_receives=5")
        values[name] = value_of(value)
    return values


# ---------------------------------------------------------------------- shown


def number(value: int | float | None) -> str:
    """A count."""
    return "-" if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Messages a second."""
    if value is None:
        return "-"
    return f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:,.1f}/s"


def duration(ms: float | None) -> str:
    """A time span, in the two largest units that matter."""
    if ms is None:
        return "-"
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = math.floor(ms / 1000)
    for unit, length, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            rest = seconds % length // part
            return f"{seconds // length} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{seconds} s"


def size(count: float | None) -> str:
    """Bytes."""
    if count is None:
        return "-"
    unit = 0
    while count >= 1024 and unit < len(_SIZES) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_SIZES[unit]}"
