"""Commands escape names and texts of others when they print them."""

from __future__ import annotations

import click
import pytest

from app.processes import errors_as_lines
from marq.errors import TopicError, UnknownQueueError
from pipeline.console import say

EVIL = "\x1b]0;owned\x07\x1b[2J\rorders\n10 messages\u202e\x9b31m"


def test_a_line_of_a_job_is_one_line_that_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"         1  {EVIL}")

    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
    assert "orders" in line


def test_the_text_of_a_message_in_a_dry_run_does_nothing_to_a_terminal() -> None:
    shown = pytest.importorskip("pipeline.selection", exc_type=ModuleNotFoundError)._shown  # needs Spark
    assert shown(EVIL).isprintable()
    assert "orders" in shown(EVIL)


def test_an_error_of_a_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), errors_as_lines():
        raise UnknownQueueError(f"there is no queue {EVIL}")

    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_an_error_that_names_several_things_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), errors_as_lines():
        raise TopicError(f"mend {EVIL}", "mend orders")

    first, second = capsys.readouterr().err.splitlines()
    assert first.isprintable()
    assert second == "mend orders"


def test_nothing_of_a_job_is_printed_in_another_way() -> None:
    from pathlib import Path

    import pipeline

    for file in Path(pipeline.__path__[0]).rglob("*.py"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if "click.echo(" in line and file.name != "console.py":
                assert "json.dumps" in line or "shlex" in line, f"{file.name}:{number}"
    assert click
