"""A Kafka with TLS, passwords and access control lists: what a worker needs, and its errors without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition

from tests.integration.cluster import ROOT, Cluster, until
from tests.integration.json_client import Client
from tests.integration.secured_kafka import SecuredKafka
from tests.kafka import unique

USER, PASSWORD, WRONG = "marq-worker", "the-pass-phrase-of-marq", "not-the-pass-phrase"
#: A user who may only log in.
GUEST = "guest"
#: A user as some providers make them: topics may be used, but neither created nor managed nor looked at.
TENANT = "tenant"


@pytest.fixture(scope="module")
def kafka_secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as kafka:
        kafka.add_user(USER, PASSWORD)
        kafka.add_user(GUEST, PASSWORD)
        kafka.add_user(TENANT, PASSWORD)
        yield kafka


def allow_what_is_documented(kafka: SecuredKafka, name: str) -> None:
    """The list in docs/operations.md."""
    logs = [f"{name}.queue", f"{name}.markers"]
    compacted = [f"{name}.queues", *(f"{name}-{table}-changelog" for table in ("messages", "markers", "progress"))]
    kafka.allow(USER, ["Read", "Write", "Create", "Delete", "DescribeConfigs"], topics=logs)
    kafka.allow(USER, ["Read", "Write", "Create", "DescribeConfigs"], topics=compacted)
    kafka.allow(USER, ["Write", "Create", "DescribeConfigs"], topics=[f"{name}.poison"])
    kafka.allow(USER, ["Read"], groups=[name])
    kafka.allow(USER, ["Describe"], groups=[f"{name}.archive"])


@pytest.fixture(scope="module")
def cluster(kafka_secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Workers that log in as the user with the documented permissions; the sender of the tests is the super user."""
    settings = kafka_secured.settings(USER, PASSWORD, log_level="DEBUG", retention_history_ms=0, persist_after_ms=300)
    with Cluster(kafka_secured.plain, tmp_path_factory.mktemp("cluster"), partitions=2, **settings) as cluster:
        allow_what_is_documented(kafka_secured, cluster.name)
        cluster.start()
        yield cluster


