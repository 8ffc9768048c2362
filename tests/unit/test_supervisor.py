"""What a supervisor knows of a worker that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.processes import WorkerProcess

#: A worker, which tells its supervisor something if it is asked to, and ends.
WORKER = """
import os, subprocess, sys
supervisor = int(sys.argv[sys.argv.index("--supervisor") + 1])
if {told}:
    os.write(supervisor, b"\\n")
subprocess.Popen(["sleep", "2"], pass_fds=[supervisor])  # a process that has the pipe as well
os._exit(2)
"""


@pytest.mark.parametrize("told", [True, False])
def test_only_what_a_worker_says_shows_that_it_can_not_start(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status may come from code of a handler."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(WORKER.format(told=told))
    monkeypatch.chdir(tmp_path)
    with WorkerProcess() as worker:
        assert worker.process.wait(60) == 2
        assert worker.could_not_start() is told
