"""Rows are sent exactly once, even if senders are killed or run twice. Runs what Spark's tasks do, without Spark."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from pipeline import sending
from pipeline.ledger import Ledger, Progress, ledger_topic
from pipeline.sending import Pace, Plan, Row, Sender, SupersededError, chunks_of, new_producer, send_batches
from tests.pipeline.lab import Installation
from tests.pipeline.sending_lab import PARTITIONS, committed, duplicates


def plan_of(installation: Installation, run: str = "run", rate: float | None = None) -> Plan:
    kafka = installation.kafka
    ledger = Ledger(kafka.client_config(), ledger_topic(kafka), "job")
    return Plan(ledger, run, installation.settings.queue_topic, PARTITIONS, rate)


def row(number: int, slice_: int = 0) -> Row:
    return Row(number, slice_, slice_, "orders", b"%d" % number, [("n", b"%d" % number)])


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)]
    columns[5] = [[{"key": k, "value": v} for k, v in headers] for headers in columns[5]]
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    types = [pa.int64(), pa.int32(), pa.int32(), pa.string(), pa.binary(), pa.list_(header)]
    arrays = [pa.array(c, t) for c, t in zip(columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=list(Row._fields))


def test_a_row_becomes_a_message_with_key_payload_and_headers(target: Installation) -> None:
    plan = plan_of(target)
    plan.ledger.claim("run")
    sender = Sender(plan, 2)
    sender.start()
    sender.send([row(7, 2), row(9, 2)])
    records = committed(target, 2)
    assert [(r.partition, r.key, r.value, r.headers) for r in records] == [
        (2, b"orders", b"7", {"n": b"7"}),
        (2, b"orders", b"9", {"n": b"9"}),
    ]
    assert plan.ledger.read().slices == {2: Progress(10, 2)}


def test_rows_that_the_ledger_counts_are_not_sent_again(target: Installation) -> None:
    plan = plan_of(target)
    plan.ledger.claim("run")
    for rows in ([row(0), row(1)], [row(1), row(2)], [row(0)]):
        sender = Sender(plan, 0)
        sender.start()
        sender.send(rows)
    assert [r.value for r in committed(target, 3)] == [b"0", b"1", b"2"]


def test_what_a_killed_sender_left_open_is_ended_at_once_and_sent_again(target: Installation) -> None:
    plan = plan_of(target)
    plan.ledger.claim("run")
    killed = new_producer(plan, 0)
    killed.init_transactions(20)
    killed.begin_transaction()
    killed.produce(target.settings.queue_topic, b"0", b"orders", 0)
    killed.flush(20)
    began = time.monotonic()
    sender = Sender(plan, 0)
    sender.start()
    sender.send([row(0)])
    records = committed(target, 1)
    assert [r.value for r in records] == [b"0"]
    assert records[0].offset > 0, "the first record was that of the killed sender"
    assert time.monotonic() - began < 35


def test_a_sender_that_was_replaced_sends_nothing_more(target: Installation) -> None:
    plan = plan_of(target)
    plan.ledger.claim("run")
    zombie = Sender(plan, 0)
    zombie.start()
    zombie.send([row(0)])
    later = plan_of(target, "later")
    later.ledger.claim("later")
    successor = Sender(later, 0)
    successor.start()
    with pytest.raises(SupersededError, match="another run of job job has taken over"):
        zombie.send([row(1)])
    successor.send([row(1), row(2)])
    assert [r.value for r in committed(target, 3)] == [b"0", b"1", b"2"]


def test_a_task_of_a_former_run_does_not_disturb_the_present_one(target: Installation) -> None:
    later = plan_of(target, "later")
    later.ledger.claim("later")
    sender = Sender(later, 0)
    sender.start()
    with pytest.raises(SupersededError):
        Sender(plan_of(target, "run"), 0).start()
    sender.send([row(0)])
    assert [r.value for r in committed(target, 1)] == [b"0"]


def test_two_attempts_of_a_task_send_each_row_once(target: Installation) -> None:
    """As with Spark's speculation: both work for the same run."""
    plan = plan_of(target)
    plan.ledger.claim("run")
    first, second = Sender(plan, 0), Sender(plan, 0)
    first.start()
    first.send([row(0)])
    second.start()
    for number in range(1, 4):
        second.send([row(n) for n in range(number + 1)])
        first.send([row(n) for n in range(number + 1)])
    assert [r.value for r in committed(target, 4)] == [b"0", b"1", b"2", b"3"]


def test_a_task_says_what_went_wrong_as_a_row(target: Installation) -> None:
    plan_of(target).ledger.claim("later")
    (result,) = send_batches(plan_of(target, "run"), iter([batch_of([row(0)])]))
    assert result.to_pylist() == [
        {"slice": -1, "sent": 0, "error": "another run of job job has taken over; this one stops"}
    ]
    assert committed(target) == []


def _rows(count: int) -> list[Row]:
    return [row(n, n % PARTITIONS) for n in range(count)]


def _task(plan: Plan, count: int) -> None:
    sending.CHUNK_ROWS = 150

    def batches() -> Iterator[pa.RecordBatch]:
        rows = _rows(count)
        if plan.rate is None:
            rows.sort(key=lambda r: (r.slice, r.row))
        for i in range(0, count, 100):
            yield batch_of(rows[i : i + 100])
            time.sleep(0.001)

    for _ in send_batches(plan, batches()):
        pass


@pytest.mark.parametrize("rate", [None, pytest.param(4000.0, marks=pytest.mark.slow)])
def test_a_task_killed_at_any_moment_and_started_again_sends_each_row_once(
    target: Installation, rate: float | None
) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    print("seed", seed)
    count = 6_000
    # not of this process, whose threads a fork would leave behind in the middle of something
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    for attempt in range(8):
        plan = plan_of(target, f"run-{attempt}", rate)
        plan.ledger.claim(plan.run)
        task = processes.Process(target=_task, args=(plan, count), daemon=True)
        task.start()
        if attempt < 7:
            time.sleep(rng.uniform(0.05, 0.8))
            assert task.pid is not None
            os.kill(task.pid, signal.SIGKILL)
        task.join(60)
        assert task.exitcode is not None
    records = committed(target, count)
    assert not duplicates(records), f"seed {seed}"
    assert {r.value for r in records} == {b"%d" % n for n in range(count)}, f"seed {seed}"
    for number in range(PARTITIONS):
        values = [int(r.value) for r in records if r.partition == number]
        assert values == sorted(values), "a partition has its rows in their order"


def test_a_chunk_ends_at_its_number_of_rows_or_bytes() -> None:
    rows = [Row(n, 0, 0, "q", bytes(1_500_000), []) for n in range(5)]
    assert [len(chunk) for chunk in chunks_of(rows, 100)] == [3, 2]
    assert [len(chunk) for chunk in chunks_of(rows, 2)] == [2, 2, 1]
    assert list(chunks_of([], 2)) == []


def test_a_pace_lets_no_more_through_than_its_rate() -> None:
    pace = Pace(1000)
    began = time.monotonic()
    for _ in range(4):
        pace.wait(100)
    assert time.monotonic() - began >= 0.29
