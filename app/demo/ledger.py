"""The ledger of a run: counts for each message, in files that several processes map into memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import shutil
import uuid
from pathlib import Path
from typing import Any

from marq.errors import MarqError


class Ledger:
    """For each message of a run: whether its send was confirmed, how often it was acknowledged and redelivered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = json.loads((folder / "run.json").read_text())
        self.run: str = meta["run"]
        self.total: int = meta["total"]
        self.sent, self.acked, self.redelivered = (
            _mapped(folder / name, self.total) for name in ("sent", "acked", "redelivered")
        )

    @classmethod
    def open(cls, data_dir: Path, total: int | None) -> Ledger:
        """The ledger of an unfinished run, if there is one (of this size), else a new one.

        Raises `MarqError` if there is none and no `total` for a new one is given.
        """
        folder = data_dir / "demo"
        with contextlib.suppress(OSError, ValueError, KeyError):
            ledger = cls(folder)
            if total in (None, ledger.total) and ledger.missing:
                return ledger
        if total is None:
            raise MarqError("no demo is under way on this data folder; begin one with `demo send`")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("sent", "acked", "redelivered"):
            with (folder / name).open("wb") as file:
                file.truncate(total)
        (folder / "run.json").write_text(json.dumps({"run": uuid.uuid4().hex[:12], "total": total}))
        return cls(folder)

    @property
    def missing(self) -> int:
        """Messages that are not acknowledged yet."""
        return self.acked[:].count(0)

    def totals(self) -> dict[str, Any]:
        """The sums over all messages."""
        sent, acked = self.sent[:], self.acked[:]
        processed, done = sum(acked), self.total - acked.count(0)
        unfinished = sum(1 for was_sent, was_acked in zip(sent, acked, strict=True) if was_sent and not was_acked)
        return {
            "sent": self.total - sent.count(0),
            "processed": processed,
            "acked": done,
            "redelivered": sum(self.redelivered[:]),
            "duplicates": processed - done,
            "unfinished": unfinished,
            "lost": None if unfinished else 0,  # nobody can tell before all is done
        }


def _mapped(file: Path, size: int) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), size)


def count(counts: mmap.mmap, number: int) -> None:
    """Add 1 to the count of a message."""
    counts[number] = min(counts[number] + 1, 255)  # a byte each
