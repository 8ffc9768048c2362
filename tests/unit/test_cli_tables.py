"""Tables of `marq` in terminals of any width, and why no worker answers."""

from __future__ import annotations

import socket

import pytest
from rich.console import Console

from marq.cli.console import table
from marq.cli.queues import STATS_TITLES, troubles_in
from marq.cli.service import Address, Connected
from marq.cli.top import _packed
from marq.errors import UnreachableError

ROW = ("orders", "1", "0", "0", "0", "12 s", "yes")


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 200])
def test_a_narrow_terminal_shows_the_first_columns_whole(width: int) -> None:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(table(STATS_TITLES, [ROW], width))
    lines = shown.get().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    titles = next(line for line in lines if "queue" in line)
    assert "orders" in shown.get()
    assert set(titles.split()) <= set(" ".join(STATS_TITLES).replace(">", "").split()), "no title is cut"
    assert (width < 80) or "receiver" in titles


def test_a_name_that_nobody_knows_is_said_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with (
        Connected(Address(("http://nobody.invalid:1",), None, None), as_json=False) as service,
        pytest.raises(UnreachableError, match=r"nobody\.invalid:1: its name is not known here; start one with"),
    ):
        service.require_answer()


@pytest.mark.parametrize(
    ("width", "lines"),
    [(30, ["sent 1/s   delivered 2/s", "redelivered 3/s"]), (10, ["sent 1/s", "delivered 2/s", "redelivered 3/s"])],
)
def test_figures_are_wrapped_between_each_other(width: int, lines: list[str]) -> None:
    assert _packed(["sent 1/s", "delivered 2/s", "redelivered 3/s"], width) == lines


def test_unreadable_offsets_are_said_to_be_missing_in_the_counts() -> None:
    assert troubles_in([{"unreadable": {}}, {"unreadable": {"3": 4}}, {}]) == [
        "partition 3 can't read 4 offsets, no replica has them whole: messages there are not counted"
    ]
