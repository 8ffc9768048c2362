"""`load`: rows of files become messages, each exactly once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marq.core.placing import fifo_partition
from marq.core.policies import QueueSettings
from marq.errors import BadValueError, MarqError, NotPossibleError, PipelineError, UnknownQueueError
from pipeline.dispatch import Outcome
from pipeline.load import What, run
from tests.pipeline.lab import Installation, finish
from tests.pipeline.sending_lab import Here, committed, duplicates, ends, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def csv(path: Path, *lines: str) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def flights(path: Path, count: int) -> str:
    """A file of rows that each have a number of their own."""
    return csv(path, "id,origin,dest", *(f"{n},JFK,LAX" for n in range(count)))


# -- what becomes of a row --------------------------------------------------------------------------------


def test_a_row_of_csv_is_sent_whole_as_json_with_key_group_headers_and_times(
    target: Installation, job: Here, tmp_path: Path
) -> None:
    path = csv(tmp_path / "a.csv", "id,who,city,wait", "1,ann,Köln,5000", '2,bob,"Paris, F",', "3,,Rom,0")
    what = What("orders", headers=(("who", "who"), ("town", "city")), key="id", group="city", delay="wait", ttl="60000")
    assert run(job, path, what) == Outcome(3, 0, 0)
    found = {record.headers["marq-key"]: record for record in committed(target, 3)}
    assert all(record.key == b"orders" for record in found.values())
    assert json.loads(found[b"2"].value) == {"id": "2", "who": "bob", "city": "Paris, F", "wait": None}
    koeln = "Köln".encode()
    assert found[b"1"].headers == {
        "who": b"ann",
        "town": koeln,
        "marq-key": b"1",
        "marq-ttl-ms": b"60000",
        "marq-delay-ms": b"5000",
        "marq-group": koeln,
    }
    assert "marq-delay-ms" not in found[b"2"].headers
    assert not {"marq-delay-ms", "who"} & found[b"3"].headers.keys()
    assert {k: r.partition for k, r in found.items()} == {
        b"1": crc32(koeln) % 3,
        b"2": crc32(b"Paris, F") % 3,
        b"3": crc32(b"Rom") % 3,
    }


def test_a_column_of_parquet_is_the_payload_byte_by_byte(target: Installation, job: Here, tmp_path: Path) -> None:
    payloads = [b"\x00\xff", b"", "ü".encode()]
    table = pa.table({"body": pa.array(payloads, pa.binary()), "n": pa.array([1, 2, 3], pa.int32())})
    pq.write_table(table, tmp_path / "a.parquet")
    run(job, str(tmp_path / "a.parquet"), What("orders", payload="body", headers=(("n", "n"), ("raw", "body"))))
    found = {record.headers["n"]: record for record in committed(target, 3)}
    assert [found[b"%d" % n].value for n in (1, 2, 3)] == payloads
    assert found[b"1"].headers["raw"] == b"\x00\xff"


@pytest.mark.slow
def test_a_line_of_json_is_sent_as_it_stands(target: Installation, job: Here, tmp_path: Path) -> None:
    lines = ['{"b": 1.50, "a": {"x": [1,2]}, "to": "JFK"}', '{"a":null,  "to":"LAX","rare":"x"}']
    path = csv(tmp_path / "a.jsonl", lines[0], "", lines[1])
    what = What("orders", headers=(("to", "to"), ("a", "a"), ("rare", "rare")))
    assert run(job, path, what).sent == 2
    found = {record.headers["to"]: record for record in committed(target, 2)}
    assert [found[b"JFK"].value.decode(), found[b"LAX"].value.decode()] == lines
    assert json.loads(found[b"JFK"].headers["a"]) == {"x": [1, 2]}
    assert found[b"LAX"].headers == {"to": b"LAX", "rare": b"x"}


@pytest.mark.slow
def test_rows_are_spread_evenly_and_keep_the_order_of_the_files(
    target: Installation, job: Here, tmp_path: Path
) -> None:
    for part in range(3):
        csv(tmp_path / "in" / f"part-{part}.csv", "n", *(str(n) for n in range(part * 1000, part * 1000 + 1000)))
    run(job, str(tmp_path / "in"), What("orders", payload="n"))
    records = committed(target, 3000)
    assert Counter(record.partition for record in records) == {0: 1000, 1: 1000, 2: 1000}
    for partition in range(3):
        numbers = [int(record.value) for record in records if record.partition == partition]
        assert numbers == sorted(numbers)


@pytest.mark.slow
def test_rows_that_name_no_delay_get_that_of_the_queue(target: Installation, job: Here, tmp_path: Path) -> None:
    record = {"v": 1, "version": 1, "by": "test", "settings": {"delay_ms": 70_000}}
    target.write(target.settings.queues_topic, 0, [(b"later", json.dumps(record).encode())])
    run(job, csv(tmp_path / "a.csv", "n,wait", "1,", "2,0", "3,5"), What("later", payload="n", delay="wait"))
    delays = {record.value: record.headers.get("marq-delay-ms") for record in committed(target, 3)}
    assert delays == {b"1": b"70000", b"2": None, b"3": b"5"}


@pytest.mark.parametrize("scope", ["queue", pytest.param("group", marks=pytest.mark.slow)])
def test_rows_for_a_fifo_queue_go_where_a_worker_would_put_them_in_the_order_of_their_groups(
    target: Installation, job: Here, tmp_path: Path, scope: str
) -> None:
    settings = {"fifo": True, "deduplication_scope": scope}
    record = {"v": 1, "version": 1, "by": "test", "settings": settings}
    target.write(target.settings.queues_topic, 0, [(b"ordered", json.dumps(record).encode())])
    path = csv(tmp_path / "a.csv", "n,g", *(f"{n},g{n % 7}" for n in range(700)))
    for wrong in (What("ordered"), What("ordered", group="g", delay="5")):
        with pytest.raises(BadValueError, match="is FIFO"):
            run(job, path, wrong)
    run(job, path, What("ordered", payload="n", group="g"))
    numbers: dict[bytes, list[int]] = {}
    for sent in committed(target, 700):
        group = sent.headers["marq-group"]
        assert sent.partition == fifo_partition(b"ordered", group, msgspec.convert(settings, QueueSettings), 3)
        numbers.setdefault(group, []).append(int(sent.value))
    assert len(numbers) == 7
    assert all(of_group == sorted(of_group) and len(of_group) == 100 for of_group in numbers.values())


# -- again ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_file_that_was_sent_is_not_sent_again_unless_the_job_has_another_name(
    target: Installation, job: Here, tmp_path: Path
) -> None:
    path = flights(tmp_path / "a.csv", 10)
    assert run(job, path, What("orders")) == Outcome(10, 0, 0)
    moved = tmp_path / "elsewhere" / "a.csv"
    moved.parent.mkdir()
    Path(path).rename(moved)
    assert run(job, str(moved), What("orders")) == Outcome(0, 10, 0)
    assert len(committed(target, 10)) == 10
    assert run(job, str(moved), What("orders"), name="second") == Outcome(10, 0, 0)
    assert run(job, str(moved), What("others")) == Outcome(10, 0, 0)
    flights(moved, 11)
    with pytest.raises(PipelineError, match="job load-second was begun with another input"):
        run(job, str(moved), What("orders"), name="second")
    assert run(job, str(moved), What("orders")) == Outcome(11, 0, 0)


def test_a_dry_run_sends_nothing(
    target: Installation, job: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = csv(tmp_path / "a.csv", "n,wait", "1,5", "2,soon")
    run(job, path, What("orders", delay="wait"), dry_run=True)
    assert committed(target) == []
    assert "1 message of" in (told := capsys.readouterr().out)
    assert "a.csv row 2: delay soon is not a number of milliseconds" in told


# -- bad input --------------------------------------------------------------------------------------------


def test_rows_that_cant_be_sent_stop_the_job_before_it_sends_or_are_put_aside(
    target: Installation, job: Here, tmp_path: Path, spark: SparkSession
) -> None:
    good = [{"body": "x", "wait": n} for n in range(5)]
    bad = [
        {"body": None, "wait": 1},
        {"body": "x", "wait": -1},
        {"body": "y" * (4 * 1024 * 1024), "wait": 1},
        {"body": "x", "who": ""},
    ]
    lines = [json.dumps(row) for row in (*good[:3], *bad, *good[3:])]
    path = csv(tmp_path / "my rows.jsonl", *lines[:7], '{"body": "x"', *lines[7:])
    what = What("orders", payload="body", delay="wait", group="who")
    with pytest.raises(PipelineError, match=r"my rows.jsonl row 4: no payload: column 'body' is null \(and 4 more\)"):
        run(job, path, what)
    assert committed(target) == []
    assert run(job, path, what, skip_bad=True) == Outcome(5, 0, 5)
    assert len(committed(target, 5)) == 5
    (folder,) = Path(job.path("jobs")).iterdir()
    rejected = spark.read.format("delta").load(str(folder / "rejected")).orderBy("row").collect()
    assert [(row["origin"], row["error"].partition(" (")[0]) for row in rejected] == [
        ("my rows.jsonl row 4", "no payload: column 'body' is null"),
        ("my rows.jsonl row 5", "delay -1 is not a number of milliseconds"),
        ("my rows.jsonl row 6", "a message of 4194329 bytes; at most 4193280 with key and headers"),
        ("my rows.jsonl row 7", "the group is empty"),
        ("my rows.jsonl row 8", "malformed JSON"),
    ]


def test_a_row_of_csv_with_too_many_cells_is_named(job: Here, tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "n,m", "1,2", "3,4,5")
    with pytest.raises(PipelineError, match=r"a.csv row 2: malformed CSV \(.*multiLine"):
        run(job, path, What("orders"))


@pytest.mark.parametrize(
    ("name", "text", "what", "message"),
    [
        ("a.csv", "n\n1\n", What("orders", key="m"), "has no column 'm'; it has n"),
        ("a.jsonl", '{"n": 1}\n', What("orders", key="m"), "has no column 'm'; it has n"),
        ("a.dat", "x", What("orders"), "don't tell one format: give --format parquet|csv|json"),
        ("a.parquet", "no parquet", What("orders"), "can't be read as parquet"),
    ],
)
def test_input_that_cant_be_used_is_an_error_of_one_line(
    job: Here, tmp_path: Path, name: str, text: str, what: What, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PipelineError) as caught:
        run(job, str(tmp_path / name), what)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "queue", "error", "message"),
    [
        ({}, "a\nb", BadValueError, "control character"),
        (
            {"auto_create": False},
            "nobody",
            UnknownQueueError,
            "there is no queue 'nobody', and MARQ_AUTO_CREATE is off",
        ),
        ({"queue_id": "mine"}, "mine", NotPossibleError, "in topic mode marq never writes to the topic"),
    ],
)
def test_a_queue_that_cant_be_sent_to_is_an_error_before_spark_starts(
    installation: Callable[..., Installation],
    tmp_path: Path,
    values: dict[str, Any],
    queue: str,
    error: type[MarqError],
    message: str,
) -> None:
    target = installation(create="queue_id" not in values, **values)
    with pytest.raises(error, match=message):
        run(target.job, flights(tmp_path / "a.csv", 1), What(queue))


def test_files_that_are_not_there_are_an_error_before_spark_starts(target: Installation, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="does not exist; give a file, or a folder of files"):
        run(target.job, str(tmp_path / "none.csv"), What("orders"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(PipelineError, match="has no files"):
        run(target.job, str(tmp_path / "empty"), What("orders"))


# -- processes that are killed ----------------------------------------------------------------------------


@contextlib.contextmanager
def loading(target: Installation, path: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the job; at the end nothing of it is left."""
    process = target.start_job("load", "orders", path, "--master", "local[2]", *options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_a_job_killed_at_several_moments_and_started_twice_at_once_sends_each_row_once(
    target: Installation, tmp_path: Path
) -> None:
    count = 30_000
    path = flights(tmp_path / "a.csv", count)
    jobs = Path(target.job.path("jobs"))

    with loading(target, path) as whole:
        wait_for(lambda: [*jobs.glob("*/rows-*")], "rows are being staged")
        os.killpg(whole.pid, signal.SIGKILL)
    assert ends(target) == 0

    with loading(target, path, "--rate", "3000") as orphaned:
        wait_for(lambda: ends(target) > 2_000, "some rows are sent")
        orphaned.kill()  # its Java and its tasks find out by themselves
        reached = ends(target)
        with loading(target, path, "--rate", "1000") as first:
            wait_for(lambda: ends(target) > reached + 1_000, "the next run has gone on")
            with loading(target, path) as second:
                done = finish(second)
            ended = finish(first)
    assert (done.returncode, ended.returncode) == (0, 2), done.stderr + ended.stderr
    assert "another run of job load-" in ended.stderr
    assert ended.stderr.count("\n") == 1
    records = committed(target, count)
    assert len(records) == count
    assert not duplicates(records)
    assert {int(json.loads(record.value)["id"]) for record in records} == set(range(count))
    again = run(target.job, path, What("orders"))
    assert again == Outcome(0, count, 0)
    assert not [*jobs.glob("*/rows-*")], "what was staged is deleted when the job is done"
