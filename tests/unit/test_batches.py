"""The decoder of record batches: what can be read is, and what can't costs its own offsets and no others."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Container, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import NodeNotReadyError
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder

from app.streaming import compression, fetching
from app.streaming.batches import Fault, FetchedRecord, FetchedRecords
from app.streaming.compression import DecodingError, decompress
from app.streaming.fetching import PATIENCE, decode_with
from marq.core.reading import Undecodable, Unreadable
from tests.raw_batches import CODECS, MS, Raw, batch, offsets_from

TP = TopicPartition("t", 3)
THREE = (Raw(b"a"), Raw(b"b"), Raw(b"c"))


ALL = range(1 << 62)


def _offsets_of(record: Any) -> range:
    return range(record.offset, record.stop if type(record) is Unreadable else record.offset + 1)


class Read:
    """The records and faults that a reader gets from some bytes, of which it gives up what has a flaw."""

    def __init__(
        self,
        data: bytes,
        position: int = 0,
        *,
        end: int = -1,
        given_up: Container[int] = ALL,
        contiguous: bool = False,
        aborted: Sequence[Any] = (),
    ) -> None:
        self.faults: list[Fault] = []
        fetched = FetchedRecords(
            data,
            aborted,
            position,
            end=end,
            given_up=given_up,
            contiguous=contiguous,
            on_fault=self.faults.append,
        )
        self.records = list(fetched)
        self.next = fetched.next_fetch_offset

    @property
    def good(self) -> list[tuple[int, bytes | None]]:
        return [(r.offset, r.value) for r in self.records if type(r) not in (Undecodable, Unreadable)]

    @property
    def bad(self) -> dict[int, str]:
        """What is poison, or can't be read, by offset."""
        return {o: r.reason for r in self.records if type(r) in (Undecodable, Unreadable) for o in _offsets_of(r)}


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_of_kafka_is_read(codec: str) -> None:
    headers = [(b"name", b"value"), (b"null", None), (b"", b"")]
    raw = batch(
        Raw(b"x" * 1000, None, headers, 5), Raw(None, b"k"), Raw(b"", b"", timestamp_delta=-5), base=7, codec=codec
    )
    read = Read(raw, 7)

    first, second, third = read.records
    assert (first.offset, first.timestamp, first.key, first.value) == (7, MS + 5, None, b"x" * 1000)
    assert first.headers == (("name", b"value"), ("null", None), ("", b""))
    assert (second.key, second.value, third.key, third.value, third.timestamp) == (b"k", None, b"", b"", MS - 5)
    assert (read.next, read.faults) == (10, [])


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_what_decompresses_to_too_much_is_refused_and_no_more_memory_is_taken(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, encode = CODECS[codec]
    data = encode(b"\0" * 1_000_000)

    assert bytes(decompress(number, data, 1_000_000)) == b"\0" * 1_000_000
    with pytest.raises(DecodingError, match="larger than 999999 bytes"):
        decompress(number, data, 999_999)

    monkeypatch.setattr(compression.decompress, "__defaults__", (1_000,))
    bomb = batch(Raw(b"x" * 10_000), Raw(b"y"), codec=codec)
    read = Read(offsets_from((bomb, 2), (batch(*THREE), 3)))
    assert list(read.bad) == [0, 1]
    assert "larger than 1000 bytes" in read.bad[0]
    assert read.good == [(2, b"a"), (3, b"b"), (4, b"c")]


def test_plain_snappy_and_several_gzip_members_are_read() -> None:
    import cramjam

    records = b"".join(record.encode(i) for i, record in enumerate(THREE))
    plain = batch(*THREE, codec_number=2, body=bytes(cramjam.snappy.compress_raw(records)))
    members = batch(*THREE, codec_number=1, body=gzip.compress(records[:9]) + gzip.compress(records[9:]))
    assert [value for _, value in Read(offsets_from((plain, 3), (members, 3))).good] == [b"a", b"b", b"c"] * 2


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (batch(*THREE, codec_number=5), "unknown codec 5"),
        (batch(*THREE, codec_number=7), "unknown codec 7"),
        (batch(*THREE, codec_number=1), "gzip data is damaged"),
        (batch(*THREE, codec_number=2), "snappy data is damaged"),
        (batch(*THREE, codec_number=3), "lz4 data is damaged"),
        (batch(*THREE, codec_number=4), "zstd data is damaged"),
        (batch(*THREE, codec_number=1, body=gzip.compress(b"x" * 500)[:-9]), "gzip data is damaged"),
        (batch(*THREE, codec_number=2, body=b"\x82SNAPPY\0\0\0\0\1\0\0\0\1\0\0\1\0abc"), "snappy data is damaged"),
        (batch(*THREE, bad_crc=True), "checksum"),
        (batch(*THREE, magic=3), "unknown format 3"),
        (batch(*THREE, magic=-1), "unknown format 255"),
        (batch(*THREE, magic=1), "checksum"),
        (batch(*THREE, body=b""), "has no end"),
        (batch(*THREE, body=b"\xff" * 30), "has no end"),
        (batch(*THREE, count=0), "number of its records is wrong"),
        (batch(*THREE, count=-1), "number of its records is wrong"),
        (batch(*THREE, count=0, body=gzip.compress(b"x"), codec_number=1), "number of its records is wrong"),
    ],
    ids=map(str, range(17)),
)
def test_a_batch_that_cant_be_decoded_is_poison_at_its_offsets_and_no_others(raw: bytes, why: str) -> None:
    data = offsets_from((batch(*THREE), 3), (raw, 3), (batch(*THREE), 3), base=100)
    read = Read(data, 100, end=109)

    assert [offset for offset, _ in read.good] == [100, 101, 102, 106, 107, 108]
    assert list(read.bad) == [103, 104, 105]
    assert all(why in reason for reason in read.bad.values())
    assert read.next == 109
    assert [(f.start, f.stop) for f in read.faults] == [(103, 106)]
    if why == "checksum" or "format" in why:
        return  # no record: another replica may have it
    # the bytes are with the first of them
    first, second, _ = (r for r in read.records if type(r) is Undecodable)
    assert first.value
    assert second.value is None and "with offset 103" in second.reason
    assert first.headers  # the core ignores records without one


