"""The page: one HTML file that needs no other file, and forbids loading any."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline.report import wording
from pipeline.report.counting import UNKNOWN, Level
from pipeline.report.measures import NO_QUEUE, Measures, Series
from pipeline.report.span import Span

_FOLDER = Path(__file__).parent

_SCRIPT_SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def page(measures: Measures, *, about: dict[str, Any]) -> str:
    """The page's HTML.

    Args:
        about: `name` of the installation, `data` (folder), `queues` (patterns), `made_ms`, `until_ms` (the last event).
    """
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        name: getattr(wording, name)
        for name in ("number", "short", "size", "duration", "percent", "moment", "day_time")
    }
    environment.globals |= {"wording": wording, "NO_QUEUE": NO_QUEUE, "line": _line}
    # compressed, the library is 2 MB instead of 5; the page's script unpacks it
    library = get_plotlyjs()
    # text inside <script> is not parsed as HTML: only a closing tag ends it
    script = f"\n{(_FOLDER / 'page.js').read_text()}"
    assert "</script" not in script and "<!--" not in script
    return environment.get_template("page.html.jinja").render(
        m=measures,
        span=measures.span,
        about=about,
        style=Markup((_FOLDER / "page.css").read_text()),
        library=base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode(),
        script=Markup(script),
        hashes=[_hash(library), _hash(script)],
        data=Markup(_data(measures)),
    )


def _hash(script: str) -> str:
    """A script's hash, with which the page's policy allows it to run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# ------------------------------------------------------------------ data of the charts


def _data(measures: Measures) -> str:
    """The data of the charts, as JSON that is safe inside a script element."""
    span = measures.span
    found = {
        "start": span.origin_ms,
        "stop": span.stop_ms,
        "width": span.width_ms,
        "count": span.count,
        "series": [
            _series(span, measures.series),
            *(_series(span, section.series) for section in measures.sections),
        ],
    }
    return json.dumps(found, separators=(",", ":")).translate(_SCRIPT_SAFE)


def _series(span: Span, series: Series) -> dict[str, Any]:
    counts = series.counts
    known = [_is_known(span, bucket) for bucket in range(span.count)]
    if not any(known):
        known = [True] * span.count  # nothing else to show
    unit_ms = wording.rate_unit(span, series)[1]
    return {
        **{name: _rates(span, counts[name], unit_ms, known) for name in ("sent", "delivered", "acked")},
        "unit": wording.rate_unit(span, series)[0],
        "backlog": series.backlog,
        "in_flight": series.in_flight,
        "oldest": [ms / 1000 for ms in series.oldest_ms],
        "waiting": _levels(series.waiting, known),
        "working": _levels(series.working, known),
        **{name: counts[name] for name in ("redelivered", "dead", "expired")},
    }


def _is_known(span: Span, bucket: int) -> bool:
    """Whether a bucket is long enough for rates and times: the first and last one may be less than a quarter."""
    covered_ms = span.end_ms(bucket) - max(span.begin_ms(bucket), span.start_ms)
    return covered_ms >= span.width_ms / 4


def _rates(span: Span, counts: list[int], unit_ms: int, known: list[bool]) -> list[float | None]:
    rates: list[float | None] = []
    for bucket, count in enumerate(counts):
        covered_ms = span.end_ms(bucket) - max(span.begin_ms(bucket), span.start_ms)
        rates.append(float(f"{count * unit_ms / covered_ms:.6g}") if known[bucket] else None)
    return rates


def _levels(levels: list[Level], known: list[bool]) -> list[list[float | None]]:
    shown = [level if is_known else UNKNOWN for level, is_known in zip(levels, known, strict=True)]
    return [[None if value is None else value / 1000 for value in line] for line in zip(*shown, strict=True)]


def _line(values: list[int], kind: str) -> Markup:
    """A small area chart as inline SVG, 96 by 24: only its shape."""
    most = max(values, default=0) or 1
    step = 96 / max(len(values) - 1, 1)
    points = " ".join(f"{i * step:.0f},{24 - 22 * v / most:.0f}" for i, v in enumerate(values))
    return Markup(
        f'<svg class="line {kind}" viewBox="0 0 96 25" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="M0,24 {points} 96,24"/></svg>'
    )


__all__ = ["page"]
