"""How the Java of a job is started: with Spark's classes from a file that `pipeline.startup` made, if it is there."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from pipeline.jars import home

#: A parallel collector's threads cost more than they bring.
_ALWAYS = "-XX:+UseSerialGC"
#: A job of a minute gains less from the second compiler than that costs.
JVM_OPTIONS = f"-XX:TieredStopAtLevel=1 {_ALWAYS}"

#: Java says on stdout that a file does not fit; that is no news to a user.
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def class_cache(java: Path) -> Path:
    """The file for a JAVA_HOME; it need not be there."""
    import pyspark

    key = f"{java} {Path(pyspark.__file__).parent} {JVM_OPTIONS}"
    return home() / f"classes-{crc32(key.encode()):08x}.aot"


def java_options(java: Path, *, lasting: bool = False) -> str:
    """What Java is started with for a job: one that starts quickly, or a lasting one, which is to get fast."""
    file, options = class_cache(java), _ALWAYS if lasting else JVM_OPTIONS
    return f'{options} "-XX:AOTCache={file}" {_QUIET}' if file.exists() else options
