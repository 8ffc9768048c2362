"""`marq peek`, `message`, `move` and `redrive`: messages that nobody has to receive for it."""

from __future__ import annotations

import base64
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from marq.cli.console import out, out_json, print_pairs, print_table, say, shortened, text_of
from marq.cli.group import QUEUE, command
from marq.cli.queues import path_of, stats_of, troubles_in
from marq.cli.receiving import payload_object
from marq.cli.service import Answer, Connected
from marq.cli.values import PLACE, Place, duration, number, size
from marq.client import wire
from marq.core.policies import DEAD_SUFFIX, default_dead_letter_queue
from marq.errors import LeaseOverError, MarqError, NotFoundError, UnknownQueueError
from marq.protocol.limits import MOVE_MAX

#: Bytes of a payload that `peek` asks for.
SHOWN_BYTES = 4 * 1024
#: Messages that one request moves, so that one sees it go on.
MOVED_AT_ONCE = 200


# ---------------------------------------------------------------------- looking


class StateType(click.Choice[str]):
    """A state of a message; `in_flight`, as in the API, is one too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The state."""
        if value in ("dead", "done"):
            self.fail(
                f"a queue has no {value} messages; dead letters are in a queue of their own, QUEUE.dead", param, ctx
            )
        return str(super().convert(str(value).replace("_", "-"), param, ctx))


@command("peek")
@click.argument("queue", type=QUEUE)
@click.option("--state", type=StateType(["ready", "delayed", "in-flight"]), help="Only those in this state.")
@click.option("--max", "limit", type=click.IntRange(1), default=10, show_default=True, help="So many at most.")
@click.option("--no-payload", is_flag=True, help="Places and states only.")
def peek(service: Connected, queue: str, state: str | None, limit: int, no_payload: bool) -> int:
    """Look at messages of QUEUE without receiving them.

    Exit status 1: there is none.
    """
    shown, troubles = _listed(service, queue, state, limit, 0 if no_payload else SHOWN_BYTES)
    rows = [as_object(brief) for brief in shown]
    if service.as_json:
        for row in rows:
            out_json(row)
    elif rows:
        titles = ["place", "state", "receives>", "age>", "size>"] + ([] if no_payload else ["payload"])
        print_table(titles, (_row(row, no_payload) for row in rows))
    else:
        say(f"no message in {queue!r}" + (f" is {state.replace('-', ' ')}" if state else ""))
    say(*troubles)
    return 0 if rows else 1


def _listed(
    service: Connected, queue: str, state: str | None, limit: int, payload_bytes: int
) -> tuple[list[dict[str, Any]], list[str]]:
    listed: list[dict[str, Any]] = []
    troubles: list[str] = []
    query: dict[str, Any] = {"state": state.replace("-", "_") if state else None, "limit": min(limit, 1_000)}
    query["payload_bytes"] = payload_bytes or None
    for page in service.pages(path_of(queue, "messages"), query):
        listed += page["messages"]
        troubles = troubles_in([page])
        if len(listed) >= limit:
            break
    return listed[:limit], troubles


def as_object(message: dict[str, Any]) -> dict[str, Any]:
    """A message with everything; its payload as `text`, or as `payload` in base64 if it is no text."""
    found = Answer(message)
    if "payload" in message:
        told = found.pop("payload")
        payload = told if isinstance(told, bytes) else base64.b64decode(told)
        found |= payload_object(payload)
        if message["size_bytes"] > len(payload):
            found["cut"] = True
    return found


def _row(row: dict[str, Any], no_payload: bool) -> list[str]:
    age = row.get("age_ms")
    if age is None and row.get("sent_ms") is not None:
        age = max(0.0, time.time() * 1000 - row["sent_ms"])
    cells = [
        str(Place(row["partition"], row["offset"])),
        row["state"].replace("_", " "),
        number(row.get("receives")),
        duration(age),
        size(row.get("size_bytes")),
    ]
    return cells if no_payload else [*cells, shortened(_text(row))]


def _text(row: dict[str, Any]) -> str:
    return str(row["text"]) if "text" in row else text_of(base64.b64decode(row.get("payload", "")))


@command("message")
@click.argument("place", type=PLACE)
def message(service: Connected, place: Place) -> int:
    """Show the message at PLACE (PARTITION:OFFSET, as `peek` and `receive` show it) with everything.

    Exit status 1: it is finished, and only its place is known.
    """
    try:
        found = as_object(service.message(place))
    except NotFoundError as error:
        raise NotFoundError(f"{error}; `marq peek QUEUE` lists the places of messages") from None
    if service.as_json:
        out_json(found)
    else:
        print_pairs(_facts(found))
        if "text" in found or "payload" in found:
            out("")
            for line in _text(found).split("\n"):
                out(line)
            if found.get("cut"):
                say(f"that is the beginning; it has {size(found['size_bytes'])}")
    return 1 if found["state"] == "done" else 0


