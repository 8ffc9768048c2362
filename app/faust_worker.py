"""The process of a worker: its start, the options of Faust that it refuses, its end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click
import faust
from click.core import ParameterSource

from app.logs import set_up
from app.processes import errors_as_lines, say
from app.settings import Settings
from app.streaming.faust_app import MarqApp
from marq import __version__
from marq.errors import SettingError

log = logging.getLogger(__name__)

#: Seconds after which a thread lets another run: two threads read and write Kafka, and an answer waits for both.
SWITCH_INTERVAL_S = 0.0005
#: New objects until the garbage collector looks for cycles among them, and how often before it includes older ones.
COLLECT = (10_000, 10, 10)
#: Seconds from the signal to stop until the process ends, whatever it still waits for, beside the time for calls of
#: handlers (`MARQ_STOP_MS`).
STOP_S = 6.0
#: At the end of the process: seconds for idle threads to end.
IDLE_THREADS_S = 0.3

#: Options of Faust's `worker` that would contradict the settings, and what to set instead.
OPTIONS_OF_FAUST = {
    "web_bind": "MARQ_WEB_HOST",
    "web_host": "MARQ_WEB_HOST",
    "web_port": "MARQ_WEB_PORT",
    "web_transport": "",
    "with_web": "",
    "datadir": "MARQ_DATA_DIR",
    "debug": "MARQ_LOG_LEVEL=DEBUG",
    "logfile": "",
}


class PreparedApp(MarqApp):
    """An app that is prepared before Faust starts it, and leaves its group before Faust stops it."""

    settings: Settings

    def prepare(self) -> None:
        """Prepare everything that Faust needs. Called outside of an event loop. Raises `MarqError`."""
        raise NotImplementedError

    def banner(self) -> str:
        """Returns the first line of the log. Called after `prepare`."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Hand over to other workers, before anything is stopped."""
        raise NotImplementedError


class FaustWorker(faust.Worker):
    """Prepares the app before Faust starts it. Used by `faust -A app worker` through the `Worker` setting."""

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._stopped_by = ""
        if isinstance(app, PreparedApp):
            if not _is_option_given("loglevel"):
                kwargs["loglevel"] = app.settings.log_level
            set_up(
                str(kwargs["loglevel"]).upper(),
                app.settings.log_format,
                is_one_of_several=app.settings.web_shared_port is not None,
            )
            kwargs["override_logging"] = False
            with errors_as_lines():
                _refuse_options_of_faust()
                app.prepare()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            kwargs["debug"] = False  # it would open a console for every user of this machine
            # output of handlers is printed at once, also into a pipe, and not logged as warnings
            kwargs["redirect_stdouts"] = False
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            log.info("%s, version %s, process %s", app.banner(), __version__, os.getpid())
        super().__init__(app, *args, **kwargs)
        self.spinner = None

    async def stop(self) -> None:
        # Libraries may wait for Kafka without end, in threads too. Being killed is harmless, hanging is not.
        last = threading.Timer(self._stop_s, self._exit_now)
        last.daemon = True
        last.start()
        try:
            if isinstance(self.app, PreparedApp):
                await self.app.leave()
        finally:
            await super().stop()

    def _on_sigint(self) -> None:
        # like Faust's, without its line on the terminal
        self._flag_as_shutdown_by_signal()
        self._schedule_shutdown(signal.SIGINT)

    def _schedule_shutdown(self, number: signal.Signals) -> None:
        if not self._stopped_by:
            self._stopped_by = number.name
            log.info("stopping: %s", number.name)
        super()._schedule_shutdown(number)

    def execute_from_commandline(self) -> NoReturn:
        _spare_collections()
        try:
            super().execute_from_commandline()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            _end(status, lambda: self._tell_why(status))
            raise

    @property
    def _stop_s(self) -> float:
        return STOP_S + (self.app.settings.stop_ms / 1000 if isinstance(self.app, PreparedApp) else 0.0)

    def _exit_now(self) -> None:
        print(f"marq: this worker did not stop within {self._stop_s:.0f} s, ending it", file=sys.stderr, flush=True)
        self._tell_why(1)
        os._exit(1)

    def _tell_why(self, status: int) -> None:
        """Log the last line: why the process ends."""
        failure = self.app.failure if isinstance(self.app, PreparedApp) else None
        # tasks that are cancelled by a stop may fail; that is no reason to report
        if failure is not None and not (self._stopped_by and status == 0):
            log.critical("ended: %s", str(failure) or repr(failure))
        else:
            log.info("ended: %s", self._stopped_by or "nothing was left to do")


def _spare_collections() -> None:
    """Make Python search garbage cycles rarely, and never in imported modules.

    By default it searches all young objects after 700 new ones, less than one chunk of records; but messages in memory
    have no cycles. Large answers may have some: see `gateway.garbage`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)


def _end(status: int, tell: Callable[[], None]) -> None:
    """End the process although handler calls still run in threads: nothing can stop them, and Python would wait.

    Their messages were given back when the grace time of these calls was over.
    """
    deadline = time.monotonic() + IDLE_THREADS_S
    while threads := _user_threads():
        if time.monotonic() > deadline:
            names = ", ".join(sorted({thread.name.rpartition("_")[0] or thread.name for thread in threads}))
            say(f"ended while {len(threads)} calls had not returned, their messages are given back: {names}")
            tell()
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        time.sleep(0.01)
    tell()


def _user_threads() -> list[threading.Thread]:
    """Threads that Python would wait for at its end."""
    return [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]


def _is_option_given(name: str) -> bool:
    """True if the user gave an option of the command. Otherwise it has Faust's default."""
    context = click.get_current_context(silent=True)
    while context is not None:
        if context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP):
            return True
        context = context.parent
    return False


def _refuse_options_of_faust() -> None:
    for name, setting in OPTIONS_OF_FAUST.items():
        if _is_option_given(name):
            option = "--without-web" if name == "with_web" else f"--{name.replace('_', '-')}"
            instead = f"set {setting} instead" if setting else "leave it out"
            raise SettingError(f"{option} is an option of Faust's that a marq worker does not accept: {instead}")
