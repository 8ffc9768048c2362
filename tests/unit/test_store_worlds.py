"""A local store is of one changelog: one of another is deleted before anything of it is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from app.streaming.raw_table import STORE_OPTIONS, SegmentStore, TableError

CHANGELOG = "t-changelog"
HERE, ELSEWHERE = "cluster-b id-b", "cluster-a id-a"


@pytest.fixture(params=[False, True], ids=["RocksDB", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    yield tmp_path, request.param


def opened(folder: tuple[Path, bool], world: str | None) -> tuple[SegmentStore, bool]:
    """A store of a worker that has just started, which owns partition 0, and whether it met one of another world."""
    path, small = folder
    app: Any = SimpleNamespace(conf=SimpleNamespace(tabledir=path, datadir=path, table_key_index_size=10))
    table: Any = SimpleNamespace(name="t", changelog_topic_name=CHANGELOG)
    store = SegmentStore("rocksdb://", app, table, table_name="t", options=dict(STORE_OPTIONS))
    store.log = logging.getLogger("store")  # type: ignore[assignment]
    store.small = small
    store._owned = {0}
    return store, asyncio.run(store.open(0, world))


def filled(folder: tuple[Path, bool], world: str | None) -> None:
    store, _ = opened(folder, world)
    store._db_for_partition(0).put(b"key", b"value")
    store.set_persisted_offset(TP(CHANGELOG, 0), 7)
    store.close(0)


def content(store: SegmentStore) -> tuple[bytes | None, int | None]:
    db = store.existing(0)
    return (None if db is None else db.get(b"key")), store.persisted_offset(TP(CHANGELOG, 0))


@pytest.mark.parametrize(("was", "now"), [(ELSEWHERE, HERE), (None, HERE)], ids=["other", "not told"])
def test_a_store_of_another_world_is_deleted(folder: tuple[Path, bool], was: str | None, now: str) -> None:
    filled(folder, was)
    store, foreign = opened(folder, now)
    assert foreign and content(store) == (None, None)
    store.close(0)
    filled(folder, now)
    store, foreign = opened(folder, now)
    assert not foreign and content(store) == (b"value", 7)
    store.close(0)


def test_a_store_of_the_same_world_is_kept_and_an_empty_one_is_of_any(folder: tuple[Path, bool]) -> None:
    store, foreign = opened(folder, ELSEWHERE)
    assert not foreign and not list(folder[0].rglob("*.world")), "nothing was written to it"
    filled(folder, HERE)
    store, foreign = opened(folder, HERE)
    assert not foreign and content(store) == (b"value", 7)
    store.close(0)


def test_an_open_store_whose_topics_were_made_anew_is_deleted(folder: tuple[Path, bool]) -> None:
    filled(folder, HERE)
    store, _ = opened(folder, HERE)
    assert asyncio.run(store.open(0, ELSEWHERE)) and content(store) == (None, None)
    store.close(0)


def test_a_store_of_another_world_that_can_not_be_deleted_is_not_read(
    folder: tuple[Path, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder, ELSEWHERE)
    monkeypatch.setattr(SegmentStore, "wipe", lambda *_: None)
    for _ in range(2):
        with pytest.raises(TableError, match="is of another Kafka"):
            opened(folder, HERE)
