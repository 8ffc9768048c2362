"""Numbers and times for people, and the sentences about charts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from pipeline.report.counting import Level
from pipeline.report.measures import NO_QUEUE, Measures, Series, Totals
from pipeline.report.span import Span

_THIN = "\N{NARROW NO-BREAK SPACE}"
_DASH = "\N{EN DASH}"


def number(value: float | None) -> str:
    """12,345; 1.5 if it is small; a dash for None."""
    if value is None:
        return _DASH
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def short(value: float) -> str:
    """1.2 M: where there is little room."""
    for least, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= least:
            scaled = value / (1e3 if unit == "k" else least)
            return f"{scaled:.3g}{_THIN}{unit}" if scaled < 1000 else f"{scaled:,.0f}{_THIN}{unit}"
    return number(value)


def size(bytes_: float) -> str:
    """1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if bytes_ < 1000:
            return f"{bytes_:.3g}{_THIN}{unit}"
        bytes_ /= 1000
    return f"{bytes_:,.3g}{_THIN}TB"


def duration(ms: float | None) -> str:
    """850 ms; 12.3 s; 4 min 5 s; 3 h 20 min; 2 d 4 h."""
    if ms is None:
        return _DASH
    if ms < 1000:
        return f"{ms:.0f}{_THIN}ms"
    if ms < 60_000:
        return f"{ms / 1000:.3g}{_THIN}s"
    seconds = round(ms / 1000)
    for (large, name), (small, minor) in pairwise(((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))):
        if seconds >= large:
            rest = seconds % large // small
            return f"{seconds // large}{_THIN}{name}" + (f" {rest}{_THIN}{minor}" if rest else "")
    return f"{seconds}{_THIN}s"


def percent(part: float) -> str:
    """4.2 %; with enough digits that only 0 reads as 0."""
    if part == 0:
        return f"0{_THIN}%"
    return f"{100 * part:.2g}{_THIN}%" if part < 0.1 else f"{100 * part:.3g}{_THIN}%"


def moment(ms: int) -> str:
    """2026-01-31 08:00:00 (UTC)."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def day_time(ms: int) -> str:
    """01-31 08:00:00 (UTC)."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%m-%d %H:%M:%S}"


def clock(ms: int, span: Span) -> str:
    """A moment within the span, as short as it stays unambiguous."""
    at = datetime.fromtimestamp(ms / 1000, UTC)
    if span.stop_ms - span.start_ms <= 43_200_000:
        return f"{at:%H:%M:%S}" if span.width_ms < 60_000 else f"{at:%H:%M}"
    return f"{at:%b} {at.day}" + (f", {at:%H:%M}" if span.width_ms < 86_400_000 else "")


def name_of(queue: str) -> str:
    return "no queue" if queue == NO_QUEUE else queue


def every(span: Span) -> str:
    """The width of a bucket, in words."""
    return duration(span.width_ms)


# ------------------------------------------------------------------ what charts show


def _peak(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def rate_unit(span: Span, series: Series) -> tuple[str, int]:
    """The unit for rates, and its ms: per second, unless the highest rate is below one."""
    most = max(max(series.counts["sent"]), max(series.counts["delivered"])) / span.width_ms
    return next((u for u in (("second", 1_000), ("minute", 60_000)) if most * u[1] >= 1), ("hour", 3_600_000))


def rates(span: Span, series: Series, totals: Totals) -> str:
    sent = series.counts["sent"]
    busiest = _peak(sent)
    if not sent[busiest]:
        return "Nothing was sent in this time"
    unit, unit_ms = rate_unit(span, series)
    text = f"Up to {short(sent[busiest] * unit_ms / span.width_ms)} sent per {unit}, at "
    text += clock(span.begin_ms(busiest), span)
    missing = totals.counts["sent"] - totals.ended
    if missing > 0:
        return f"{text}; {number(missing)} more came than ended"
    return f"{text}; as many ended as came" if not missing else f"{text}; {number(-missing)} more ended than came"


def backlog(span: Span, series: Series) -> str:
    most = _peak(series.backlog)
    if not series.backlog[most]:
        return "Nothing stayed unfinished"
    text = f"At most {number(series.backlog[most])}, at {clock(span.end_ms(most), span)}"
    last = series.backlog[-1]
    return f"{text}; {number(last)} at the end" if last else f"{text}; none at the end"


def oldest(span: Span, series: Series) -> str:
    most = _peak(series.oldest_ms)
    if not series.oldest_ms[most]:
        return "Nothing stayed unfinished"
    return f"At most {duration(series.oldest_ms[most])}, at {clock(span.end_ms(most), span)}"


def level(what: Level, nothing: str) -> str:
    if what.p50 is None:
        return nothing
    return f"Half within {duration(what.p50)}, 99{_THIN}% within {duration(what.p99)}"


def trouble(totals: Totals) -> str:
    counts = totals.counts
    parts = [
        f"{percent(totals.redelivered_part)} of deliveries were repeats" if counts["redelivered"] else "",
        f"{number(counts['lapsed'])} leases ran out" if counts["lapsed"] else "",
        f"{number(counts['dead'])} dead letters" if counts["dead"] else "no dead letters",
    ]
    text = "; ".join(part for part in parts if part)
    return text[0].upper() + text[1:]


def findings(measures: Measures) -> list[tuple[str, str]]:
    """What to look at first: (kind, sentence); kind is `good`, `note` or `bad`."""
    found = []
    totals, queues = measures.totals, measures.queues
    working = [queue for queue in queues if not queue.takes_dead_letters]
    dead = sorted((q for q in queues if q.counts["dead"]), key=lambda q: -q.counts["dead"])
    if dead:
        dead_letters = (
            "One dead letter" if totals.counts["dead"] == 1 else f"{number(totals.counts['dead'])} dead letters"
        )
        where = f"in {len(dead)} queues, most of them in" if len(dead) > 1 else "in"
        found.append(("bad", f"{dead_letters} {where} {name_of(dead[0].name)}."))
    growing = sorted((q for q in working if q.backlog > 100 and q.counts["sent"] > 1.05 * q.ended), key=_held)
    if growing:
        worst = growing[-1]
        kind = "bad" if worst.backlog > worst.ended else "note"
        others = f"; so do {len(growing) - 1} other queues" if len(growing) > 2 else ""
        others = "; so does one other queue" if len(growing) == 2 else others
        text = f"{name_of(worst.name)} gets more than is finished and holds {number(worst.backlog)} messages{others}."
        found.append((kind, text))
    if totals.backlog and working:
        old = max(working, key=lambda q: q.oldest_ms)
        found.append(
            ("note", f"The oldest unfinished message has been in {name_of(old.name)} for {duration(old.oldest_ms)}.")
        )
    often = [q for q in queues if q.redelivered_part > 0.05 and q.counts["delivered"] >= 20]
    if often:
        worst = max(often, key=lambda q: q.redelivered_part)
        others = f"; so were more than 5{_THIN}% in {len(often) - 1} other queues" if len(often) > 2 else ""
        others = f"; so were more than 5{_THIN}% in one other queue" if len(often) == 2 else others
        text = f"{percent(worst.redelivered_part)} of the deliveries of {name_of(worst.name)} were repeats{others}."
        found.append(("note", text))
    if not found:
        found.append(("good", "No dead letters, nothing left over, and hardly a delivery had to be repeated."))
    return found


def _held(queue: Totals) -> int:
    return queue.backlog
