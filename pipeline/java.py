"""Options of a job's Java. It loads Spark's classes from the file that `pipeline.startup` makes, if there is one."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from pipeline.jars import home

#: The threads of a parallel collector cost more than they gain.
_ALWAYS = "-XX:+UseSerialGC"
#: A job of a minute gains less from the second compiler than that compiler costs.
JVM_OPTIONS = f"-XX:TieredStopAtLevel=1 {_ALWAYS}"

#: Java would warn on stdout about a file that does not fit; users can ignore that.
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def class_cache(java: Path) -> Path:
    """The class file for a JAVA_HOME, which may not exist."""
    import pyspark

    key = f"{java} {Path(pyspark.__file__).parent} {JVM_OPTIONS}"
    return home() / f"classes-{crc32(key.encode()):08x}.aot"


def java_options(java: Path, *, lasting: bool = False) -> str:
    """Java's options for a job: to start quickly, or to run fast if it is `lasting`."""
    file, options = class_cache(java), _ALWAYS if lasting else JVM_OPTIONS
    return f'{options} "-XX:AOTCache={file}" {_QUIET}' if file.exists() else options
