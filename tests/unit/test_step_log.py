"""The lines that a worker logs at start, stop and rebalance, and their format."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from app.logs import Lines, Objects, OurSteps
from app.step_log import StepLog
from tests.integration.cluster import ROOT


class Log:
    """A `StepLog` with a clock that the test sets, and its log."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: list[str] = []
        self.step_log = StepLog(lambda line, *args: self.lines.append(line % args), lambda: self.now_s)

    def serves(self, *numbers: int, serving: bool = True) -> None:
        for number in numbers:
            self.step_log.settled(number, 8, serving=serving)


def test_a_start_is_one_line_when_all_is_served() -> None:
    log = Log()
    log.step_log.assigned({0, 1, 2}, 8)
    log.serves(0, 1)
    assert log.lines == []
    log.now_s = 0.4
    log.serves(2)
    assert log.lines == ["serving 3 of 8 partitions, 0.4 s"]


def test_a_rebalance_says_what_comes_and_goes_and_when_it_is_over() -> None:
    log = Log()
    log.step_log.assigned({0, 1}, 8)
    log.serves(0, 1)
    log.step_log.assigned({1, 2, 3}, 8)
    log.now_s = 2.0
    log.serves(2, 3)
    assert log.lines[1:] == ["rebalance: 2 partitions come, 1 go", "serving 3 of 8 partitions, 2.0 s"]


def test_a_rebalance_that_changes_nothing_says_nothing() -> None:
    log = Log()
    log.step_log.assigned({0}, 8)
    log.serves(0)
    log.step_log.assigned({0}, 8)
    assert len(log.lines) == 1


def test_a_worker_without_partitions_says_so() -> None:
    log = Log()
    log.step_log.assigned(set(), 8)
    assert log.lines == ["serving none of 8 partitions: other workers have them"]


def test_a_partition_that_can_not_be_served_is_not_counted() -> None:
    log = Log()
    log.step_log.assigned({0, 1}, 8)
    log.serves(0)
    log.serves(1, serving=False)
    assert log.lines == ["serving 1 of 8 partitions, 0.0 s"]


# -- lines ----------------------------------------------------------------------------------------------


def record(text: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("app.worker", level, __file__, 1, text, args, None)


def test_a_line_has_no_name_of_a_service_and_no_blank_at_its_end() -> None:
    said = Lines().format(record("[^--Ownership]: Serving %s ", 3))
    assert said.endswith("] [INFO] Serving 3")


def test_an_object_is_one_line_whatever_it_says() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        error = sys.exc_info()
    one = logging.LogRecord("app", logging.ERROR, __file__, 1, "[^-A]: x\ny", (), error)
    (line,) = Objects().format(one).splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("ERROR", "app", "x\ny")
    assert "ValueError" in found["error"]
    assert found["time"].endswith("Z")


@pytest.mark.parametrize(("level", "passes"), [(logging.INFO, False), (logging.WARNING, True)])
def test_steps_of_faust_are_left_out_and_its_warnings_are_not(level: int, passes: bool) -> None:
    import faust

    one = logging.LogRecord("app.worker", level, faust.__file__ or "", 1, "Seek stream partitions", (), None)
    assert OurSteps().filter(one) is passes
    assert OurSteps().filter(record("of ours", level=level))


def test_that_an_error_is_raised_again_is_not_worth_a_line() -> None:
    text = "[^-A]: We experienced a crash! Reraising original exception..."
    assert not OurSteps().filter(record(text, level=logging.CRITICAL))


# -- commands -------------------------------------------------------------------------------------------


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_speaks_of_marq() -> None:
    for args in (("--help",), ("worker", "--help")):
        done = run(*args)
        assert done.returncode == 0
        assert not any(word in done.stdout for word in ("livecheck", "models", "6066", "agents ", "--web-port")), args
    assert run("--version").stdout.startswith("marq ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wroker", "did you mean worker?"),
        ("send", "it is `marq send`"),
        ("agents", "it is `faust -A app agents`"),
        ("zzz", "there are: up, worker, broker"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_one_that_was_meant(name: str, said: str) -> None:
    done = run(name)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
