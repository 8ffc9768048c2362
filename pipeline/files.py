"""Files of the data folder, wherever it is: through Hadoop's file systems, as Spark itself reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marq.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _place(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """The file system of a path, and the path as it wants it."""
    from pipeline.session import explain

    jvm: Any = spark.sparkContext._jvm
    try:
        place = jvm.org.apache.hadoop.fs.Path(path)
        return place.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()), place
    except Exception as error:
        raise PipelineError(f"can't reach {path}: {explain(error)}; correct --data") from None


def exists(spark: SparkSession, path: str) -> bool:
    system, place = _place(spark, path)
    return bool(system.exists(place))


def names(spark: SparkSession, path: str) -> list[str]:
    """Names in a folder, sorted; none where it does not exist. A file has its own name."""
    system, place = _place(spark, path)
    if not system.exists(place):
        return []
    return sorted(str(status.getPath().getName()) for status in system.listStatus(place))


def read_text(spark: SparkSession, path: str) -> str:
    """All of a small file."""
    system, place = _place(spark, path)
    stream = system.open(place)
    try:
        return bytes(stream.readAllBytes()).decode()
    finally:
        stream.close()


def delete(spark: SparkSession, path: str) -> None:
    """Delete a file, or a folder with all that is in it; nothing happens where there is none."""
    system, place = _place(spark, path)
    system.delete(place, True)
