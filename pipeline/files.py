"""Files of the data folder, local or remote: read through Hadoop's file systems, like Spark's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marq.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _place(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """The file system of a path, and the path as a Hadoop object."""
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
    """Names in a folder, sorted; none if it does not exist. For a file, its own name."""
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
    """Delete a file, or a folder with everything in it; does nothing if it does not exist."""
    system, place = _place(spark, path)
    system.delete(place, True)