def test_the_time_of_a_batch_is_taken_from_its_header_if_that_can_be_trusted() -> None:
    good = batch(*THREE, timestamp=MS + 50)
    assert Read(batch(*THREE, codec_number=4)).records[0].timestamp == MS
    assert Read(offsets_from((good, 3), (batch(*THREE, bad_crc=True), 3)), end=6).records[-1].timestamp == MS + 50
    assert Read(batch(*THREE, bad_crc=True), end=3).records[0].timestamp == -1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Raw(b"v", header_count=-1), "number of its headers"),
        (Raw(b"v", header_count=5), "has no end"),
        (Raw(b"v", b"k", [(b"a", b"b")], header_count=0), "another length"),
        (Raw(b"v", header_count=2**31 - 1), "number of its headers"),
    ],
)
def test_of_a_batch_with_a_bad_record_the_others_are_read(codec: str, bad: Raw, why: str) -> None:
    raw = batch(Raw(b"a"), bad, Raw(b"c"), base=10, codec=codec)
    read = Read(raw, 10)

    assert read.good == [(10, b"a"), (12, b"c")]
    assert list(read.bad) == [11] and why in read.bad[11]
    assert read.next == 13


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (batch(Raw(b"a"), Raw(b"v", header_count=5), Raw(b"c"), Raw(b"d")), (11, 12, 14)),
        (batch(Raw(b"a"), Raw(b"b", length=1000), Raw(b"c"), Raw(b"d")), (11, 14, 14)),
        (batch(*THREE, last_delta=3, count=4), (13, 14, 14)),
        (batch(*THREE, last_delta=3, codec_number=5), (10, 14, 14)),
        (batch(*THREE, Raw(b"d"), bad_crc=True), (10, 14, 14)),
        (batch(Raw(b"a"), Raw(b"b", b"k", [(b"\xff", b"")]), Raw(b"c"), Raw(b"d")), (11, 12, 0)),
    ],
    ids=map(str, range(6)),
)
def test_a_fault_says_where_its_batch_ends_if_others_fail_there(raw: bytes, fault: tuple[int, int, int]) -> None:
    data = offsets_from((raw, 4), (batch(*THREE), 3), base=10)

    found = Read(data, 10, end=17).faults

    assert [(f.start, f.stop, f.batch_stop) for f in found] == [fault]


