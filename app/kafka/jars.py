"""Jars from Maven Central, kept in a cache that all installations of a user share.

`requirements/*-jars.txt` list the jars, with the SHA-256 of each. A jar is used only while it has that hash, and only
from folders that nobody but this user, or root, can write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import re
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from app.folders import check_owner
from marq.errors import DownloadError

MAVEN_CENTRAL = "https://repo1.maven.org/maven2"

_LOCKS = Path(__file__).resolve().parents[2] / "requirements"
_LINE = re.compile(r"([\w.-]+):([\w.-]+):([\w.-]+) sha256:([0-9a-f]{64})", re.ASCII)

#: Jars fetched at the same time.
_FETCHERS = 8
#: Seconds to wait for the next bytes of a server.
_TIMEOUT_S = 60.0
_ATTEMPTS = 4
#: Largest accepted jar; the largest that we use has 13 MB.
_MAX_BYTES = 64 * 1024 * 1024

log = logging.getLogger(__name__)


class Jar(NamedTuple):
    """One line of a lock."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Its file name."""
        return f"{self.artifact}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Its path in a Maven repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.file}"


def default_cache_dir() -> Path:
    """Where downloads are kept for all installations of a user: `MARQ_CACHE_DIR`, else `~/.cache/marq`."""
    return Path(os.environ.get("MARQ_CACHE_DIR") or Path.home() / ".cache" / "marq").expanduser()


def locked(name: str) -> list[Jar]:
    """The jars of the lock `requirements/<name>-jars.txt`.

    Raises:
        DownloadError: the file is not there, or a line of it is no jar.
    """
    file = _LOCKS / f"{name}-jars.txt"
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise DownloadError(f"{file} can't be read ({error.strerror}); restore it from the repository") from error
    jars = []
    for line in lines:
        if line and not line.startswith("#"):
            found = _LINE.fullmatch(line)
            if found is None:
                raise DownloadError(f"{file} has a line that names no jar: {line[:100]!r}; restore the file")
            jars.append(Jar(*found.groups()))
    return jars


def install(home: Path, wanted: Sequence[Jar], source: str = MAVEN_CENTRAL) -> list[Path]:
    """Paths of the jars in `home / "jars"`, in the order of `wanted`. Those that are missing are fetched.

    Each jar is hashed at each call. Several processes may call it at once.

    Raises:
        DownloadError: a jar can't be fetched or has another hash, or somebody else could have written to the folder.
    """
    folder = home / "jars"
    try:
        for parent in (home.parent, home, folder):
            own(parent)
        if missing := [jar for jar in wanted if not (folder / jar.file).exists()]:
            with FileLock(home / "install.lock"):
                # another process may have fetched them while we waited
                if missing := [jar for jar in missing if not (folder / jar.file).exists()]:
                    _fetch(folder, missing, source)
        paths = [folder / jar.file for jar in wanted]
        for jar, path in zip(wanted, paths, strict=True):
            check_owner(path, "MARQ_CACHE_DIR", DownloadError)
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != jar.sha256:
                raise DownloadError(
                    f"{path} is not the file that marq was made with: its SHA-256 is {found}, not {jar.sha256}; find "
                    "out who changed it, then delete it to have it fetched again"
                )
    except OSError as error:
        raise DownloadError(
            f"can't use {error.filename or folder} ({error.strerror or error}); set MARQ_CACHE_DIR to a folder that "
            "can be written"
        ) from error
    return paths


def own(folder: Path) -> Path:
    """Make a folder for this user alone, or check one that is there; returns it.

    Raises:
        DownloadError: it belongs to somebody else, or others can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = check_owner(folder, "MARQ_CACHE_DIR", DownloadError).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        try:
            folder.chmod(stat.S_IMODE(mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        except OSError:
            raise DownloadError(
                f"{folder} can be written by other users, so nothing in it is trusted; set MARQ_CACHE_DIR to a folder "
                "of your own"
            ) from None
    return folder


def _fetch(folder: Path, jars: Sequence[Jar], source: str) -> None:
    log.info("fetching %d jars into %s (once)", len(jars), folder)
    tls = ssl.create_default_context()
    with contextlib.suppress(ImportError):
        import certifi

        # Some Pythons (macOS) come without certificate authorities. The hash shows whether the file is the right one.
        tls.load_verify_locations(certifi.where())
    pool = ThreadPoolExecutor(_FETCHERS)
    try:
        for done in [pool.submit(_fetch_one, folder, jar, f"{source}/{jar.path}", tls) for jar in jars]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch_one(folder: Path, jar: Jar, url: str, tls: ssl.SSLContext) -> None:
    try:
        for attempt in Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_random_exponential(max=5),
            stop=stop_after_attempt(_ATTEMPTS),
            reraise=True,
        ):
            with attempt, urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=tls) as answer:
                content: bytes = answer.read(_MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"can't fetch {url}: {error}; check the network") from error
    found = hashlib.sha256(content).hexdigest()
    if found != jar.sha256:
        raise DownloadError(f"{url} is not the file that marq was made with: its SHA-256 is {found}, not {jar.sha256}")
    # Written completely, then renamed: a file with the name of a jar is never incomplete.
    draft = folder / f".{jar.file}.{os.getpid()}"
    draft.write_bytes(content)
    draft.replace(folder / jar.file)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code == 429 or error.code >= 500
    return isinstance(error, (OSError, http.client.HTTPException))
