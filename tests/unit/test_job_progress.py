"""A job shows its progress on a terminal; its output in a pipe has none."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import ROOT

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_")} | {
    "MARQ_KAFKA": "kafka://127.0.0.1:1",
    "TERM": "xterm",
}


def job(tmp_path: Path) -> list[str]:
    (tmp_path / "rows.csv").write_text("a\n1\n")
    return [sys.executable, "-m", "pipeline", "load", "orders", str(tmp_path / "rows.csv"), "--dry-run"]


def test_a_terminal_shows_what_a_job_is_doing_before_the_job_ends(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        job(tmp_path), cwd=ROOT, env=ENVIRONMENT, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    assert process.wait(60) == 2
    assert process.stdout is not None
    assert process.stdout.read() == b""
    assert b"load: asking Kafka" in seen
    assert seen.index(b"load: asking Kafka") < seen.index(b"marq: ")
    process.stdout.close()
    os.close(ours)


def test_a_pipe_gets_one_line_for_an_error_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(job(tmp_path), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)


@pytest.mark.parametrize("module", ["pipeline.startup", "pipeline.jars"])
def test_help_of_a_preparation_is_help_and_prepares_nothing(module: str, tmp_path: Path) -> None:
    if module == "pipeline.startup":
        pytest.importorskip("pyspark", exc_type=ModuleNotFoundError)
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        env=ENVIRONMENT | {"MARQ_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python -m {module}")
    assert not (tmp_path / "cache").exists()
