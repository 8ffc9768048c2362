"""The remarks of a test are printed, also if several processes share the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

OPTIONS = ("-p", "tests.conftest", "-p", "no:cacheprovider", "--import-mode=importlib")

TESTS = """
from tests.conftest import SAID


def test_that_passes(record_property):
    record_property(SAID, "seeds 1 to 5")


def test_that_fails(record_property):
    record_property(SAID, "seeds 6 to 7")
    raise AssertionError
"""


def test_what_a_test_says_is_printed_at_the_end_whether_it_fails_or_not(tmp_path: Path) -> None:
    (tmp_path / "test_says.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "--tb=no", *OPTIONS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.count("seeds 1 to 5") == done.stdout.count("seeds 6 to 7") == 1, done.stdout + done.stderr
