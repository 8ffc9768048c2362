"""From one version to another and back, with three workers and load: nothing is lost, no attempt is burned.

Version 0.1 is the code of its commit, from the history of this repository. A patch of this version is a copy of it
with another number.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from shutil import copyfile, copytree, ignore_patterns
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from marq import __version__
from marq.core.markers import Start, decode
from marq.core.ranges import offsets_in
from tests.integration.cluster import ROOT, Cluster, Worker, until
from tests.integration.json_client import Client

#: The commit of version 0.1.0.
RELEASED = "e0b59913835af6662fd512b2bdf241041db29809"
#: A commit between 0.1 and 0.2.
URL_ALONE = "3c996ff"
FOLDERS = ("app", "agents", "tables", "gateway", "marq", "tests")
IGNORED = ignore_patterns("__pycache__", "golden")
LOAD_PER_S = 200
QUEUES = ["work-a", "work-b"]
#: Seconds of load with each set of workers.
LOAD_S = 3.0
#: Milliseconds between checkpoints of a worker that may have to give its partitions back to 0.1 (docs/operations.md).
HELD_OFF_MS = 86_400_000


def no_attempt_is_burned(cluster: Cluster) -> None:
    """Each message was handed over once, as its first attempt."""
    assert {one.attempt for one in cluster.begun()} == {1}


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """Version 0.1, with handlers that write down what those of this version do."""
    if subprocess.run(["git", "cat-file", "-e", RELEASED], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("the repository has no history, and so no version 0.1")
    code = tmp_path / "old"
    code.mkdir()
    packed = subprocess.run(["git", "archive", RELEASED, *FOLDERS], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(code)], input=packed, check=True)
    copyfile(ROOT / "tests/integration/witness.py", code / "tests/integration/witness.py")
    return code


def replaced(cluster: Cluster, name: str, code: Path, **settings: Any) -> Worker:
    """Stop a worker, and start one of another version in its place. Returns when all partitions are served."""
    (former,) = [worker for worker in cluster.running if worker.folder.name == name]
    former.stop()
    former.ending = True
    worker = cluster.start(name, ready=False, code=code, **settings)
    cluster.wait_served()
    return worker


def take_larger_messages(cluster: Cluster) -> None:
    """What a worker of this version asks for, in a line, of a queue topic that 0.1 has made."""
    entry = ConfigEntry("max.message.bytes", "4259840", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, cluster.queue_topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(20)


@pytest.fixture
def without_identities(tmp_path: Path) -> Path:
    """The last commit whose workers announce a URL alone."""
    if subprocess.run(["git", "cat-file", "-e", URL_ALONE], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("the repository has no history")
    code = tmp_path / "before"
    code.mkdir()
    packed = subprocess.run(["git", "archive", URL_ALONE, *FOLDERS], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(code)], input=packed, check=True)
    return code


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """This version with the number of a patch."""
    code = tmp_path / "patch"
    for folder in (*FOLDERS, "requirements"):
        copytree(ROOT / folder, code / folder, ignore=IGNORED)
    init = code / "marq" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', '"99.0.1"'))
    return code


@pytest.mark.slow
def test_a_patch_goes_in_and_out_one_worker_at_a_time(kafka: str, tmp_path: Path, patched: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=4) as cluster:
        cluster.start_many(3)
        with cluster.load(QUEUES, LOAD_PER_S):
            for code, version in ((patched, "99.0.1"), (ROOT, __version__)):
                for name in ("w0", "w1", "w2"):
                    assert f"version {version}" in replaced(cluster, name, code).log
        cluster.assert_nothing_lost()
        no_attempt_is_burned(cluster)


def burned_by(cluster: Cluster) -> set[tuple[int, int]]:
    """Partition and epoch of the starts that counted an attempt and handed nothing over."""
    again = {(one.partition, one.offset) for one in cluster.begun() if one.attempt > 1}
    starts: dict[tuple[int, int], list[int]] = {place: [] for place in again}
    for record in cluster.read(f"{cluster.name}.markers", cluster.partitions):
        for marker in decode(record.value).markers:
            for offset in offsets_in(marker.offsets) if isinstance(marker, Start) else ():
                if (record.partition, offset) in again:
                    starts[record.partition, offset].append(marker.epoch)
    return {(partition, epoch) for (partition, _), epochs in starts.items() for epoch in epochs[:-1]}


def epochs_of(former: Path, cluster: Cluster) -> set[tuple[int, int]]:
    """The partitions that workers of 0.1 have served, and in which epochs."""
    logs = {worker.log for worker in cluster.workers if worker.code == former}  # those of a name share a log
    return {
        (int(n), int(epoch)) for log in logs for n, epoch in re.findall(r"Serving partition (\d+), epoch (\d+)", log)
    }


def test_this_version_goes_on_where_0_1_was_and_the_other_way_round(kafka: str, tmp_path: Path, former: Path) -> None:
    """One worker after the other: in short what the next test does."""
    with Cluster(kafka, tmp_path, partitions=1, checkpoint_ms=300) as cluster:
        cluster.start("w", ready=False, code=former)
        cluster.wait_served()
        take_larger_messages(cluster)
        cluster.send("work-a", 20)
        for code, settings in ((ROOT, {"checkpoint_ms": HELD_OFF_MS}), (former, {})):
            replaced(cluster, "w", code, **settings)
            cluster.send("work-a", 20)
        total = cluster.assert_nothing_lost()
        assert total.sent == 60
        assert burned_by(cluster) <= epochs_of(former, cluster)


@pytest.mark.slow
def test_this_version_takes_the_place_of_0_1_one_worker_at_a_time_and_gives_it_back(
    kafka: str, tmp_path: Path, former: Path
) -> None:
    """While its checkpoints are held off, all that it writes is markers, which 0.1 reads.

    Version 0.1 burns attempts when partitions leave it, in a cluster of its own, too; this version burns none.
    """
    with Cluster(kafka, tmp_path, partitions=4, checkpoint_ms=300) as cluster:
        for _ in range(3):
            cluster.start(ready=False, code=former)
        cluster.wait_served()
        take_larger_messages(cluster)
        with cluster.load(QUEUES, LOAD_PER_S):
            time.sleep(LOAD_S)
            for name in ("w0", "w1", "w2"):
                replaced(cluster, name, ROOT, checkpoint_ms=HELD_OFF_MS)
                time.sleep(LOAD_S / 3)
            for name in ("w1", "w2", "w0"):
                replaced(cluster, name, former)
                time.sleep(LOAD_S / 3)
        cluster.assert_nothing_lost()
        assert burned_by(cluster) <= epochs_of(former, cluster)


@pytest.mark.slow
def test_all_workers_of_0_1_stop_and_those_of_this_version_go_on(kafka: str, tmp_path: Path, former: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=4, checkpoint_ms=300) as cluster:
        old = [cluster.start(ready=False, code=former) for _ in range(3)]
        cluster.wait_served()
        with cluster.load(QUEUES, LOAD_PER_S):
            time.sleep(LOAD_S)
            for worker in old:
                worker.stop()
            take_larger_messages(cluster)
            for name in ("w0", "w1", "w2"):
                cluster.start(name, ready=False)
            cluster.wait_served()
            time.sleep(LOAD_S)
        cluster.assert_nothing_lost()
        no_attempt_is_burned(cluster)


@pytest.mark.slow
def test_there_is_no_way_back_to_0_1_and_it_says_so(kafka: str, tmp_path: Path, former: Path) -> None:
    """Once a manifest of this version is written."""
    with Cluster(kafka, tmp_path, partitions=1, checkpoint_ms=300) as cluster:
        worker = cluster.start()
        cluster.send("work-a", 20)
        cluster.assert_nothing_lost()
        until(lambda: cluster.read(f"{cluster.name}-progress-changelog"), "a manifest")
        worker.stop()
        back = cluster.start("back", ready=False, code=former)
        until(lambda: not back.running, "its end", 60)
        assert "damaged manifest" in back.log and "max_timestamp_ms" in back.log


@pytest.mark.slow
@pytest.mark.parametrize("leader", ["before", "this"])
def test_workers_that_announce_a_url_alone_and_those_with_an_identity_reach_each_other(
    kafka: str, tmp_path: Path, without_identities: Path, leader: str
) -> None:
    codes = (without_identities, ROOT) if leader == "before" else (ROOT, without_identities)
    with Cluster(kafka, tmp_path, partitions=4, handlers="") as cluster:
        workers = [cluster.start(ready=index == 0, code=code) for index, code in enumerate(codes)]
        cluster.wait_served()
        assert all(worker.serving() for worker in workers)
        for worker in workers:
            queue = f"of-{worker.folder.name}"
            cluster.send(queue, 40)
            taken: list[Any] = []
            while len(taken) < 40 and (messages := Client(worker.url).receive(queue, 10, 3_000)):
                taken += messages
            assert {message["partition"] for message in taken} == {0, 1, 2, 3}
            told = worker.get("/v1/workers")[1]
            assert (len(told["workers"]), told["missing"], told.get("troubles", [])) == (2, [], [])