@pytest.mark.parametrize("codec", CODECS)
def test_a_record_with_a_wrong_length_takes_those_behind_it_along(codec: str) -> None:
    read = Read(batch(Raw(b"a"), Raw(b"b", length=1000), Raw(b"c"), codec=codec))

    assert read.good == [(0, b"a")]
    assert list(read.bad) == [1, 2]
    assert read.next == 3


@pytest.mark.parametrize("codec", CODECS)
def test_the_name_of_a_header_that_is_not_utf_8_is_marked_and_keeps_its_bytes(codec: str) -> None:
    raw = batch(Raw(b"a"), Raw(b"b", b"k", [(b"ok", b"1"), (b"ab\xff\xfe", b"2")]), Raw(b"c"), base=10, codec=codec)
    read = Read(raw, 10)

    assert read.good == [(10, b"a"), (11, b"b"), (12, b"c")]
    assert read.records[1].headers == (("ok", b"1"), ("\ufffdab\\xff\\xfe", b"2"))
    assert read.faults == [Fault(11, 12, "the name of a header is not UTF-8")]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("count", "good", "bad"), [(2, 2, 1), (4, 3, 0), (2**31 - 1, 3, 0)])
def test_a_record_count_that_lies(codec: str, count: int, good: int, bad: int) -> None:
    raw = batch(*THREE, codec=codec, count=count)
    read = Read(offsets_from((raw, 3), (batch(*THREE), 3)))

    assert len(read.good) == good + 3
    assert len(read.bad) == bad
    assert read.faults
    assert read.next == 6


def test_offsets_that_were_compacted_away_are_passed() -> None:
    read = Read(batch(Raw(b"a"), last_delta=9, base=5), 5)
    assert (read.good, read.next, read.faults) == ([(5, b"a")], 15, [])
    empty = Read(batch(last_delta=9, count=0, base=5), 5)
    assert (empty.good, empty.next, empty.faults) == ([], 15, [])


def test_reading_begins_in_the_middle_of_a_batch() -> None:
    assert Read(batch(*THREE, base=5), 6).good == [(6, b"b"), (7, b"c")]
    assert list(Read(batch(*THREE, base=5, codec_number=5), 6).bad) == [6, 7]
    assert list(Read(batch(*THREE, base=5, bad_crc=True), 7, end=8).bad) == [7]


def test_aborted_transactions_and_control_records_are_passed_though_they_cant_be_decoded() -> None:
    transactional, control = 0x10, 0x30
    data = offsets_from(
        (batch(*THREE, flags=transactional, producer_id=7, codec_number=5), 3),
        (batch(Raw(b"other"), flags=transactional, producer_id=8), 1),
        (batch(Raw(None, struct.pack(">hh", 0, 0)), flags=control, producer_id=7), 1),
        (batch(Raw(b"later"), flags=transactional, producer_id=7), 1),
        (batch(Raw(None, b""), flags=control, producer_id=7, count=5), 1),
    )
    read = Read(data, aborted=[(7, 0)])
    assert read.good == [(3, b"other"), (5, b"later")]
    assert (read.next, read.faults) == (7, [])


def test_a_control_record_that_cant_be_read_hides_nothing_behind_it() -> None:
    data = offsets_from(
        (batch(Raw(b"aborted"), flags=0x10, producer_id=7), 1),
        (batch(Raw(None, b"?"), flags=0x30, producer_id=7), 1),
        (batch(Raw(b"later"), flags=0x10, producer_id=7), 1),
    )
    assert Read(data, aborted=[(7, 0)]).good == [(2, b"later")]


@pytest.mark.parametrize("codec", [0, 1, 2, 3])
@pytest.mark.parametrize("magic", [0, 1])
def test_old_formats_are_read(codec: int, magic: int) -> None:
    codec = 0 if (magic, codec) == (0, 3) else codec
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=codec, batch_size=9999)
    for offset in range(3):
        builder.append(offset, MS, b"k", b"v%d" % offset)
    raw = bytes(builder.build())
    # the broker gives a set of messages the offset of the last one
    first = struct.pack(">q", 2) + raw[8:] if codec else raw
    read = Read(first)
    assert [value for _, value in read.good] == [b"v0", b"v1", b"v2"]
    assert {r.timestamp for r in read.records} == {MS if magic else -1}
    assert (read.next, read.faults) == (3, [])


