"""Folders and files that no other user of the machine can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: The umask of our processes: others can't read their new files and folders.
UMASK = 0o077


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can use, and return it. An existing one of this user is closed to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    shared = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    # a folder for everybody, such as /tmp, stays as it is
    if shared and status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~0o077)
    return folder


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user can read, at any moment."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
    draft.replace(file)
