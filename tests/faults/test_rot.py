"""Bits flip on the disks of brokers, and segments lose their ends: what any replica has whole is delivered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings import Settings
from tests.faults import rot
from tests.faults.brokers import IDS, Brokers
from tests.integration.cluster import Cluster, until

#: Messages that are sent together, as one batch.
TOGETHER = 20


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with Brokers(tmp_path_factory.mktemp("rot") / "kafka") as brokers:
        yield brokers


class Lab(Cluster):
    """Workers on topics with one partition, which broker 1 leads; the brokers have all of it."""

    def __init__(self, brokers: Brokers, folder: Path) -> None:
        super().__init__(brokers.bootstrap, folder, partitions=1, replication=2, checkpoint_ms=300)
        self.brokers = brokers

    def create(self) -> None:
        settings = Settings(kafka=f"kafka://{self.bootstrap}", name=self.name)
        self.run(self.brokers.create(settings, [list(IDS)], 2))

    def wait_copied(self, topic: str, offset: int) -> None:
        """Wait until all brokers have an offset on their disks."""
        for n in IDS:
            until(
                lambda n=n: any(b.last >= offset for b in rot.batches(self.brokers[n], topic, 0)),
                f"broker {n} has offset {offset} of {topic}",
            )

    def handled(self) -> set[str]:
        return {one.id for one in self.finished()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("damaged", [(1,), (1, 2)], ids=["leader", "leader and a follower"])
def test_what_one_replica_has_whole_is_delivered_as_if_nothing_had_been(
    brokers: Brokers, tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    with Lab(brokers, tmp_path) as lab:
        lab.create()
        for _ in range(3):
            lab.send("work-a", TOGETHER, partition=0)
        lab.wait_copied(lab.queue_topic, 3 * TOGETHER - 1)
        for n in damaged:
            rot.flip(brokers[n], lab.queue_topic, 0, TOGETHER + 5)

        worker = lab.start()
        until(lambda: len(lab.handled()) == 3 * TOGETHER, "all messages are handled", 60)

        assert f"{lab.queue_topic}:0 [{TOGETHER}, {2 * TOGETHER}) is damaged" in worker.log
        assert f"read from broker {3 if len(damaged) > 1 else 2}" in worker.log
        assert "oison" not in worker.log


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_no_replica_has_whole_is_named_and_holds_up_nothing_until_it_is_read(
    brokers: Brokers, tmp_path: Path
) -> None:
    with Lab(brokers, tmp_path) as lab:
        lab.create()
        for _ in range(3):
            lab.send("work-a", TOGETHER, partition=0)
        lab.wait_copied(lab.queue_topic, 3 * TOGETHER - 1)
        for n in IDS:
            rot.flip(brokers[n], lab.queue_topic, 0, TOGETHER + 5)
        ids = [sent.id for sent in lab.sent]

        worker = lab.start()
        until(lambda: len(lab.handled()) == 2 * TOGETHER, "the messages around it are handled", 60)
        assert f"{lab.queue_topic}:0 [{TOGETHER}, {2 * TOGETHER}) can't be read, no replica has it whole" in worker.log
        assert "oison" not in worker.log
        assert lab.handled() == {*ids[:TOGETHER], *ids[2 * TOGETHER :]}

        # the next owner knows, too, and acknowledges what comes behind
        worker.kill()
        worker = lab.start()
        lab.send("work-a", TOGETHER, partition=0)
        until(lambda: len(lab.handled()) == 3 * TOGETHER, "later messages are handled", 60)
        until(lambda: worker.partitions()[0]["unreadable"] == [[TOGETHER, 2 * TOGETHER]], "it is named")

        rot.flip(brokers[2], lab.queue_topic, 0, TOGETHER + 5)  # a disk has it whole again
        until(lambda: len(lab.handled()) == 4 * TOGETHER, "what was unreadable is handled", 150)
        until(lambda: worker.partitions()[0]["unreadable"] == [], "nothing is named")
        assert len(lab.finished()) == 4 * TOGETHER


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_partition_whose_markers_no_replica_has_whole_is_not_served_until_they_are_read(
    brokers: Brokers, tmp_path: Path
) -> None:
    with Lab(brokers, tmp_path) as lab:
        lab.create()
        worker = lab.start()
        lab.send("work-a", TOGETHER, partition=0)
        until(lambda: len(lab.handled()) == TOGETHER, "all messages are handled", 60)
        worker.kill()
        markers = f"{lab.name}.markers"
        (*_, last) = rot.batches(brokers[1], markers, 0)
        lab.wait_copied(markers, last.last)
        for n in IDS:
            rot.flip(brokers[n], markers, 0, last.first)

        worker = lab.start(ready=False)
        why = f"the records [{last.first}, {last.last + 1}) of the markers topic can't be read from any replica"
        until(lambda: worker.log.count(why) > 0, f"it says so\n{worker.log}", 60)
        assert not worker.serving()

        rot.flip(brokers[3], markers, 0, last.first)
        lab.wait_served(150)
        lab.send("work-a", TOGETHER, partition=0)
        until(lambda: len(lab.handled()) == 2 * TOGETHER, "later messages are handled", 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_repair_names_what_no_replica_has_whole_and_ends_it_once_the_loss_is_accepted(
    brokers: Brokers, tmp_path: Path
) -> None:
    with Lab(brokers, tmp_path) as lab:
        lab.create()
        for _ in range(2):
            lab.send("work-a", TOGETHER, partition=0)
        lab.wait_copied(lab.queue_topic, 2 * TOGETHER - 1)
        for n in IDS:
            rot.flip(brokers[n], lab.queue_topic, 0, 0)
        worker = lab.start()
        until(lambda: len(lab.handled()) == TOGETHER, "the messages behind it are handled", 60)
        until(lambda: "offsets 0 to 19" in lab.command("repair", "--partition", "0").stdout, "it is named", 60)

        accepted = lab.command("repair", "--partition", "0", "--accept-loss")
        assert accepted.returncode == 0, accepted
        until(lambda: worker.partitions()[0].get("unreadable") == [], "it has ended", 60)

        # markers: the partition is unserved until the loss is accepted
        worker.kill()
        markers = f"{lab.name}.markers"
        (*_, last) = rot.batches(brokers[1], markers, 0)
        lab.wait_copied(markers, last.last)
        for n in IDS:
            rot.flip(brokers[n], markers, 0, last.first)
        worker = lab.start(ready=False)
        until(lambda: "can't be read from any replica" in worker.log, "it is unserved", 60)
        named = lab.command("repair", "--partition", "0")
        assert f"offsets {last.first} to {last.last} of the markers topic" in named.stdout, named
        accepted = lab.command("repair", "--partition", "0", "--accept-loss")
        assert accepted.returncode == 0, accepted
        lab.wait_served(150)
        lab.send("work-a", TOGETHER, partition=0)
        until(lambda: {sent.id for sent in lab.sent[TOGETHER:]} <= lab.handled(), "later messages are handled", 60)
