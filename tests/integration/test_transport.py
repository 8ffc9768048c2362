"""Chunks and appends, on a real broker: what the transport promises its callers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiokafka.errors import KafkaError, KafkaTimeoutError, MessageSizeTooLargeError
from faust.types import TP

from app.streaming import consumer_thread
from app.streaming import producer as producer_module
from app.streaming.producer import ProducerFull
from marq.protocol.limits import RECORD_MAX_BYTES
from tests.integration.worker_lab import Lab, until
from tests.raw_batches import CODECS, Raw, batch
from tests.raw_client import produce


def test_an_agent_gets_every_record_once_in_contiguous_chunks(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            for p in range(2):
                await lab.send(lab.queue, p, *(b"%d" % i for i in range(3000)))
            worker = await lab.worker()
            await worker.ready()
            worker.open_all()
            await until(lambda: all(worker.position(lab.q(p)) == 3000 for p in range(2)), "all records")
            for p in range(2):
                worker.assert_contiguous(lab.q(p), 0)
                assert worker.values(lab.q(p)) == [b"%d" % i for i in range(3000)]
            assert worker.chunks[lab.q()][0].generation == worker.app.consumer_generation_id

    asyncio.run(scenario())


def test_a_chunk_holds_no_more_than_the_limit(kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_thread, "MAX_CHUNK_RECORDS", 70)

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 500)
            worker = await lab.worker()
            await worker.ready()
            worker.open_all()
            await until(lambda: worker.position(lab.q()) == 500)
            worker.assert_contiguous(lab.q(), 0)
            assert max(len(chunk.records) for chunk in worker.chunks[lab.q()]) == 70

    asyncio.run(scenario())


def test_seek_chunks_goes_back_and_forth(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            await lab.send(lab.queue, 0, *[b"x"] * 100)
            worker = await lab.worker()
            await worker.ready()
            worker.open_all()
            await until(lambda: worker.position(lab.q()) == 100)
            for start in (40, 90, 0):
                worker.chunks.clear()
                assert worker.app.consumer.seek_chunks(lab.q(), start)
                assert worker.app.consumer.seek_chunks(lab.q(), start)
                await until(lambda: worker.position(lab.q()) == 100)
                worker.assert_contiguous(lab.q(), start)

    asyncio.run(scenario())


def test_calls_for_another_generation_or_partition_do_nothing(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            await worker.ready()
            consumer, old = worker.app.consumer, worker.app.consumer_generation_id - 1
            assert not consumer.start_from(lab.q(), 0, generation=old)
            assert not consumer.seek_chunks(lab.q(), 0, generation=old)
            assert not consumer.set_commit_position(lab.q(), 5, generation=old)
            assert not consumer.start_from(TP(lab.queue, 99), 0)
            assert not consumer.pause_reading(TP("other", 0))

    asyncio.run(scenario())


def test_append_tells_offset_and_broker_time_in_the_order_of_the_calls(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            append = worker.app.producer.append
            # Larger than a batch together, so that several batches wait behind each other.
            values = [b"%d:" % i + b"x" * 50_000 for i in range(60)]
            futures = [append(lab.queue, 1, v, key=b"k", headers=[("h", b"1")]) for v in values]
            records = await asyncio.gather(*futures)
            assert [r.offset for r in records] == list(range(60))
            await worker.ready()
            worker.open_all()
            await until(lambda: worker.position(lab.q(1)) == 60)
            assert worker.values(lab.q(1)) == values
            read = [r for chunk in worker.chunks[lab.q(1)] for r in chunk.records]
            assert [r.timestamp for r in read] == [r.timestamp for r in records]
            assert read[0].headers == (("h", b"1"),)
            assert worker.app.producer.pending_bytes == 0

    asyncio.run(scenario())


def test_fausts_own_way_to_send_goes_through_append(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            topic = worker.app.topic(lab.queue)
            sent = await (await topic.send(key=b"k", value=b"v", key_serializer="raw", value_serializer="raw"))
            assert sent.offset == 0
            assert (sent.topic, sent.partition) in worker.app.producer._known

    asyncio.run(scenario())


def test_a_record_too_large_fails_and_what_follows_does_not(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            append = worker.app.producer.append
            assert (await append(lab.queue, 0, b"first")).offset == 0
            with pytest.raises(MessageSizeTooLargeError):
                await append(lab.queue, 0, b"x" * RECORD_MAX_BYTES)
            # Small enough for the producer, but not for the topic: the broker refuses it.
            with pytest.raises(MessageSizeTooLargeError):
                await append(lab.queue, 0, b"x" * (4 * 1024 * 1024))
            assert (await append(lab.queue, 0, b"y" * (4 * 1024 * 1024 - 100))).offset == 1
            later = await asyncio.gather(*(append(lab.queue, 0, b"z") for _ in range(3)))
            assert [r.offset for r in later] == [2, 3, 4]
            # The changelog takes what does not fit into the queue.
            assert (await append(lab.changelog, 0, b"x" * (4 * 1024 * 1024), key=b"k")).offset == 0

    asyncio.run(scenario())


def test_appends_have_an_end(kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            producer = worker.app.producer
            await producer.append(lab.queue, 0, b"0")
            producer.delivery_timeout_s = 0.0
            with pytest.raises(KafkaTimeoutError):
                await producer.append(lab.queue, 0, b"1")
            producer.delivery_timeout_s = 10.0
            # Not confirmed in time does not mean not written.
            assert (await producer.append(lab.queue, 0, b"2")).offset == 2
            with pytest.raises(KafkaError):
                await producer.append(lab.queue, 99, b"no such partition")
            monkeypatch.setattr(producer_module, "MAX_PENDING_BYTES", 1000)
            futures = [producer.append(lab.queue, 0, b"x" * 100) for _ in range(20)]
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert isinstance(results[-1], ProducerFull)
            await until(lambda: producer.pending_bytes == 0)
            await producer.append(lab.queue, 0, b"room again")

    asyncio.run(scenario())


def test_a_resumed_partition_is_read_at_once(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            await worker.ready()
            consumer = worker.app.consumer
            await lab.send(lab.queue, 0, b"x")
            loop = asyncio.get_running_loop()
            await asyncio.sleep(1.2)  # everything is idle by now
            begun = loop.time()
            assert consumer.start_from(lab.q(), 0)
            await until(lambda: worker.position(lab.q()) == 1)
            assert loop.time() - begun < 0.5
            consumer.pause_reading(lab.q())
            await asyncio.sleep(0.3)
            await lab.send(lab.queue, 0, b"y")
            begun = loop.time()
            consumer.resume_reading(lab.q())
            await until(lambda: worker.position(lab.q()) == 2)
            assert loop.time() - begun < 0.5

    asyncio.run(scenario())


def test_every_codec_is_read_and_what_cant_be_decoded_costs_its_own_offsets(kafka: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            worker = await lab.worker()
            await worker.ready()
            worker.open_all()
            expected = []
            for codec in CODECS:
                records = [Raw(b"%s %d" % (codec.encode(), i), b"k", [(b"h", b"v")]) for i in range(3)]
                bad = Raw(b"bad", b"k", [(b"\xff\xfe", b"v")])
                assert (
                    await produce(kafka, lab.queue, 0, batch(records[0], bad, records[1], records[2], codec=codec)) == 0
                )
                expected += [records[0].value, b"bad", records[1].value, records[2].value]
            await until(lambda: worker.position(lab.q()) == len(expected), "all records")
            worker.assert_contiguous(lab.q(), 0)
            assert worker.values(lab.q()) == expected
            names = [r.headers[0][0] for chunk in worker.chunks[lab.q()] for r in chunk.records]
            assert names == ["h", "\ufffd\\xff\\xfe", "h", "h"] * len(CODECS)
            assert worker.app.consumer.unreadable == {lab.queue: len(CODECS)}
            assert not worker.crashes

    asyncio.run(scenario())


@pytest.mark.parametrize("codec", list(CODECS))
def test_what_the_broker_refuses_of_a_wrong_batch(kafka: str, tmp_path: Path, codec: str) -> None:
    """What is refused here is shown at the decoder alone (`test_batches.py`)."""
    number = CODECS[codec][0]
    wrong = {
        "checksum": batch(Raw(), Raw(), codec=codec, bad_crc=True),
        "count": batch(Raw(), Raw(), codec=codec, count=3),
        "fewer": batch(Raw(), Raw(), codec=codec, count=1),
        "offsets": batch(Raw(), Raw(), codec=codec, last_delta=7),
        "body": batch(Raw(), Raw(), codec_number=number, body=b"\xff" * 40),
        "codec": batch(Raw(), Raw(), codec_number=5),
        "format": batch(Raw(), Raw(), codec=codec, magic=3),
        "header count": batch(Raw(), Raw(header_count=9), codec=codec),
        "length": batch(Raw(), Raw(length=999), codec=codec),
    }

    async def scenario() -> None:
        async with Lab(kafka, tmp_path) as lab:
            taken = {what for what, raw in wrong.items() if await produce(kafka, lab.queue, 0, raw) == 0}
            print(codec, "taken:", sorted(taken))
            worker = await lab.worker()
            await worker.ready()
            worker.open_all()
            end = await lab.end_offset(lab.q())
            await until(lambda: worker.position(lab.q()) == end or not end, "all that was taken")
            assert not worker.crashes

    asyncio.run(scenario())
