"""Every command of `marq`: with JSON, without a worker, and completed by real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from marq.cli.commands import run  # noqa: F401  registers all commands
from marq.cli.group import cli
from tests.integration.cluster import ROOT, Cluster
from tests.integration.marq_command import Command, Ran, environment
from tests.kafka import unique

COMMANDS = set(cli.commands) - {"completion"}


@pytest.fixture
def marq(shared_cluster: Cluster) -> Command:
    return Command(shared_cluster.workers[0].url)


#: Arguments for each command that could be carried out if there were a worker, and how it ends without.
ALONE: dict[str, tuple[tuple[str, ...], int]] = {
    "ack": (("x",), 2),
    "create": (("q",), 2),
    "delete": (("q", "--yes"), 2),
    "doctor": ((), 1),  # it reports that no worker answers
    "extend": (("x", "--for", "1m"), 2),
    "message": (("0:0",), 2),
    "move": (("q", "--to", "r"), 2),
    "open": (("--print",), 0),
    "partitions": ((), 2),
    "peek": (("q",), 2),
    "purge": (("q", "--yes"), 2),
    "queues": ((), 2),
    "receive": (("q", "--wait", "20s"), 2),
    "redrive": (("q",), 2),
    "reject": (("-",), 2),
    "release": (("x",), 2),
    "send": (("q", "-"), 2),
    "set": (("q", "ttl_ms=1"), 2),
    "stats": ((), 2),
    "top": ((), 2),
    "workers": ((), 2),
}


def test_no_command_is_left_out() -> None:
    assert set(ALONE) == set(USES) == COMMANDS


@pytest.mark.parametrize("name", sorted(ALONE))
def test_where_no_worker_answers_a_command_says_so_at_once(name: str) -> None:
    args, status = ALONE[name]
    began_s = time.monotonic()
    done = Command("http://127.0.0.1:1")(name, *args, given=b"x\n")
    assert done.status == status, done
    said = done.out if name == "doctor" else done.err
    assert ("no worker answers at http://127.0.0.1:1: connection refused" in said) == (name != "open"), done
    assert name == "doctor" or len(done.err.splitlines()) == (name != "open"), done
    assert time.monotonic() - began_s < 20, "it waits for no worker: --wait is for messages"


def taken(marq: Command, queue: str) -> str:
    """The receipt of a message that was sent just now."""
    assert marq("send", queue, "taken").status == 0
    return str(marq("receive", queue, "--wait", "10s", "--json").objects[0]["receipt"])


#: For each command, one use of it that has something to tell.
USES: dict[str, Callable[[Command, str], Ran]] = {
    "ack": lambda marq, queue: marq("ack", taken(marq, queue), "--json"),
    "create": lambda marq, queue: marq("create", f"{queue}-new", "max_receives=3", "--json"),
    "delete": lambda marq, queue: marq("delete", queue, "--yes", "--json"),
    "doctor": lambda marq, queue: marq("doctor", "--json"),
    "extend": lambda marq, queue: marq("extend", "-", "--for", "1m", "--json", given=taken(marq, queue).encode()),
    "message": lambda marq, queue: marq("message", marq("send", queue, "b").out.strip(), "--json"),
    "move": lambda marq, queue: marq("move", queue, "--to", f"{queue}-2", "--json"),
    "open": lambda marq, queue: marq("open", queue, "--print", "--json"),
    "partitions": lambda marq, queue: marq("partitions", "--json"),
    "peek": lambda marq, queue: marq("peek", queue, "--json"),
    "purge": lambda marq, queue: marq("purge", queue, "--yes", "--json"),
    "queues": lambda marq, queue: marq("queues", queue, "--json"),
    "receive": lambda marq, queue: marq("receive", queue, "--wait", "10s", "--json"),
    "redrive": lambda marq, queue: marq("redrive", f"{queue}.dead", "--to", queue, "--json"),
    "reject": lambda marq, queue: marq("reject", taken(marq, queue), "--reason", "\x1b[2J", "--json"),
    "release": lambda marq, queue: marq("release", taken(marq, queue), "--json"),
    "send": lambda marq, queue: marq("send", queue, "-", "--json", given=b"one\ntwo\n"),
    "set": lambda marq, queue: marq("set", queue, "ttl_ms=60000", "--json"),
    "stats": lambda marq, queue: marq("stats", queue, "--json"),
    "top": lambda marq, queue: marq("top", "--json"),
    "workers": lambda marq, queue: marq("workers", "--json"),
}


@pytest.mark.parametrize("name", sorted(USES))
def test_every_command_tells_scripts_what_it_did_as_objects(marq: Command, name: str) -> None:
    queue = unique("json")
    assert marq("send", queue, "a\x1b[2J\u202e").status == 0
    if name == "redrive":
        assert marq("send", f"{queue}.dead", "letter").status == 0
    done = USES[name](marq, queue)
    # a disk of the machine that runs this may be nearly full
    assert done.status == 0 or name == "doctor", done
    assert done.objects, done
    assert all(isinstance(one, dict) for one in done.objects)
    assert done.out.isascii()
    assert all(line.isprintable() for line in done.out.splitlines())


def test_settings_of_a_queue_that_does_not_exist_are_an_error(shared_cluster: Cluster, tmp_path: Path) -> None:
    variables = {k: v for k, v in shared_cluster.environment.items() if k.startswith("MARQ_")}
    done = subprocess.run(
        [sys.executable, "-m", "app", "queue", unique("nope")],
        cwd=ROOT,
        env=environment(**variables | {"MARQ_DATA_DIR": str(tmp_path)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
    assert "nope" in done.stderr


# -- shells


@pytest.fixture
def on_path(tmp_path: Path) -> str:
    """A PATH with a `marq` that is ours."""
    script = tmp_path / "bin" / "marq"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec env PYTHONPATH="{ROOT}" "{sys.executable}" -m marq.cli "$@"\n')
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def typed(shell: list[str], variables: dict[str, str], lines: list[str], wanted: str) -> str:
    """What an interactive shell shows after it was told `lines`, until `wanted` is seen."""
    pid, ours = pty.fork()
    if not pid:
        os.execvpe(shell[0], shell, variables)
    seen = b""
    try:
        for number, line in enumerate(lines):
            # a prompt appears at first, and after each executed line
            while seen.count(b"READY>") <= number:
                seen += _more(ours, seen)
            os.write(ours, line.encode())
        while wanted.encode() not in seen:
            seen += _more(ours, seen)
    finally:
        os.close(ours)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return seen.decode(errors="replace")


def _more(descriptor: int, seen: bytes) -> bytes:
    assert select.select([descriptor], [], [], 30)[0], f"nothing came after {seen[-2000:]!r}"
    return os.read(descriptor, 65536)


@pytest.mark.parametrize(
    ("shell", "load"),
    [
        (["bash", "--norc", "--noprofile", "-i"], "source {file}"),
        (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; source {file}"),
    ],
    ids=["bash", "zsh"],
)
def test_a_shell_completes_what_is_typed(
    marq: Command, on_path: str, tmp_path: Path, shell: list[str], load: str
) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"no {shell[0]} here")
    queue = unique("tab")
    assert marq("send", queue, "a").status == 0
    file = tmp_path / "completion"
    file.write_text(marq("completion", shell[0]).out)
    variables = environment(MARQ_URL=marq.url, PATH=on_path, PS1="READY>", TERM="dumb", HOME=str(tmp_path))
    load = load.format(file=file)
    shown = typed(shell, variables, [f"{load}\n", "marq redr\t"], "marq redrive")
    assert "command not found" not in shown
    typed(shell, variables, [f"{load}\n", f"marq receive {queue[:-2]}\t"], queue)
    typed(shell, variables, [f"{load}\n", f"marq receive {queue} --fol\t"], "--follow")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_no_name_of_a_queue_is_run_by_a_shell(marq: Command, on_path: str, tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    prefix, planted = unique("tab"), tmp_path / "planted"
    for end in (f"$(touch {planted})", f";touch {planted};", f"`touch {planted}`", "-a"):
        assert marq("create", prefix + end).status == 0
    file = tmp_path / "completion"
    file.write_text(marq("completion", shell).out)
    load = f"autoload -U compinit; compinit -u -D; source {file}" if shell == "zsh" else f"source {file}"
    variables = environment(MARQ_URL=marq.url, PATH=on_path, PS1="READY>", TERM="dumb", HOME=str(tmp_path))
    options = ["-f"] if shell == "zsh" else ["--norc", "--noprofile"]
    shown = typed([shell, *options, "-i"], variables, [f"{load}\n", f"marq stats {prefix}\t"], f"{prefix}-a")
    assert "touch" not in shown, "only the name that every shell takes literally is offered"
    assert not planted.exists()


def test_fish_completes_what_is_typed(marq: Command, on_path: str, tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    queue = unique("tab")
    assert marq("send", queue, "a").status == 0
    file = tmp_path / "marq.fish"
    file.write_text(marq("completion", "fish").out)

    def completed(line: str) -> str:
        variables = environment(MARQ_URL=marq.url, PATH=on_path, HOME=str(tmp_path))
        script = f"source {file}; complete -C '{line}'"
        return subprocess.run(
            ["fish", "--no-config", "-c", script], env=variables, capture_output=True, text=True, check=True
        ).stdout

    assert "redrive" in completed("marq redr")
    assert completed(f"marq receive {queue[:-2]}").split() == [queue]
    assert "--follow" in completed("marq receive q --fo")
