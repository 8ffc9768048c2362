"""Three brokers in one cluster, and topics whose replicas lie where a test wants them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from unittest import mock

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from app.kafka import topics as needed
from app.kafka.broker import LOOPBACK, EmbeddedBroker, free_port, new_cluster_id
from app.kafka.topics import TABLES, Topics
from app.settings import Settings

#: Seconds until the controller counts a killed broker out. Kafka's default is half as long.
SESSION_S = 18
IDS = (1, 2, 3)


class Brokers:
    """Each is broker and controller. Two of them are enough for the cluster to go on.

    `more`: further properties of a broker, by its number, its port and that of its controller. `environment`: of some
    brokers.
    """

    def __init__(
        self,
        folder: Path,
        more: Callable[[int, int, int], Mapping[str, str]] | None = None,
        environment: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self._environment = environment or {}
        ports = {n: (free_port(), free_port()) for n in IDS}
        voters = ",".join(f"{n}@{LOOPBACK}:{controller}" for n, (_, controller) in ports.items())
        cluster_id = new_cluster_id()
        self._brokers = {
            n: EmbeddedBroker(
                folder / f"broker-{n}",
                port,
                heap_mib=384,
                cluster_id=cluster_id,
                config={
                    "node.id": str(n),
                    "controller.quorum.voters": voters,
                    "listeners": f"PLAINTEXT://{LOOPBACK}:{port},CONTROLLER://{LOOPBACK}:{controller}",
                    "offsets.topic.replication.factor": "3",
                    "transaction.state.log.replication.factor": "3",
                    "share.coordinator.state.topic.replication.factor": "3",
                    "broker.session.timeout.ms": str(SESSION_S * 1000),
                    **(more(n, port, controller) if more else {}),
                },
            )
            for n, (port, controller) in ports.items()
        }
        self.bootstrap = ",".join(f"{LOOPBACK}:{port}" for port, _ in ports.values())

    def __getitem__(self, n: int) -> EmbeddedBroker:
        return self._brokers[n]

    def __enter__(self) -> Brokers:
        try:
            with ThreadPoolExecutor(len(IDS)) as threads:  # none answers before two of them run
                plain = [threads.submit(one.start) for n, one in self._brokers.items() if n not in self._environment]
                for started in plain:
                    started.result()
            for n, environment in self._environment.items():
                with mock.patch.dict(os.environ, environment):
                    self._brokers[n].start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        for broker in self._brokers.values():
            broker.kill()

    async def create(
        self,
        settings: Settings,
        replicas: Sequence[Sequence[int]],
        min_in_sync: int,
        others: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """Create the topics of a worker with `replicas` of each partition, or `others` for some topics.

        Single replicas are on broker 1 or 2.
        """
        topics = Topics(
            queue=settings.queue_topic,
            markers=settings.markers_topic,
            poison=settings.poison_topic,
            queues=settings.queues_topic,
            dead_letter=None,
            changelogs={table: f"{settings.name}-{table}-changelog" for table in TABLES},
            partitions=len(replicas),
        )
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            needs = needed._needs(topics, topic_mode=False)
            made = await admin.create_topics(
                [_topic(need, (others or {}).get(need.name, replicas), min_in_sync) for need in needs]
            )
        finally:
            await admin.close()
        assert not any(code for _, code, _ in made.topic_errors), made


def _topic(need: needed._Need, replicas: Sequence[Sequence[int]], min_in_sync: int) -> NewTopic:
    config: Mapping[str, str] = {**need.creation, **need.must, "min.insync.replicas": str(min_in_sync)}
    of_each = replicas if need.partitions == len(replicas) else [[1, 2]]
    return NewTopic(need.name, -1, -1, {n: list(found) for n, found in enumerate(of_each)}, dict(config))
