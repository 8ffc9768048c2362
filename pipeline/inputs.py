"""Input files of a job: which files, their format, and what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from marq.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Ending of a name -> format of the file.
ENDINGS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
#: Endings of compressed files, which Spark decompresses by itself.
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4", ".snappy", ".deflate")
FORMATS = ("parquet", "csv", "json")

_BLOCK_BYTES = 1024 * 1024


class File(NamedTuple):
    """A file, its name within the input, its size, and a checksum of what is in it."""

    name: str
    size_bytes: int
    checksum: str


def is_local(path: str) -> bool:
    """Whether a path is on this machine's file system."""
    return "://" not in path or path.startswith("file:")


def local_path(path: str) -> Path:
    """The path of a local path or `file:` address."""
    return Path(path.removeprefix("file://").removeprefix("file:")).expanduser()


def address(path: str) -> str:
    """A path as an address for Spark; a local path stays local, whatever the default file system is."""
    # not escaped: Hadoop does not unescape it
    return f"file://{local_path(path).resolve()}" if is_local(path) else path


def local_files(path: str) -> list[File]:
    """The files of a local input, by name.

    Raises:
        PipelineError: there are none, or they can't be read.
    """
    root = local_path(path)
    try:
        if root.is_file():
            found = [(root.name, root)]
        elif root.is_dir():
            found = [(file.relative_to(root).as_posix(), file) for file in sorted(root.rglob("*")) if file.is_file()]
            found = [(name, file) for name, file in found if not _is_hidden(name)]
        else:
            raise PipelineError(f"{path} does not exist; give a file, or a folder of files")
        if not found:
            raise PipelineError(f"{path} has no files")
        with ThreadPoolExecutor(4) as pool:
            checksums = list(pool.map(lambda entry: _checksum(entry[1]), found))
        return [
            File(name, file.stat().st_size, checksum) for (name, file), checksum in zip(found, checksums, strict=True)
        ]
    except OSError as error:
        raise PipelineError(f"{error.filename or path} can't be read: {error.strerror}") from None


def _is_hidden(name: str) -> bool:
    """Whether Spark ignores a file: `_SUCCESS`, `.file.crc` and the like."""
    return any(part.startswith((".", "_")) and "=" not in part for part in name.split("/"))


def _checksum(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def remote_files(spark: SparkSession, path: str) -> list[File]:
    """The files of an input in another file system, by name, each with the checksum that the file system has of it, or
    else the time of its last change.

    Raises:
        PipelineError: there are none, or the file system can't be reached.
    """
    try:
        root = spark._jvm.org.apache.hadoop.fs.Path(path)  # type: ignore[union-attr]
        system = root.getFileSystem(spark._jsc.hadoopConfiguration())
        found = sorted(_remote(system, root))
    except Exception as error:
        from pipeline.session import explain

        raise PipelineError(f"{path} can't be read: {explain(error)}") from None
    if not found:
        raise PipelineError(f"{path} has no files")
    return found


def _remote(system: object, root: object) -> Iterator[File]:
    base = system.getFileStatus(root)  # type: ignore[attr-defined]
    prefix = base.getPath().toString()
    statuses = system.listFiles(root, True)  # type: ignore[attr-defined]
    while statuses.hasNext():
        status = statuses.next()
        place = status.getPath()
        name = place.toString().removeprefix(prefix).strip("/") or place.getName()
        if not _is_hidden(name):
            checksum = system.getFileChecksum(place)  # type: ignore[attr-defined]
            known = checksum.toString() if checksum is not None else str(status.getModificationTime())
            yield File(name, status.getLen(), known)


def format_of(files: list[File], path: str) -> str:
    """The format, from the files' names. Raises `PipelineError` if they don't tell."""
    found = set()
    for file in files:
        name = Path(file.name)
        while name.suffix in COMPRESSED:
            name = name.with_suffix("")
        found.add(ENDINGS.get(name.suffix))
    if len(found) != 1 or None in found:
        raise PipelineError(f"the file names of {path} don't tell one format: give --format {'|'.join(FORMATS)}")
    return str(found.pop())
