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


def plural(count: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> plural(1, "worker"), plural(1_500, "worker"), plural(2, "entry", "entries")
    ('1 worker', '1,500 workers', '2 entries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
