"""Only this user can read what we write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.folders import private_folder, write_private
from app.kafka.broker_file import running_broker
from app.kafka.datadir import claim_worker
from app.settings import Settings
from marq.errors import DataDirError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o755, 0o777, 0o700])
def test_a_folder_of_ours_is_closed_to_others(tmp_path: Path, before: int | None) -> None:
    folder = tmp_path / "a" / "b"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)

    assert private_folder(folder) == folder
    assert mode(folder) == 0o700


@pytest.mark.parametrize("part", ["data", "data/broker.json"])
def test_a_broker_that_another_user_names_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    data_dir = private_folder(tmp_path / "data")
    (data_dir / "broker.json").write_text('{"bootstrap": "127.0.0.1:1", "pid": 1}')
    theirs, stat = tmp_path / part, Path.stat

    def owned(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        return os.stat_result([*found[:4], 12345 if path == theirs else os.geteuid(), *found[5:]])

    monkeypatch.setattr(Path, "stat", owned)  # only root could make a file that is another's
    with pytest.raises(DataDirError, match=f"{theirs} belongs to user 12345"):
        running_broker(data_dir)


def test_a_folder_that_all_may_write_to_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)

    private_folder(tmp_path)

    assert mode(tmp_path) == 0o1777


def test_a_file_is_private_from_its_first_byte_and_keeps_no_permissions(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old")
    file.chmod(0o644)

    write_private(file, "new")

    assert (file.read_text(), mode(file)) == ("new", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["password"]


def test_the_folder_of_a_worker_is_its_users_alone(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    worker = claim_worker(Settings(data_dir=data_dir, web_port=0))

    assert mode(data_dir) == 0o700
    assert mode(worker.folder) == 0o700
