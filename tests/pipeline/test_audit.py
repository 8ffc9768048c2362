"""The audit proves what is whole, and names what is not: faults are put into real topics, one a partition."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from marq.core import rows
from marq.core.digest import STATES
from marq.core.markers import End, Keepalive, Marker, Own, Release, Start, Tick, decode, encode
from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.errors import PipelineError
from marq.protocol.limits import MESSAGE_MAX_BYTES
from pipeline.audit import audit
from pipeline.verdict import Found, Verdict, as_json, lines
from tests.pipeline.lab import Installation
from tests.pipeline.tables_lab import checkpoint, folded, read, run_archive
from tests.raw_batches import CODECS, Raw, batch
from tests.raw_client import produce

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEASE_MS = 600_000
MESSAGES = 6
#: More than a worker appends while the test runs (one a second while a lease is on).
TICKS = 300
#: Codecs of batches with a record that Java's client fails at; each costs Spark another read.
LONG_CODECS = ("gzip", "zstd")


def ordinary(here: Installation, number: int) -> None:
    """Six messages of `q`, all delivered by w as 0/1; 0 and 1 acknowledged, 2 given back, 3 extended."""
    here.send(number, *[(b"q", b"payload %d" % i, [("marq-key", b"%d" % i), ("mine", None)]) for i in range(MESSAGES)])
    here.mark(
        number,
        [Own("w", "w/1")],
        [Start(0, 1, [0, MESSAGES], LEASE_MS, "r")],
        [End(0, [0, 2], "acked", 1), Release(0, 1, [2, 3]), Keepalive(0, 1, [3, 4], 2 * LEASE_MS)],
    )


def all_is_well(here: Installation, number: int) -> None:
    ordinary(here, number)
    checkpoint(here, number)
    here.mark(number, [Start(0, 2, [2, 3], LEASE_MS, "r", 2)], [End(0, [2, 3], "acked", 2)])


def a_start_is_forged_while_another_lease_is_on(here: Installation, number: int) -> None:
    ordinary(here, number)
    here.mark(number, [Start(0, 2, [4, 5], LEASE_MS, "thief", 2)])


def a_record_is_gone_before_its_end(here: Installation, number: int) -> None:
    producer = Producer(here.kafka.client_config() | {"transactional.id": f"{here.settings.name}-{number}"})
    producer.init_transactions(20)
    here.send(number, (b"q", b"0"))
    producer.begin_transaction()
    producer.produce(here.settings.queue_topic, b"1", b"q", number)
    producer.flush(20)
    producer.abort_transaction(20)
    here.mark(number, [Own("w", "w/1")], [Start(0, 1, [0, 2], LEASE_MS, "r")])
    here.send(number, (b"q", b"2"))


def an_attempt_is_missing(here: Installation, number: int) -> None:
    ordinary(here, number)
    here.mark(number, [Start(0, 3, [2, 3], LEASE_MS, "r", 3)])


def an_own_marker_is_missing(here: Installation, number: int) -> None:
    ordinary(here, number)
    here.mark(number, [Start(7, 1, [2, 3], LEASE_MS, "r", 2)])


def a_former_owner_hands_out(here: Installation, number: int) -> None:
    ordinary(here, number)
    here.mark(number, [Own("v", "v/1")], [Start(0, 2, [2, 3], LEASE_MS, "r", 2)], [End(0, [2, 3], "acked", 2)])


def a_manifest_is_ahead_of_what_the_tables_have(here: Installation, number: int) -> None:
    ordinary(here, number)
    checkpoint(here, number, row=lambda key, value: None, rows={})


def a_row_is_missing(here: Installation, number: int) -> None:
    ordinary(here, number)
    checkpoint(here, number, row=lambda key, value: None if rows.kind_of(key) == "messages" else value)


def a_row_is_damaged(here: Installation, number: int) -> None:
    ordinary(here, number)
    checkpoint(here, number, row=lambda key, value: value[:-1] + b"?")


def a_row_has_another_payload(here: Installation, number: int) -> None:
    ordinary(here, number)
    state = folded(here, number)
    record = state.messages[5]
    state.messages[5] = record._replace(value=b"something")
    checkpoint(here, number, partition=state)


def a_manifest_is_beyond_the_log(here: Installation, number: int) -> None:
    ordinary(here, number)
    checkpoint(here, number, markers_position=1_000)


def the_tables_bring_back_what_is_done(here: Installation, number: int) -> None:
    ordinary(here, number)
    state = folded(here, number)
    here.mark(number, [End(0, [4, 5], "acked", 1)])
    checkpoint(here, number, partition=state, markers_position=4)


def an_ack_is_no_longer_in_the_log(here: Installation, number: int) -> None:
    """The tables were written when it was."""
    without(here, number, [End(0, [4, 5], "acked", 1)])


def all_markers_of_a_message_are_no_longer_in_the_log(here: Installation, number: int) -> None:
    without(here, number, [Start(0, 2, [6, 7], LEASE_MS, "r")], [End(0, [6, 7], "acked", 2)])


def without(here: Installation, number: int, *batches: list[Marker]) -> None:
    """Tables of a log that had these records of markers, which now has ticks in their places."""
    ordinary(here, number)
    here.send(number, (b"q", b"one more"))
    state = folded(here, number)
    for markers in batches:
        state.fold(state.markers_position, state.last_timestamp_ms, markers)
    here.mark(number, *[[Tick()] for _ in batches])
    checkpoint(here, number, partition=state)


def a_commit_is_beyond_the_manifest(here: Installation, number: int) -> None:
    ordinary(here, number)
    checkpoint(here, number)
    here.kafka.commit(here.settings.name, {here.settings.queue_topic: {number: MESSAGES + 1}})


FAULTS: dict[Callable[[Installation, int], None], list[tuple[int, str, str]]] = {
    all_is_well: [],
    a_start_is_forged_while_another_lease_is_on: [(4, "two leases", "0/2 was started while 0/1 had")],
    a_record_is_gone_before_its_end: [(1, "record gone", "no longer has its record")],
    an_attempt_is_missing: [(2, "attempts", "said to be attempt 3; the log has 1 before it")],
    an_own_marker_is_missing: [(2, "owner", "the log has no own marker at 7")],
    a_former_owner_hands_out: [(2, "owner", "its receipt was used")],
    a_manifest_is_ahead_of_what_the_tables_have: [
        (offset, "tables", "lost after a recovery from the newest manifest") for offset in (2, 3, 4, 5)
    ],
    a_row_is_missing: [(-1, "tables", "it is not in the table")],
    a_row_is_damaged: [(-1, "tables", "does not have the checksum")],
    a_row_has_another_payload: [(5, "tables", "another payload")],
    a_manifest_is_beyond_the_log: [(-1, "manifest", "is at 1000 of the markers log, which ends at 3")],
    the_tables_bring_back_what_is_done: [(4, "tables", "is done, but in_flight again")],
    an_ack_is_no_longer_in_the_log: [(4, "tables", "is in_flight, but lost")],
    all_markers_of_a_message_are_no_longer_in_the_log: [(6, "tables", "is ready, but lost")],
    a_commit_is_beyond_the_manifest: [(-1, "committed", "beyond 6, the position of the newest manifest")],
}


@pytest.fixture(scope="module")
def tampered(
    spark: SparkSession, kafka: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Verdict, dict[Callable[[Installation, int], None], int]]:
    """One audit of an installation that has a fault in each of its partitions, but the first."""
    here = Installation(kafka, tmp_path_factory.mktemp("tampered"), partitions=len(FAULTS))
    numbers = {fault: number for number, fault in enumerate(FAULTS)}
    for fault, number in numbers.items():
        fault(here, number)
    return audit(spark, here.job), numbers


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_named_and_nothing_else(tampered: Any, fault: Callable[[Installation, int], None]) -> None:
    verdict, numbers = tampered
    found: list[Found] = [f for f in verdict.faults if f.partition == numbers[fault]]
    assert [(f.offset, f.kind) for f in found] == [(offset, kind) for offset, kind, _ in FAULTS[fault]], found
    for one, (_, _, text) in zip(found, FAULTS[fault], strict=True):
        assert text in one.what


def test_what_is_wrong_with_one_partition_does_not_hide_the_rest(tampered: Any) -> None:
    verdict, _ = tampered
    assert not verdict.proven
    assert len(verdict.summaries) == len(FAULTS)
    assert verdict.fault_count == sum(len(faults) for faults in FAULTS.values())


def test_payloads_in_the_tables_are_compared_with_the_log(tampered: Any) -> None:
    verdict, numbers = tampered
    summary = verdict.summaries[numbers[all_is_well]]
    assert (summary.recovered, summary.compared) == (4, 4)
    assert summary.sent == {"q": 6} and summary.done == {"q": {"acked": 3}}
    assert summary.held == {"q": {"ready": 0, "delayed": 0, "in_flight": 3}}
    assert (summary.deliveries, summary.redeliveries) == (7, 1)


# ------------------------------------------------------------------ what is no longer in the logs


def trim(here: Installation, number: int, queue: int, markers: int) -> None:
    here.delete_before({here.settings.queue_topic: queue, here.settings.markers_topic: markers}, number)


def test_lives_that_began_before_the_logs_are_left_out_and_the_tables_stand_for_them(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    here = installation(partitions=2)
    for number in (0, 1):
        ordinary(here, number)
    checkpoint(here, 0)
    for number in (0, 1):
        trim(here, number, 3, 3)
    here.mark(0, [End(0, [3, 4], "acked", 1)])

    verdict = audit(spark, here.job)

    assert [(f.partition, f.kind) for f in verdict.faults] == [(1, "deleted unread"), (1, "deleted unread")]
    assert "offsets 0 to 2 of the queue topic" in verdict.faults[0].what
    assert "there is no manifest" in verdict.faults[0].what
    assert as_json(verdict)["deleted_unread"] == 3
    assert verdict.summaries[0].first is None
    assert not as_json(verdict)["whole"]
    assert verdict.summaries[0].recovered == 4


def test_records_that_were_deleted_before_a_manifest_had_them_are_found(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    here = installation(partitions=1)
    ordinary(here, 0)
    checkpoint(here, 0, position=2, rows={})
    trim(here, 0, 4, 3)
    (fault,) = audit(spark, here.job).faults
    assert fault.kind == "deleted unread" and "beyond the position 2" in fault.what
    assert "offsets 2 to 3 of the queue topic (2 records, 2 not known to be done)" in fault.what


@pytest.mark.slow
def test_the_archive_alone_is_proof_until_a_row_of_it_is_gone(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    here = installation(partitions=1)
    ordinary(here, 0)
    here.mark(0, [Tick()])
    run_archive(spark, here.job)
    here.mark(0, [End(0, [4, 5], "acked", 1)])

    verdict = audit(spark, here.job, archive=True)
    assert verdict.faults == []
    assert as_json(verdict)["whole"] and as_json(verdict)["source"] == "archive"
    assert verdict.summaries[0].done == {"q": {"acked": 3}}, "what is not archived yet comes from Kafka"

    for table, offset in (("messages", 3), ("markers", 2)):
        spark.sql(f"DELETE FROM delta.`{here.job.path('archive', table)}` WHERE offset = {offset}")
    messages = here.job.path("archive", "messages")
    spark.sql(f"INSERT INTO delta.`{messages}` SELECT * FROM delta.`{messages}` WHERE offset = 5")
    done = here.run_job("audit", "--offline", "--json", "-")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert not result["proven"]
    assert [(f["partition"], f["offset"], f["kind"]) for f in result["faults"]] == [
        (0, -1, "markers gone"),
        (0, 3, "record gone"),
        (0, 5, "doubled"),
    ]
    assert "WRONG: 3 faults" in done.stderr
    assert "  0:3 - record gone: was delivered, but the queue topic no longer has its record" in done.stderr


@pytest.mark.slow
def test_an_archive_without_queues_is_audited_without_the_order_of_groups_and_says_so(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    """Version 0.1 made such."""
    here = installation(partitions=1)
    ordinary(here, 0)
    run_archive(spark, here.job)
    assert audit(spark, here.job, archive=True, offline=True).ordered
    shutil.rmtree(here.job.path("archive", "queues"))
    verdict = audit(spark, here.job, archive=True, offline=True)
    assert verdict.proven and not verdict.ordered and not as_json(verdict)["ordered"]
    assert any("order of FIFO groups: not looked at" in line for line in lines(verdict, 1))


# ------------------------------------------------------------------ a live worker


def test_a_live_worker_agrees_and_a_log_without_one_of_its_ends_does_not(
    spark: SparkSession, installation: Callable[..., Installation], tmp_path: Path
) -> None:
    here = installation(partitions=2)
    with here.cluster(handlers="") as cluster:
        worker = cluster.start().wait_ready()
        from marq.client import Service

        with Service(worker.url) as service:
            queue = service.queue("orders")
            for i in range(40):
                queue.send(b"%d" % i)
            taken = queue.receive_many(30, timeout=10, visibility_timeout=600)
            queue.ack_many(taken[:20])
            taken[20].release()
            ordered = service.queue("ordered")
            ordered.create(fifo=True)
            for i in range(6):
                ordered.send(b"%d" % i, group=f"g{i % 2}", deduplication_id=f"{i // 2}")
            ordered.ack_many(ordered.receive_many(1, timeout=10))
        verdict = audit(spark, here.job, worker=worker.url)
        assert verdict.faults == []
        assert {summary.live for summary in verdict.summaries} == {"agrees"}
        result = as_json(verdict)
        orders, ordered_ones = result["queues"]["orders"], result["queues"]["ordered"]
        assert (orders["sent"], orders["acked"]) == (40, len(taken[:20]))
        assert sum(orders[state] for state in STATES) == 40 - len(taken[:20])
        assert (ordered_ones["sent"], ordered_ones["acked"]) == (6, 1)

        job = here.run_job("audit", "--worker", worker.url, "--json", str(tmp_path / "result.json"))
        assert job.returncode == 0, job.stderr
        assert "PROVEN" in job.stdout and "2 of 2 partitions agree" in job.stdout
        assert json.loads((tmp_path / "result.json").read_text())["proven"] is True

        without = installation(partitions=2)
        removed = copy_without_an_end(here, without)
        verdict = audit(spark, without.job, worker=worker.url)
        wrong = [f for f in verdict.faults if f.partition == removed]
        assert wrong and {f.kind for f in wrong} == {"worker"}
        assert any(f.queue == "orders" for f in wrong)
        assert any("acked messages" in f.what for f in wrong)


@pytest.mark.slow
def test_records_of_every_kind_are_to_the_audit_what_they_are_to_the_worker(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    """Each codec; poison of each kind that Spark is given; records that are larger than a message, and copies."""
    here = installation(partitions=1)
    topic, bootstrap = here.settings.queue_topic, here.kafka.bootstrap
    good, bad_name = Raw(b"x", b"work-q"), Raw(b"x", b"work-q", [(b"\xff\xfe", b"v")])
    long = Raw(b"x", b"work-q", length=999)
    large = Raw(b"x", b"work-q", [(b"h", b"v")] * (MESSAGE_MAX_BYTES // (HEADER_OVERHEAD_BYTES + 2) + 1))
    with here.cluster() as cluster:
        worker = cluster.start().wait_ready()
        for codec in CODECS:
            assert asyncio.run(produce(bootstrap, topic, 0, batch(good, bad_name, good, codec=codec))) == 0
            # the broker takes it, and Java's client fails at it
            if codec in LONG_CODECS:
                assert asyncio.run(produce(bootstrap, topic, 0, batch(good, long, good, codec=codec))) == 0
        assert asyncio.run(produce(bootstrap, topic, 0, batch(good, large, good, codec="zstd"))) == 0
        (end,) = cluster.ends().values()
        cluster.settle()
        undecodable = 2 * len(LONG_CODECS)
        assert cluster.counters()["poison"] == len(CODECS) + 1 + undecodable

        verdict = audit(spark, here.job, worker=worker.url)
        assert verdict.faults == []
        (summary,) = verdict.summaries
        assert summary.done["work-q"] == {"acked": 2 * len(CODECS) + len(LONG_CODECS) + 2}
        assert end == 3 * (len(CODECS) + len(LONG_CODECS) + 1)

    plain = installation(partitions=1)
    topic = plain.settings.queue_topic
    for codec in CODECS:
        assert asyncio.run(produce(bootstrap, topic, 0, batch(good, bad_name, good, codec=codec))) == 0
    run_archive(spark, plain.job)
    malformed = spark.read.format("delta").load(plain.job.path("archive", "malformed")).collect()
    assert [row.reason for row in malformed] == ["the name of a header is not UTF-8"] * len(CODECS)


def copy_without_an_end(here: Installation, there: Installation) -> int:
    """Both logs again in other topics, with one end left out; the partition of that.

    Ticks follow, so that the worker, which goes on, is not beyond the copy.
    """
    removed = None
    for number in range(2):
        for record in read(here, here.settings.queue_topic, number):
            there.write(there.settings.queue_topic, number, [(record.key, record.value, list(record.headers))])
        for record in read(here, here.settings.markers_topic, number):
            batch = decode(record.value)
            value = record.value
            if removed is None and any(isinstance(marker, End) for marker in batch.markers):
                removed, value = number, encode([Tick()], batch.by, batch.seq)
            there.write(there.settings.markers_topic, number, [(None, value)])
        there.mark(number, *[[Tick()]] * TICKS)
    assert removed is not None
    return removed


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--worker", "http://127.0.0.1:9"), "does not answer"),
        (("--worker", "localhost:9324"), "is no address of HTTP"),
        (("--offline", "--worker", "http://127.0.0.1:9"), "--offline reads no worker"),
        (("--worker", "http://127.0.0.1:9", "--key-file", "no/key"), "--key-file no/key can't be read"),
    ],
)
def test_what_can_not_be_audited_is_one_line_and_status_2(
    installation: Callable[..., Installation], arguments: tuple[str, ...], text: str
) -> None:
    here = installation(partitions=1)
    job = here.run_job("audit", *arguments)
    assert job.returncode == 2
    assert text in job.stderr and len(job.stderr.strip().splitlines()) == 1


def test_an_archive_that_is_not_there_is_an_error(
    spark: SparkSession, installation: Callable[..., Installation]
) -> None:
    with pytest.raises(PipelineError, match="is not a table"):
        audit(spark, installation(partitions=1).job, archive=True, offline=True)
