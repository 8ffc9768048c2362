"""Only jars with the hashes of the lock are used, from folders that no other user can write to."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.kafka.jars import Jar, install, locked, own
from marq.errors import DownloadError, PipelineError
from pipeline.jars import home as home_of_spark
from pipeline.jars import install_spark_jars

GOOD, OTHER = b"a jar", b"another jar"
JAR = Jar("org.example", "thing", "1.0", hashlib.sha256(GOOD).hexdigest())


class Repository:
    """A Maven repository on loopback."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.failures = 0
        self.asked: list[str] = []
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                repository.asked.append(self.path)
                content = repository.files.get(self.path)
                if repository.failures:
                    repository.failures -= 1
                    self.send_error(503)
                elif content is None:
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/maven2"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def repository() -> Iterator[Repository]:
    found = Repository()
    yield found
    found.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "thing"


def in_cache(home: Path, content: bytes) -> Path:
    own(home / "jars")
    file = home / "jars" / JAR.file
    file.write_bytes(content)
    return file


def test_a_jar_is_fetched_once(repository: Repository, home: Path) -> None:
    repository.files["/maven2/org/example/thing/1.0/thing-1.0.jar"] = GOOD
    assert install(home, [JAR], repository.url) == [home / "jars" / "thing-1.0.jar"]
    assert install(home, [JAR], repository.url)[0].read_bytes() == GOOD
    assert len(repository.asked) == 1


def test_a_failure_of_the_server_that_passes_is_no_failure(repository: Repository, home: Path) -> None:
    repository.files[f"/maven2/{JAR.path}"] = GOOD
    repository.failures = 1
    assert install(home, [JAR], repository.url)[0].read_bytes() == GOOD


def test_a_jar_that_is_not_there_is_named_with_its_address(repository: Repository, home: Path) -> None:
    with pytest.raises(DownloadError, match=r"can't fetch http://.*/thing-1.0.jar: .*404.*; check the network"):
        install(home, [JAR], repository.url)
    assert len(repository.asked) == 1


def test_a_fetched_jar_with_another_hash_is_an_error_and_never_in_the_cache(repository: Repository, home: Path) -> None:
    repository.files[f"/maven2/{JAR.path}"] = OTHER
    with pytest.raises(DownloadError, match=r"thing-1.0.jar is not the file that marq was made with"):
        install(home, [JAR], repository.url)
    assert [file.name for file in (home / "jars").iterdir()] == []


def test_a_jar_that_was_changed_in_the_cache_is_an_error_and_stays_as_it_is(repository: Repository, home: Path) -> None:
    repository.files[f"/maven2/{JAR.path}"] = GOOD
    file = in_cache(home, OTHER)
    with pytest.raises(DownloadError, match=f"{file} is not the file that marq was made with"):
        install(home, [JAR], repository.url)
    assert file.read_bytes() == OTHER
    assert repository.asked == []


def test_only_jars_of_the_lock_are_used(repository: Repository, home: Path) -> None:
    file = in_cache(home, GOOD)
    (home / "jars" / "aaa.jar").write_bytes(OTHER)
    assert install(home, [JAR], repository.url) == [file]


@pytest.mark.parametrize("part", ["cache", "cache/thing", "cache/thing/jars", "cache/thing/jars/thing-1.0.jar"])
def test_a_cache_that_belongs_to_somebody_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path, part: str
) -> None:
    in_cache(home, GOOD)
    theirs, stat = tmp_path / part, Path.stat
    me, somebody = os.geteuid(), 12345

    def owned(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        return os.stat_result([*found[:4], somebody if path == theirs else me, *found[5:]])

    monkeypatch.setattr(Path, "stat", owned)  # only root could make a file that is another's
    with pytest.raises(DownloadError, match=f"{theirs} belongs to user {somebody}"):
        install(home, [JAR])


def test_new_folders_are_for_this_user_alone(repository: Repository, home: Path) -> None:
    repository.files[f"/maven2/{JAR.path}"] = GOOD
    install(home, [JAR], repository.url)
    for folder in (home.parent, home, home / "jars"):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


def test_others_can_not_write_to_a_folder_of_ours_any_more(home: Path) -> None:
    in_cache(home, GOOD)
    (home / "jars").chmod(0o777)
    install(home, [JAR])
    assert (home / "jars").stat().st_mode & 0o777 == 0o755


def locks() -> list[str]:
    folder = Path(__file__).resolve().parents[2] / "requirements"
    return sorted(file.name.removesuffix("-jars.txt") for file in folder.glob("*-jars.txt"))


def test_all_that_is_fetched_has_a_lock() -> None:
    assert {"kafka", "spark", "bench", "elasticmq"} <= set(locks())


@pytest.mark.parametrize("name", locks())
def test_each_lock_names_every_jar_once_with_its_hash_and_no_address(name: str) -> None:
    jars = locked(name)
    assert jars
    assert len({jar.file for jar in jars}) == len(jars)
    assert [jar.file for jar in jars] == sorted(jar.file for jar in jars)


def test_a_changed_jar_stops_a_spark_job(tmp_path: Path) -> None:
    folder = own(home_of_spark(tmp_path) / "jars")
    for jar in locked("spark"):
        (folder / jar.file).write_bytes(OTHER)
    with pytest.raises(PipelineError, match=r"\.jar is not the file that marq was made with"):
        install_spark_jars(tmp_path)
