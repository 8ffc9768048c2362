"""Every record that some Kafka client can write: delivered once, in order, whole, or poison. Nothing stops."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from marq.core.state import HEADER_OVERHEAD_BYTES
from marq.protocol.limits import MESSAGE_MAX_BYTES
from tests.foreign_producers import CLIENTS, CODECS, MODES, Batch, Record, content, send
from tests.integration.cluster import Cluster, until
from tests.kafka import unique
from tests.other_kafka import parsed, version_for_tests
from tests.raw_batches import CODECS as RAW_CODECS
from tests.raw_batches import Raw, batch
from tests.raw_client import produce

QUEUE = "order-all"
YEAR_MS = 365 * 86_400_000
#: A year ahead, and long ago: what producers write into records.
NOW_MS = int(time.time() * 1000)


@pytest.fixture(scope="module")
def multiplexed(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A worker on topics of its own, one partition: the order of offsets is the order of deliveries."""
    with Cluster(kafka, tmp_path_factory.mktemp("multiplexed"), partitions=1) as cluster:
        cluster.create_topics()
        cluster.start().wait_ready()
        yield cluster


def record(i: str, key: Any, value: Any, timestamp: int | None = None, headers: Any = ()) -> Record:
    return {"key": key, "value": value, "timestamp": timestamp, "headers": [["id", i], *headers]}


def shapes(name: str, key: str | None, *, large: bool) -> list[tuple[Record, bool]]:
    """Records, and whether they are messages."""
    found: list[tuple[Record, bool]] = [
        (record(f"{name}/text", key, "text", NOW_MS, [["h", "ü"], ["null", None], ["h", "again"], ["", ""]]), True),
        (record(f"{name}/null value", key, None), True),
        (record(f"{name}/empty value", key, ""), True),
        (record(f"{name}/year ahead", key, "x", NOW_MS + YEAR_MS), True),
        (record(f"{name}/long ago", key, "x", 0), True),
        (record(f"{name}/headers", key, "x", None, [[f"h{i}", "v" * i] for i in range(100)]), True),
    ]
    topic_mode = key is None
    found += [
        (record(f"{name}/null key", None, "x"), topic_mode),
        (record(f"{name}/both null", None, None), topic_mode),
        (record(f"{name}/both empty", "", ""), topic_mode),
        (record(f"{name}/own key", "other-queue-that-nobody-reads" if topic_mode else key, "x"), True),
    ]
    if name.startswith("aiokafka"):  # it takes no record without both
        found = [(r, good) for r, good in found if r["key"] is not None or r["value"] is not None]
    if large:
        for what, more, good in (("largest", 0, True), ("too large", 1, False)):
            i = f"{name}/{what}"
            size = MESSAGE_MAX_BYTES - len(key or "") - HEADER_OVERHEAD_BYTES - len("id") - len(i.encode())
            found.append((record(i, key, size + more), good))
    return found


def matrix(
    topic: str, client: str, key: str | None, codecs: Any, modes: Any, large: Any
) -> tuple[list[Batch], list[list[tuple[Record, bool]]]]:
    batches, contents = [], []
    for codec in codecs:
        for mode in modes:
            records = shapes(f"{client}/{codec}/{mode}", key, large=(codec, mode) in large)
            contents.append(records)
            batches.append(
                {"codec": codec, "mode": mode, "topic": topic, "partition": 0, "records": [r for r, _ in records]}
            )
    return batches, contents


def check(cluster: Cluster, queue: str, expected: list[tuple[int, Record]], poison: int) -> None:
    """All of `expected` (offset, record) was delivered once, in order and unchanged; the rest is poison."""
    cluster.settle(120)
    seen = cluster.begun(queue)
    assert [s.offset for s in seen] == sorted(offset for offset, _ in expected)
    assert len(cluster.finished(queue)) == len(seen)
    by_offset = dict(expected)
    for one in seen:
        sent = by_offset[one.offset]
        headers = {name: "" if value is None else value for name, value in sent["headers"]}
        assert one.headers == headers, one
        assert one.id == headers["id"]
        assert one.payload_crc == zlib.crc32(content(sent["value"]) or b""), one
    assert cluster.counters()["poison"] == poison
    assert not cluster.errors_logged()
    assert all(worker.running for worker in cluster.workers)


def sent_of(batches: list[Batch], contents: Any, offsets: Any) -> tuple[list[tuple[int, Record]], int]:
    """The messages that have to be delivered, and the number of poison records. Kafka must have accepted all."""
    expected, poison = [], 0
    for plan, records, at in zip(batches, contents, offsets, strict=True):
        assert None not in at, (plan["codec"], plan["mode"], at)
        if plan["mode"] == "aborted":
            continue
        expected += [(offset, r) for offset, (r, good) in zip(at, records, strict=True) if good]
        poison += sum(not good for _, good in records)
    return expected, poison


