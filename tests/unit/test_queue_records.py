"""The records of queues, read by this version and by earlier ones of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.engine.catalog import Catalog
from app.engine.queue_records import decode, encode, next_record
from app.settings import Settings
from marq.core.policies import QueueSettings
from marq.core.settings import RECORD_VERSION, QueueSettingsError
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


def test_and_stops_the_worker_that_reads_it() -> None:
    settings = Settings()
    catalog = Catalog(settings, lambda: settings.queues_topic)
    with pytest.raises(NewerVersionError, match=r"record 7 of marq\.queues: a queue's record of version 2"):
        catalog._take(SimpleNamespace(key=b"q", value=b'{"v": 2}', offset=7))


def test_what_is_no_record_is_passed_over() -> None:
    with pytest.raises(QueueSettingsError):
        decode(b'{"v": "x"}')
