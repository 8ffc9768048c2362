"""The walk folds each partition independently, in whatever order Spark returns the rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.pandas.types import from_arrow_schema

from pipeline.fingerprints import fingerprint, fingerprint_column
from pipeline.jars import zip_code
from pipeline.lifecycle_walker import LIFECYCLE, LifecycleWalker, Plan
from pipeline.logs import LOGS
from pipeline.walk import walk
from tests.simulation.simulator import Simulator, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

FIRST_SEED = 500
SCHEMA = from_arrow_schema(LIFECYCLE)


def simulated(wanted: int) -> Simulator:
    """A run of the simulator whose partition has this number (0 or 3), with many queues."""
    return next(s for s in map(run, range(FIRST_SEED, FIRST_SEED + 200)) if s.number == wanted and s.queue_id is None)


def rows_of(simulator: Simulator) -> list[tuple[Any, ...]]:
    """Both logs as rows of `LOGS`."""
    n = simulator.number
    queue = [
        (n, "queue", r.offset, r.timestamp, r.key, None, len(r.value or b""), list(r.headers))
        for r in simulator.queue.records
    ]
    markers = [
        (n, "markers", r.offset, r.timestamp, None, r.value, len(r.value or b""), []) for r in simulator.markers.records
    ]
    return queue + markers


def frame(spark: SparkSession, rows: Iterable[tuple[Any, ...]]) -> DataFrame:
    """In disorder, over several tasks."""
    shuffled = list(rows)
    Random(1).shuffle(shuffled)
    return spark.createDataFrame(shuffled, LOGS).repartition(3)


def plan(simulator: Simulator, run_number: int, queue_stop: int, markers_stop: int) -> bytes:
    return msgspec.msgpack.encode(Plan(0, queue_stop, 0, markers_stop, simulator.queue_id, run_number))


def ended(found: Iterable[Row]) -> dict[tuple[int, int], Row]:
    histories: dict[tuple[int, int], Row] = {}
    for row in found:
        if row.outcome is not None:
            assert (row.partition, row.offset) not in histories, "ended twice"
            histories[row.partition, row.offset] = row
    return histories


def check(simulators: Iterable[Simulator], histories: dict[tuple[int, int], Row]) -> None:
    wanted = {(s.number, offset): outcome for s in simulators for offset, outcome in s.reference.done.items()}
    assert {place: row.outcome for place, row in histories.items()} == wanted
    for simulator in simulators:
        for offset, message in simulator.reference.messages.items():
            row = histories[simulator.number, offset]
            history = [state for _, state in simulator.reference.history[offset] if not isinstance(state, str)]
            assert row.receives == (history[-1][2] if history else 0), row
            assert len(row.deliveries) == len({state[:2] for state in history}), row
            assert (row.sent_ms, row.size) == (message.record.timestamp, len(message.record.value or b"")), row
            assert row.queue == message.queue, row


def test_partitions_are_folded_apart_whatever_order_their_records_come_in(spark: SparkSession) -> None:
    simulators = [simulated(0), simulated(3)]
    plans = {s.number: plan(s, 1, s.queue.end, s.markers.end) for s in simulators}
    logs = frame(spark, [row for s in simulators for row in rows_of(s)])
    found = walk(spark, logs, plans, LifecycleWalker, SCHEMA).collect()
    check(simulators, ended(row for row in found if row.state_key is None))


def test_a_walk_goes_on_where_another_one_stopped(spark: SparkSession) -> None:
    simulator = simulated(0)
    number, rows = simulator.number, rows_of(simulator)
    half = (simulator.queue.end // 2, simulator.markers.end // 3)

    def before(row: tuple[Any, ...]) -> bool:
        return bool(row[2] < half[row[1] == "markers"])

    first = walk(
        spark, frame(spark, filter(before, rows)), {number: plan(simulator, 1, *half)}, LifecycleWalker, SCHEMA
    ).collect()
    state = [(number, row.state_key, bytearray(row.state_value), 0) for row in first if row.state_key is not None]
    second = walk(
        spark,
        frame(spark, [row for row in rows if not before(row)]),
        {number: plan(simulator, 2, simulator.queue.end, simulator.markers.end)},
        LifecycleWalker,
        SCHEMA,
        rows=spark.createDataFrame(state, "partition int, key string, value binary, offset long"),
    ).collect()

    histories = [row for row in first + second if row.state_key is None]
    check([simulator], ended(histories))
    unfinished = {row.offset for row in first if row.state_key is None and row.outcome is None}
    assert unfinished and unfinished <= {row.offset for row in second if row.state_key is None}


def test_a_partition_whose_logs_are_empty_is_walked_too(spark: SparkSession) -> None:
    simulator = simulated(0)
    plans = {0: plan(simulator, 1, 0, 0), 1: plan(simulator, 1, 0, 0)}
    found = walk(spark, frame(spark, []), plans, LifecycleWalker, SCHEMA).collect()
    assert {(row.partition, row.state_key) for row in found} >= {(0, "walker"), (1, "walker")}


def test_a_fingerprint_is_the_same_in_spark(spark: SparkSession) -> None:
    messages: list[tuple[int, bytes | None, list[tuple[str, bytes | None]], bytes | None]] = [
        (0, None, [], None),
        (1_700_000_000_123, b"q", [("a", b"\x00\xff"), ("é", None)], b"payload"),
        (5, b"", [("a", b"")], b""),
        (5, b"ab", [], b"c"),
        (5, b"a", [], b"bc"),
    ]
    found = spark.createDataFrame(
        [(i, *message) for i, message in enumerate(messages)],
        "i int, at long, key binary, headers array<struct<key:string,value:binary>>, payload binary",
    ).select("i", fingerprint_column("at", "key", "headers", "payload").alias("print"))
    prints = [row.print for row in sorted(found.collect())]
    assert prints == [fingerprint(*message) for message in messages]
    assert len(set(prints)) == len(messages)


def test_walkers_need_nothing_but_what_is_sent_to_the_executors(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(zip_code(tmp_path))!r}); "
        "import pipeline.auditor, pipeline.lifecycle_walker, pipeline.fingerprints as last; "
        "print(last.__file__, *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    file, *modules = done.stdout.split()
    assert file.startswith(str(tmp_path))
    assert not {"app", "click", "pydantic", "pydantic_settings", "pyspark", "confluent_kafka", "faust"} & set(modules)
