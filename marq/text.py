"""Text of others, as it may be shown: on a terminal, in a log, in an error."""

from __future__ import annotations

import re

#: Control characters, halves of characters, line ends of Unicode, and marks that turn the direction of what follows.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def cleaned(text: str) -> str:
    """``text`` in one line, without what would do something to where it is shown: that is written as ``\\x1b``.

    What is cleaned once is not changed by cleaning it again.
    """
    return text if text.isprintable() else _UNFIT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()
