"""The data folder: the part of it that belongs to this worker, and the address of the broker.

<data_dir>/broker.json     the embedded broker (see `app.kafka.broker`)
<data_dir>/worker-0/       local tables of one worker process, which keeps `lock` locked while it lives; `web_port`
                           has the port of its HTTP
<data_dir>/worker-1/       the same of the next process, and so on
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from app.folders import private_folder
from app.kafka.broker_file import MECHANISM, USER, password_of, running_broker
from app.settings import Settings, is_explicit
from marq.errors import BrokerError, DataDirError, SettingError

#: Workers on one data folder. More than this are a mistake.
MAX_WORKERS = 256


#: Locks of this process. An unreferenced lock would be collected, and so released.
_held: list[FileLock] = []


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process: its folder, its HTTP port, its number."""

    folder: Path
    web_port: int
    index: int


def claim_worker(settings: Settings) -> Worker:
    """Take the first free `worker-N` folder for the life of this process, and a free port for its HTTP.

    The port is `web_port`. If that is in use, and was not set by the user, it is the next free one above.

    Raises:
        SettingError: the port was set by the user and is in use, or the host can't be listened on.
        DataDirError: the folder can't be written, or all its worker folders are taken.
    """
    data_dir = settings.data_dir.resolve()
    try:
        private_folder(data_dir)
        # One process at a time: two that start together would choose the same port.
        with _claiming(data_dir):
            index, lock = _first_free(data_dir)
            try:
                port = _web_port(settings, {worker.web_port for worker in _running(data_dir)})
                folder = data_dir / f"worker-{index}"
                (folder / "web_port").write_text(f"{port}\n")
            except BaseException:
                lock.release()
                raise
    except OSError as error:
        raise DataDirError(
            f"can't write to the data folder {data_dir} ({error.strerror}); set MARQ_DATA_DIR to a folder that "
            "can be written"
        ) from error
    _held.append(lock)
    return Worker(folder, port, index)


def free_web_port(settings: Settings) -> int:
    """The port that a worker would take now. Raises `SettingError`, as `claim_worker` does."""
    return _web_port(settings, {worker.web_port for worker in running_workers(settings.data_dir)})


def running_workers(data_dir: Path) -> list[Worker]:
    """The workers that have claimed a part of a data folder and still live, by number."""
    if not data_dir.is_dir():
        return []
    with _claiming(data_dir):
        return _running(data_dir.resolve())


def _claiming(data_dir: Path) -> FileLock:
    return FileLock(data_dir / "claim.lock", is_singleton=False)


def _worker_lock(folder: Path) -> FileLock:
    # Not a singleton: two claims in one process must not share it.
    return FileLock(folder / "lock", timeout=0, is_singleton=False)


def _first_free(data_dir: Path) -> tuple[int, FileLock]:
    for index in range(MAX_WORKERS):
        folder = data_dir / f"worker-{index}"
        private_folder(folder)
        lock = _worker_lock(folder)
        try:
            lock.acquire()
        except Timeout:
            continue
        (folder / "web_port").unlink(missing_ok=True)
        return index, lock
    raise DataDirError(
        f"all {MAX_WORKERS} worker folders in {data_dir} are in use; set MARQ_DATA_DIR to another folder"
    )


def _running(data_dir: Path) -> list[Worker]:
    workers = []
    for index in range(MAX_WORKERS):
        folder = data_dir / f"worker-{index}"
        try:
            port = int((folder / "web_port").read_text())
        except (OSError, ValueError):
            continue
        try:
            with _worker_lock(folder):
                pass
        except Timeout:
            workers.append(Worker(folder, port, index))
    return workers


def _web_port(settings: Settings, claimed: set[int]) -> int:
    host, first = settings.web_host, settings.web_port
    if first == 0:
        return _any_port(host)
    for port in range(first, 65536):
        if port not in claimed and _can_listen(host, port):
            return port
        if is_explicit(settings, "web_port"):
            raise SettingError(f"MARQ_WEB_PORT={port} is in use on {host}; set another, or 0 for any free one")
    raise SettingError(f"no free port from {first} on {host}; set MARQ_WEB_PORT")


def _can_listen(host: str, port: int) -> bool:
    with _listener(host) as probe:
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise SettingError(f"MARQ_WEB_HOST={host!r} can't be listened on: {error.strerror}") from error
        return True


def _any_port(host: str) -> int:
    with _listener(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _listener(host: str) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # The web server sets it too: a port with only lingering closed connections is free.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe


def resolve_bootstrap(settings: Settings, *, wait_s: float = 0) -> list[str]:
    """`host:port` of the brokers to use: `MARQ_KAFKA`, else the embedded broker of the data folder.

    Args:
        wait_s: seconds to wait for an embedded broker that is just being started by another process.

    Raises:
        BrokerError: there is neither.
    """
    if settings.bootstrap_servers is not None:
        return settings.bootstrap_servers
    deadline = time.monotonic() + wait_s
    while (broker := running_broker(settings.data_dir)) is None:
        if time.monotonic() >= deadline:
            raise BrokerError(
                f"no Kafka to use: no broker runs on the data folder {settings.data_dir.resolve()}; start one with "
                "`python -m app broker`, or set MARQ_KAFKA=kafka://host:port"
            )
        time.sleep(0.1)
    if settings.keys is not None and not broker.asks_password:
        raise BrokerError(
            f"the broker on the data folder {settings.data_dir.resolve()} was started without MARQ_KEYS, so that every "
            "user of this machine can read all that is in it, secrets too: stop it, and start it with them"
        )
    return [broker.bootstrap]


class Login(NamedTuple):
    """How we log in to Kafka."""

    username: str
    password: str
    mechanism: str


def kafka_login(settings: Settings) -> Login | None:
    """The log-in that Kafka needs, as far as is known; None if it needs none. Raises `BrokerError`."""
    if settings.kafka_username is not None:
        assert settings.kafka_password is not None
        return Login(settings.kafka_username, settings.kafka_password.get_secret_value(), settings.kafka_mechanism)
    if settings.kafka is not None:
        return None
    broker = running_broker(settings.data_dir)
    if broker is None or not broker.asks_password:
        return None
    return Login(USER, password_of(settings.data_dir), MECHANISM)
