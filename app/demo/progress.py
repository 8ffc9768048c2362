"""How far a run is, and how fast it was."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from app.demo.ledger import Ledger

#: Part of the messages that are not dropped over which the rate of processing is measured.
MEASURED = 0.9
#: Seconds over which rates are shown.
RATES_S = 3.0


class Rates:
    """Messages that were sent, and acknowledged, in a second of the last few."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen: deque[tuple[float, int, int]] = deque()

    def now(self) -> tuple[float, float]:
        """Both rates."""
        sent, acked = (self._ledger.total - counts[:].count(0) for counts in (self._ledger.sent, self._ledger.acked))
        self._seen.append((time.monotonic(), sent, acked))
        while self._seen[-1][0] - self._seen[0][0] > RATES_S:
            self._seen.popleft()
        first = self._seen[0]
        seconds = max(self._seen[-1][0] - first[0], 0.001)
        return (sent - first[1]) / seconds, (acked - first[2]) / seconds


class Course:
    """How fast a run was: sending and processing apart, and both apart from the wait for the last leases to end."""

    def __init__(self, ledger: Ledger, drop: float, clock: Callable[[], float] = time.monotonic) -> None:
        totals = ledger.totals()
        self._ledger = ledger
        self._clock = clock
        self._began_s = clock()
        self._sent, self._acked = totals["sent"], totals["acked"]
        # of what is acknowledged when it comes first, so much that dropped messages are not waited for
        self._goal = self._acked + max(1, int(MEASURED * (1 - drop) * ledger.missing))
        self._send_s: float | None = None
        self._process_s: float | None = None
        self._measured = 0

    def look(self) -> None:
        """Look at the ledger; often."""
        sent, acked = (self._ledger.total - counts[:].count(0) for counts in (self._ledger.sent, self._ledger.acked))
        if self._send_s is None and sent == self._ledger.total:
            self._send_s = self._clock() - self._began_s
        if self._process_s is None and acked >= self._goal:
            self._process_s, self._measured = self._clock() - self._began_s, acked - self._acked

    def summary(self) -> dict[str, Any]:
        """The last line. `lost`: confirmed sends that were never acknowledged, once all is said to be done."""
        totals, seconds = self._ledger.totals(), self._clock() - self._began_s
        return totals | {
            "seconds": round(seconds, 2),
            "rate": _rate(totals["acked"] - self._acked, seconds),
            "send_rate": _rate(totals["sent"] - self._sent, self._send_s or seconds),
            "process_rate": _rate(self._measured, self._process_s) if self._process_s else None,
        }


def _rate(count: int, seconds: float) -> int:
    return round(count / max(seconds, 0.001))


def _progress(ledger: Ledger, rates: Rates) -> Table:
    totals = ledger.totals()
    sent_rate, acked_rate = rates.now()
    table = Table(title=f"{ledger.total:,} flights, run {ledger.run}", show_header=False)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    table.add_row("sent", f"{totals['sent']:,}", f"{sent_rate:,.0f}/s")
    table.add_row("processed", f"{totals['acked']:,}", f"{acked_rate:,.0f}/s")
    table.add_row("backlog", f"{totals['sent'] - totals['acked']:,}")
    table.add_row("redelivered", f"{totals['redelivered']:,}")
    table.add_row("done twice", f"{totals['duplicates']:,}")
    table.add_row("still to do", f"{ledger.missing:,}")
    return table


async def watch(ledger: Ledger, stopped: Callable[[], bool], course: Course) -> None:
    """Show the ledger until everything is acknowledged."""
    rates = Rates(ledger)
    console = Console(stderr=True)
    with Live(_progress(ledger, rates), console=console, refresh_per_second=4) as live:
        while ledger.missing and not stopped():
            await asyncio.sleep(0.25)
            course.look()
            live.update(_progress(ledger, rates))
        course.look()
        live.update(_progress(ledger, rates))
    if not console.is_terminal:
        console.line()  # what Live writes to a file has no end of its last line


def in_words(found: dict[str, Any]) -> str:
    """The most important figures as a sentence."""
    processed = f"processed at {found['process_rate']:,}/s" if found["process_rate"] else "not processed to the end"
    return (
        f"{found['sent']:,} sent at {found['send_rate']:,}/s, {processed}; {found['redelivered']:,} redelivered, "
        f"{found['duplicates']:,} done twice, {found['lost']:,} lost; {found['seconds']:.1f} s, the last of them until "
        "the leases of dropped messages were over"
    )