#: Near the limit of size, CI tries one uncompressed and one compressed combination.
LARGE = {("none", "idempotent"), ("zstd", "committed")}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_any_client_writes_into_the_queue_topic(multiplexed: Cluster, client: str) -> None:
    queue = f"order-{client}"
    before = multiplexed.counters()["poison"]
    modes = ("idempotent", "committed", "aborted")
    batches, contents = matrix(multiplexed.queue_topic, client, queue, CODECS, modes, LARGE)
    expected, poison = sent_of(batches, contents, send(client, multiplexed.bootstrap, batches))
    check(multiplexed, queue, expected, before + poison)


def test_what_can_be_written_by_hand_only(multiplexed: Cluster) -> None:
    """Names of headers that are not UTF-8, records that are longer than their batch, timestamps before all time."""
    queue, before = "order-raw", multiplexed.counters()["poison"]
    good = Raw(b"x", queue.encode(), [(b"id", b"good"), (b"h", b"v")])
    bad_name = Raw(b"x", queue.encode(), [(b"id", b"bad"), (b"\xff\xfe", b"v")])
    long = Raw(b"x", queue.encode(), [(b"id", b"bad")], length=999)
    count, poison = 0, 0

    async def write(raw: bytes) -> bool:
        return await produce(multiplexed.bootstrap, multiplexed.queue_topic, 0, raw) == 0

    for codec in RAW_CODECS:
        assert asyncio.run(write(batch(good, bad_name, good, codec=codec)))
        count, poison = count + 2, poison + 1
        assert asyncio.run(write(batch(good, codec=codec, timestamp=-1)))
        count += 1
        if asyncio.run(write(batch(good, long, good, codec=codec))):
            count, poison = count + 1, poison + 2  # nothing behind it can be found
        assert asyncio.run(write(batch(good, codec=codec)))
        count += 1
    multiplexed.wait_begun(queue, count)
    until(lambda: multiplexed.counters()["poison"] == before + poison, "all poison is finished")
    multiplexed.settle()
    seen = multiplexed.begun(queue)
    assert len(seen) == count
    assert all(one.headers == {"id": "good", "h": "v"} and one.payload_crc == zlib.crc32(b"x") for one in seen)
    copies = [dict(r.headers) for r in multiplexed.read(f"{multiplexed.name}.poison")]
    reasons = {copy["marq-poison-reason"].decode() for copy in copies}
    assert "the name of a header is not UTF-8" in reasons
    assert any("longer than its batch" in reason for reason in reasons)
    assert any("\ufffd\\xff\\xfe" in copy for copy in copies)
    (worker,) = multiplexed.running
    assert "can't be decoded: the name of a header is not UTF-8" in worker.log
    assert not multiplexed.errors_logged()


def test_headers_that_are_larger_than_a_row_are_poison_and_their_copies_are_cut(multiplexed: Cluster) -> None:
    queue, before = "order-headers", multiplexed.counters()["poison"]
    key = queue.encode()
    good = Raw(b"x", key, [(b"id", b"good")])
    one = Raw(b"x", key, [(b"h", b"v" * (5 << 20))])
    many = Raw(b"x" * 70_000, key, [(b"h", b"v")] * (MESSAGE_MAX_BYTES // (HEADER_OVERHEAD_BYTES + 2)))
    for large in (one, many):
        raw = batch(good, large, good, codec="zstd")
        assert asyncio.run(produce(multiplexed.bootstrap, multiplexed.queue_topic, 0, raw)) == 0
    multiplexed.wait_begun(queue, 4)
    until(lambda: multiplexed.counters()["poison"] == before + 2, "both are finished")
    multiplexed.settle()
    copies = [r for r in multiplexed.read(f"{multiplexed.name}.poison") if r.key == key]
    first, second = copies
    assert '"headers_bytes"' in dict(first.headers)["marq-poison-cut"].decode()
    assert first.value == b"x"
    assert len(second.headers) > 300_000
    assert len(second.value) > 60_000
    assert len(multiplexed.begun(queue)) == 4
    assert not multiplexed.errors_logged()


def test_markers_that_cant_be_decoded_change_nothing(multiplexed: Cluster) -> None:
    """Any client with the right to acknowledge may write what it likes into the markers topic."""
    markers, queue = f"{multiplexed.name}.markers", "order-after-bad-markers"
    not_a_marker = Raw(b"x", None, [(b"\xff", b"v")])
    long = Raw(b"x", None, length=999)
    wrong = sum(
        asyncio.run(produce(multiplexed.bootstrap, markers, 0, batch(raw, not_a_marker, codec=codec))) == 0
        for codec in RAW_CODECS
        for raw in (not_a_marker, long)
    )
    assert wrong >= len(RAW_CODECS)
    later = batch(Raw(b'{"v":99}', None), Raw(b'{"v":99,"seal":"%b"}' % (b"0" * 24), None))
    assert asyncio.run(produce(multiplexed.bootstrap, markers, 0, later)) == 0
    later = batch(Raw(b'{"v":99,"version":1}', b"zz"), Raw(b'{"v":99,"version":1}', queue.encode()))
    assert asyncio.run(produce(multiplexed.bootstrap, f"{multiplexed.name}.queues", 0, later)) == 0
    multiplexed.send(queue, 10)
    multiplexed.wait_begun(queue, 10)
    until(lambda: multiplexed.counters()["unreadable_markers"] == 2 * wrong + 2, "they are counted")
    multiplexed.settle()
    (worker,) = multiplexed.running
    assert worker.log.count("of the queues topic: a queue's record of version 99") == 2
    assert not multiplexed.errors_logged()


async def _create(bootstrap: str, topic: str, config: dict[str, str]) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        (answer,) = (await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=config)])).topic_errors
        assert answer[1] == 0, answer
    finally:
        await admin.close()


