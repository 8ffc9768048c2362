"""Programs with SQS clients of other makers: how they are built and run.

    PROGRAM ENDPOINT QUEUE_URL SCENARIO COUNT

Each is the smallest thing that does the scenarios with the client that it is for, and prints a JSON object a line.
Message `i` has the body `m-<i>` and the number `i` as attribute `n`; in FIFO queues it is of the group `g<i modulo 7>`.

- `send` sends COUNT messages, the first alone, the others in batches of ten. It prints `sent`, the body, and `id`.
- `work` receives with long polls and deletes, COUNT messages or until it is stopped. It prints `ready`; of each message
  `got`, the body, and `id`, `receives`, `group`, `n`; of each that is deleted `deleted`, the id.
- `heartbeat` receives one message, makes it invisible for 4 s anew each second, COUNT times, and deletes it. It prints
  `got` and `deleted`.
- `fail` receives one message COUNT times and gives it back, then receives once more. It prints `got`, and `left`, the
  number of messages of the last receive.

What goes wrong, what is tried again and what the client warns of comes on standard error. What a framework does by
itself (heartbeats of sqs-consumer, listeners of Spring) it does its own way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.kafka.jars import default_cache_dir
from tests.integration.cluster import ROOT, until

SOURCES = Path(__file__).parent
#: Seconds that a build may take: compilers of a machine that does something else, too.
BUILD_S = 1200.0


def environment(**values: str) -> dict[str, str]:
    """That of a client, without credentials and settings of this machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MARQ_"))}
    given = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    # that the SDK will need another node one day is nothing that the tests ask
    given["AWS_SDK_JS_NODE_VERSION_SUPPORT_WARNING_DISABLED"] = "true"
    return kept | given | {"AWS_EC2_METADATA_DISABLED": "true"} | values


def build(name: str, *commands: list[str]) -> Path:
    """Build a client in a folder that outlives the run, so that its tool can reuse earlier results."""
    missing = {command[0] for command in commands if shutil.which(command[0]) is None}
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} is not installed")
    folder = default_cache_dir() / "tests" / "sdks" / name
    shutil.copytree(SOURCES / name, folder, dirs_exist_ok=True)
    for command in commands:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BUILD_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{command[0]} did not end within {BUILD_S} s")
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder


def go() -> list[str]:
    return [str(build("go", ["go", "build", "-mod=readonly", "-o", "client", "."]) / "client")]


def rust() -> list[str]:
    return [str(build("rust", ["cargo", "build", "--quiet", "--locked"]) / "target" / "debug" / "client")]


def javascript() -> list[str]:
    return ["node", str(build("js", ["npm", "ci", "--ignore-scripts", "--silent"]) / "client.js")]


def _java(main: str) -> list[str]:
    maven = ["mvn", "--batch-mode", "--quiet", "--strict-checksums", "compile", "dependency:build-classpath"]
    target = build("java", maven) / "target"
    classpath = f"{target / 'classes'}{os.pathsep}{(target / 'classpath').read_text()}"
    return ["java", "-XX:TieredStopAtLevel=1", "-cp", classpath, main]


def java() -> list[str]:
    return _java("sdks.Client")


def spring() -> list[str]:
    return _java("sdks.Listener")


def kombu() -> list[str]:
    return [sys.executable, str(SOURCES / "kombu_client.py")]


def php() -> list[str]:
    if shutil.which("php") is None or not Path("/usr/share/php/AsyncAws/Sqs/autoload.php").exists():
        pytest.skip("Debian's php-cli and php-async-aws-sqs are not installed")
    return ["php", "-d", "display_errors=stderr", "-d", "error_reporting=-1", str(SOURCES / "php" / "client.php")]


CLIENTS: dict[str, Callable[[], list[str]]] = {
    "go": go,
    "java": java,
    "javascript": javascript,
    "kombu": kombu,
    "php": php,
    "rust": rust,
    "spring": spring,
}


class Program:
    """A run of a client's program."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self.lines: list[dict[str, Any]] = []
        self._other: list[str] = []  # that it printed
        self._errors = folder / f"{name}.errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                continue  # of a killed process
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self._other.append(line.decode(errors="replace").strip())

    def said(self, key: str) -> list[Any]:
        return [line[key] for line in list(self.lines) if key in line]

    @property
    def errors(self) -> str:
        """Its unexpected output: other lines of standard output, and standard error."""
        lines = self._other + self._errors.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("Picked up JAVA_TOOL_OPTIONS"))

    def until_said(self, key: str, count: int = 1, timeout_s: float = 60.0) -> list[Any]:
        def enough() -> bool:
            assert self._process.poll() in (None, 0), self.errors
            return len(self.said(key)) >= count

        until(enough, f"{key} {count} times", timeout_s)
        return self.said(key)

    def end(self, timeout_s: float = 90.0) -> list[dict[str, Any]]:
        """Wait for its end. Returns its output."""
        assert self._process.wait(timeout_s) == 0, self.errors
        self._reader.join()
        return self.lines

    def end_said(self, key: str, timeout_s: float = 90.0) -> list[Any]:
        """Wait for its end. Returns one value of its output."""
        self.end(timeout_s)
        return self.said(key)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


class Client:
    """A client that is built, and a folder for what it writes."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self._command = command
        self._folder = folder
        self._running: list[Program] = []

    def start(self, endpoint: str, url: str, scenario: str, count: int) -> Program:
        name = f"{self.name}-{scenario}-{len(self._running)}"
        self._running.append(Program([*self._command, endpoint, url, scenario, str(count)], self._folder, name))
        return self._running[-1]

    def stop(self) -> None:
        for program in self._running:
            program.kill()
