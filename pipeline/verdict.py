"""What an audit found, for programs as JSON and for people as lines of text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from pipeline.auditor import Summary

#: Version of the result as JSON.
FORMAT_VERSION = 1

#: Kinds of faults, as in the table of docs/pipeline.md.
FAULTS = (
    "lost",
    "fold",
    "record gone",
    "markers gone",
    "rewritten",
    "doubled",
    "no start",
    "two leases",
    "delivered after its end",
    "order",
    "attempts",
    "owner",
    "expired early",
    "tables",
    "misplaced",
    "manifest",
    "newer version",
    "deleted unread",
    "given up",
    "committed",
    "worker",
)


class Found(NamedTuple):
    """A fault."""

    partition: int
    offset: int  # -1: not about one message
    queue: str | None
    kind: str
    what: str

    def __str__(self) -> str:
        place = f"{self.partition}:{self.offset}" if self.offset >= 0 else f"partition {self.partition}"
        return f"{place} {self.queue or '-'} {self.kind}: {self.what}"


class Verdict(NamedTuple):
    """What an audit found."""

    summaries: list[Summary]
    faults: list[Found]
    fault_count: int
    archived: bool
    tables: bool  # whether the tables were compared
    worker: str | None
    seconds: float
    ordered: bool = True  # whether the order of FIFO groups was checked

    @property
    def proven(self) -> bool:
        return self.fault_count == 0

    @property
    def whole(self) -> bool:
        """Whether the logs reach back to the beginning."""
        return all(summary.whole for summary in self.summaries)


def _total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The result as JSON, for programs."""
    summaries = verdict.summaries
    queues: dict[str, dict[str, int]] = {}
    for summary in summaries:
        for queue, amount in summary.sent.items():
            queues.setdefault(queue, Counter())["sent"] += amount
        for part in (summary.done, summary.held):
            for queue, counts in part.items():
                queues.setdefault(queue, Counter()).update(counts)
    return {
        "v": FORMAT_VERSION,
        "proven": verdict.proven,
        "whole": verdict.whole,
        "since_ms": max((s.since_ms for s in summaries if s.since_ms is not None), default=None),
        "deleted_unread": sum(_records_lost(summary) for summary in summaries),
        "messages": sum(sum(summary.sent.values()) for summary in summaries),
        "done": dict(_total(counts for summary in summaries for counts in summary.done.values())),
        "held": dict(_total(counts for summary in summaries for counts in summary.held.values())),
        "deliveries": sum(summary.deliveries for summary in summaries),
        "redeliveries": sum(summary.redeliveries for summary in summaries),
        "queues": {queue: dict(queues[queue]) for queue in sorted(queues)},
        "source": "archive" if verdict.archived else "kafka",
        "tables": verdict.tables,
        "worker": verdict.worker,
        "ordered": verdict.ordered,
        "fault_count": verdict.fault_count,
        "faults": [fault._asdict() for fault in verdict.faults],
        "partitions": [msgspec.to_builtins(summary) for summary in summaries],
        "seconds": round(verdict.seconds, 2),
    }


def lines(verdict: Verdict, faults: int) -> Iterable[str]:
    """The result as lines of text, for people."""
    result, summaries = as_json(verdict), verdict.summaries
    since = "since the beginning" if verdict.whole else "of what the logs still have"
    yield f"{result['messages']:,} messages in {len(result['queues'])} queues, {len(summaries)} partitions, {since}"
    if not verdict.whole:
        yield from _beginnings(summaries)
    for summary in summaries:
        for deleted in summary.deleted:
            how = "given up" if deleted.given_up else "never read"
            amount = f"{deleted.stop - deleted.start:,} records, {deleted.unfinished:,} messages not known to be done"
            place = f"{summary.partition}:{deleted.start} to {summary.partition}:{deleted.stop - 1}"
            yield f"  DELETED UNREAD in the {deleted.log} topic: {place} ({amount}), {how}"
    done = ", ".join(f"{name} {amount:,}" for name, amount in sorted(result["done"].items())) or "none"
    held = ", ".join(f"{name} {amount:,}" for name, amount in result["held"].items() if amount) or "none"
    yield f"  done: {done}; held: {held}"
    yield f"  deliveries: {result['deliveries']:,}, {result['redeliveries']:,} of them again"
    if verdict.tables:
        manifests = [summary for summary in summaries if summary.manifest is not None]
        stored, compared = (sum(getattr(s, n) or 0 for s in manifests) for n in ("recovered", "compared"))
        yield (
            f"  tables: {len(manifests)} manifests, {stored:,} unfinished messages in their rows, {compared:,} of them "
            "compared with the log, byte by byte"
        )
    else:
        yield "  tables: not looked at (--offline)"
    if not verdict.ordered:
        yield "  order of FIFO groups: not looked at: the archive lacks the queues, `archive` adds them"
    if verdict.worker is None:
        yield "  nothing live was compared: name a worker with --worker"
    else:
        agree = sum(summary.live == "agrees" for summary in summaries)
        yield f"  worker {verdict.worker}: counts and digests of {agree} of {len(summaries)} partitions agree"
    if verdict.proven:
        lost = result["deleted_unread"]
        but = f" but the {lost:,} records that were given up" if lost else ""
        scope = "" if verdict.whole else ", as far back as the logs reach"
        yield f"PROVEN{scope}: nothing is lost{but}, nothing came again after its end ({verdict.seconds:.1f} s)"
        return
    yield f"WRONG: {verdict.fault_count:,} faults ({verdict.seconds:.1f} s); partition:offset queue what"
    for fault in verdict.faults[:faults]:
        yield f"  {fault}"


def _records_lost(summary: Summary) -> int:
    return sum(deleted.stop - deleted.start for deleted in summary.deleted if deleted.log == "queue")


def _beginnings(summaries: list[Summary]) -> Iterable[str]:
    """Where the audit of each partition begins: what was before is no longer in the logs."""
    whole = [str(summary.partition) for summary in summaries if summary.whole]
    if whole:
        yield f"  since the beginning: partitions {', '.join(whole)}"
    for summary in summaries:
        if summary.whole:
            continue
        begin = f"its queue topic begins at offset {summary.queue[0]}, its markers at {summary.markers[0]}"
        if summary.first is None:
            proven = "no message is seen whole"
        elif summary.since_ms is None:
            proven = f"audited from offset {summary.first} on, no message since"
        else:
            proven = f"audited from offset {summary.first} on, sent since {_time(summary.since_ms)}"
        yield f"  partition {summary.partition}: {proven} ({begin})"


def _time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))
