"""What Faust, aiokafka and Kafka do that would lose, double or block messages, one test each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import RecordsToDelete
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from aiokafka.structs import BrokerMetadata
from faust.types import TP

from app.kafka import internals
from app.streaming import consumer_thread
from app.streaming.chunks import MAX_BUFFERED_CHUNKS, Chunk
from app.streaming.raw_table import SegmentTable, TableError
from app.streaming.transport import OffsetOutOfRange
from marq.protocol.limits import RECORD_MAX_BYTES
from tests.integration.worker_lab import Lab, Worker, until

# -- reading ------------------------------------------------------------------------------------------


def test_a_restart_skips_nothing_though_the_broker_is_slow(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain Faust drops what it fetched between its seek to the committed offset and the end of the rebalance."""
    send = AIOKafkaClient.send

    async def slow_send(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(0.003)
        return await send(*args, **options)

    monkeypatch.setattr(AIOKafkaClient, "send", slow_send)
    monkeypatch.setattr(consumer_thread, "MAX_CHUNK_RECORDS", 500)

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            for p in range(2):
                await lab.send(lab.queue, p, *[b"x"] * 5000)
            first = await lab.worker(table=True)
            await first.ready()
            first.open_all()
            await until(lambda: all(first.position(lab.q(p)) > 0 for p in range(2)))
            starts = {p: first.chunks[lab.q(p)][0].next for p in range(2)}
            for p, position in starts.items():
                first.app.consumer.set_commit_position(lab.q(p), position)
            await first.stop()
            second = await lab.worker(table=True)
            await second.ready()
            for p, position in starts.items():
                assert second.app.consumer.start_from(lab.q(p), position)
            await until(lambda: all(second.position(lab.q(p)) == 5000 for p in starts))
            for p, position in starts.items():
                second.assert_contiguous(lab.q(p), position)

    asyncio.run(scenario())


def test_nothing_is_delivered_before_start_from(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 20)
            worker = await lab.worker()
            await worker.ready()
            await asyncio.sleep(0.5)
            assert not worker.chunks
            assert worker.app.consumer.start_from(lab.q(), 7)
            await until(lambda: worker.position(lab.q()) == 20)
            worker.assert_contiguous(lab.q(), 7)

    asyncio.run(scenario())


def test_start_from_during_recovery_waits_for_the_end_of_the_rebalance(kafka: str, tmp_path: Path) -> None:
    """Faust clears the agents' queues after the callbacks of recovery have run."""

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 50)
            worker = Worker(lab, 0, table=True)

            async def on_recover() -> None:
                assert worker.app.rebalancing
                worker.open_all()
                await asyncio.sleep(0.3)
                assert not worker.chunks

            worker.table.on_recover(on_recover)
            await worker.start()
            await until(lambda: worker.position(lab.q()) == 50)
            worker.assert_contiguous(lab.q(), 0)
            assert worker.app.consumer.chunks_dropped == 0

    asyncio.run(scenario())


