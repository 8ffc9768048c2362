"""The state of messages survives any end of a worker and any start of the next one."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rocksdict

from marq.core import rows as core_rows
from marq.protocol.limits import RECORD_MAX_BYTES
from tests.integration.cluster import Cluster, Seen, Worker, by_id, until

#: Settings with which messages get into the tables soon.
SMALL = {"checkpoint_ms": 200, "persist_after_ms": 300, "window_offsets": 200}


@pytest.fixture
def cluster(kafka: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(kafka, tmp_path, partitions=2, **SMALL) as cluster:
        yield cluster


def store_path(worker: Worker, table: str, partition: int) -> Path:
    """The local store of one partition of a table."""
    ending = "rows" if table == "progress" else "db"
    (path,) = worker.data_dir.glob(f"worker-0/v*/tables/{table}-{partition}.{ending}")
    return path


def rows(worker: Worker, table: str, partition: int) -> rocksdict.Rdict:
    """The same, opened; its worker must have ended."""
    return rocksdict.Rdict(str(store_path(worker, table, partition)), rocksdict.Options(raw_mode=True))


def attempts(seen: list[Seen]) -> dict[str, int]:
    """The highest attempt of each message."""
    found: dict[str, int] = {}
    for one in seen:
        found[one.id] = max(one.attempt, found.get(one.id, 0))
    return found


def fingerprint(cluster: Cluster) -> dict[int, tuple[int, ...]]:
    """The values that must be equal before and after: unfinished messages, deliveries, counters of each partition."""
    return {
        number: (
            state["in_memory"] + state["parked"],
            state["held"],
            *(state["counters"].get(name, 0) for name in ("delivered", "redelivered", "acked", "dead", "expired")),
        )
        for number, state in cluster.partition_states().items()
    }


def steady(cluster: Cluster) -> dict[int, tuple[int, ...]]:
    """The fingerprint, once it no longer changes and everything above the manifests is read."""
    before: dict[int, tuple[int, ...]] = {}

    def same() -> bool:
        nonlocal before
        now, before = before, fingerprint(cluster)
        time.sleep(0.3)
        return now == before and len(now) == cluster.partitions

    until(same, "nothing changes any more")
    return before


def fill(cluster: Cluster) -> None:
    """Messages in every state: leased, delayed, waiting without a handler, given back several times, dead, done."""
    cluster.send("work-done", 200)
    cluster.send("idle-parked", 1500, size=200)
    for turns in range(4):
        cluster.send("turn-a", 20, extra={"turns": turns})
    cluster.send("work-later", 40, headers={"marq-delay-ms": "600000"})
    cluster.send("fail-dead", 6)
    until(lambda: cluster.counters()["dead"] == 6, "the failing ones are dead")
    until(lambda: len(cluster.begun("turn-a")) == 20 * (1 + 2 + 3 + 4), "all were given back as often as they say")
    until(lambda: cluster.counters()["acked"] == 200, "the plain ones are done")


# -- restarts -----------------------------------------------------------------------------------------


def test_every_state_survives_a_restart_and_a_move_to_an_empty_store(cluster: Cluster) -> None:
    worker = cluster.start()
    fill(cluster)
    before = steady(cluster)
    assert sum(state[0] for state in before.values()) == 1500 + 80 + 40 + 6
    assert sum(s["segments"] for s in cluster.partition_states().values()) > 0, "some are in the tables"

    worker.stop()
    worker = cluster.start("w0")
    assert steady(cluster) == before, "after a restart"

    worker.stop()
    worker = cluster.start("another")
    assert steady(cluster) == before, "at another worker, from the changelogs alone"


@pytest.mark.slow
def test_every_state_survives_a_kill(cluster: Cluster) -> None:
    worker = cluster.start(session_timeout_ms=6000)
    fill(cluster)
    before = steady(cluster)
    begun = len(cluster.begun())
    worker.kill()
    cluster.start("w0", session_timeout_ms=6000)
    assert steady(cluster) == before
    assert len(cluster.begun()) == begun, "nothing that is leased, delayed or waits was delivered meanwhile"


@pytest.mark.slow
def test_attempts_go_on_where_they_were(cluster: Cluster) -> None:
    worker = cluster.start(WITNESS_TIMEOUT_MS=400_000)
    for turns in range(4):
        cluster.send("turn-a", 20, extra={"turns": turns})
    cluster.send("drop-b", 20)
    cluster.wait_begun("turn-a", 20 * (1 + 2 + 3 + 4))
    cluster.wait_begun("drop-b", 20)
    steady(cluster)
    worker.stop()
    # the next worker delivers the rest; leased messages are not delivered
    cluster.send("turn-a", 20, extra={"turns": 2})
    cluster.start("w0", WITNESS_TIMEOUT_MS=400_000)
    cluster.wait_begun("turn-a", 20 * (1 + 2 + 3 + 4 + 3))
    steady(cluster)
    for seen in by_id(cluster.begun()).values():
        assert [s.attempt for s in seen] == list(range(1, len(seen) + 1))
    assert len(cluster.begun("drop-b")) == 20


# -- a local store that is not what it should be ------------------------------------------------------


def fill_tables(cluster: Cluster) -> dict[int, tuple[int, ...]]:
    cluster.send("idle-x", 1200, size=200)
    cluster.send("hold-x", 50)
    cluster.wait_begun("hold-x", 50)
    until(
        lambda: (
            len(cluster.partition_states()) == cluster.partitions
            and all(s["persisted"] > 300 for s in cluster.partition_states().values())
        ),
        "payloads are in the tables",
    )
    return steady(cluster)


def test_rows_missing_rows_damaged_and_files_damaged_are_filled_again_from_the_changelog(
    kafka: str, tmp_path: Path
) -> None:
    with Cluster(kafka, tmp_path, partitions=4, **SMALL) as cluster:
        worker = cluster.start()
        before = fill_tables(cluster)
        worker.stop()
        with rows(worker, "messages", 0) as store:
            del store[min(key for key in store.keys() if key.startswith(b"0/"))]  # type: ignore[arg-type]  # noqa: SIM118
        with rows(worker, "markers", 1) as store:
            key = max(key for key in store.keys() if key.startswith(b"1/"))  # type: ignore[arg-type]  # noqa: SIM118
            store[key] = store[key][:-2] + b"!!"  # type: ignore[index]
        (store_path(worker, "messages", 2) / "CURRENT").write_bytes(b"nonsense\n")
        path = store_path(worker, "progress", 3)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 3] + bytes(50) + content[len(content) // 3 + 50 :])
        worker = cluster.start("w0")
        assert steady(cluster) == before
        assert {n for n in range(4) if f"Recovery of partition {n}" in worker.log} >= {0, 1}
        assert {n for n in range(4) if f"Store of partition {n} is damaged" in worker.log} == {2, 3}


# -- little memory ------------------------------------------------------------------------------------


def test_rows_that_kafka_refuses_put_off_the_checkpoints_of_one_partition_until_it_takes_them(
    kafka: str, tmp_path: Path
) -> None:
    with Cluster(kafka, tmp_path, partitions=2, checkpoint_ms=200, persist_after_ms=200) as cluster:
        changelog = cluster.create_topics().changelogs["messages"]
        worker = cluster.start()
        cluster.configure_topics([changelog], "max.message.bytes", "20000")
        cluster.send("work-later", 30, partition=0, headers={"marq-delay-ms": "20000"}, size=5_000)
        cluster.send("work-later", 30, partition=1, headers={"marq-delay-ms": "20000"})

        until(lambda: changelog in worker.partitions()[0].get("reason", ""), "the reason is shown")
        assert "set max.message.bytes" in worker.partitions()[0]["reason"]
        assert worker.get("/health/ready")[1]["stalled"] == [0]
        assert worker.get("/v1/stats")[1]["stalled"]["0"]["topic"] == changelog
        cluster.send("work-a", 50, partition=0)
        cluster.send("work-a", 50, partition=1)
        until(lambda: len(cluster.finished("work-a")) == 100, "both partitions are served")
        assert worker.serving() == {0, 1}
        until(lambda: not worker.partitions()[1]["unsaved"], "the other partition makes checkpoints")
        assert worker.partitions()[0]["unsaved"]

        cluster.configure_topics([changelog], "max.message.bytes", str(RECORD_MAX_BYTES))
        until(lambda: not worker.partitions()[0].get("reason"), "the reason is gone")
        until(lambda: not worker.partitions()[0]["unsaved"], "everything is in a checkpoint")
        worker.kill()
        cluster.wipe(worker)
        cluster.start()
        cluster.assert_nothing_lost()
        assert not cluster.errors_logged()


def test_a_worker_that_is_killed_while_kafka_refuses_its_rows_loses_nothing(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=1, checkpoint_ms=200, persist_after_ms=200) as cluster:
        changelog = cluster.create_topics().changelogs["messages"]
        worker = cluster.start("one")
        cluster.configure_topics([changelog], "max.message.bytes", "20000")
        cluster.send("work-a", 50)
        cluster.send("work-later", 30, headers={"marq-delay-ms": "10000"}, size=5_000)
        until(lambda: changelog in worker.partitions()[0].get("reason", ""), "the reason is shown")
        worker.kill()
        cluster.configure_topics([changelog], "max.message.bytes", str(RECORD_MAX_BYTES))
        cluster.start("one")
        cluster.assert_nothing_lost()
        assert not cluster.errors_logged()


def test_a_queue_that_nobody_receives_from_blocks_no_other_and_stays_out_of_memory(kafka: str, tmp_path: Path) -> None:
    limits = {"memory_bytes": 2 << 20, "read_ahead_bytes": 1 << 19}
    with Cluster(kafka, tmp_path, partitions=2, **SMALL | limits) as cluster:
        cluster.create_topics()
        for _ in range(4):
            cluster.send("idle-a", 1500, size=2000)  # 12 MB in all
            cluster.send("work-a", 50)
        worker = cluster.start()
        until(lambda: cluster.counters()["acked"] == 200, "the other queue is done")
        held = sum(s["in_memory"] + s["parked"] for s in cluster.partition_states().values())
        assert held == 6000
        assert sum(s["bytes"] for s in cluster.partition_states().values()) < 4 << 20
        before = steady(cluster)
        worker.stop()
        cluster.start("w0")
        assert steady(cluster) == before


# -- leaving and joining ------------------------------------------------------------------------------


def test_a_worker_that_is_stopped_hands_over_within_5_seconds_and_counts_only_what_it_delivered(
    kafka: str, tmp_path: Path
) -> None:
    with Cluster(kafka, tmp_path, partitions=4) as cluster:
        leaving, staying = cluster.start_many(2)
        for worker in (leaving, staying):
            assert worker.serving()
        # slow enough that many wait their turn in the worker
        cluster.send("thread-a", 200)
        with cluster.load(["work-a", "bulk-a"], 300):
            time.sleep(0.7)
            leaving.signal(signal.SIGTERM)
            began = time.monotonic()
            until(lambda: len(staying.serving()) == 4, "the other serves all partitions", 10)
            taken_s = time.monotonic() - began
            leaving.process.wait(10)
            ended_s = time.monotonic() - began
        total = cluster.assert_nothing_lost()
    print(f"taken over after {taken_s:.2f} s, process ended after {ended_s:.2f} s")
    assert taken_s < 5
    assert ended_s < 5
    assert leaving.process.returncode == 0
    assert total.duplicates == 0
    assert {s.attempt for s in cluster.begun()} == {1}, "what was taken ahead and given back was not counted"


@pytest.mark.slow
def test_a_handler_that_runs_on_does_not_hold_up_the_end_of_its_worker(cluster: Cluster) -> None:
    worker = cluster.start(WITNESS_WORK_S=60)
    cluster.send("work-long", 3)
    cluster.wait_begun("work-long", 3)
    assert worker.stop() < 6
    cluster.start("w0")
    total = cluster.assert_nothing_lost()
    assert total.redelivered == 3
    assert sorted(attempts(cluster.begun()).values()) == [2, 2, 2], "a call that was broken off is counted"


def test_workers_come_and_go_under_load(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=4) as cluster:
        first = cluster.start()
        with cluster.load(["work-a", "bulk-a"], 500):
            second = cluster.start()
            until(lambda: len(first.serving()) == len(second.serving()) == 2, "both have half of the partitions")
            time.sleep(0.5)
            first.stop()
            until(lambda: len(second.serving()) == 4, "the second has all")
            time.sleep(0.5)
        total = cluster.assert_nothing_lost()
        assert total.duplicates == 0


@pytest.mark.slow
def test_a_worker_without_a_partition_is_ready_and_steps_in(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=1) as cluster:
        workers = cluster.start_many(2)
        (serving,) = (w for w in workers if w.serving())
        (idle,) = (w for w in workers if not w.serving())
        assert idle.ready()
        cluster.send("work-a", 100)
        cluster.assert_nothing_lost()
        serving.stop()
        until(lambda: idle.serving() == {0}, "the idle worker has stepped in")
        cluster.send("work-a", 100)
        assert cluster.assert_nothing_lost().duplicates == 0


# -- checkpoints --------------------------------------------------------------------------------------


def manifests(cluster: Cluster) -> dict[int, core_rows.Manifest]:
    """The newest manifest of each partition, by its changelog."""
    newest: dict[int, Any] = {}
    for record in cluster.read(f"{cluster.name}-progress-changelog", cluster.partitions):
        if record.value is not None:
            manifest = core_rows.decode_manifest(record.value)
            known = newest.get(record.partition)
            if known is None or manifest.epoch >= known.epoch:
                newest[record.partition] = manifest
    return newest


def live_rows(cluster: Cluster, table: str) -> dict[bytes, bytes]:
    """The rows of a table as its changelog has them."""
    found: dict[bytes, bytes] = {}
    for record in cluster.read(f"{cluster.name}-{table}-changelog", cluster.partitions):
        if record.value is None:
            found.pop(record.key, None)
        else:
            found[record.key] = record.value
    return found


def test_checkpoints_carry_the_committed_offsets_and_leave_no_rows_behind(cluster: Cluster) -> None:
    cluster.start(WITNESS_TIMEOUT_MS=1000, WITNESS_ACK=1)
    positions = {cluster.queue_topic: "position", f"{cluster.name}.markers": "markers_position"}
    progress = set()
    with cluster.load(["work-a", "drop-a", "turn-a"], 400):
        for _ in range(6):
            time.sleep(0.4)
            committed = cluster.committed()
            known = manifests(cluster)  # read after the commits
            for (topic, partition), offset in committed.items():
                if topic in positions:
                    assert offset <= getattr(known[partition], positions[topic]), (topic, partition)
            progress.add(tuple(m.position for m in known.values()))
            assert sum(len(live_rows(cluster, table)) for table in ("messages", "markers")) < 100
    assert len(progress) > 3, "checkpoints were made"
    cluster.assert_nothing_lost()
    until(
        lambda: not live_rows(cluster, "messages") and not live_rows(cluster, "markers"),
        "the rows of what is finished are deleted",
    )
    assert len(live_rows(cluster, "progress")) == cluster.partitions
    ends = {(cluster.queue_topic, partition): end for partition, end in cluster.ends().items()}
    until(lambda: ends.items() <= cluster.committed().items(), "the committed offsets are at the end")
