"""Jars from Maven Central, fetched once into a cache that all installations of a user share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def default_cache_dir() -> Path:
    """Where downloads are kept for all installations of a user: `MARQ_CACHE_DIR`, else `~/.cache/marq`."""
    return Path(os.environ.get("MARQ_CACHE_DIR") or Path.home() / ".cache" / "marq").expanduser()


def install(home: Path, fetch: Callable[[Path, Path], None]) -> Path:
    """Return `home / "jars"`, filled by `fetch(work, jars)` if this is the first time.

    Safe when several processes do it at once; half of it counts as nothing. `work` is a folder that is deleted
    afterwards. Raises whatever `fetch` does, and `OSError` where nothing can be written.
    """
    jars, marker = home / "jars", home / "INSTALLED"
    if marker.exists():
        return jars
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / "install.lock"):
        if not marker.exists():
            shutil.rmtree(jars, ignore_errors=True)
            jars.mkdir(parents=True)
            work = home / "resolve"
            fetch(work, jars)
            shutil.rmtree(work, ignore_errors=True)
            marker.write_text(f"{len(list(jars.iterdir()))} jars\n")
    return jars