@pytest.mark.parametrize("magic", [0, 1])
def test_an_old_set_of_messages_that_cant_be_decoded(magic: int) -> None:
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=1, batch_size=9999)
    for offset in range(3):
        builder.append(offset, MS, b"k", b"v" * 100)
    raw = bytearray(builder.build())
    raw[-20:-10] = b"\xff" * 10
    data = struct.pack(">q", 2) + bytes(raw[8:])
    read = Read(data + struct.pack(">q", 3) + batch(*THREE)[8:], end=6)
    assert list(read.bad) == [0, 1, 2]
    assert read.next == 6


# ---------------------------------------------------------------------- where no header can be trusted


def test_a_batch_with_a_wrong_checksum_ends_where_the_next_begins() -> None:
    # it says that it has a thousand offsets
    liar = batch(*THREE, bad_crc=True, last_delta=999, count=1000)
    read = Read(offsets_from((liar, 3), (batch(*THREE), 3)), end=2000)
    assert list(read.bad) == [0, 1, 2]
    assert [offset for offset, _ in read.good] == [3, 4, 5]
    assert read.records[0].value == liar  # for those who look at what is left of it


def test_the_last_batch_counts_for_one_offset_if_its_fields_dont_agree() -> None:
    liar = batch(*THREE, bad_crc=True, last_delta=999)
    assert list(Read(liar, end=2000).bad) == [0]
    beyond = batch(*THREE, bad_crc=True, last_delta=999, count=1000)
    assert list(Read(beyond, end=3).bad) == [0]
    # and where the broker answers with the same for the next offset, that is one more
    assert list(Read(liar, 1, end=2000).bad) == [1]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">qi", 0, -1) + b"x" * 100,
        struct.pack(">qi", 0, 0) + b"x" * 100,
        struct.pack(">qi", 0, 2**31 - 1) + batch(*THREE)[12:],
        struct.pack(">qi", 0, -(2**31)) + b"x" * 100,
        b"\0" * 100,
        b"\xff" * 100,
        b"xy",
        batch(*THREE)[:-1],
        batch(*THREE, base=-5),
        struct.pack(">qiib", 0, 5, 0, 2),
        struct.pack(">qiib", 0, 5, 0, 1),
    ],
    ids=map(str, range(11)),
)
def test_what_has_no_usable_header_moves_reading_on_by_one_offset(data: bytes) -> None:
    read = Read(data, 5, end=50)
    assert list(read.bad) == [5]
    assert read.next == 6


def test_what_was_cut_off_is_asked_for_again_first() -> None:
    data = batch(*THREE)[:-1]
    read = Read(data, given_up=())
    assert (read.records, read.next) == ([], 0)
    # behind a whole batch it is how an answer ends
    read = Read(offsets_from((batch(*THREE), 3), (batch(*THREE), 3))[:-1])
    assert (len(read.good), read.bad, read.next) == (3, {}, 3)
    assert PATIENCE > 1