def run_marq(
    settings: dict[str, Any], *arguments: str, folder: Path, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """`python -m app …` to its end, with both outputs in `stdout`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MARQ_")}
    environment |= {f"MARQ_{name.upper()}": str(value) for name, value in settings.items()}
    environment |= {"MARQ_DATA_DIR": str(folder), "MARQ_WEB_PORT": "0", "MARQ_KAFKA_WAIT_MS": "1000"}
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def said_by(settings: dict[str, Any], folder: Path, *arguments: str) -> str:
    """The output of a command that fails: one line for each problem, status 2, no traceback, no secret."""
    done = run_marq({"name": unique(), "partitions": 1} | settings, *(arguments or ("worker",)), folder=folder)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stdout
    assert PASSWORD not in done.stdout
    assert WRONG not in done.stdout
    lines = [line for line in done.stdout.splitlines() if not line.startswith("marq: waiting up to")]
    assert lines and lines[0].startswith("marq: "), done.stdout
    return "\n".join(lines)


# -- with the documented rights, all works ------------------------------------------------------------


def test_messages_go_round_through_http_and_through_handlers(cluster: Cluster) -> None:
    client = Client(cluster.workers[0].url)
    queue = unique("http")
    client.send(queue, *(b"%d" % number for number in range(20)))
    assert len(client.drain(queue, 20)) == 20
    cluster.send("work-a", 500)
    cluster.send("flaky-a", 50)
    assert cluster.assert_nothing_lost().lost == []


@pytest.mark.slow
def test_tables_are_written_and_read_again_after_a_kill(cluster: Cluster) -> None:
    worker = cluster.running[0]
    cluster.send("hold-a", 100)
    cluster.wait_begun("hold-a", 100)
    until(lambda: all(p["segments"] for p in worker.partitions().values()), "they are in the tables")
    worker.kill()
    cluster.wipe(worker)
    again = cluster.start(worker.folder.name)
    held = [p["in_memory"] + p["parked"] for p in again.partitions().values()]
    assert sum(held) == 100, "known from the changelogs, in flight as before"
    cluster.send("work-c", 10)
    until(lambda: len(cluster.finished("work-c")) == 10, "it goes on")
    assert len(cluster.begun("hold-a")) == 100


@pytest.mark.slow
def test_old_records_are_deleted(cluster: Cluster) -> None:
    """Which needs the right Delete, on topics that are never deleted."""
    cluster.send("work-d", 200)
    until(lambda: len(cluster.finished("work-d")) == 200, "all are handled")
    tps = [TopicPartition(cluster.queue_topic, number) for number in range(cluster.partitions)]

    async def starts() -> dict[TopicPartition, int]:
        return await (await cluster._reading()).beginning_offsets(tps)

    until(lambda: any(cluster.run(starts()).values()), "records that are finished are gone", 90)


def test_commands_log_in_too(kafka_secured: SecuredKafka, cluster: Cluster, tmp_path: Path) -> None:
    settings = kafka_secured.settings(USER, PASSWORD, name=cluster.name)
    done = run_marq(settings, "queue", "orders", "max_receives=7", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert '"max_receives": 7' in done.stdout
    assert PASSWORD not in done.stdout
    info = Client(cluster.running[0].url).request("GET", "/v1/queues/orders").body
    assert info["settings"]["max_receives"] == 7


def test_the_password_is_in_no_log_and_no_file(cluster: Cluster) -> None:
    assert cluster.workers[0].log.count("\n") > 100  # at the level DEBUG
    for file in cluster.folder.rglob("*"):
        if file.is_file():
            assert PASSWORD.encode() not in file.read_bytes(), file


# -- without them, it says what lacks -----------------------------------------------------------------


def test_a_wrong_password(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    said = said_by(kafka_secured.settings(USER, WRONG), tmp_path)
    assert said == (
        f"marq: can't use Kafka at {kafka_secured.address}: it refused user '{USER}' or the password (SCRAM-SHA-512); "
        "check MARQ_KAFKA_USERNAME and MARQ_KAFKA_PASSWORD, and that the user was made for this mechanism"
    )


@pytest.mark.parametrize("command", [["queue", "orders"], ["demo", "send", "--messages", "10"]])
def test_a_wrong_password_of_a_command(kafka_secured: SecuredKafka, tmp_path: Path, command: list[str]) -> None:
    said = said_by(kafka_secured.settings(USER, WRONG), tmp_path, *command)
    assert f"it refused user '{USER}' or the password" in said
    assert "\n" not in said


def test_an_unknown_user(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    said = said_by(kafka_secured.settings("nobody", PASSWORD), tmp_path)
    assert "it refused user 'nobody' or the password" in said
    assert "\n" not in said


def test_a_mechanism_that_is_not_enabled(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    said = said_by(kafka_secured.settings(USER, PASSWORD, kafka_mechanism="SCRAM-SHA-256"), tmp_path)
    assert "it does not let anybody log in by SCRAM-SHA-256, only by SCRAM-SHA-512" in said
    assert said.endswith("set MARQ_KAFKA_MECHANISM to one that it has")


def test_a_certificate_of_an_unknown_authority(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    settings = kafka_secured.settings(USER, PASSWORD, kafka_ca_file=kafka_secured.other_ca_file)
    said = said_by(settings, tmp_path)
    assert "its certificate is not to be trusted" in said
    assert str(kafka_secured.other_ca_file) in said
    assert "set MARQ_KAFKA_CA_FILE to the certificate of the authority that signed it" in said
    assert "\n" not in said


def test_a_host_name_that_the_certificate_has_not(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    address = kafka_secured.address.replace("127.0.0.1", "127.1")
    said = said_by(kafka_secured.settings(USER, PASSWORD, kafka=f"kafka://{address}"), tmp_path)
    assert "its certificate is not to be trusted" in said
    assert "a host name that the certificate has" in said


def test_a_file_that_holds_no_certificate(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    said = said_by(kafka_secured.settings(USER, PASSWORD, kafka_ca_file=empty), tmp_path)
    assert f"MARQ_KAFKA_CA_FILE='{empty}' can't be used" in said
    assert "\n" not in said


def test_no_tls_to_a_port_that_speaks_it(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    said = said_by({"kafka": f"kafka://{kafka_secured.address}"}, tmp_path)
    assert "it speaks TLS on this port; set MARQ_KAFKA_TLS=true, or MARQ_KAFKA_CA_FILE" in said
    assert "\n" not in said


def test_tls_to_a_port_that_does_not_speak_it(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    said = said_by(kafka_secured.settings(USER, PASSWORD, kafka=f"kafka://{kafka_secured.plain}"), tmp_path)
    assert "it speaks no TLS on this port; unset MARQ_KAFKA_TLS and MARQ_KAFKA_CA_FILE" in said
    assert "\n" not in said


def test_no_user_where_one_is_needed(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    settings = {"kafka": f"kafka://{kafka_secured.address}", "kafka_ca_file": kafka_secured.ca_file}
    said = said_by(settings, tmp_path)
    assert "it wants a user name and a password (SCRAM-SHA-512); set MARQ_KAFKA_USERNAME, MARQ_KAFKA_PASSWORD" in said
    assert "\n" not in said


def test_a_user_where_none_can_log_in(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    settings = {"kafka": f"kafka://{kafka_secured.plain}", "kafka_username": USER, "kafka_password": PASSWORD}
    said = said_by(settings, tmp_path)
    assert "it takes no user name and password on this port; unset MARQ_KAFKA_USERNAME" in said
    assert "\n" not in said


def test_a_user_without_any_rights_is_told_all_that_lack(kafka_secured: SecuredKafka, tmp_path: Path) -> None:
    name = unique()
    said = said_by(kafka_secured.settings(GUEST, PASSWORD, name=name), tmp_path).splitlines()
    assert len(said) == 9
    log = (
        f"Kafka does not allow user '{GUEST}' Create, Read, Write, DescribeConfigs, Delete on topic {name}.queue; "
        f"mend: kafka-acls.sh --bootstrap-server {kafka_secured.address} --add --allow-principal User:{GUEST} "
    )
    assert any(log in line for line in said), said
    assert any(f"'{GUEST}' Create, Write, DescribeConfigs on topic {name}.poison" in line for line in said), said
    assert any(f"'{GUEST}' Read on group {name}; mend" in line for line in said), said
    assert any(f"'{GUEST}' Describe on group {name}.archive; mend" in line for line in said), said


def test_the_doctor_names_a_password_that_is_refused_and_rights_that_lack(
    kafka_secured: SecuredKafka, cluster: Cluster, tmp_path: Path
) -> None:
    topic = f"{cluster.name}.markers"
    kafka_secured.take_away(USER, ["Delete"], topics=[topic])
    try:
        for password, check, text in (
            (WRONG, "kafka", "refused user"),
            (PASSWORD, "topics", f"Delete on topic {topic}"),
        ):
            settings = kafka_secured.settings(USER, password, name=cluster.name)
            done = run_marq(settings, "doctor", "--json", folder=tmp_path)
            assert done.returncode == 1, done.stdout
            found = [json.loads(line) for line in done.stdout.splitlines()]
            (wrong,) = [one for one in found if one["level"] == "problem"]
            assert (wrong["check"], text in wrong["what"]) == (check, True), wrong
            assert wrong["mend"]
            assert password not in done.stdout
    finally:
        kafka_secured.allow(USER, ["Delete"], topics=[topic])


def test_a_single_right_that_lacks_is_named(kafka_secured: SecuredKafka, cluster: Cluster, tmp_path: Path) -> None:
    topic, group = f"{cluster.name}.markers", cluster.name
    kafka_secured.take_away(USER, ["Delete"], topics=[topic])
    kafka_secured.take_away(USER, ["Read"], groups=[group])
    try:
        settings = kafka_secured.settings(USER, PASSWORD, name=cluster.name, partitions=2)
        said = said_by(settings, tmp_path).splitlines()
    finally:
        kafka_secured.allow(USER, ["Delete"], topics=[topic])
        kafka_secured.allow(USER, ["Read"], groups=[group])
    command = f"kafka-acls.sh --bootstrap-server {kafka_secured.address} --add --allow-principal User:{USER}"
    assert said == [
        f"marq: Kafka does not allow user '{USER}' Delete on topic {topic}; mend: {command} --operation Delete "
        f"--topic {topic}; or set MARQ_KAFKA_WITHOUT=Delete: no old record is deleted",
        f"Kafka does not allow user '{USER}' Read on group {group}; mend: {command} --operation Read --group {group}",
    ]


# -- a provider that grants less ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def rented(kafka_secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Topics that somebody else has created, and that the worker's user may only read and write."""
    settings = kafka_secured.settings(TENANT, PASSWORD, persist_after_ms=300)
    with Cluster(kafka_secured.plain, tmp_path_factory.mktemp("rented"), partitions=1, **settings) as cluster:
        topics = cluster.create_topics()
        used = [topics.queue, topics.markers, topics.queues, topics.poison, *topics.changelogs.values()]
        kafka_secured.allow(TENANT, ["Read", "Write"], topics=used)
        kafka_secured.allow(TENANT, ["Read"], groups=[cluster.name, f"{cluster.name}.archive"])
        yield cluster


def test_what_a_provider_does_not_grant_is_named_with_what_it_costs_to_do_without(
    kafka_secured: SecuredKafka, rented: Cluster, tmp_path: Path
) -> None:
    settings = kafka_secured.settings(TENANT, PASSWORD, name=rented.name, partitions=1)
    said = said_by(settings, tmp_path).splitlines()
    assert len(said) == 7
    (markers,) = [line for line in said if f"on topic {rented.name}.markers;" in line]
    assert f"'{TENANT}' DescribeConfigs, Delete on topic" in markers
    assert markers.endswith(
        "; or set MARQ_KAFKA_WITHOUT=DescribeConfigs,Delete: the settings of topics are not checked, and no old record "
        "is deleted"
    )
    settings["kafka_without"] = "DescribeConfigs"
    said = said_by(settings, tmp_path).splitlines()
    assert len(said) == 2
    assert all("; or set MARQ_KAFKA_WITHOUT=Delete: no old record is deleted" in line for line in said), said


def test_it_works_without_create_describe_configs_and_delete_records(rented: Cluster) -> None:
    worker = rented.start(kafka_without="DescribeConfigs,Delete")
    client = Client(worker.url)
    queue = unique("http")
    client.send(queue, *(b"%d" % number for number in range(20)))
    assert len(client.drain(queue, 20)) == 20
    rented.send("work-a", 200)
    rented.send("flaky-a", 20)
    assert rented.assert_nothing_lost().lost == []
    assert "no record of" in worker.log
    assert "the settings of topics are not checked; they must be" in worker.log
    assert f"{rented.name}.markers: cleanup.policy=delete, message.timestamp.type=LogAppendTime" in worker.log
    worker.stop()


def test_markers_with_the_time_of_workers_are_not_served_even_if_settings_can_not_be_read(
    kafka_secured: SecuredKafka, rented: Cluster
) -> None:
    markers = f"{rented.name}.markers"
    kafka_secured.set_config(markers, message_timestamp_type="CreateTime")
    worker = rented.start(ready=False, kafka_without="DescribeConfigs,Delete")
    said = f"{markers} has message.timestamp.type=CreateTime, must be LogAppendTime"
    until(lambda: said in str(worker.get("/health/ready")[1]), "it says why the partition is not served")
    kafka_secured.set_config(markers, message_timestamp_type="LogAppendTime")
    worker.wait_ready()
