"""Folders and files that no other user of the machine can read, and what to do when they can't be written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from marq.errors import DataDirError, MarqError

#: The umask of our processes: others can't read their new files and folders.
UMASK = 0o077

_MEND = "set MARQ_DATA_DIR to a folder that can be written"
_MAKE_ROOM = "make room on the disk of the data folder, or set MARQ_DATA_DIR to another"
#: Errors of the system about folders and disks, and what to do.
_DISK_ERRORS = {
    errno.EACCES: _MEND,
    errno.EPERM: _MEND,
    errno.EROFS: _MEND,
    errno.ENOENT: _MEND,
    errno.ENOTDIR: _MEND,
    errno.EEXIST: _MEND,
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
}
#: How the messages of RocksDB's errors begin if the disk is full. They have no class or number.
_ROCKSDB_FULL = ("IO error: No space left on device", "IO error: Disk quota exceeded")


def disk_error(error: BaseException, folder: Path | None = None) -> DataDirError | None:
    """The line for an error about folders and disks, with what to do. None for any other error.

    Args:
        folder: named if the error names no file.
    """
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS and not isinstance(error, ConnectionError):
        where, why, mend = error.filename or folder, error.strerror, _DISK_ERRORS[error.errno]
    elif type(error) is Exception and str(error).startswith(_ROCKSDB_FULL):
        where, why, mend = folder, str(error).split(": ")[1], _MAKE_ROOM
    else:
        return None
    return DataDirError(f"{where or 'a file'} can't be written ({why}); {mend}")


def check_owner(path: Path, setting: str, kind: type[MarqError] = DataDirError) -> os.stat_result:
    """The status of a file or folder. Raises an error of `kind` if it belongs to another user, who could change it."""
    status = path.stat()
    # Root can write everywhere anyway. A container's folders are root's, its process is not.
    if status.st_uid not in (0, os.geteuid()):
        raise kind(
            f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}: nothing in it is trusted; set "
            f"{setting} to a folder of your own"
        )
    return status


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can use, and return it. An existing one of this user is closed to others.

    Raises `DataDirError` if it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = check_owner(folder, "MARQ_DATA_DIR")
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