def test_a_rebalance_under_load_starts_each_partition_where_it_was_told(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            one = await lab.worker(table=True)
            await one.ready()
            one.open_all()
            stop = asyncio.Event()

            async def load() -> None:
                while not stop.is_set():
                    for p in range(2):
                        await lab.send(lab.queue, p, *[b"x"] * 50)

            task = asyncio.create_task(load())
            await until(lambda: all(one.position(lab.q(p)) > 100 for p in range(2)))
            two = await lab.worker(table=True)
            await one.ready(1)
            await two.ready(1)
            assert one.owned() | two.owned() == {0, 1}
            stop.set()
            await task
            positions = {p: one.position(lab.q(p)) for p in range(2)}
            one.chunks.clear()
            for worker in (one, two):
                tp = lab.q(*worker.owned())
                start = positions[tp.partition] - 50
                assert worker.app.consumer.start_from(tp, start)
                end = await lab.end_offset(tp)
                await until(lambda w=worker, tp=tp, end=end: w.position(tp) == end)
                worker.assert_contiguous(tp, start)

    asyncio.run(scenario())


def test_control_and_aborted_records_move_the_position(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send_transaction(lab.queue, 0, b"a", b"b", commit=True)  # 0 1, control 2
            await lab.send_transaction(lab.queue, 0, b"c", commit=False)  # 3, control 4
            await lab.send_transaction(lab.queue, 1, b"d", commit=False)  # 0, control 1: nothing but gaps
            worker = await lab.worker()
            await worker.ready()
            worker.open_all()
            await until(lambda: worker.position(lab.q(0)) == 5, "position after the control record")
            await until(lambda: worker.position(lab.q(1)) == 2, "chunk without records")
            assert worker.values(lab.q(0)) == [b"a", b"b"]
            assert worker.values(lab.q(1)) == []
            # A reader that is up to date sees the end of a transaction, too.
            await lab.send_transaction(lab.queue, 0, b"e", commit=True)
            await until(lambda: worker.position(lab.q(0)) == 7)
            worker.assert_contiguous(lab.q(0), 0)

    asyncio.run(scenario())


def test_a_position_outside_of_the_log_is_loud(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 50)
            await lab.admin.delete_records({lab.q(): RecordsToDelete(before_offset=30)})
            worker = await lab.worker()
            await worker.ready()
            calls: list[tuple[TP, int]] = []
            worker.app.on_offset_out_of_range = lambda tp, position: calls.append((tp, position))
            worker.open_all()
            await until(lambda: calls == [(lab.q(), 0)])
            assert worker.app.consumer.start_from(lab.q(), 999)
            await until(lambda: calls[1:] == [(lab.q(), 999)])
            assert worker.app.consumer.start_from(lab.q(), 30)
            await until(lambda: worker.position(lab.q()) == 50)
            worker.assert_contiguous(lab.q(), 30)
            del worker.app.on_offset_out_of_range
            worker.app.consumer.start_from(lab.q(), 0)
            await until(lambda: worker.crashes, "the worker stops by default")
            assert isinstance(worker.crashes[0], OffsetOutOfRange)

    asyncio.run(scenario())


def test_an_empty_set_of_partitions_is_never_asked_for(kafka: str, tmp_path: Path) -> None:
    """To aiokafka an empty set means all partitions."""

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 10)
            await lab.send(lab.changelog, 0, b"row")
            worker = await lab.worker(table=True)
            fetcher = worker.app.consumer._thread._ensure_consumer()._fetcher
            asked, fetched_records = [], fetcher.fetched_records

            async def noted(partitions: Any, **options: Any) -> Any:
                asked.append(set(partitions))
                return await fetched_records(partitions, **options)

            fetcher.fetched_records = noted
            await worker.ready()
            worker.app.consumer.start_from(lab.m(), 0)
            await asyncio.sleep(1.2)
            assert set() not in asked
            assert not worker.chunks

    asyncio.run(scenario())


def test_markers_go_on_while_a_queue_partition_is_paused(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker(table=True)
            await worker.ready()
            worker.open_all()
            consumer = worker.app.consumer
            assert consumer.pause_reading(lab.q(0))
            # Faust's own bookkeeping must not undo it.
            consumer.pause_partitions({lab.q(0)})
            consumer.resume_partitions({lab.q(0), lab.q(1)})
            for i in range(3):
                await lab.send(lab.queue, 0, b"%d" % i)
                await lab.send(lab.queue, 1, b"%d" % i)
                await lab.send(lab.markers, 0, b"%d" % i)
            await until(lambda: worker.position(lab.m(0)) == 3)
            await until(lambda: worker.position(lab.q(1)) == 3)
            assert worker.position(lab.q(0)) == 0
            assert consumer.resume_reading(lab.q(0))
            await until(lambda: worker.position(lab.q(0)) == 3)
            worker.assert_contiguous(lab.q(0), 0)

    asyncio.run(scenario())


def test_a_stuck_agent_holds_few_chunks_and_neither_a_rebalance_nor_the_stop(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            stuck = asyncio.Event()

            async def wait(chunk: Chunk) -> None:
                if chunk.topic == lab.queue:
                    await stuck.wait()

            worker = await lab.worker(on_chunk=wait)
            await worker.ready()
            worker.open_all()
            for i in range(20):
                await lab.send(lab.queue, 0, b"%d" % i)
                await lab.send(lab.markers, 0, b"%d" % i)
                await asyncio.sleep(0.02)
            await until(lambda: worker.position(lab.m()) == 20, "markers go on")
            reader = worker.app.consumer._thread.readers[lab.q()]
            assert reader.taken == MAX_BUFFERED_CHUNKS + 1  # one is in the agent's body
            other = await lab.worker()
            await other.ready(1)
            await worker.ready(1)
            await worker.stop()
            await other.ready(2)

    asyncio.run(scenario())


# -- commits ------------------------------------------------------------------------------------------


def test_only_the_set_position_is_committed(kafka: str, tmp_path: Path) -> None:
    """Faust commits past events that are not acked, and acks an event whose agent raised."""

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 10)

            async def fail(chunk: Chunk) -> None:
                raise ValueError("an agent that raises")

            worker = await lab.worker(on_chunk=fail, broker_commit_interval=0.1)
            await worker.ready()
            worker.open_all()
            await until(lambda: worker.position(lab.q()) == 10)
            await asyncio.sleep(0.4)
            assert await lab.committed(lab.q()) is None
            worker.app.consumer.set_commit_position(lab.q(), 4)
            await asyncio.sleep(0.4)
            assert await lab.committed(lab.q()) == 4
            worker.app.consumer.set_commit_position(lab.q(), 6)
            await worker.stop()
            assert await lab.committed(lab.q()) == 6, "the stop commits"

    asyncio.run(scenario())


def test_positions_are_committed_when_partitions_are_revoked_and_not_later(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 10)
            await lab.send(lab.queue, 1, *[b"x"] * 10)
            one = await lab.worker(broker_commit_interval=60)
            await one.ready()
            one.open_all()
            generation = one.app.consumer_generation_id
            for p in range(2):
                assert one.app.consumer.set_commit_position(lab.q(p), 3)
            two = await lab.worker()
            await two.ready(1)
            await one.ready(1)
            assert [await lab.committed(lab.q(p)) for p in range(2)] == [3, 3]
            assert not one.app.consumer.set_commit_position(lab.q(*two.owned()), 9)
            assert not one.app.consumer.set_commit_position(lab.q(*one.owned()), 9, generation=generation)
            await one.stop()
            assert [await lab.committed(lab.q(p)) for p in range(2)] == [3, 3]

    asyncio.run(scenario())


# -- assignment ---------------------------------------------------------------------------------------


def test_a_member_that_has_left_the_group_reads_on_while_another_one_gets_its_partitions(
    kafka: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            first = await lab.worker()
            await first.ready()
            first.open_all()
            first.app.consumer.leave_group()
            second = await lab.worker()
            await second.ready()
            assert not first.app.rebalancing
            await lab.send(lab.queue, 0, b"x", b"y")
            await until(lambda: first.values(lab.q(0)) == [b"x", b"y"])
            second.open_all()
            await until(lambda: second.values(lab.q(0)) == [b"x", b"y"])
            await first.stop()
            assert not first.crashes

    asyncio.run(scenario())


# -- tables -------------------------------------------------------------------------------------------


class Writer:
    """Runs a function in the event of a partition of the queue, as an agent does."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.calls: asyncio.Queue = asyncio.Queue()

    async def on_chunk(self, chunk: Chunk) -> None:
        while not self.calls.empty():
            done, partition, function = self.calls.get_nowait()
            if partition != chunk.partition:
                self.calls.put_nowait((done, partition, function))
                return
            try:
                done.set_result(function())
            except Exception as exc:
                done.set_exception(exc)

    async def run(self, partition: int, function: Any) -> Any:
        done = asyncio.get_running_loop().create_future()
        self.calls.put_nowait((done, partition, function))
        await self.lab.send(self.lab.queue, partition, b"event")
        return await asyncio.wait_for(done, 10)


async def table_worker(lab: Lab) -> tuple[Worker, SegmentTable, Writer]:
    writer = Writer(lab)
    worker = await lab.worker(table=True, on_chunk=writer.on_chunk)
    await worker.ready()
    worker.open_all()
    return worker, worker.table, writer  # type: ignore[return-value]


def test_rows_of_one_key_in_two_partitions_do_not_touch_each_other(kafka: str, tmp_path: Path) -> None:
    """Faust's `del table[key]` may delete the row of another partition."""

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            _, table, writer = await table_worker(lab)
            for p in range(2):
                await (await writer.run(p, lambda p=p: table.write(b"key", b"%d" % p)))
            await (await writer.run(0, lambda: table.write(b"key", None)))
            assert table.read(0, b"key") is None
            assert table.read(1, b"key") == b"1"
            assert (list(table.rows_of(0)), list(table.rows_of(1))) == ([], [(b"key", b"1")])
            assert await lab.read(TP(lab.changelog, 0)) == [(b"key", b"0"), (b"key", None)]
            with pytest.raises(TableError):
                await writer.run(1, lambda: table.__delitem__(b"key"))
            with pytest.raises(TableError):
                table.write(b"key", b"outside of an event")
            with pytest.raises(TableError):
                table.read(7, b"key")

    asyncio.run(scenario())


def test_rows_come_back_on_another_machine(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker, table, writer = await table_worker(lab)
            big = b"x" * (4 * 1024 * 1024)
            await (await writer.run(0, lambda: table.write(b"gone", b"1")))
            await (await writer.run(0, lambda: table.write(b"big", big)))
            await (await writer.run(0, lambda: table.write(b"gone", None)))
            assert table.persisted(0) == 2
            await worker.stop()
            _, table, _ = await table_worker(lab)
            assert list(table.rows_of(0)) == [(b"big", big)]
            assert table.persisted(0) == 2

    asyncio.run(scenario())


def test_a_store_that_is_still_being_closed_is_opened_after_that(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            _, table, writer = await table_worker(lab)
            await (await writer.run(0, lambda: table.write(b"key", b"1")))
            actives = {TP(lab.changelog, p) for p in range(2)}
            await table.data.on_rebalance({TP(lab.changelog, 1)}, {TP(lab.changelog, 0)}, set())
            with pytest.raises(TableError):
                await table.open(0)
            await table.data.on_rebalance(actives, set(), {TP(lab.changelog, 0)})
            assert not table.data.is_open(0), "it costs nothing in the middle of a rebalance"
            await table.open(0)
            assert table.read(0, b"key") == b"1"
            await table.data.on_rebalance({TP(lab.changelog, 1)}, {TP(lab.changelog, 0)}, set())
            await table.data.on_rebalance(actives, set(), {TP(lab.changelog, 0)})
            assert table.read(0, b"key") == b"1", "who does not open it waits as well"

    asyncio.run(scenario())


def test_a_row_too_large_fails_and_does_not_stop_the_others(kafka: str, tmp_path: Path) -> None:
    """In Faust the future of such a row never resolves, and no later row is sent."""

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker, table, writer = await table_worker(lab)
            future = await writer.run(0, lambda: table.write(b"large", b"x" * RECORD_MAX_BYTES))
            with pytest.raises(MessageSizeTooLargeError):
                await asyncio.wait_for(future, 5)
            # The same by Faust's own way to send a changelog.
            future = table.send_changelog(0, b"large", b"x" * RECORD_MAX_BYTES)
            with pytest.raises(KafkaError):
                await asyncio.wait_for(future, 5)
            assert (await asyncio.wait_for(table.send_changelog(0, b"small", b"x"), 5)).offset == 0
            assert (await (await writer.run(0, lambda: table.write(b"k", b"v")))).offset == 1
            # Other errors in it do not end Faust's sending task either.
            send, worker.app.producer.send = worker.app.producer.send, None  # type: ignore[assignment]
            with pytest.raises(TypeError):
                await asyncio.wait_for(table.send_changelog(0, b"small", b"x"), 5)
            worker.app.producer.send = send
            assert (await asyncio.wait_for(table.send_changelog(0, b"small", b"x"), 5)).offset == 2
            assert not worker.crashes

    asyncio.run(scenario())


def test_the_persisted_offset_stays_below_records_of_another_writer(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            _, table, writer = await table_worker(lab)
            await (await writer.run(0, lambda: table.write(b"a", b"1")))
            await lab.send(lab.changelog, 0, b"foreign", key=b"b")
            await (await writer.run(0, lambda: table.write(b"c", b"3")))
            assert table.persisted(0) == 0
            # The gap is closed by rows that the caller reads itself ...
            table.apply(0, [(b"b", b"foreign", 1), (b"c", b"3", 2)])
            assert table.persisted(0) == 2
            await (await writer.run(0, lambda: table.write(b"d", b"4")))
            assert table.persisted(0) == 3
            # ... even if offsets are missing in them.
            await lab.send(lab.changelog, 0, b"foreign", b"foreign", key=b"b")
            table.apply(0, [(b"b", b"foreign", 5)], upto=6)
            assert table.persisted(0) == 5

    asyncio.run(scenario())


def test_a_wiped_partition_is_filled_by_the_next_recovery(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker, table, writer = await table_worker(lab)

            def write_and_wipe() -> asyncio.Future:
                future = table.write(b"a", b"1")
                table.wipe(0)
                return future

            # The acknowledgement of a row that was wiped meanwhile must not count it as present.
            assert (await (await writer.run(0, write_and_wipe))).offset == 0
            assert (table.persisted(0), list(table.rows_of(0))) == (None, [])
            await (await writer.run(0, lambda: table.write(b"b", b"2")))
            await (await writer.run(1, lambda: table.write(b"other", b"3")))
            assert table.persisted(0) is None
            await worker.stop()
            again = await Worker(lab, 0, table=True).start()
            await again.ready()
            assert list(again.table.rows_of(0)) == [(b"a", b"1"), (b"b", b"2")]
            assert (again.table.persisted(0), again.table.persisted(1)) == (1, 0)

    asyncio.run(scenario())


def test_a_late_acknowledgement_does_not_open_a_revoked_partition(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker, table, writer = await table_worker(lab)
            held: dict[int, asyncio.Future] = {}
            append = worker.app.producer.append

            def held_append(topic: str, partition: int, *args: Any) -> asyncio.Future:
                held[partition] = asyncio.get_running_loop().create_future()
                append(topic, partition, *args).add_done_callback(lambda done: sent.append((partition, done.result())))
                return held[partition]

            sent: list[tuple[int, Any]] = []
            worker.app.producer.append = held_append  # type: ignore[assignment]
            for p in range(2):
                await writer.run(p, lambda: table.write(b"row", b"value"))
            await until(lambda: len(sent) == 2)
            other = await lab.worker(table=True)
            await other.ready(1)
            await worker.ready(1)
            for partition, metadata in sent:
                held[partition].set_result(metadata)
            await asyncio.sleep(0.1)
            lost, kept = *other.owned(), *worker.owned()
            assert not table.data.is_open(lost)
            with pytest.raises(TableError):
                table.read(lost, b"row")
            assert table.persisted(kept) == 0
            assert other.table.read(lost, b"row") == b"value"

    asyncio.run(scenario())


def test_a_client_asks_another_broker_if_one_does_not_answer(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiokafka would wait for the time-out of its requests, and open no other connection meanwhile."""
    monkeypatch.setattr(internals, "ANSWER_S", 0.1)
    monkeypatch.setattr(internals, "_patience_s", {})

    async def scenario() -> None:
        asked = asyncio.Event()

        async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(swallow, "127.0.0.1", 0)
        client = AIOKafkaClient(bootstrap_servers=kafka, request_timeout_ms=600_000)
        await client.bootstrap()
        try:
            while not asked.is_set():  # it asks brokers in any order
                client.cluster._brokers[99] = BrokerMetadata(99, *server.sockets[0].getsockname(), None)
                assert await client.force_metadata_update()
        finally:
            await client.close()
            server.close()

    asyncio.run(scenario())
