"""The command `marq` as a process of its own.

Most of the time of a short command is Python's start and its imports. So one process does that once, and forks for each
command. Commands that go on by themselves are started as a user does.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.cluster import ROOT


class Ran(NamedTuple):
    """The output and the exit status of a command."""

    status: int
    out: str
    err: str

    @property
    def objects(self) -> list[Any]:
        """Its output as JSON, an object a line."""
        return [json.loads(line) for line in self.out.splitlines()]


def environment(**variables: str) -> dict[str, str]:
    """The environment without the settings of the person who runs the tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MARQ_")} | variables


class Command:
    """Runs `marq` against one worker."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *args: str, given: bytes = b"", **variables: str) -> Ran:
        return _forker().run(args, environment(MARQ_URL=self.url) | variables, given)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command in the background. If it has a terminal, `TERM` names a capable one."""
        variables = environment(MARQ_URL=self.url, TERM="xterm-256color")
        for name in ("COLUMNS", "LINES"):  # of another terminal
            variables.pop(name, None)
        return subprocess.Popen([sys.executable, "-m", "marq.cli", *args], cwd=ROOT, env=variables, **options)


class _Forker:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._process.kill)

    def run(self, args: tuple[str, ...], variables: dict[str, str], given: bytes) -> Ran:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "0").write_bytes(given)
            print(json.dumps([name, args, variables]), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            return Ran(status, *((folder / stream).read_bytes().decode() for stream in "12"))


@cache
def _forker() -> _Forker:
    return _Forker()


_FORKER = """
import json, os, sys, traceback
from marq.cli import commands
for line in sys.stdin:
    folder, args, variables = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, flags in enumerate((os.O_RDONLY, os.O_CREAT | os.O_WRONLY, os.O_CREAT | os.O_WRONLY)):
        os.dup2(os.open(f"{folder}/{number}", flags, 0o600), number)
    sys.stdin = open(0, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["marq", *args]
    status = 0
    try:
        commands.run()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""
