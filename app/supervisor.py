"""Keeps worker processes up: one that dies is started again, unless it does so again and again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import click

from app.kafka.broker import EmbeddedBroker
from app.kafka.datadir import free_web_port
from app.processes import WORKER_START_S, CanNotStart, WorkerProcess, check_start
from app.settings import Settings, is_explicit, variable
from marq.errors import SettingError
from marq.text import cleaned

#: Deaths of a worker, each within so many seconds of its start, after which we give up.
DEATHS_MAX, LASTING_S = 5, 60.0
#: Seconds between two looks at the processes.
LOOK_S = 0.1


def workers_for(partitions: int) -> int:
    """How many workers suit this machine: a processor is left for Kafka and the clients, and no worker has nothing."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - 1, partitions))


class Supervisor:
    """Runs `count` workers until it is told to stop. Several listen on one port together, and each on one of its own.

    Args:
        stopped: whether to stop.
        broker: the embedded broker that they need, if there is one. Its end is our end.

    Raises:
        SettingError: the port is taken.
    """

    def __init__(
        self, settings: Settings, count: int, stopped: Callable[[], bool], broker: EmbeddedBroker | None = None
    ) -> None:
        self._stopped = stopped
        self._broker = broker
        self._url = ""
        environment: dict[str, str] = {}
        if count > 1:
            if is_explicit(settings, "web_shared_port"):
                raise SettingError(f"{variable('web_shared_port')} is for single workers: leave it out, or --workers")
            port = free_web_port(settings)
            environment = {variable("web_port"): "0", variable("web_shared_port"): str(port)}
            self._url = settings.url_at(port)
        self._slots = [_Slot(number, count, environment) for number in range(1, count + 1)]

    def run(self) -> None:
        """Start the workers, and keep them up. Raises `MarqError` if one does not become ready, and `SystemExit`."""
        try:
            for slot in self._slots:
                slot.start()
            deadline_s = time.monotonic() + WORKER_START_S
            while not self._stopped() and not all(slot.ready for slot in self._slots):
                self._look()
                check_start(deadline_s)
            if not self._stopped():
                self._tell_ready()
            while not self._stopped():
                if self._look():
                    self._tell_ready()
            click.echo("Stopping …")
        finally:
            for slot in self._slots:
                slot.ask_to_stop()
            for slot in self._slots:
                slot.stop()

    def _tell_ready(self) -> None:
        ready = sum(slot.ready for slot in self._slots)
        count = f", {ready} of {len(self._slots)} workers" if len(self._slots) > 1 else ""
        click.echo(f"marq is ready: {self._url or self._slots[0].url}{count}  (Ctrl-C stops it)")

    def _look(self) -> bool:
        """Whether a worker has become ready."""
        if self._broker is not None and not self._broker.is_running:
            end_for_dead(self._broker)
        found = [slot.look() for slot in self._slots]
        time.sleep(LOOK_S)
        return any(found)


class _Slot:
    """One of the workers, whichever process it is just now."""

    def __init__(self, number: int, count: int, environment: dict[str, str]) -> None:
        self.ready = False
        self._name = f"worker {number} of {count}" if count > 1 else "the worker"
        self._environment = environment
        self._process: WorkerProcess | None = None
        self._began_s = 0.0
        self._due_s = 0.0
        self._deaths = 0

    @property
    def url(self) -> str:
        return self._process.url if self._process is not None else ""

    def start(self) -> None:
        self._began_s = time.monotonic()
        self._process = WorkerProcess(None, **self._environment)

    def look(self) -> bool:
        """Start it again if that is due, and note whether it has died. Whether it has become ready just now."""
        if self._process is None:
            if time.monotonic() >= self._due_s:
                self.start()
            return False
        status = self._process.process.poll()
        if status is not None:
            if self._process.could_not_start():
                raise CanNotStart  # it said why, and another try would say the same
            self._died(status)
            return False
        if self.ready:
            return False
        self.ready = self._process.is_ready()
        return self.ready

    def ask_to_stop(self) -> None:
        if self._process is not None:
            self._process.ask_to_stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def _died(self, status: int) -> None:
        lasted = time.monotonic() - self._began_s > LASTING_S
        self._deaths = 1 if lasted else self._deaths + 1
        gives_up = self._deaths > DEATHS_MAX
        again = "not starting it again" if gives_up else f"starting it again ({self._deaths} of {DEATHS_MAX})"
        click.echo(f"marq: {self._name} ended {_how(status)}; {again}", err=True)
        if gives_up:
            raise SystemExit(1)
        self.ready = False
        self._process = None
        self._due_s = time.monotonic() + self._deaths


def end_for_dead(broker: EmbeddedBroker) -> NoReturn:
    """End this process because its broker did."""
    lines = (
        f"marq: the embedded broker ended by itself, with status {broker.wait()}; what was confirmed is kept, start "
        f"again to go on; the end of {broker.log_file}:",
        *broker.log_tail(5),
    )
    click.echo("\n".join(map(cleaned, lines)), err=True)
    raise SystemExit(1)


def _how(status: int) -> str:
    """How a process ended, in words for its log."""
    if status >= 0:
        return f"with status {status}; its last line says why"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    guess = ", maybe for want of memory" if name == "SIGKILL" else ""
    return f"by signal {name}{guess}"
