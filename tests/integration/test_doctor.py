"""The doctor, on real Kafka and real workers: it finds each fault, and nothing on a healthy system."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner

from app.commands import doctor
from app.doctor import data_folder, dispensed, file_limit
from app.settings import Settings
from marq.cli.checks import Facts, Level, examine
from marq.cli.doctor import certificate_days
from tests.integration.cluster import Cluster, until
from tests.integration.marq_command import Command
from tests.kafka import settings_for


def findings(data_dir: Path, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status of `python -m app doctor`, and its problems, by check."""
    done = CliRunner().invoke(doctor, ["--json"], env={"MARQ_DATA_DIR": str(data_dir), **variables})
    assert done.exit_code in (0, 1), done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return done.exit_code, {one["check"]: one for one in found if one["level"] in ("warning", "problem")}


@pytest.fixture(scope="module")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(kafka, tmp_path_factory.mktemp("doctor"), partitions=1, handlers="") as running:
        running.start()
        yield running


def test_a_service_that_is_well_has_nothing_wrong_and_a_dead_letter_is_named(cluster: Cluster) -> None:
    marq = Command(cluster.workers[0].url)
    wrong = [one for one in marq("doctor", "--json").objects if one["level"] in ("warning", "problem")]
    assert [one for one in wrong if one["check"] != "disk"] == []

    assert marq("send", "orders", "a").status == 0
    (message,) = marq("receive", "orders", "--wait", "10s", "--json").objects
    assert marq("reject", message["receipt"]).status == 0
    until(lambda: "orders: 1 dead letter" in marq("doctor", "--quiet").out, "it is named")
    assert marq("doctor").status == 1


def test_a_worker_of_another_installation_or_kafka_than_the_settings_name_is_no_reason_to_be_well(
    cluster: Cluster,
) -> None:
    (worker,) = cluster.workers
    marq = Command(worker.url)

    def levels(**variables: str) -> dict[str, str]:
        found = marq("doctor", "--json", given=b"", **variables).objects
        return {one["check"]: one["level"] for one in found if one["check"] in ("installation", "kafka")}

    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = f"kafka://127.0.0.1:{unused.getsockname()[1]}"
    ours = {name: value for name, value in cluster.environment.items() if name in ("MARQ_KAFKA", "MARQ_NAME")}
    assert levels() == {"installation": "ok"}
    assert levels(**ours) == {"installation": "ok", "kafka": "skipped"}
    assert levels(MARQ_NAME="another", MARQ_KAFKA=dead) == {"installation": "problem", "kafka": "problem"}
    lines = marq("doctor", "--quiet", MARQ_KAFKA=dead)
    assert (lines.status, f"nothing answers at {dead}" in lines.out, "nothing is wrong" in lines.out) == (
        1,
        True,
        False,
    )

    def found(**variables: str) -> dict[str, tuple[str, str]]:
        given = {name: value for name, value in cluster.environment.items() if name.startswith("MARQ_")} | variables
        done = CliRunner().invoke(doctor, ["--json"], env=given | {"MARQ_DATA_DIR": str(worker.data_dir)})
        objects = [json.loads(line) for line in done.stdout.splitlines()]
        # the workers have a check of topics, too: that of this machine comes first
        return {one["check"]: (one["level"], one["what"]) for one in reversed(objects)}

    assert [found()[check][0] for check in ("kafka", "topics", "installation")] == ["ok", "ok", "ok"]
    without_kafka = found(MARQ_KAFKA=dead)
    assert [without_kafka[check][0] for check in ("kafka", "topics", "installation")] == [
        "problem",
        "skipped",
        "skipped",
    ]
    level, what = found(MARQ_NAME="another")["installation"]
    assert (level, what.endswith('the settings here name "another"')) == ("problem", True)


def test_workers_that_disagree_are_named(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path, partitions=1, handlers="") as cluster:
        first = cluster.start(ready=False, visibility_timeout_ms=10_000)
        cluster.start(ready=False, visibility_timeout_ms=20_000)
        cluster.wait_served()
        (wrong,) = [one for one in Command(first.url)("doctor", "--json").objects if one["check"] == "settings"]
        assert wrong["level"] == "problem"
        assert "disagree on visibility_timeout_ms: 10000 at" in wrong["what"]

        place = first.place
        assert place is not None
        status, found = findings(
            first.data_dir, **{k: v for k, v in cluster.environment.items() if k.startswith("MARQ_")}
        )
        assert (status, "settings" in found) == (1, True)


def test_topics_that_are_not_what_they_must_be_are_named_and_nothing_is_created(kafka: str, tmp_path: Path) -> None:
    import asyncio

    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

    settings = settings_for(kafka, partitions=2)

    async def topics(*new: NewTopic) -> set[str]:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
        await admin.start()
        try:
            if new:
                await admin.create_topics(list(new))
            return {name for name in await admin.list_topics() if name.startswith(settings.name)}
        finally:
            await admin.close()

    variables = {"MARQ_KAFKA": f"kafka://{kafka}", "MARQ_NAME": settings.name, "MARQ_WEB_PORT": "0"}
    assert "topics" not in findings(tmp_path, **variables)[1]
    assert asyncio.run(topics()) == set()

    asyncio.run(topics(NewTopic(settings.queue_topic, 2, 1, topic_configs={"retention.ms": "1000"})))
    status, found = findings(tmp_path, **variables)
    assert status == 1
    assert "must be" in found["topics"]["what"]
    assert "kafka-configs.sh" in found["topics"]["mend"]
    assert asyncio.run(topics()) == {settings.queue_topic}


