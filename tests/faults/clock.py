"""A broker whose wall clock a test can set.

By libfaketime, which comes with the development packages on Linux, or as Debian's package `faketime`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

FOLDERS = [
    *Path("/usr/lib").glob("*/faketime"),
    *map(Path, getattr(find_spec("libfaketime"), "submodule_search_locations", None) or ()),
]
LIBRARY = next((str(file) for folder in FOLDERS for file in sorted(folder.rglob("libfaketime.so.1"))), "")
#: Environment of a broker with such a clock, besides FAKETIME_TIMESTAMP_FILE: the file of a `Clock`.
FAKE = {
    "LD_PRELOAD": LIBRARY,
    "FAKETIME_NO_CACHE": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    "DONT_FAKE_MONOTONIC": "1",
    "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else Java waits for ever
}


class Clock:
    """The wall clock of the broker. Its monotonic one is never changed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0)

    def set(self, off_s: int) -> None:
        """From now on it is off by so much."""
        draft = self.file.with_suffix(".tmp")
        draft.write_text(f"{off_s:+d}\n")
        draft.replace(self.file)
