"""One partition of a real cluster can't be written to, because a broker is down: the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from app.settings import Settings
from tests.faults.brokers import Brokers
from tests.integration.cluster import Cluster, Worker, until
from tests.integration.json_client import Client

LEASE_MS = 600_000
HURT = 0  # the partition
PARTITIONS = 4
#: Messages of each partition that are in work when the broker goes.
HELD = 5


class Case(NamedTuple):
    """Where replicas lie, as many of each partition. Broker 3 goes, which has one of partition 0 alone."""

    replicas: list[list[int]]
    min_in_sync: int


CASES = {
    "below its minimum of in-sync replicas": Case([[1, 3], [1, 2], [2, 1], [1, 2]], 2),
    "without a leader": Case([[3], [1], [2], [1]], 1),
}


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with Brokers(tmp_path / "kafka") as brokers:
        yield brokers


class Lab(Cluster):
    """Workers on the topics of a case."""

    def __init__(self, brokers: Brokers, folder: Path, case: Case) -> None:
        replication = min(map(len, case.replicas))
        settings = {"replication": replication, "session_timeout_ms": 6000, "checkpoint_ms": 300}
        super().__init__(brokers.bootstrap, folder, partitions=PARTITIONS, **settings)
        self.brokers, self.case = brokers, case

    def create(self) -> None:
        settings = Settings(kafka=f"kafka://{self.bootstrap}", name=self.name)
        self.run(self.brokers.create(settings, self.case.replicas, self.case.min_in_sync))

    def stalled(self, worker: Worker) -> set[str]:
        """Partitions that a worker says are stalled."""
        status, stats = worker.get("/v1/stats")
        return set(stats["stalled"]) if status == 200 else set()

    def has_share(self, worker: Worker) -> bool:
        """The group has assigned it partitions, and every partition that can be served is served."""
        state = worker.get("/health/ready")[1] or {}
        served = {number for one in self.running for number in one.serving()}
        return bool(state.get("serving") or state.get("unserved")) and {1, 2, 3} <= served

    def handled(self, number: int, count: int = 20) -> None:
        """Messages of a partition are handled, and acknowledged, now."""
        before, acked = len(self.finished("work-a")), self.acked(number)
        self.send("work-a", count, partition=number)
        until(lambda: len(self.finished("work-a")) >= before + count, f"messages of {number} are handled", 60)
        until(lambda: self.acked(number) >= acked + count, f"messages of {number} are acknowledged", 60)

    def acked(self, number: int) -> int:
        return int(self.partition_states().get(number, {"counters": {}})["counters"].get("acked", 0))


def fill(client: Client, queue: str, count: int) -> None:
    """Send the same number of messages to each partition: the messages of one request go to one partition."""
    filled = [0] * PARTITIONS
    while min(filled) < count:
        results = client.send(queue, *[b"%d" % i for i in range(count)])
        filled[results[0]["partition"]] += count


def take(client: Client, queue: str, wanted: int) -> list[Any]:
    """Messages that stay in work."""
    taken: list[Any] = []
    while len(taken) < wanted and (messages := client.receive(queue, 100, 5_000, visibility_timeout_ms=LEASE_MS)):
        taken += messages
    return taken


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_partition_that_can_not_be_written_to_holds_up_no_other(brokers: Brokers, tmp_path: Path, name: str) -> None:
    with Lab(brokers, tmp_path, CASES[name]) as lab:
        lab.create()
        workers = lab.start_many(2)
        client = Client(workers[0].url)
        fill(client, "held", HELD)
        fill(client, "mixed", HELD)
        held = take(client, "held", HELD * PARTITIONS)
        hurt = [message for message in held if message["partition"] == HURT]
        others = [message for message in held if message["partition"] != HURT]
        assert hurt and others

        brokers[3].kill()
        refused: list[Any] = []
        waiting = threading.Thread(target=lambda: refused.extend(Client(workers[0].url).ack(*hurt)))
        waiting.start()
        for number in (1, 2, 3):  # Kafka still waits for the replicas of the other
            lab.handled(number)
        first = f"the ack of partition {HURT} {'waits' if waiting.is_alive() else 'was answered'} meanwhile"
        waiting.join(60)
        assert refused and all("error" in result for result in refused), refused
        until(lambda: str(HURT) in lab.stalled(workers[0]), "the partition is stalled", 60)
        assert lab.stalled(workers[0]) == lab.stalled(workers[1]) == {str(HURT)}

        assert client.ack(*others) == [{"ok": True}] * len(others)
        sent = [client.send("work-b", b"{}")[0]["partition"] for _ in range(2 * PARTITIONS)]
        assert HURT not in sent
        there = client.drain("mixed", HELD * (PARTITIONS - 1), 5_000)
        assert {message["partition"] for message in there} == {1, 2, 3}
        assert client.drain("mixed", 1, 1_000) == []
        assert all(worker.ready() for worker in workers)
        metrics = client.request("GET", "/metrics").body.decode()
        assert f'marq_partition_stalled_seconds{{partition="{HURT}"}}' in metrics
        began, cpu = time.monotonic(), sum(cpu_s(worker) for worker in workers)
        time.sleep(5)
        share = (sum(cpu_s(worker) for worker in workers) - cpu) / (time.monotonic() - began)

        joining = lab.start("joining", ready=False)
        until(lambda: lab.has_share(joining), "a worker that joins has a share", 60)
        for number in (1, 2, 3):
            lab.handled(number, 5)

        brokers[3].start()
        until(lambda: not any(lab.stalled(worker) for worker in lab.running), "no partition is stalled", 90)
        lab.wait_served(90)
        client = Client(workers[0].url)
        until(lambda: {"ok": True} in client.ack(*hurt[:1]), "the ack is taken", 60)
        assert client.ack(*hurt) == [{"ok": True}] * len(hurt)
        rest = client.drain("mixed", HELD, 10_000)
        assert {message["partition"] for message in rest} == {HURT} and len(rest) == HELD
        lab.handled(HURT)
        assert client.drain("held", 1, 1_000) == []
        assert {sent.id for sent in lab.sent} <= {one.id for one in lab.finished()}
        print(f"{name}: {first}; {share:.2f} of a processor for two idle workers while it was stalled")


def cpu_s(worker: Worker) -> float:
    """Seconds of processor time that it has used."""
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
