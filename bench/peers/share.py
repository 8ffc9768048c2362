"""Kafka share groups (KIP-932), driven by `ShareGroup.java`, which Eclipse's compiler compiles: no JDK is needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from filelock import FileLock

from app.kafka.broker import install_kafka, java_command
from app.kafka.jars import default_cache_dir, install, locked

SOURCE = Path(__file__).with_name("ShareGroup.java")


def compile_driver() -> Path:
    """The folder with the driver's classes, which are compiled again when the source is newer."""
    jars = install_kafka()
    home = default_cache_dir() / "bench"
    home.mkdir(parents=True, exist_ok=True)
    target = home / "ShareGroup.class"
    with FileLock(home / "lock"):
        if not target.exists() or target.stat().st_mtime < SOURCE.stat().st_mtime:
            [compiler] = install(home / "compiler", locked("bench"))
            java, *_ = java_command(jars)
            classpath = os.pathsep.join(map(str, jars))
            subprocess.run(
                [java, "-jar", str(compiler), "-21", "-nowarn", "-cp", classpath, "-d", str(home), str(SOURCE)],
                check=True,
            )
    return home


def run(
    bootstrap: str, *, messages: int, mode: str, batch: int, rate: int, phases: list[str], size: int
) -> dict[str, dict[str, str]]:
    """Run the driver. Its RESULT lines are printed and returned by phase."""
    classes = compile_driver()
    command = java_command(install_kafka(), "-Xmx512m")
    command[-1] = f"{command[-1]}{os.pathsep}{classes}"
    wanted = ",".join(phase for phase in phases if phase in ("process", "latency"))
    arguments = [bootstrap, str(messages), mode, str(batch), str(rate), wanted, str(size)]
    out = subprocess.run([*command, "ShareGroup", *arguments], check=True, capture_output=True, text=True).stdout
    found = {}
    for line in out.splitlines():
        if line.startswith("RESULT "):
            print(line, flush=True)
            values = dict(part.split("=", 1) for part in line.split()[1:])
            found[values["phase"]] = values
    return found
