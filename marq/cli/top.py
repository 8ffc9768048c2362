"""`marq top`: queues as they are now, and where they go."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from marq.cli.console import out_json, table
from marq.cli.group import command, flush
from marq.cli.queues import ORDERS, STATS_TITLES, figure, stats_cells, stats_of
from marq.cli.service import Connected
from marq.cli.values import DURATION, duration, rate
from marq.errors import NotAllowedError, UnavailableError
from marq.text import cleaned, plural

#: Lines of the table beside its rows, and of the foot.
TABLE_LINES = 6
#: Counters of partitions that together say how many messages were finished.
FINISHED = ("acked", "dead", "expired", "purged", "moved", "poison")
#: Orders that the key s goes through.
KEYS = ("depth", "ready", "in-flight", "dead", "oldest", "name")


class Sample(NamedTuple):
    """What the service said at one time."""

    at_s: float  # monotonic
    queues: list[dict[str, Any]]
    troubles: list[str]
    workers: int
    partitions: dict[int, dict[str, Any]]  # those that are served


class Rates(NamedTuple):
    """Messages a second between two samples; None before there are two."""

    sent: float | None = None
    delivered: float | None = None
    finished: float | None = None
    redelivered: float | None = None


def rates_between(before: Sample | None, now: Sample) -> Rates:
    """Rates of the whole service. A partition that changed its owner counts from the next sample on."""
    if before is None or now.at_s <= before.at_s:
        return Rates()
    same = [
        (before.partitions[n], p)
        for n, p in now.partitions.items()
        if n in before.partitions and before.partitions[n]["owner"] == p["owner"]
    ]
    seconds = now.at_s - before.at_s

    def grown(*names: str) -> float:
        counts = ((old["counters"].get(n, 0), new["counters"].get(n, 0)) for old, new in same for n in names)
        return float(sum(max(0, new - old) for old, new in counts))

    return Rates(
        sum(max(0, new["position"] - old["position"]) for old, new in same) / seconds,
        grown("delivered") / seconds,
        grown(*FINISHED) / seconds,
        grown("redelivered") / seconds,
    )


def sample_of(service: Connected, prefix: str) -> Sample:
    """Ask the service. Raises `MarqError`."""
    queues, troubles = stats_of(service, None, prefix)
    workers, partitions = 0, {}
    with contextlib.suppress(NotAllowedError):
        workers = len(service.ask("/v1/workers")["workers"])
        found = service.ask("/v1/partitions", query={"scope": "cluster"})["partitions"]
        partitions = {one["partition"]: one for one in found if "counters" in one}
    return Sample(time.monotonic(), queues, troubles, workers, partitions)


@command("top")
@click.option("--prefix", default="", help="Queues whose names begin so.")
@click.option("--sort", type=click.Choice(list(ORDERS)), default="depth", show_default=True)
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Time between two looks.")
@click.option("--count", type=click.IntRange(1), help="End after so many looks; without a terminal, 1.")
def top(service: Connected, prefix: str, sort: str, interval: float, count: int | None) -> None:
    """Watch the queues, live: q quits, s sorts by the next column.

    With --json, one object a look.
    """
    interval = max(0.2, interval)
    if service.as_json or not sys.stdout.isatty():
        _print_looks(service, prefix, sort, interval, count or 1)
        return
    console = Console()
    before: Sample | None = None
    now: Sample | None = None
    problem = ""
    looks = 0
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                before, now, problem = now, sample_of(service, prefix), ""
                looks += 1
            except UnavailableError as error:
                problem = str(error)  # it may come back
            while True:
                live.update(_screen(service, before, now, sort, problem, console), refresh=True)
                if count is not None and looks >= count:
                    return
                key = keys(interval)
                if key == "q":
                    return
                if key != "s":
                    break
                sort = KEYS[(KEYS.index(sort) + 1) % len(KEYS)] if sort in KEYS else KEYS[0]


def _print_looks(service: Connected, prefix: str, sort: str, interval: float, count: int) -> None:
    before: Sample | None = None
    for look in range(count):
        if look:
            time.sleep(interval)
        now = sample_of(service, prefix)
        queues = sorted(now.queues, key=ORDERS[sort])
        if service.as_json:
            rates = rates_between(before, now)._asdict()
            out_json({"rates": rates, "workers": now.workers, "queues": queues, "troubles": now.troubles})
        else:
            Console(file=sys.stdout, highlight=False, width=120).print(
                table(STATS_TITLES, map(stats_cells, queues), 120)
            )
        flush()
        before = now


def _screen(
    service: Connected, before: Sample | None, now: Sample | None, sort: str, problem: str, console: Console
) -> Group:
    lines: list[Any] = [Text(f"marq  {service.url}  {time.strftime('%H:%M:%S')}", style="bold", no_wrap=True)]
    if now is not None:
        rates = rates_between(before, now)
        flows = [f"{name} {rate(value)}" for name, value in rates._asdict().items()]
        lines += [Text(line, style="cyan") for line in _packed(flows, console.width)]
        counted = [queue for queue in now.queues if not queue.get("takes_dead_letters")]
        total = {name: sum(queue[name] for queue in counted) for name in ("ready", "delayed", "in_flight")}
        known = {name: any(queue.get(name) for queue in now.queues) for name in ("at_least", "at_most")}
        messages = sum(total.values())
        oldest = max((queue["oldest_ms"] or 0 for queue in counted), default=0)
        counts = [
            plural(len(now.queues), "queue"),
            f"{figure(known, messages)} message{'' if messages == 1 else 's'}",
            f"{figure(known, total['ready'])} ready",
            f"{figure(known, total['in_flight'])} in flight",
            f"oldest {duration(oldest) if oldest else '?' if known['at_least'] else '-'}",
            plural(now.workers, "worker"),
        ]
        lines += [Text(line) for line in _packed(counts, console.width)]
        lines += [Text(cleaned(trouble), style="bold red") for trouble in now.troubles[:3]]
    if problem:
        lines.append(Text(cleaned(problem), style="bold red"))
    if now is not None:
        queues = sorted(now.queues, key=ORDERS[sort])
        shown = queues[: max(1, console.height - TABLE_LINES - len(lines))]
        lines.append(table(STATS_TITLES, map(_coloured, shown), console.width))
        more = len(queues) - len(shown)
        lines.append(Text(f"by {sort}" + (f", {more} more" if more else "") + "    q quit   s sort", style="dim"))
    return Group(*lines)


def _packed(parts: list[str], width: int) -> list[str]:
    """Lines of `width` columns that hold all parts, three spaces apart."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += "   " + part
        else:
            lines.append(part)
    return lines


def _coloured(queue: dict[str, Any]) -> list[Any]:
    """A row, with what asks for a look in colour."""
    cells: list[Any] = list(stats_cells(queue))
    if queue["dead"]:
        cells[4] = Text(cells[4], style="red")
    if queue["ready"] and queue["has_receiver"] is False:
        cells[6] = Text(cells[6], style="yellow")
    return cells


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key, and returns it; "" if none came."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)

        def read(seconds: float) -> str:
            if select.select([descriptor], [], [], seconds)[0]:
                key = os.read(descriptor, 16).decode(errors="replace")
                return key[:1].lower() if key else "q"
            return ""

        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
