"""From one version to another, with three workers and load: nothing is lost, no attempt is burned.

Another version is a checkout: `MARQ_TEST_OLD` names that of 0.1 (`git worktree add /tmp/marq-0.1 e0b5991`). A patch
of this version is a copy of it with another number.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from shutil import copyfile, copytree, ignore_patterns

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from marq import __version__
from tests.integration.cluster import ROOT, Cluster, until

pytestmark = pytest.mark.slow

OLD = os.environ.get("MARQ_TEST_OLD")
FOLDERS = ("app", "agents", "tables", "gateway", "marq", "tests")
IGNORED = ignore_patterns("__pycache__", "golden")
LOAD_PER_S = 200
QUEUES = ["work-a", "work-b"]
#: Seconds of load with each set of workers.
LOAD_S = 3.0


def no_attempt_is_burned(cluster: Cluster) -> None:
    """Each message was handed over once, as its first attempt."""
    assert {one.attempt for one in cluster.begun()} == {1}


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """Version 0.1, with handlers that write down what those of this version do."""
    for folder in FOLDERS:
        copytree(Path(str(OLD)) / folder, tmp_path / "old" / folder, ignore=IGNORED)
    copyfile(ROOT / "tests/integration/witness.py", tmp_path / "old/tests/integration/witness.py")
    return tmp_path / "old"


def take_larger_messages(cluster: Cluster) -> None:
    """What a worker of this version asks for, in a line, of a queue topic that 0.1 has made."""
    entry = ConfigEntry("max.message.bytes", "4259840", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, cluster.queue_topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(20)


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """This version with the number of a patch."""
    code = tmp_path / "patch"
    for folder in (*FOLDERS, "requirements"):
        copytree(ROOT / folder, code / folder, ignore=IGNORED)
    init = code / "marq" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', '"99.0.1"'))
    return code


def test_a_patch_goes_in_and_out_one_worker_at_a_time(kafka: str, tmp_path: Path, patched: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=4) as cluster:
        cluster.start_many(3)
        with cluster.load(QUEUES, LOAD_PER_S):
            for code, version in ((patched, "99.0.1"), (ROOT, __version__)):
                for name in ("w0", "w1", "w2"):
                    former = [w for w in cluster.running if w.folder.name == name]
                    former[0].stop()
                    former[0].ending = True
                    worker = cluster.start(name, ready=False, code=code)
                    cluster.wait_served()
                    assert f"version {version}" in worker.log
        cluster.assert_nothing_lost()
        no_attempt_is_burned(cluster)


@pytest.mark.skipif(OLD is None, reason="MARQ_TEST_OLD does not name a checkout of 0.1")
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


@pytest.mark.skipif(OLD is None, reason="MARQ_TEST_OLD does not name a checkout of 0.1")
def test_there_is_no_way_back_to_0_1_and_it_says_so(kafka: str, tmp_path: Path) -> None:
    """Once a manifest of this version is written."""
    with Cluster(kafka, tmp_path, partitions=1, checkpoint_ms=300) as cluster:
        worker = cluster.start()
        cluster.send("work-a", 20)
        cluster.assert_nothing_lost()
        until(lambda: cluster.read(f"{cluster.name}-progress-changelog"), "a manifest")
        worker.stop()
        former = cluster.start("back", ready=False, code=Path(str(OLD)))
        until(lambda: not former.running, "its end", 60)
        assert "damaged manifest" in former.log and "max_timestamp_ms" in former.log