def test_a_key_that_is_not_known_is_named(kafka: str, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("w" * 24)
    with Cluster(kafka, tmp_path / "c", partitions=1, handlers="", keys="k" * 24) as cluster:
        worker = cluster.start(ready=False)
        until(lambda: worker.place is not None and worker.get("/health/ready")[0] == 200, "it is ready", 40)
        marq = Command(worker.url)
        for args in ((), ("--key-file", str(tmp_path / "wrong"))):
            done = marq("doctor", "--json", *args)
            (wrong,) = [one for one in done.objects if one["level"] in ("warning", "problem")]
            assert (done.status, wrong["check"]) == (1, "key"), wrong
            assert "inspect:*" in wrong["mend"]


def test_a_certificate_that_ends_soon_is_named(tmp_path: Path) -> None:
    """In the handshake with a real server; no worker is asked."""
    authority = trustme.CA()
    ends = datetime.now(UTC) + timedelta(days=3.5)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", not_after=ends).configure_cert(context)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError), context.wrap_socket(listening.accept()[0], server_side=True) as secure:
                secure.recv(1)

        server = threading.Thread(target=serve)
        server.start()
        days = certificate_days(f"https://127.0.0.1:{listening.getsockname()[1]}", trust)
        server.join(20)
    assert days is not None
    assert 3 < days <= 3.5
    (found,) = [one for one in examine(Facts("https://…", certificate_days=days)) if one.check == "certificate"]
    assert (found.level, found.what) == (Level.WARNING, "the certificate of https://… ends in 3 days")


@pytest.mark.parametrize(
    ("variables", "check", "said"),
    [
        ({"MARQ_KAFKA": "kafka://127.0.0.1:1"}, "kafka", "Connection refused"),
        ({}, "kafka", "no Kafka to use"),
        ({"MARQ_KAFKA": "localhost"}, "settings", "must be kafka://host:port"),
        ({"MARQ_KEYS": "short"}, "keys", "shorter than 16 characters"),
        ({"MARQ_WEB_HOST": "0.0.0.0"}, "keys", "lets others in"),
        (
            {"MARQ_WEB_TLS_CERTIFICATE_FILE": __file__, "MARQ_WEB_TLS_KEY_FILE": __file__},
            "certificate",
            "can't be used",
        ),
    ],
    ids=["nobody there", "none set", "no address", "a short key", "no key", "no certificate"],
)
def test_a_setting_that_can_not_work_is_named(variables: dict[str, str], check: str, said: str, tmp_path: Path) -> None:
    status, found = findings(tmp_path, **({"MARQ_WEB_PORT": "0"} | variables))
    assert status == 1
    assert said in found[check]["what"]
    assert found[check]["mend"]


def test_a_port_that_somebody_has_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        _, found = findings(tmp_path, MARQ_WEB_PORT=str(port))
    assert found["port"]["level"] == "problem"
    assert f"port {port}: Address already in use" in found["port"]["what"]


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert data_folder(tmp_path / "new" / "deeper").level is not Level.PROBLEM
    assert not (tmp_path / "new").exists()
    found = data_folder(Path("/proc/self/marq"))
    assert found.level is Level.PROBLEM
    assert "can't be written" in found.what
    assert data_folder(tmp_path / "file").level is Level.PROBLEM
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_nearly_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1024**3
    for free, total, level in (
        (1, 100, Level.WARNING),
        (40, 1_000, Level.WARNING),
        (3, 50, Level.OK),
        (2, 3, Level.OK),
    ):
        usage = shutil._ntuple_diskusage(total * gib, (total - free) * gib, free * gib)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        found = data_folder(tmp_path)
        assert (found.level, f"{free}.0 GiB" in found.what) == (level, True), found


def test_where_no_worker_runs_the_rest_is_looked_at(tmp_path: Path) -> None:
    done = CliRunner().invoke(doctor, ["--json"], env={"MARQ_DATA_DIR": str(tmp_path), "MARQ_WEB_PORT": "0"})
    (found,) = [one for one in map(json.loads, done.stdout.splitlines()) if one["check"] == "workers"]
    assert (found["level"], "none runs on" in found["what"]) == ("skipped", True)


def test_a_limit_of_open_files_below_the_connections_is_named() -> None:
    assert file_limit(Settings(), 1_024).level is Level.WARNING
    assert file_limit(Settings(), 65_536).level is Level.OK
    assert file_limit(Settings(max_connections=10), 1_034).level is Level.OK


def test_what_a_missing_permission_costs_is_said() -> None:
    both = list(dispensed(Settings(kafka_without="DescribeConfigs,Delete")))
    assert {one.level for one in both} == {Level.WARNING}
    assert ["retention.ms" in one.mend for one in both] == [True, True]
    (delete,) = dispensed(Settings(kafka_without="Delete"))
    assert delete.what == "without Delete, no old record is deleted"
    assert "leave retention.ms at -1" in delete.mend
    assert list(dispensed(Settings())) == []