def topic_mode(
    kafka: str, folder: Path, codec: str, timestamps: str, clients: Any, codecs: Any, modes: Any, large: Any
) -> None:
    topic = unique("users")
    config = {
        "compression.type": codec,
        "message.timestamp.type": timestamps,
        "max.message.bytes": str(8 * 1024 * 1024),
        "retention.ms": "-1",
    }
    if parsed(version_for_tests()) >= (3, 6):  # earlier ones take any time
        config["message.timestamp.after.max.ms"] = str(2 * YEAR_MS)
    asyncio.run(_create(kafka, topic, config))
    expected: list[tuple[int, Record]] = []
    poison = 0
    with Cluster(kafka, folder, partitions=1, queue_id=QUEUE, queue_topic=topic) as cluster:
        cluster.start().wait_ready()
        for client in clients:
            batches, contents = matrix(topic, client, None, codecs, modes, large)
            more, bad = sent_of(batches, contents, send(client, kafka, batches))
            expected, poison = expected + more, poison + bad
        good = Raw(b"x", None, [(b"id", b"raw")])
        assert asyncio.run(produce(kafka, topic, 0, batch(good, timestamp=-1))) == 0
        (end,) = cluster.ends().values()
        expected.append((end - 1, record("raw", None, "x")))
        check(cluster, QUEUE, expected, poison)


def test_topic_mode_on_a_topic_with_times_of_producers(kafka: str, tmp_path: Path) -> None:
    topic_mode(kafka, tmp_path, "zstd", "CreateTime", CLIENTS, ("none", "snappy"), ("committed",), LARGE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("timestamps", ["CreateTime", "LogAppendTime"])
@pytest.mark.parametrize("codec", ["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_topic_mode_everything(kafka: str, tmp_path: Path, codec: str, timestamps: str) -> None:
    large = {(codec, mode) for codec in CODECS for mode in ("idempotent", "committed")}
    topic_mode(kafka, tmp_path, codec, timestamps, CLIENTS, CODECS, MODES, large)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_the_topics_of_an_installation_may_be_compressed_by_the_broker(kafka: str, tmp_path: Path, codec: str) -> None:
    """Queue, markers, changelogs and settings of queues: whatever reads them reads each codec."""

    with Cluster(kafka, tmp_path, partitions=2, checkpoint_ms=100, persist_after_ms=100) as cluster:
        topics = cluster.create_topics()
        names = [topics.queue, topics.markers, topics.queues, *topics.changelogs.values()]
        cluster.configure_topics(names, "compression.type", codec)
        worker = cluster.start().wait_ready()
        delayed = cluster.send("work-a", 50, headers={"marq-delay-ms": "3000"}, size=5_000)
        cluster.send("work-a", 500)
        until(lambda: len(cluster.finished("work-a")) >= 500, "what is not delayed")
        time.sleep(1)  # the delayed ones get into rows
        worker.kill()
        cluster.wipe(worker)
        cluster.start().wait_ready()
        total = cluster.assert_nothing_lost()
        assert total.sent == 550 and delayed
        assert not cluster.errors_logged()
