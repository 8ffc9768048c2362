"""Jobs as their users start them: as a process, or on a cluster."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from app.kafka.broker import LOOPBACK, free_port
from marq.core.markers import Tick
from pipeline import archive
from pipeline.jars import java_home
from pipeline.java import JVM_OPTIONS
from tests.pipeline.lab import ROOT, Installation, finish, start_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., Installation]


def places(spark: SparkSession, here: Installation, table: str) -> Counter[tuple[int, int]]:
    """How often each record is in a table."""
    found = spark.read.format("delta").load(here.job.path(table)).select("partition", "offset").collect()
    return Counter((row.partition, row.offset) for row in found)


def expected(here: Installation, topic: str) -> Counter[tuple[int, int]]:
    """Each record of a topic, once."""
    return Counter((n, o) for n, (start, end) in here.kafka.bounds(topic).items() for o in range(start, end))


@contextmanager
def traffic(here: Installation) -> Iterator[None]:
    """Records in both topics, all the while."""
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for partition in range(here.settings.partitions):
                here.send(partition, *[(b"q", os.urandom(20))] * 20, (None, b"poison"))
                here.mark(partition, [Tick()])
            time.sleep(0.05)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_help_needs_no_java() -> None:
    done = finish(start_job("--help", PATH=""))
    assert done.returncode == 0
    assert "archive" in done.stdout


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a failed job, which is one line and status 2."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("marq: ")
    return lines[0]


#: Each job with its required arguments.
JOBS = (
    ("archive", "--once"),
    ("audit",),
    ("load", "orders", __file__, "--format", "csv"),
    ("replay", "--where", "true"),
    ("redrive", "orders.dead"),
)


def test_a_kafka_that_is_away_is_one_line(tmp_path: Path) -> None:
    away = {"MARQ_KAFKA": f"kafka://{LOOPBACK}:{free_port()}", "MARQ_DATA_DIR": str(tmp_path)}
    given = start_job(
        "report", "--kafka", away["MARQ_KAFKA"], MARQ_DATA_DIR=str(tmp_path)
    )  # which needs the archive alone
    for process in [*(start_job(*job, **away) for job in JOBS), given]:
        assert re.search(r"can't reach Kafka at .*refused.*check that it runs", one_line(finish(process)))
    assert list(tmp_path.iterdir()) == []


def test_without_any_kafka_it_says_how_to_start_one(tmp_path: Path) -> None:
    assert "python -m app broker" in one_line(finish(start_job("archive", MARQ_DATA_DIR=str(tmp_path))))


def test_a_topic_that_does_not_exist_is_one_line(installation: Make) -> None:
    here = installation(create=False)
    for process in [here.start_job(*job) for job in JOBS]:
        assert re.search(rf"topic {here.settings.name}\.queues? does not exist", one_line(finish(process)))
    assert not Path(here.data).exists()


def test_a_setting_of_spark_is_checked(installation: Make) -> None:
    here = installation(create=False)
    assert "--set memory=1 is not of the form spark.KEY=VALUE" in one_line(here.run_job("archive", "--set", "memory=1"))


def test_a_java_that_is_none_is_one_line(installation: Make) -> None:
    here = installation()
    assert "has no bin/java" in one_line(here.run_job("archive", "--once", JAVA_HOME=str(here.folder)))


def test_an_error_inside_spark_is_one_line_too(installation: Make) -> None:
    here = installation()
    Path(here.data).parent.mkdir(exist_ok=True)
    Path(here.data).write_text("a file")
    text = one_line(here.run_job("archive", "--once"))
    assert here.data in text


@pytest.mark.slow
def test_a_java_that_has_ended_is_one_line_too(installation: Make) -> None:
    here = installation()
    job = here.start_job("archive", "--interval", "0.2")
    assert job.stdout is not None
    while not job.stdout.readline().startswith("Archiving"):
        assert job.poll() is None
    (java,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(java), signal.SIGKILL)
    assert "Java in which Spark ran has ended" in one_line(finish(job))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while Java starts", "while it archives"])
def test_a_signal_to_its_process_group_stops_it_in_order(installation: Make, moment: str) -> None:
    """As a terminal, systemd or a container sends it: to the job, its Java and the Python workers of that."""
    here = installation()
    for _ in range(20):
        here.send(0, *[(b"q", b"x")] * 5_000)
    job = here.start_job("archive", "--once")
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while not children.read_text():
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    if moment == "while it archives":
        assert job.stdout is not None
        assert job.stdout.readline().startswith("Archiving")
        time.sleep(1)
    os.killpg(job.pid, signal.SIGTERM)
    done = finish(job)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"Archived [\d,]+ messages?, [\d,]+ markers?(, .*)?; asked to stop", done.stdout.splitlines()[-1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 6])
def test_killed_at_any_moment_it_loses_nothing_and_doubles_nothing(
    spark: SparkSession, installation: Make, kills: int
) -> None:
    here = installation()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    with traffic(here):
        for _ in range(kills):
            job = here.start_job("archive", "--interval", "0")
            assert job.stdout is not None
            # the line that says that streaming begins; before it, a kill proves little
            while not job.stdout.readline().startswith("Archiving"):
                assert job.poll() is None, job.communicate()
            time.sleep(moments.uniform(0.5, 6))
            os.kill(job.pid, signal.SIGKILL)
            job.communicate()
        job = here.start_job("archive", "--interval", "0")
        assert job.stdout is not None
        job.stdout.readline()
    settings = here.settings
    ends = {topic: expected(here, topic) for topic in (settings.queue_topic, settings.markers_topic)}
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        committed = here.kafka.committed(settings.archive_group)
        if all({n: o for n, (_, o) in here.kafka.bounds(t).items()} == committed.get(t) for t in ends):
            break
        time.sleep(0.2)
    # asked to stop, it ends in order
    job.send_signal(signal.SIGTERM)
    done = finish(job)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Archived " in done.stdout
    assert places(spark, here, archive.MESSAGES) == ends[settings.queue_topic]
    assert places(spark, here, archive.MARKERS) == ends[settings.markers_topic]
    messages = spark.read.format("delta").load(here.job.path(archive.MESSAGES))
    poison = Counter((r.partition, r.offset) for r in messages.where("queue is null").collect())
    assert places(spark, here, archive.MALFORMED) == poison
    assert poison


#: For a machine that runs driver, master and worker beside it.
SMALL_EXECUTOR = [
    *("--conf", "spark.executor.memory=512m"),
    *("--conf", "spark.cores.max=2"),
    *("--conf", f"spark.executor.extraJavaOptions={JVM_OPTIONS}"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A standalone master with one worker; its URL.

    Its executors are started in a folder without our code.
    """
    folder = tmp_path / "cluster"
    folder.mkdir()
    port, ui = free_port(), free_port()
    launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = os.environ | {
        "JAVA_HOME": str(java_home()),
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_JAVA_OPTS": JVM_OPTIONS,
    }
    master = f"spark://{LOOPBACK}:{port}"
    commands = (
        ["master.Master", "--host", LOOPBACK, "--port", str(port), "--webui-port", str(ui)],
        ["worker.Worker", "--host", LOOPBACK, "--webui-port", "0", "-c", "2", "-m", "1g", master],
    )
    processes = []
    try:
        for name, *arguments in commands:
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [str(launcher), f"org.apache.spark.deploy.{name}", *arguments],
                        env=environment,
                        cwd=folder,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + 90
        while not _has_worker(ui):
            assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in folder.glob("*.log")]
            time.sleep(0.2)
        yield master
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def _has_worker(ui: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{ui}/json/", timeout=2) as answer:
            return bool(json.load(answer)["workers"])
    except OSError:
        return False


@pytest.mark.slow
def test_spark_submit_runs_it_on_a_cluster(spark: SparkSession, installation: Make, cluster: str) -> None:
    here = installation()
    here.send(0, *[(b"q", b"%d" % i) for i in range(50)], (None, b"poison"))
    here.mark(1, [Tick()], [Tick()])
    options = subprocess.run(
        [sys.executable, "-m", "pipeline", "submit-options"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    job = ["pipeline/__main__.py", "archive", "--once"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_") or k == "MARQ_CACHE_DIR"}
    submitted = subprocess.run(
        [submit, "--master", cluster, *SMALL_EXECUTOR, *shlex.split(options), *job],
        cwd=ROOT,
        env=environment
        | here.environment
        | {"JAVA_HOME": str(java_home()), "SPARK_LOCAL_IP": LOOPBACK, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert submitted.returncode == 0, submitted.stdout[-3000:] + submitted.stderr[-3000:]
    assert places(spark, here, archive.MESSAGES) == expected(here, here.settings.queue_topic)
    assert places(spark, here, archive.MARKERS) == expected(here, here.settings.markers_topic)
    assert places(spark, here, archive.MALFORMED) == Counter({(0, 50): 1})


@pytest.mark.slow
def test_it_runs_on_the_cluster_that_master_names(spark: SparkSession, installation: Make, cluster: str) -> None:
    here = installation()
    here.mark(1, [Tick()], [Tick()])
    conf = ["--set" if argument == "--conf" else argument for argument in SMALL_EXECUTOR]
    done = finish(here.start_job("archive", "--once", "--master", cluster, *conf, SPARK_LOCAL_IP=LOOPBACK), 250)
    assert done.returncode == 0, done.stderr
    assert places(spark, here, archive.MARKERS) == expected(here, here.settings.markers_topic)
