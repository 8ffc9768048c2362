"""The figures of a run: one row for each kind of fault, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tests.chaos.check import Figures

#: The row of what happened while a fault was prepared.
BETWEEN = "(between)"
#: The row of several faults at once.
MIXED_ROW = "mixed"


@dataclass
class Row:
    """All faults of one kind. Times are the worst of all of them, in seconds."""

    fault: str
    kind: str = ""
    times: int = 0
    sent: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    twice: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    burned: int = 0  # deliveries after the first
    copies: int = 0  # messages that their senders sent again
    exits: int = 0  # workers that ended by themselves
    recovery_s: float = 0.0
    longest_wait_s: float = 0.0
    unanswered_s: dict[str, dict[str, float]] = field(default_factory=dict)
    hit: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return self.violations["lost"]

    @property
    def twice_per_million(self) -> float:
        return 1e6 * self.twice / self.sent if self.sent else 0.0

    @property
    def at_most_per_million(self) -> float:
        """What the true figure is below, with a probability of 95 %: 3 in N if none of N was done twice (Poisson)."""
        return 1e6 * (self.twice + 1.96 * self.twice**0.5 + (3.0 if not self.twice else 2.0)) / max(1, self.sent)

    def add(self, found: Figures) -> None:
        """The figures of another fault of the kind."""
        self.sent += found.sent
        self.burned += found.burned
        self.copies += found.copies
        self._raise(found.recovery_s, found.longest_wait_s, found.unanswered_s)

    def _raise(self, recovery_s: float, longest_wait_s: float, unanswered_s: dict[str, dict[str, float]]) -> None:
        self.recovery_s = max(self.recovery_s, recovery_s)
        self.longest_wait_s = max(self.longest_wait_s, longest_wait_s)
        for action, worst in unanswered_s.items():
            mine = self.unanswered_s.setdefault(action, {})
            for protocol, seconds in worst.items():
                mine[protocol] = max(seconds, mine.get(protocol, 0.0))

    def merge(self, other: Row) -> None:
        """What happened elsewhere, too."""
        for name in ("times", "sent", "twice", "burned", "copies", "exits"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.violations.update(other.violations)
        self.causes.update(other.causes)
        self.hit += other.hit
        self._raise(other.recovery_s, other.longest_wait_s, other.unanswered_s)

    def worst(self, action: str) -> float:
        """The longest time without an answer, in any protocol."""
        return max(self.unanswered_s.get(action, {}).values(), default=0.0)


def total(rows: Iterable[Row]) -> Row:
    """All together."""
    found = Row("all")
    for row in rows:
        found.merge(row)
    return found


def table(rows: Iterable[Row], order: Sequence[str]) -> str:
    """For a terminal, and for the documentation: Markdown."""
    rows = sorted(rows, key=lambda row: order.index(row.fault))
    heads = (
        *("fault", "times", "sent", "lost", "twice", "per million", "attempts"),
        *("send s", "receive s", "ack s", "recovery s", "longest s", "exits", "violations"),
    )
    cells = [
        (
            row.fault,
            f"{row.times}",
            f"{row.sent:,}",
            f"{row.lost}",
            f"{row.twice}",
            f"{row.twice_per_million:.0f} (< {row.at_most_per_million:.0f})",
            f"{row.burned}",
            *(f"{row.worst(action):.1f}" for action in ("send", "receive", "ack")),
            f"{row.recovery_s:.1f}",
            f"{row.longest_wait_s:.1f}",
            f"{row.exits}",
            ", ".join(f"{count} {rule}" for rule, count in sorted(row.violations.items()) if count) or "0",
        )
        for row in [*rows, total(rows)]
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = [heads, tuple("-" * width for width in widths), *cells]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def as_json(rows: Iterable[Row], **about: Any) -> dict[str, Any]:
    """All that is known of the run."""
    rows = list(rows)
    found = []
    for row in [*rows, total(rows)]:
        more = {"lost": row.lost, "twice_per_million": row.twice_per_million}
        found.append(vars(row) | more | {"at_most_per_million": row.at_most_per_million})
    return {**about, "faults": found}


def of_json(runs: Iterable[dict[str, Any]]) -> list[Row]:
    """The rows of several runs, added up."""
    rows: dict[str, Row] = {}
    names = {field.name for field in fields(Row)}
    for run in runs:
        for values in run["faults"][:-1]:
            row = Row(**{name: value for name, value in values.items() if name in names})
            row.violations, row.causes = Counter(row.violations), Counter(row.causes)
            rows.setdefault(row.fault, Row(row.fault, row.kind)).merge(row)
    return list(rows.values())
