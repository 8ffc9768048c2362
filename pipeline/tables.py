"""Delta tables that record their version and their source.

The table property `marq.version` is the version of its rows. A version later than ours is refused. An earlier one gets
the columns that it lacks (null in old rows): later versions may only add columns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from marq.errors import PipelineError
from pipeline import files

if TYPE_CHECKING:
    from delta.tables import DeltaTable
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

VERSION = "marq.version"
SOURCE = "marq.source"
#: Property of a table: the day on which its unneeded files were last deleted.
VACUUMED = "marq.vacuumed"
_KEPT_SMALL = {
    # A commit that makes too many small files merges them.
    "delta.autoOptimize.autoCompact": "true",
    # Keeps the log short, as jobs commit every few seconds.
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 2 days",
    "delta.deletedFileRetentionDuration": "interval 1 day",
}


def is_table(spark: SparkSession, path: str) -> bool:
    """Whether there is a Delta table at a path."""
    from delta.tables import DeltaTable

    return files.exists(spark, f"{path}/_delta_log") and DeltaTable.isDeltaTable(spark, path)


def check(spark: SparkSession, path: str, *, version: int = 1, source: str = "") -> dict[str, str] | None:
    """Properties of the table at `path`, or None if there is none. Checks it like `open_table`, but changes nothing."""
    if not is_table(spark, path):
        if files.names(spark, path):
            raise PipelineError(
                f"{path} is not a table, and not empty; move it away, or choose another folder with --data"
            )
        return None
    found = properties_of(spark, path)
    _check_source(path, found, source)
    _version(path, found, version)
    return found


def open_table(
    spark: SparkSession,
    path: str,
    schema: StructType,
    *,
    version: int = 1,
    partition_by: Sequence[str] = (),
    source: str = "",
    properties: Mapping[str, str] | None = None,
) -> DeltaTable:
    """The table at `path`: created if there is none, upgraded if it is older than `version`.

    Args:
        source: what its rows come from (see `Kafka.source_of`). A table of another source is refused. Empty: any.
        properties: further properties (`delta.…`), for a table that does not have them yet.

    Raises:
        PipelineError: something else is at the path, or a table of another source, a later version, or not of marq's.
    """
    from delta.tables import DeltaTable

    found = check(spark, path, version=version, source=source)
    if found is None:
        builder = DeltaTable.createIfNotExists(spark).location(path).addColumns(schema)
        if partition_by:
            builder = builder.partitionedBy(*partition_by)
        for key, value in {**(properties or {}), VERSION: str(version), SOURCE: source}.items():
            if value:
                builder = builder.property(key, value)
        builder.execute()
        return DeltaTable.forPath(spark, path)
    if _version(path, found, version) != version:
        _upgrade(spark, path, schema, version)
    lacking = {key: value for key, value in (properties or {}).items() if key not in found}
    if lacking:
        set_properties(spark, path, lacking)
    return DeltaTable.forPath(spark, path)


def read_table(spark: SparkSession, path: str, made_by: str, *, version: int = 1) -> DataFrame:
    """The rows of the table at `path`.

    Args:
        made_by: the command that makes it, for the error.

    Raises:
        PipelineError: there is none, or one of a later version.
    """
    if not is_table(spark, path):
        raise PipelineError(f"{path} is not a table; `{made_by}` makes it, --data says where")
    _version(path, properties_of(spark, path), version)
    return spark.read.format("delta").load(path)


def size_bytes(table: DataFrame) -> int:
    """Size of the files of a table, by its log."""
    return int(str(cast(Any, table)._jdf.queryExecution().analyzed().stats().sizeInBytes()))


def properties_of(spark: SparkSession, path: str) -> dict[str, str]:
    """Properties of the table at a path."""
    return {row[0]: row[1] for row in spark.sql(f"SHOW TBLPROPERTIES delta.`{path}`").collect()}


def set_property(spark: SparkSession, path: str, key: str, value: str) -> None:
    set_properties(spark, path, {key: value})


def set_properties(spark: SparkSession, path: str, properties: Mapping[str, str]) -> None:
    """Set several in one statement: Delta refuses some that do not fit the others already set."""
    listed = ", ".join(f"'{key}' = '{value}'" for key, value in properties.items())
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({listed})")


def _version(path: str, found: Mapping[str, str], ours: int) -> int:
    text = found.get(VERSION)
    if text is None or not text.isdigit():
        raise PipelineError(f"{path} is a Delta table, but not one of marq's; choose another folder with --data")
    if int(text) > ours:
        raise PipelineError(
            f"{path} has rows of version {text}, and this marq reads up to {ours}; upgrade marq, or choose another "
            "folder with --data"
        )
    return int(text)


def _check_source(path: str, found: Mapping[str, str], source: str) -> None:
    other = found.get(SOURCE, "")
    if source and other and other != source:
        raise PipelineError(
            f"{path} belongs to another topic or Kafka ({other}; this one is {source}); choose another folder with "
            "--data, or correct MARQ_NAME, MARQ_QUEUE_TOPIC or MARQ_KAFKA"
        )


def _upgrade(spark: SparkSession, path: str, schema: StructType, version: int) -> None:
    missing = list(_missing(spark.read.format("delta").load(path).schema, schema))
    if missing:
        spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMNS ({', '.join(missing)})")
    set_property(spark, path, VERSION, str(version))


def _missing(there: StructType, schema: StructType, prefix: str = "") -> Iterator[str]:
    """Columns that a table lacks, and fields of structs in its arrays. They are nullable: old rows have none."""
    from pyspark.sql.types import ArrayType, StructType

    for field in schema:
        if field.name not in there.names:
            yield f"{prefix}`{field.name}` {field.dataType.simpleString()}"
            continue
        old, new = there[field.name].dataType, field.dataType
        if isinstance(new, ArrayType) and isinstance(new.elementType, StructType):
            assert isinstance(old, ArrayType) and isinstance(old.elementType, StructType), field.name
            yield from _missing(old.elementType, new.elementType, f"{prefix}`{field.name}`.element.")


def kept_small() -> dict[str, str]:
    """Properties of a table that is written often and cleaned up by `vacuum_daily`."""
    return _KEPT_SMALL | {VACUUMED: today()}


def vacuum_daily(spark: SparkSession, path: str, table: DeltaTable) -> None:
    """Once a day, delete the files that were merged into larger ones at least a day ago."""
    if properties_of(spark, path).get(VACUUMED) != today():
        table.vacuum()
        set_property(spark, path, VACUUMED, today())


def today() -> str:
    """The day, UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())
