"""Text for people: foreign text made safe to show, and what an error says."""

from __future__ import annotations

import re

#: Control characters, lone surrogates, Unicode's line ends, and marks that change the direction of text.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def cleaned(text: str) -> str:
    """The text in one line, with characters that would affect where it is shown written like ``\\x1b``.

    Cleaning a text again does not change it.
    """
    return text if text.isprintable() else _UNFIT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def reason_of(error: BaseException) -> str:
    """What an error says; its kind, if it says nothing."""
    return str(error) or type(error).__name__


#: What msgspec says of a value that does not fit: the reason, and the place.
_AT_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
#: Its names of types, as users call them.
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "bytes": "base64",
    "null": "null",
}
#: Units of whole numbers, by the ends of names.
_UNITS = {"_ms": "milliseconds", "_bytes": "bytes"}
_TYPE = re.compile(r"`([\w |]+)`")


def invalid_value(error: Exception) -> str:
    """Where a value does not fit, and why, from an error of msgspec.

    >>> invalid_value(ValueError("Expected `int | null`, got `str` - at `$.messages[0].delay_ms`"))
    'messages[0].delay_ms: expected a whole number of milliseconds or null, got text'
    """
    found = _AT_PLACE.fullmatch(str(error))
    reason, place = (found[1], found[2]) if found else (str(error), "")
    if reason.startswith("Expected"):
        reason = _TYPE.sub(lambda type_: " or ".join(_TYPES.get(one, one) for one in type_[1].split(" | ")), reason)
        reason = reason.replace("got a number", "got a fraction")
    for suffix, unit in _UNITS.items():
        if place.endswith(suffix):
            reason = reason.replace("a whole number", f"a whole number of {unit}", 1)
    reason = (reason[:1].lower() + reason[1:]).replace("`", "'")
    return f"{place}: {reason}" if place else reason


def plural(count: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> plural(1, "worker"), plural(1_500, "worker"), plural(2, "entry", "entries")
    ('1 worker', '1,500 workers', '2 entries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