def _facts(found: dict[str, Any]) -> list[tuple[str, Any]]:
    facts: list[tuple[str, Any]] = [
        ("place", f"{found['topic']} {found['partition']}:{found['offset']}"),
        ("state", str(found["state"]).replace("_", " ")),
    ]
    if "queue" in found:
        facts += [
            ("queue", found["queue"]),
            ("receives", number(found["receives"])),
            ("sent", _at(found["sent_ms"]) + (f", {duration(found['age_ms'])} ago" if "age_ms" in found else "")),
            ("size", size(found["size_bytes"])),
        ]
    for name, title in (("ready_at_ms", "ready at"), ("expires_at_ms", "expires at")):
        if found.get(name) is not None:
            facts.append((title, _at(found[name])))
    if found.get("poison"):
        facts.append(("poison", found["poison"]))
    if delivery := found.get("delivery"):
        state = f"comes back in {duration(delivery['left_ms'])}" if delivery["leased"] else "the lease is over"
        facts.append(("receiver", f"{delivery['receiver'] or 'without a name'}, {state}"))
    return facts + [(f"header {name}", value) for name, value in found.get("headers") or ()]


def _at(ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(ms / 1000))


# ---------------------------------------------------------------------- moving


@command("move")
@click.argument("queue", type=QUEUE)
@click.argument("places", nargs=-1, type=PLACE, metavar="[PLACE]...")
@click.option("--to", required=True, type=QUEUE, help="The queue they go to.")
@click.option("--max", "limit", type=click.IntRange(1), help="So many at most; by default all that are ready now.")
def move(service: Connected, queue: str, places: tuple[Place, ...], to: str, limit: int | None) -> int:
    """Put messages of QUEUE that are ready into another queue, each once: those at PLACEs, or the first of them."""
    if places:
        if limit is not None:
            raise click.UsageError("give either places or --max")
        return _move_named(service, queue, places, to)
    return _move_all(service, queue, to, limit, f"moved from {queue!r} to {to!r}")


@command("redrive")
@click.argument("queue", type=QUEUE)
@click.option("--to", type=QUEUE, help="Another queue than the one that each came from.")
@click.option("--max", "limit", type=click.IntRange(1), help="So many at most; by default all there are now.")
def redrive(service: Connected, queue: str, to: str | None, limit: int | None) -> int:
    """Send the dead letters of QUEUE back to where they came from.

    QUEUE may also be a dead-letter queue itself, if its name ends in ".dead". Ctrl-C stops it; what was moved stays so.

    Exit status 1: some were not moved.
    """
    source = queue
    if not queue.endswith(DEAD_SUFFIX):
        settings = service.queue(queue).get().settings
        # a key may see no settings: then the name that the dead letters have by default
        source = settings.get("dead_letter_queue") or default_dead_letter_queue(queue)
    back = f"to {to!r}" if to else "back"
    return _move_all(service, source, to, limit, f"sent {back} from {source!r}")


def _move_named(service: Connected, queue: str, places: tuple[Place, ...], to: str) -> int:
    moved = failed = 0
    for start in range(0, len(places), MOVE_MAX):
        some = places[start : start + MOVE_MAX]
        wanted = [{"partition": place.partition, "offset": place.offset} for place in some]
        results = _moved(service, queue, {"to": to, "messages": wanted})
        for place, result in zip(some, results, strict=True):
            if isinstance(result, MarqError):
                failed += 1
                said = str(result)
                say(said if said.startswith(str(place)) else f"{place}: {said}")
            else:
                moved += 1
                _show_copy(service, place, result)
    if not service.as_json:
        out(f"{number(moved)} moved from {queue!r} to {to!r}")
    return 1 if failed or not moved else 0


def _show_copy(service: Connected, place: Place, copy: Any) -> None:
    if service.as_json:
        out_json({"from": str(place), "partition": copy.partition, "offset": copy.offset})


def _moved(service: Connected, queue: str, body: dict[str, Any]) -> list[Any]:
    answer = service.run(
        service.operations.connection.request("POST", path_of(queue, "move"), wire.encode(body), retry_for=0)
    )
    return wire.send_results(answer)


def _move_all(service: Connected, queue: str, to: str | None, limit: int | None, done: str) -> int:
    """Move what is ready now, and not what comes meanwhile; a message that fails again would go round and round."""
    try:
        ready = stats_of(service, queue)[0][0]["ready"]
    except UnknownQueueError:
        if not queue.endswith(DEAD_SUFFIX):
            raise
        ready = 0  # it comes into being with its first dead letter
    total = min(ready, limit or ready)
    moved = failed = 0
    with Progress(
        TextColumn("moving"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task("", total=total)
        try:
            while moved + failed < total:
                body = {"to": to, "max": min(MOVED_AT_ONCE, total - moved - failed)}
                results = _moved(service, queue, {k: v for k, v in body.items() if v is not None})
                errors = [result for result in results if isinstance(result, MarqError)]
                # somebody received them in the meantime
                lasting = [error for error in errors if not isinstance(error, LeaseOverError)]
                moved += len(results) - len(errors)
                failed += len(errors)
                for error in lasting[:1]:
                    say(str(error))
                if not results or len(lasting) == len(results):
                    break
                progress.update(task, completed=moved)
        except KeyboardInterrupt:
            say(f"stopped: {number(moved)} {done}")
            raise
    if service.as_json:
        out_json({"queue": queue, "to": to, "moved": moved, "failed": failed})
    else:
        out(f"{number(moved)} {done}" + (f", {number(failed)} were not" if failed else ""))
    return 1 if failed else 0
