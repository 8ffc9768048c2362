"""How other processes find the embedded broker of a data folder, and log in: `broker.json`, and its password."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from app.folders import check_owner
from marq.errors import BrokerError

#: Where a broker asks for a password: the user, the mechanism of the log-in, and the file with the password.
USER, MECHANISM, PASSWORD_FILE = "marq", "PLAIN", "password"


class Running(NamedTuple):
    """A broker that runs on a data folder."""

    bootstrap: str  # "127.0.0.1:PORT"
    asks_password: bool


def running_broker(data_dir: str | Path) -> Running | None:
    """The broker that runs on a data folder, or None if none does.

    Raises `DataDirError` if another user could have written its address: we would send him messages and the password.
    """
    file = Path(data_dir) / "broker.json"
    try:
        for path in (file.parent, file):
            check_owner(path, "MARQ_DATA_DIR")
        info = json.loads(file.read_text())
        bootstrap, pid = str(info["bootstrap"]), int(info["pid"])
        asks_password = bool(info.get("asks_password"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Running(bootstrap, asks_password) if _is_broker(pid) else None


def bootstrap_of(data_dir: str | Path) -> str | None:
    """Address ("127.0.0.1:PORT") of the broker that runs on a data folder, or None if none does."""
    running = running_broker(data_dir)
    return running.bootstrap if running is not None else None


def password_of(data_dir: str | Path) -> str:
    """The password of the broker of a data folder. Raises `BrokerError`."""
    file = Path(data_dir) / "kafka" / PASSWORD_FILE
    try:
        return file.read_text().strip()
    except OSError as error:
        raise BrokerError(
            f"the embedded broker asks for the password in {file}, which can't be read ({error.strerror}): run this "
            "as the user who runs the broker"
        ) from None


def _is_broker(pid: int) -> bool:
    """True if a process runs and is a Kafka, as far as the system can tell: process ids are reused."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return b"kafka.Kafka" in command  # empty for a zombie
