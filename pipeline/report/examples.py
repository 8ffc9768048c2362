"""Single messages that stand out, and the busiest receivers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from pipeline.report.counting import ACCURACY, RANKS, deliveries
from pipeline.report.span import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Rows in the tables of messages and of receivers.
MESSAGES_SHOWN = 10
RECEIVERS_SHOWN = 10


#: Orders of messages, descending: the slowest, the most retried.
SLOWEST: tuple[str, ...] = ("total_ms",)
RETRIED: tuple[str, ...] = ("receives", "total_ms")


#: Messages by order and queue; None: of all queues together.
Examples = dict[tuple[tuple[str, ...], str | None], list[dict[str, Any]]]


def messages(histories: DataFrame, span: Span, queues: Sequence[str]) -> Examples:
    """The first messages in both orders, of each of these queues, and of all together, in one query."""
    end = F.when(F.col("ended_ms") < span.stop_ms, F.col("ended_ms")).otherwise(span.stop_ms)
    alive = histories.where(F.coalesce(F.col("ended_ms") >= span.start_ms, F.lit(True)))
    rows = alive.select(
        "queue",
        "partition",
        "offset",
        F.when(F.col("ended_ms") < span.stop_ms, F.col("outcome")).otherwise(F.lit(None)).alias("outcome"),
        "state",
        "receives",
        "sent_ms",
        "waiting_ms",
        "working_ms",
        (end - F.col("sent_ms")).alias("total_ms"),
    )
    parts = []
    for order in (SLOWEST, RETRIED):
        of_order = rows.where("receives > 1") if order is RETRIED else rows
        by = [*[F.desc(name) for name in order], F.asc("partition"), F.asc("offset")]
        listed = F.lit(order[0]).alias("list")
        parts.append(of_order.orderBy(*by).limit(MESSAGES_SHOWN).select("*", listed, F.lit(True).alias("of_all")))
        if queues:
            place = F.row_number().over(Window.partitionBy("queue").orderBy(*by))
            first = of_order.where(F.col("queue").isin(list(queues))).withColumn("place", place)
            first = first.where(F.col("place") <= MESSAGES_SHOWN).drop("place")
            parts.append(first.select("*", listed, F.lit(False).alias("of_all")))
    found: Examples = {}
    for row in reduce(lambda a, b: a.unionByName(b), parts).collect():
        order = SLOWEST if row["list"] == SLOWEST[0] else RETRIED
        found.setdefault((order, None if row["of_all"] else row["queue"]), []).append(row.asDict())
    for (order, _), few in found.items():
        few.sort(key=lambda row: (*(-row[name] for name in order), row["partition"], row["offset"]))
    return found


def receivers(histories: DataFrame, span: Span, queues: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The receivers with most deliveries, by queue. Each row also has the number of all `receivers` of the queue."""
    inside = (F.col("start_ms") >= span.start_ms) & (F.col("start_ms") < span.stop_ms)
    took = F.col("finish_ms") - F.col("start_ms")
    each = deliveries(histories.where(F.col("queue").isin(list(queues)))).where(inside)
    by_receiver = each.groupBy("queue", "receiver").agg(
        F.count("*").alias("delivered"),
        F.count_if(F.col("end") == "acked").alias("acked"),
        F.count_if(F.col("end") == "released").alias("released"),
        F.count_if(F.col("end") == "expired_lease").alias("lapsed"),
        F.min("start_ms").alias("first_ms"),
        F.max("start_ms").alias("last_ms"),
        F.percentile_approx(F.when(F.col("end") == "acked", took), list(RANKS), ACCURACY).alias("levels"),
    )
    by = Window.partitionBy("queue")
    ranked = by_receiver.withColumns(
        {
            "place": F.row_number().over(by.orderBy(F.desc("delivered"), F.asc("receiver"))),
            "receivers": F.count("*").over(by),
        }
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for row in ranked.where(F.col("place") <= RECEIVERS_SHOWN).orderBy("queue", "place").collect():
        found.setdefault(row["queue"], []).append(row.asDict())
    return found
