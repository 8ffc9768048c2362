"""Folders and files that no other user of the machine reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: What new files and folders of a process of ours are not: readable by others.
UMASK = 0o077


def private_folder(folder: Path) -> Path:
    """Make a folder for this user alone; one that is there is closed to others, if it is this user's. Returns it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    shared = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    # a folder that all may write to, as /tmp, is nobody's to close
    if shared and status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~0o077)
    return folder


def write_private(file: Path, text: str) -> None:
    """Write a file that this user alone reads, from its first byte on."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
    draft.replace(file)
