"""The records of queues, read by this version and by earlier ones of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sized
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from pydantic import SecretStr

from app.engine.catalog import Catalog
from app.engine.queue_records import decode, encode, id_of_queue, next_record
from app.settings import Settings
from marq.core.policies import QUEUE_NAME_MAX, QueueSettings
from marq.core.settings import RECORD_VERSION, QueueSettingsError
from marq.core.versions import VERSIONS, place_of_queue, version_seal
from marq.errors import NewerVersionError

RECORD = next_record(None, settings=QueueSettings(fifo=True), state="active")


def test_a_record_comes_back() -> None:
    assert decode(encode(RECORD)) == RECORD


@pytest.mark.parametrize("value", [b'{"v": 2, "settings": 7}', encode(RECORD).replace(b'"v":1', b'"v":2')])
def test_one_of_a_later_version_says_which_is_needed(value: bytes) -> None:
    with pytest.raises(
        NewerVersionError, match=f"version 2, and this marq reads up to version {RECORD_VERSION}: run a marq"
    ):
        decode(value)


def take(catalog: Catalog, key: bytes, value: bytes | None) -> None:
    catalog._take(SimpleNamespace(key=key, value=value, offset=7))


def sealed(value: bytes, key: bytes, queue: str = "q") -> bytes:
    return b'%b,"seal":"%b"}' % (value[:-1], version_seal(value[:-1], place_of_queue(queue), key))


@pytest.mark.parametrize("secret", ["", "s" * 32])
def test_and_stops_the_worker_that_reads_it_if_the_installation_has_sealed_it(secret: str) -> None:
    settings = Settings(secret=SecretStr(secret)) if secret else Settings()
    catalog = Catalog(settings, lambda: settings.queues_topic)
    take(catalog, b"q", b'{"v":2}')  # nothing is sealed before there is a secret
    take(catalog, b"\0secret/1", b"k" * 32)
    with pytest.raises(NewerVersionError, match=r"record 7 of marq\.queues: a queue's record of version 2"):
        take(catalog, b"q", sealed(b'{"v":2}', catalog.keys_for(VERSIONS)[0]))


def test_and_is_ignored_with_a_warning_if_it_has_not(caplog: pytest.LogCaptureFixture) -> None:
    catalog = Catalog(Settings(), lambda: "t")
    take(catalog, b"\0secret/1", b"k" * 32)
    take(catalog, b"q", encode(RECORD))
    (key,) = catalog.keys_for(VERSIONS)
    wrong = [
        b'{"v":2}',
        sealed(b'{"v":2}', b"s" * 32),
        sealed(b'{"v":2}', key, "r"),
        b'{"v":2,"seal":"%b"}' % (b"0" * 24),
    ]
    for value in wrong:
        take(catalog, b"q", value)
    assert catalog.records["q"].settings == RECORD.settings
    assert caplog.text.count("Ignored record 7 of the queues topic: a queue's record of version 2") == len(wrong)


@pytest.mark.parametrize("value", [b'{"v":2}', b"junk"])
def test_what_is_ignored_does_not_replace_the_record_of_its_queue_for_good(value: bytes) -> None:
    """Compaction keeps the last record of a key only, so the one that counts is written again."""
    catalog = Catalog(Settings(), lambda: "t")
    take(catalog, b"q", encode(RECORD))
    take(catalog, b"q", value)
    take(catalog, b"unknown", value)
    assert set(catalog._overwritten) == {"q"}


def test_what_is_no_record_is_passed_over() -> None:
    with pytest.raises(QueueSettingsError):
        decode(b'{"v": "x"}')


def put(catalog: Catalog, queue: str, version: int, **kwargs: Any) -> None:
    """A record of a queue is read, or with no version its deletion, and that it is forgotten."""
    record = next_record(
        catalog.records.get(queue), settings=QueueSettings(**kwargs), state="active" if version else "deleted"
    )
    catalog._take(SimpleNamespace(key=queue.encode(), value=encode(record), offset=0))
    if not version:
        catalog._take(SimpleNamespace(key=queue.encode(), value=None, offset=0))


@pytest.mark.parametrize("named", ["", "hospital", "orders.dead"])
def test_a_queue_is_there_while_another_one_sends_its_dead_letters_there(named: str) -> None:
    target = named or "orders.dead"
    catalog = Catalog(Settings(), lambda: "t")
    assert not catalog.exists(target)
    put(catalog, "orders", 1, dead_letter_queue=named)
    put(catalog, "bills", 1, dead_letter_queue="hospital")
    assert catalog.exists(target)
    put(catalog, "orders", 2, dead_letter_queue="elsewhere")
    put(catalog, "bills", 0)
    assert not catalog.exists(target)
    assert not catalog.exists("nobody.dead")


def test_the_dead_letter_queue_of_the_longest_name_is_there() -> None:
    name = "q" * QUEUE_NAME_MAX
    catalog = Catalog(Settings(), lambda: "t")
    put(catalog, name, 1)
    target = catalog.settings_of(name).dead_letters_of(name)
    assert len(target) == QUEUE_NAME_MAX and catalog.exists(target)


def test_queues_that_come_and_go_leave_nothing() -> None:
    catalog = Catalog(Settings(), lambda: "t")
    before = {name: len(value) for name, value in vars(catalog).items() if isinstance(value, Sized)}
    for i in range(100):
        put(catalog, f"q{i}", 1, dead_letter_queue=f"d{i}", ttl_ms=5_000, backoff_ms=100)
        catalog.settings_of(f"q{i}")
        put(catalog, f"q{i}", 0)
    assert {name: len(value) for name, value in vars(catalog).items() if isinstance(value, Sized)} == before


def test_many_queues_that_are_alike_take_300_bytes_each() -> None:
    catalog = Catalog(Settings(), lambda: "t")
    count = 5_000
    put(catalog, "first", 1)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for i in range(count):
        put(catalog, f"queue-{i}", 1, visibility_timeout_ms=5_000)
    assert len(catalog.names()) == count + 1
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / count < 300


def test_a_queue_whose_name_has_the_same_checksum_does_not_share_the_back_off_of_another() -> None:
    """CRC-32 of the two names is equal; with a right to make `evil-*`, one can find such a name for any queue."""
    victim, evil = b"payroll-runs", colliding(b"payroll-runs", b"evil-")
    assert crc32(victim) == crc32(evil)
    catalog = Catalog(Settings(), lambda: "t")
    put(catalog, victim.decode(), 1, backoff_ms=100)
    put(catalog, evil.decode(), 1, backoff_ms=31_622_400_000)
    assert catalog.with_backoff[id_of_queue(victim.decode())] == victim.decode()
    put(catalog, evil.decode(), 2, backoff_ms=0)
    assert catalog.with_backoff == {id_of_queue(victim.decode()): victim.decode()}


def colliding(target: bytes, prefix: bytes) -> bytes:
    """A name of letters a and b after `prefix` with the CRC-32 of `target`: CRC is linear, so bits are solved for."""
    name = bytearray(prefix + b"a" * 64)
    zero, basis = crc32(name), dict[int, tuple[int, int]]()
    for i in range(64):
        name[len(prefix) + i] = ord("b")
        value, mask = crc32(name) ^ zero, 1 << i
        name[len(prefix) + i] = ord("a")
        while value and (pivot := value.bit_length()) in basis:
            value, mask = value ^ basis[pivot][0], mask ^ basis[pivot][1]
        if value:
            basis[value.bit_length()] = value, mask
    value, mask = crc32(target) ^ zero, 0
    while value:
        value, mask = value ^ basis[value.bit_length()][0], mask ^ basis[value.bit_length()][1]
    return bytes(prefix) + bytes(ord("b" if mask >> i & 1 else "a") for i in range(64))
