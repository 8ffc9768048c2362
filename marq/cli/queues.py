"""Queues, workers and partitions: what there is, and its settings."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import click

from marq.cli.console import confirm, out, out_json, print_pairs, print_table, say
from marq.cli.group import QUEUE, command
from marq.cli.service import Answer, Connected
from marq.cli.values import duration, number, settings_of, size
from marq.errors import MarqError, NotPossibleError, UnknownQueueError

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def path_of(queue: str, *rest: str) -> str:
    """The path of a queue in the HTTP API."""
    return "/".join(("/v1/queues", quote(queue, safe=""), *rest))


# ---------------------------------------------------------------------- queues


@command("queues")
@click.argument("prefix", default="")
def queues(service: Connected, prefix: str) -> None:
    """List the queues, with the settings that differ from the defaults."""
    found = (queue for page in service.pages("/v1/queues", {"prefix": prefix}) for queue in page["queues"])
    if service.as_json:
        for queue in found:
            out_json(queue)
        return
    rows = [(queue["name"], settings_shown(queue["settings"])) for queue in found]
    if not rows:
        say(f"there is no queue whose name begins with {prefix!r}" if prefix else f"no queue yet; {FIRST}")
        return
    print_table(["queue", "settings"], rows)


#: How the first queue comes to be.
FIRST = "the first message makes one: marq send orders hello"
#: What a queue has when nothing else is said; of others there is no need to speak.
_ORDINARY: dict[str, Any] = {
    "visibility_timeout_ms": 30_000,
    "breaker_pause_ms": 30_000,
    "deduplication_scope": "queue",
}


def settings_shown(settings: dict[str, Any]) -> str:
    """Settings that differ from the defaults, in a line."""
    return " ".join(
        f"{name}={_value_shown(name, value)}"
        for name, value in settings.items()
        if value != _ORDINARY.get(name) and value not in (0, "", None, False, [])
    )


def _value_shown(name: str, value: Any) -> str:
    if name.endswith("_ms") and isinstance(value, int):
        return duration(value).replace(" ", "")
    return str(value).lower() if isinstance(value, bool) else str(value)


#: What `stats --sort` knows, with what it sorts by.
ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda queue: queue["queue"],
    "ready": lambda queue: -queue["ready"],
    "delayed": lambda queue: -queue["delayed"],
    "in-flight": lambda queue: -queue["in_flight"],
    "dead": lambda queue: -queue["dead"],
    "oldest": lambda queue: -(queue["oldest_ms"] or 0),
    "depth": lambda queue: -(queue["ready"] + queue["delayed"] + queue["in_flight"]),
}
#: What an answer with counts says of what is not counted.
TROUBLES = ("missing", "unserved", "stalled", "unreadable", "uncounted")
#: Titles of the columns of `stats` and `top`.
STATS_TITLES = ["queue", "ready>", "delayed>", "in flight>", "dead>", "oldest>", "receiver"]


@command("stats")
@click.argument("queue", required=False, type=QUEUE)
@click.option("--prefix", default="", help="Queues whose names begin so.")
@click.option("--sort", type=click.Choice(list(ORDERS)), default="name", show_default=True)
@click.option("--limit", type=click.IntRange(1), help="So many at most.")
def stats(service: Connected, queue: str | None, prefix: str, sort: str, limit: int | None) -> None:
    """Count the messages of QUEUE, or of all queues, by state."""
    found, troubles = stats_of(service, queue, prefix)
    found.sort(key=ORDERS[sort])
    found = found[:limit]
    if service.as_json:
        for one in found:
            out_json(one)
    elif queue is not None and found:
        print_pairs(zip([title.rstrip(">") for title in STATS_TITLES], stats_cells(found[0]), strict=True))
    elif found:
        print_table(STATS_TITLES, map(stats_cells, found))
    else:
        say(f"there is no queue whose name begins with {prefix!r}" if prefix else f"no queue yet; {FIRST}")
    say(*troubles)


def stats_of(service: Connected, queue: str | None, prefix: str = "") -> tuple[list[dict[str, Any]], list[str]]:
    """Queues with their counts, and what makes the counts incomplete."""
    if queue is not None:
        one = service.ask(path_of(queue, "stats"))
        troubles = troubles_in([one])
        return [Answer((name, value) for name, value in one.items() if name not in TROUBLES)], troubles
    pages = list(service.pages("/v1/stats", {"prefix": prefix}))
    return [queue for page in pages for queue in page["queues"]], troubles_in(pages)


def stats_cells(queue: dict[str, Any]) -> list[str]:
    """A row of the table of queues."""
    breaker = queue.get("breaker") or {}
    receiver = {True: "yes", False: "none", None: "?"}[queue["has_receiver"]]
    if breaker.get("state", "closed") != "closed":
        receiver += f", breaker {breaker['state']}"
    counts = (figure(queue, queue[name]) for name in ("ready", "delayed", "in_flight", "dead"))
    oldest = "?" if queue["oldest_ms"] is None and queue.get("at_least") else duration(queue["oldest_ms"])
    return [queue["queue"], *counts, oldest, receiver]


def figure(queue: dict[str, Any], count: int) -> str:
    """A count of messages: exact, at least (≥), at most (≤), about (~), or not known (?)."""
    at_least, at_most = queue.get("at_least", False), queue.get("at_most", False)
    if at_least and not count:
        return "?"
    return ("~" if at_least and at_most else "≥" if at_least else "≤" if at_most else "") + number(count)


def troubles_in(pages: Iterable[dict[str, Any]]) -> list[str]:
    """What makes counts incomplete, a line each."""
    missing: set[str] = set()
    unserved: dict[str, str] = {}
    stalled: dict[str, Any] = {}
    uncounted: dict[str, int] = {}
    unreadable: dict[str, int] = {}
    for page in pages:
        uncounted.update(page.get("uncounted", {}))
        missing.update(page.get("missing", ()))
        unserved.update(page.get("unserved", {}))
        stalled.update(page.get("stalled", {}))
        unreadable.update(page.get("unreadable", {}))
    return [
        *(f"worker {url} did not answer: what it owns is not counted" for url in sorted(missing)),
        *(
            f"partition {number} is not served: {reason}; its messages are not counted"
            for number, reason in sorted(unserved.items())
        ),
        *(
            f"partition {number} has messages that are not counted, for {duration(ms)} now"
            for number, ms in sorted(uncounted.items())
        ),
        *(
            f"partition {number} {stall['reason']}"
            if isinstance(stall, dict) and stall.get("reason")
            else f"partition {number} is stalled: Kafka confirms nothing in it"
            for number, stall in sorted(stalled.items())
        ),
        *(
            f"partition {number} can't read {count} offsets, no replica has them whole: messages there are not counted"
            for number, count in sorted(unreadable.items())
        ),
    ]


@command("create")
@click.argument("queue", type=QUEUE)
@click.argument("assignments", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--fifo", is_flag=True, help="Deliver the messages of a group in order.")
def create(service: Connected, queue: str, assignments: tuple[str, ...], fifo: bool) -> None:
    """Make QUEUE, with settings: `marq create orders max_receives=5 visibility_timeout_ms=60000`."""
    values = settings_of(assignments) | ({"fifo": True} if fifo else {})
    try:
        there = service.queue(queue).get()
    except UnknownQueueError:
        there = None
    if there is not None and there.version:
        raise NotPossibleError(f"queue {queue!r} exists; `marq set` changes single settings of it")
    _show_settings(service, service.ask(path_of(queue), method="PUT", body=values))


@command("set")
@click.argument("queue", type=QUEUE)
@click.argument("assignments", nargs=-1, metavar="[NAME=VALUE]...")
def set_settings(service: Connected, queue: str, assignments: tuple[str, ...]) -> None:
    """Change settings of QUEUE, or show them all: `marq set orders ttl_ms=86400000 max_receives=5`."""
    if assignments:
        info = service.ask(path_of(queue), method="PATCH", body=settings_of(assignments))
    else:
        info = service.ask(path_of(queue))
    _show_settings(service, info)


def _show_settings(service: Connected, info: dict[str, Any]) -> None:
    if service.as_json:
        out_json(info)
        return
    print_pairs((name, _setting_shown(value)) for name, value in info["settings"].items())


def _setting_shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value in (None, "") else str(value)


@command("purge")
@click.argument("queue", type=QUEUE)
@yes_option
def purge(service: Connected, queue: str, yes: bool) -> None:
    """Drop all messages that are in QUEUE now."""
    confirm(f"Drop {_what_is_in(service, queue)} of queue {queue!r}?", yes)
    service.queue(queue).purge()
    _done(service, f"queue {queue!r} is being purged", queue=queue, purged=True)


@command("delete")
@click.argument("queue", type=QUEUE)
@yes_option
def delete(service: Connected, queue: str, yes: bool) -> None:
    """Remove QUEUE and all its messages."""
    confirm(f"Remove queue {queue!r} with {_what_is_in(service, queue)}?", yes)
    service.queue(queue).delete()
    _done(service, f"queue {queue!r} was deleted", queue=queue, deleted=True)


def _what_is_in(service: Connected, queue: str) -> str:
    service.queue(queue).get()  # a name that is mistyped is an error here
    try:
        (found,), _ = stats_of(service, queue)
    except MarqError:
        return "all messages"  # its key may not look inside
    count = found["ready"] + found["delayed"] + found["in_flight"]
    return f"{number(count)} message{'' if count == 1 else 's'}"


def _done(service: Connected, line: str, **values: Any) -> None:
    if service.as_json:
        out_json(values)
    else:
        out(line)


# ---------------------------------------------------------------------- workers and partitions


@command("workers")
def workers(service: Connected) -> None:
    """List the workers."""
    answer = service.ask("/v1/workers")
    if service.as_json:
        for worker in answer["workers"]:
            out_json(worker)
    else:
        print_table(
            ["worker", "address", "ready", "partitions", "up>", "memory, peak>", "payloads>", "receives that wait>"],
            (
                (
                    worker["worker"],
                    worker["url"],
                    "yes" if worker["ready"] else "no",
                    numbers_shown(worker["partitions"]),
                    duration(worker["uptime_s"] * 1000),
                    size(worker["peak_memory_bytes"]),
                    size(worker["payload_bytes"]),
                    number(worker["waiting_receives"]),
                )
                for worker in answer["workers"]
            ),
        )
    say(*troubles_in([answer]))


def numbers_shown(numbers: list[int]) -> str:
    """Numbers of partitions, neighbours as a range.

    >>> numbers_shown([0, 1, 2, 5, 7, 8]), numbers_shown([])
    ('0-2, 5, 7-8', '-')
    """
    ranges: list[list[int]] = []
    for one in sorted(numbers):
        if ranges and one == ranges[-1][1] + 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) or "-"


@command("partitions")
def partitions(service: Connected) -> None:
    """List the partitions: who serves them, and how far behind."""
    answer = service.ask("/v1/partitions", query={"scope": "cluster"})
    if service.as_json:
        for partition in answer["partitions"]:
            out_json(partition)
    else:
        print_table(
            ["partition>", "phase", "owner", "epoch>", "lag>", "markers lag>", "checkpoint>", "messages>", "parked>"],
            (
                (
                    partition["partition"],
                    partition["phase"] + (f": {partition['reason']}" if "reason" in partition else ""),
                    partition["owner"],
                    number(partition.get("epoch")),
                    number(partition.get("lag")),
                    number(partition.get("markers_lag")),
                    duration(partition.get("checkpoint_age_ms")),
                    number(partition.get("in_memory")),
                    number(partition.get("parked")),
                )
                for partition in answer["partitions"]
            ),
        )
    say(*troubles_in([answer]))


@command("open")
@click.argument("queue", required=False, type=QUEUE)
@click.option("--print", "only_print", is_flag=True, help="Print the address, and open nothing.")
def open_page(service: Connected, queue: str | None, only_print: bool) -> None:
    """Open the service's page in a browser, at QUEUE if one is named."""
    url = f"{service.url}/" if queue is None else f"{service.url}/ui/queue?name={quote(queue, safe='')}"
    if service.as_json:
        out_json({"url": url})
    else:
        out(url)
    if not only_print and not webbrowser.open(url):
        say("no browser could be opened here; open the address yourself")