def test_any_damage_is_survived_and_reading_always_moves_on() -> None:
    import random

    random_ = random.Random(11)
    for round_ in range(1500):
        codec = random_.choice(list(CODECS))
        parts = [(batch(*(Raw(random_.randbytes(9)) for _ in range(4)), codec=codec), 4) for _ in range(3)]
        data = bytearray(offsets_from(*parts))
        for _ in range(random_.randint(1, 4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        read = Read(bytes(data), end=12)
        offsets = [r.offset for r in read.records]
        assert read.next > 0, round_
        assert offsets == sorted(set(offsets)), round_


# ---------------------------------------------------------------------- around aiokafka's fetcher


class Fetcher:
    """The needed parts of aiokafka's fetcher, with brokers whose answers the test sets. Broker 1 leads."""

    def __init__(self, *, contiguous: bool = False) -> None:
        self._client: Any = self
        self._records: dict[TopicPartition, Any] = {}
        self._prefetch_backoff = 0.1
        self._max_partition_fetch_bytes = 100
        self._fetch_task = SimpleNamespace(add_done_callback=lambda _: None)
        self._fetch_waiters: list[Any] = []
        replicas = SimpleNamespace(leader=1, replicas=[3, 1, 2])
        self.cluster = SimpleNamespace(_partitions={"t": {3: replicas}})
        self.answers: dict[int, bytes | int | None] = {}  # by broker; a number is an error, None: it is away
        self.asked: list[int] = []
        self.left: Any = None  # of the records, for aiokafka's own decoder
        self.position = SimpleNamespace(has_valid_position=True, position=5, paused=False, consumed_to=self._moved)
        self.assignment = SimpleNamespace(active=True, state_value=lambda tp: self.position)
        self.faults: list[tuple[TopicPartition, Fault]] = []
        consumer: Any = SimpleNamespace(_fetcher=self)
        self.decoder = decode_with(
            consumer,
            lambda topic: topic == "t",
            lambda tp, fault: self.faults.append((tp, fault)),
            lambda topic: contiguous,
        )

    def _moved(self, position: int) -> None:
        self.position.position = position

    async def send(self, node_id: int, request: Any) -> Any:
        self.asked.append(node_id)
        answer = self.answers[node_id]
        if answer is None:
            raise NodeNotReadyError
        error, data = (answer, b"") if isinstance(answer, int) else (0, answer)
        part = (3, error, 50, 50, 0, [], -1, data)
        topics = [("t", [part])] if len(request.topics) == 1 and request._max_wait_ms == 0 else None
        return SimpleNamespace(API_VERSION=11, topics=topics or [("t", [part]), ("other", [part])])

    async def _proc_fetch_request(self, assignment: Any, node_id: int, request: Any) -> bool:
        response = await self._client.send(node_id, request)
        self.left = {topic: parts[0][-1] for topic, parts in response.topics}
        return False

    def fetch(self, answer: bytes | int) -> list[Any]:
        """The records that a fetch brings, with the answer of the leader."""
        self.answers[1] = answer
        return asyncio.run(self._fetched())

    async def _fetched(self) -> list[Any]:
        request = FetchRequest(100, 1, 1000, 1, [("t", [(3, self.position.position, 100)])])
        await self._proc_fetch_request(self.assignment, 1, request)
        while self.decoder._tasks:
            await asyncio.gather(*self.decoder._tasks)
        result = self._records.pop(TP, None)
        return [] if result is None else list(result.getall(10))

    def read(self, answer: bytes | int) -> list[Any]:
        """The records that come in the end, while the answer of the leader stays the same."""
        self.faults.clear()
        for _ in range(PATIENCE + 2):
            if records := self.fetch(answer):
                return records
        return []


def test_the_records_of_some_topics_are_kept_from_aiokafka() -> None:
    fetcher = Fetcher()
    records = fetcher.fetch(batch(*THREE, base=5))
    assert [r.value for r in records] == [b"a", b"b", b"c"]
    assert fetcher.left == {"t": b"", "other": batch(*THREE, base=5)}
    assert fetcher.position.position == 8


def test_what_was_sought_away_from_meanwhile_is_not_taken() -> None:
    fetcher = Fetcher()
    fetcher.answers[1] = batch(*THREE, base=5)
    request = FetchRequest(100, 1, 1000, 1, [("t", [(3, 4, 100)])])
    assert not asyncio.run(fetcher._proc_fetch_request(fetcher.assignment, 1, request))
    assert not fetcher._records


def test_a_batch_that_is_cut_off_is_asked_for_whole_and_given_up_in_the_end() -> None:
    fetcher = Fetcher()
    raw = batch(Raw(b"v" * 1000), base=5)
    assert fetcher.fetch(raw[:200]) == []
    assert fetcher._max_partition_fetch_bytes == len(raw)
    # it comes whole
    assert [r.offset for r in fetcher.fetch(raw)] == [5]

    # it never does
    raw = batch(Raw(b"v" * 1000), base=6)
    fetcher.answers = dict.fromkeys((2, 3), raw[:200])
    for _ in range(PATIENCE):
        assert fetcher.fetch(raw[:200]) == []
    assert fetcher.position.position == 6
    (given_up,) = fetcher.fetch(raw[:200])
    assert type(given_up) is Unreadable and given_up.offset == 6
    assert fetcher.position.position == 7
    assert fetcher.faults == [(TP, Fault(6, 7, "the length or the offset of a batch is wrong", 7, is_flaw=True))]


WHOLE, GOES_ON = batch(*THREE, base=5), batch(*THREE, base=8)
ROTTEN = batch(*THREE, base=5, bad_crc=True)


@pytest.mark.parametrize(
    ("answer", "contiguous"),
    [
        (ROTTEN, False),
        (ROTTEN + GOES_ON, True),
        (batch(*THREE, base=5, magic=3) + GOES_ON, False),
        (GOES_ON, True),  # the batch is missing
        (batch(*THREE, base=6) + GOES_ON, True),  # it says that it begins later
        (b"\0" * 100, False),
        (b"", True),  # though the log goes on
        (2, False),  # CORRUPT_MESSAGE
    ],
    ids=["checksum", "first", "format", "missing", "offset", "length", "cut", "error"],
)
def test_what_the_leader_does_not_have_whole_is_read_from_another_replica(
    answer: bytes | int, contiguous: bool
) -> None:
    fetcher = Fetcher(contiguous=contiguous)
    fetcher.answers = {2: WHOLE + GOES_ON, 3: None}

    records = fetcher.read(answer)

    assert [(r.offset, r.value) for r in records[:3]] == [(5, b"a"), (6, b"b"), (7, b"c")]
    # what lies behind is read from the leader again, if the flaw ends there
    assert fetcher.position.position == (11 if answer in (b"", 2) else 8)
    assert fetcher.asked[-2:] == [3, 2]
    ((_, fault),) = fetcher.faults
    assert (fault.start, fault.stop, fault.read_from) == (5, 5, 2)
    assert fault.batch_stop == fetcher.position.position


def test_the_leader_itself_is_asked_again_first() -> None:
    fetcher = Fetcher()
    fetcher.answers = {2: None, 3: None}
    assert fetcher.fetch(ROTTEN) == fetcher.fetch(batch(*THREE, base=5)[:-1]) == []
    assert [r.offset for r in fetcher.fetch(WHOLE)] == [5, 6, 7]
    assert set(fetcher.asked) == {1}


def test_records_in_front_of_a_flaw_are_read_and_those_behind_it_only_once_it_is_given_up() -> None:
    fetcher = Fetcher(contiguous=True)
    data = batch(*THREE, base=5) + batch(*THREE, base=8, bad_crc=True) + batch(*THREE, base=11)
    fetcher.answers = {2: batch(*THREE, base=8, bad_crc=True), 3: batch(*THREE, base=11)}
    assert [r.offset for r in fetcher.fetch(data)] == [5, 6, 7]
    data = data[len(WHOLE) :]
    records = fetcher.read(data)
    assert [(type(r), r.offset) for r in records[:2]] == [(Unreadable, 8), (FetchedRecord, 11)]
    assert records[0].stop == 11
    assert [(f.start, f.stop, f.read_from) for _, f in fetcher.faults] == [(8, 11, -1)]


def test_a_flaw_is_not_given_up_before_all_replicas_were_asked_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "ROUND_S", 0.0)
    fetcher = Fetcher()
    fetcher.answers = {2: None, 3: ROTTEN}
    assert [(r.offset, r.stop) for r in fetcher.read(ROTTEN)] == [(5, 8)]
    assert fetcher.asked.count(2) == fetching.ROUNDS
    # when all have answered there is nothing to wait for
    fetcher = Fetcher()
    fetcher.answers = {2: ROTTEN, 3: ROTTEN}
    assert fetcher.read(ROTTEN)
    assert fetcher.asked.count(2) == 1


def test_a_log_that_is_compacted_may_have_gaps() -> None:
    fetcher = Fetcher()
    assert [r.offset for r in fetcher.fetch(GOES_ON)] == [8, 9, 10]
    assert not fetcher.faults


def test_what_was_given_up_is_read_again_from_any_replica() -> None:
    fetcher = Fetcher()
    fetcher.answers = {1: ROTTEN + GOES_ON, 2: None, 3: ROTTEN + GOES_ON}

    position, records = asyncio.run(fetcher.decoder.read_again(TP, 5, 8))
    assert [(type(r), r.offset, r.stop) for r in records] == [(Unreadable, 5, 8)] and position == 8
    fetcher.answers[2] = WHOLE + GOES_ON
    position, records = asyncio.run(fetcher.decoder.read_again(TP, 5, 8))
    assert [(r.offset, r.value) for r in records] == [(5, b"a"), (6, b"b"), (7, b"c")]
    fetcher.answers = dict.fromkeys((1, 2, 3))
    assert asyncio.run(fetcher.decoder.read_again(TP, 5, 8)) == (5, [])
