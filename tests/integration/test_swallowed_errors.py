"""Errors where Faust and aiokafka only log them: the worker stops with the reason, or begins anew."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from mode import Service

from app.engine.catalog import Catalog
from app.settings import Settings
from tests.integration.cluster import Cluster
from tests.integration.worker_lab import Lab, Worker, until


def raises(*_: Any) -> Any:
    raise KeyError("planted")


def in_a_worker(kafka: str, folder: Path, scenario: Callable[[Worker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Lab(kafka, folder) as lab:
            worker = await lab.worker()
            await worker.ready()
            worker.open_all()
            await scenario(worker)
            await until(lambda: worker.app.failure is not None, "the worker stops")
            assert "planted" in str(worker.app.failure)

    asyncio.run(main())


def test_a_worker_that_reads_no_more_stops(kafka: str, tmp_path: Path) -> None:
    async def scenario(worker: Worker) -> None:
        fetcher = worker.app.consumer._thread._consumer._fetcher
        fetcher._get_actions_per_node = raises

    in_a_worker(kafka, tmp_path, scenario)


def test_an_error_in_the_thread_that_reads_stops_the_worker(kafka: str, tmp_path: Path) -> None:
    async def scenario(worker: Worker) -> None:
        tp, reader = next(iter(worker.app.consumer._thread.readers.items()))
        reader.state.pause = raises
        assert worker.app.consumer.pause_reading(tp)

    in_a_worker(kafka, tmp_path, scenario)


@pytest.mark.parametrize("moment", ["on_partitions_assigned", "on_partitions_revoked"])
def test_an_error_in_a_rebalance_stops_the_worker(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async def main() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            await worker.ready()

            async def rebalanced(*_: Any) -> None:
                raises()

            monkeypatch.setattr(worker.app.consumer, moment, rebalanced)
            other = asyncio.ensure_future(lab.worker())
            await until(lambda: worker.app.failure is not None, "the worker stops")
            assert "planted" in str(worker.app.failure)
            await worker.stop()
            await other

    asyncio.run(main())


def test_a_service_whose_task_ended_is_the_reason_that_the_worker_stops_for(kafka: str, tmp_path: Path) -> None:
    class Dying(Service):
        @Service.task
        async def _run(self) -> None:
            raises()

    async def scenario(worker: Worker) -> None:
        await Dying(beacon=worker.app.beacon).start()

    in_a_worker(kafka, tmp_path, scenario)


def test_a_worker_ends_by_an_error_of_its_own_and_says_which(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=1, handlers="tests.integration.planted_error") as cluster:
        worker = cluster.start()
        (cluster.witness / "raise").touch()
        assert worker.process.wait(30) == 1
        assert "Stopping: 'planted'" in worker.log
        assert worker.log.count("Traceback") == 1
        assert "NoneType: None" not in worker.log
        assert worker.log.splitlines()[-1].endswith("ended: 'planted'")
        worker.ending = True


def test_a_full_disk_ends_a_worker_with_one_line_that_names_the_folder(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=1, handlers="tests.integration.planted_error") as cluster:
        worker = cluster.start()
        before = len(worker.log.splitlines())
        (cluster.witness / "raise").write_text("full")
        assert worker.process.wait(30) == 1
        worker.ending = True
        (line,) = worker.log.splitlines()[before:]
        assert line.endswith(
            f"ended: {worker.data_dir}/worker-0 can't be written (No space left on device); make room on the disk of "
            "the data folder, or set MARQ_DATA_DIR to another"
        )


def test_a_worker_whose_group_another_program_uses_says_what_to_do(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=1, handlers="") as cluster:

        async def join() -> AIOKafkaConsumer:
            consumer = AIOKafkaConsumer(topics.queue, bootstrap_servers=kafka, group_id=cluster.name)
            await consumer.start()
            while not consumer.assignment():
                await asyncio.sleep(0.05)
            return consumer

        topics = cluster.create_topics()
        other = cluster.run(join())
        try:
            worker = cluster.start(ready=False)
            worker.ending = True
            assert worker.process.wait(60) == 1
        finally:
            cluster.run(other.stop())
        assert worker.log.splitlines()[-1].endswith(
            f"ended: a program that is no marq worker is in the consumer group {cluster.name!r}: end it, or set "
            "MARQ_NAME to a name that nothing else uses"
        )
        assert "Traceback" not in worker.log


async def _catalog(kafka: str) -> Catalog:
    from app.kafka.topics import ensure_topics

    settings = Settings(kafka=f"kafka://{kafka}", name="lab-" + uuid.uuid4().hex[:8], partitions=1)
    await ensure_topics(settings, settings.name)
    catalog = Catalog(settings, lambda: settings.queues_topic)
    await catalog.start()
    await asyncio.wait_for(catalog.read_up.wait(), 15)
    return catalog


def test_a_worker_that_reads_no_more_of_queues_stops(kafka: str) -> None:
    async def main() -> None:
        catalog = await _catalog(kafka)
        try:
            catalog.topic.consumer._fetcher._get_actions_per_node = raises
            await until(lambda: catalog.crashed, "it crashes")
            assert "planted" in str(catalog.crash_reason)
        finally:
            await catalog.stop()

    asyncio.run(main())


def test_changes_of_queues_are_written_again_after_their_producer_has_ended(kafka: str) -> None:
    async def main() -> None:
        catalog = await _catalog(kafka)
        try:
            await catalog.create("a", {})
            assert catalog.topic._producer is not None
            sender = catalog.topic._producer._sender.sender_task
            sender.cancel()
            await asyncio.wait({sender})
            await catalog.create("b", {})
            assert {"a", "b"} <= catalog.records.keys()
        finally:
            await catalog.stop()

    asyncio.run(main())
