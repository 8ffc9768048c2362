"""The file with the few rows of a partition: whole after a crash, and damage is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.streaming.raw_table import is_damage
from app.streaming.row_file import RowFile


def test_rows_are_there_for_the_next_who_opens_it(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "a.rows")
    rows.put(b"2", b"two")
    rows.put(b"1", b"one")
    rows.write_all([(b"3", b"three"), (b"2", None)])
    rows.delete(b"no such row")
    again = RowFile(tmp_path / "a.rows")
    assert list(again.iter_rows()) == [(b"1", b"one"), (b"3", b"three")]
    assert (again.get(b"3"), again.get(b"2")) == (b"three", None)


def test_looking_makes_no_file(tmp_path: Path) -> None:
    assert RowFile(tmp_path / "a.rows").get(b"1") is None
    assert not list(tmp_path.iterdir())


def test_whoever_goes_through_the_rows_sees_no_change_meanwhile(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "a.rows")
    rows.write_all([(b"1", b"one"), (b"2", b"two")])
    found = []
    for key, _ in rows.iter_rows():
        rows.delete(b"2")
        found.append(key)
    assert found == [b"1", b"2"]


@pytest.mark.parametrize("size", [0, 3, 4, 20, 39])
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path, size: int) -> None:
    RowFile(tmp_path / "a.rows").put(b"key", bytes(range(30)))
    content = (tmp_path / "a.rows").read_bytes()
    assert len(content) > size
    (tmp_path / "a.rows").write_bytes(content[:size])
    with pytest.raises(Exception, match="checksum") as found:
        RowFile(tmp_path / "a.rows")
    assert is_damage(found.value)


def test_a_changed_byte_is_damage_wherever_it_is(tmp_path: Path) -> None:
    RowFile(tmp_path / "a.rows").put(b"key", b"value")
    content = (tmp_path / "a.rows").read_bytes()
    for at in range(len(content)):
        (tmp_path / "a.rows").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(Exception, match="checksum") as found:
            RowFile(tmp_path / "a.rows")
        assert is_damage(found.value)


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "a.rows")
    rows.put(b"1", b"one")
    (tmp_path / "a.tmp").mkdir()
    with pytest.raises(OSError, match=r"a\.tmp"):
        rows.put(b"1", b"two")
    assert rows.get(b"1") == b"one"
    assert RowFile(tmp_path / "a.rows").get(b"1") == b"one"


def test_what_may_be_lost_is_written_with_the_next_row_or_at_the_end(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "a.rows")
    rows.write_all([(b"1", b"one"), (b"2", b"two")])
    rows.delete(b"1")
    rows.put_soon(b"offset", b"7")
    assert (rows.get(b"1"), rows.get(b"offset")) == (None, b"7")
    after_a_crash = RowFile(tmp_path / "a.rows")
    assert list(after_a_crash.iter_rows()) == [(b"1", b"one"), (b"2", b"two")]
    rows.put(b"3", b"three")
    assert dict(RowFile(tmp_path / "a.rows").iter_rows()) == {b"2": b"two", b"3": b"three", b"offset": b"7"}
    rows.put_soon(b"offset", b"8")
    rows.delete(b"3")
    rows.close()
    assert dict(RowFile(tmp_path / "a.rows").iter_rows()) == {b"2": b"two", b"offset": b"8"}


def test_closing_writes_only_what_has_changed(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "a.rows")
    rows.put(b"1", b"one")
    (tmp_path / "a.rows").unlink()
    rows.delete(b"no such row")
    rows.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_at_the_end_is_as_a_crash(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "a.rows")
    rows.put(b"1", b"one")
    rows.put_soon(b"offset", b"8")
    (tmp_path / "a.tmp").mkdir()
    rows.close()
    assert dict(RowFile(tmp_path / "a.rows").iter_rows()) == {b"1": b"one"}
