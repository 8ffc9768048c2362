"""The checks of the doctor: each finds its own faults, and no others."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest

from marq.cli.checks import CHECKS, Facts, Level, examine
from marq.cli.doctor import reached, show

NOW_MS = 1_800_000_000_000
GIB = 1024**3


def vitals(**values: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "clock_ms": NOW_MS,
        "broker_ms": NOW_MS,
        "brokers_ms": {"1": NOW_MS},
        "partitions": 2,
        "disk_free_bytes": 50 * GIB,
        "disk_total_bytes": 100 * GIB,
        "memory_bytes": GIB,
        "open_files": 65_536,
        "max_connections": 8_192,
        "keys": "",
        "settings": {"name": '"marq"', "visibility_timeout_ms": "30000", "auto_create": "true"},
        "topics": [],
        "cluster": "kafka-1",
    } | values


def worker(port: int, **values: Any) -> dict[str, Any]:
    given = {name: values.pop(name) for name in list(values) if name in vitals()}
    return {
        "url": f"http://127.0.0.1:{port}",
        "ready": True,
        "payload_bytes": 0,
        "vitals": vitals(**given),
    } | values


def partition(number: int, **values: Any) -> dict[str, Any]:
    return {
        "partition": number,
        "phase": "serving",
        "lag": 0,
        "markers_lag": 0,
        "checkpoint_age_ms": 1_000,
        "unsaved": True,
        "paused": False,
    } | values


def queue(name: str, **values: Any) -> dict[str, Any]:
    return {
        "queue": name,
        "ready": 10,
        "dead": 0,
        "oldest_ms": 1_000,
        "breaker": {"state": "closed", "failures": 0},
        "has_receiver": True,
    } | values


def facts(**values: Any) -> Facts:
    """The facts of a healthy service, with the given changes."""
    told: dict[str, Any] = {
        "url": "http://127.0.0.1:1",
        "version": "1.0",
        "ready": True,
        "workers": [worker(1), worker(2)],
        "partitions": [partition(0), partition(1)],
        "queues": [queue("orders"), queue("orders.dead", has_receiver=False, oldest_ms=10**9)],
        "clock_ms": NOW_MS,
        "certificate_days": 90.0,
    }
    return Facts(**told | values)


def wrong(found: Facts) -> list[tuple[str, str]]:
    """Check and text of all that is wrong."""
    return [(one.check, one.what) for one in examine(found) if one.level in (Level.WARNING, Level.PROBLEM)]


#: A fault, the check that has to find it, and a part of its message.
BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "unreachable": ({"unreachable": "no worker answers"}, "address", "no worker answers"),
    "certificate": ({"certificate_days": 3.2}, "certificate", "ends in 3 days"),
    "a certificate that ends": ({"certificate_days": 0.4}, "certificate", "ends in 0 days"),
    "refused": ({"refused": "a key is needed"}, "key", "a key is needed"),
    "not ready": ({"ready": False, "health": '{"ready":false}'}, "ready", "not ready"),
    "a worker that is missing": ({"missing": ["http://127.0.0.1:3"]}, "workers", "127.0.0.1:3 did not answer"),
    "workers at one address": (
        {"troubles": [{"what": "workers A and B announce the same address", "mend": "set MARQ_WEB_URL"}]},
        "addresses",
        "A and B announce the same address",
    ),
    "another installation": (
        {"name": "shop"},
        "installation",
        'http://127.0.0.1:1, http://127.0.0.1:2 belong to the installation "marq", the settings here name "shop"',
    ),
    "another Kafka": (
        {"name": "marq", "cluster": "kafka-2"},
        "installation",
        "http://127.0.0.1:2 belong to the Kafka cluster kafka-1, the settings here name kafka-2",
    ),
    "a worker that is not ready": ({"workers": [worker(1, ready=False), worker(2)]}, "workers", "1:1 is not ready"),
    "two versions": ({"workers": [worker(1), worker(2, version="2.0")]}, "versions", "1.0: http://127.0.0.1:1; 2.0"),
    "an earlier version": ({"workers": [worker(1), worker(2, vitals=None)]}, "versions", "an earlier one"),
    "another version of the command": ({"version": "0.9"}, "versions", "this command has version 0.9"),
    "settings": (
        {"workers": [worker(1), worker(2, settings={"auto_create": "false"})]},
        "settings",
        "disagree on auto_create: false at http://127.0.0.1:2; true at http://127.0.0.1:1",
    ),
    "keys": ({"workers": [worker(1, keys="a"), worker(2, keys="b")]}, "keys", "different keys"),
    "no keys": ({"workers": [worker(1, keys="a"), worker(2)]}, "keys", "without keys: http://127.0.0.1:2"),
    "the clock of a worker": (
        {"workers": [worker(1, clock_ms=NOW_MS + 60_000), worker(2)]},
        "clocks",
        "the clock of the worker at http://127.0.0.1:1 is 1 min ahead of the others",
    ),
    "a clock that is behind": (
        {"workers": [worker(1, clock_ms=NOW_MS - 60_000), worker(2)]},
        "clocks",
        "the clock of the worker at http://127.0.0.1:1 is 1 min behind the others",
    ),
    "the clock of a broker": (
        {"workers": [worker(1, brokers_ms={"1": NOW_MS, "2": NOW_MS - 60_000}), worker(2)]},
        "clocks",
        "the clock of broker 2 is 1 min behind the others",
    ),
    "the clock of the only broker": (
        {"workers": [worker(1, brokers_ms={"1": NOW_MS + 60_000})]},
        "clocks",
        "the clock of broker 1 is 1 min ahead of the others",
    ),
    "the clock of this machine": ({"clock_ms": NOW_MS - 60_000}, "clocks", "this machine is 1 min behind the others"),
    "a disk": ({"workers": [worker(1, disk_free_bytes=GIB)]}, "disk", "1.0 GiB of 100.0 GiB left"),
    "a large disk": (
        {"workers": [worker(1, disk_free_bytes=40 * GIB, disk_total_bytes=1_000 * GIB)]},
        "disk",
        "40.0 GiB of 1000.0 GiB left",
    ),
    "a full disk": ({"workers": [worker(1, disk_free_bytes=0)]}, "disk", "0 B of 100.0 GiB left"),
    "open files": ({"workers": [worker(1, open_files=1_024)]}, "open files", "1,024 files"),
    "memory": ({"workers": [worker(1, payload_bytes=2 * GIB)]}, "memory", "2.0 GiB of payloads"),
    "an unserved partition": (
        {"partitions": [partition(0), {"partition": 1, "phase": "unserved", "reason": "records were deleted"}]},
        "partitions",
        "partition 1 is not served: records were deleted",
    ),
    "a partition of nobody": ({"partitions": [partition(0)]}, "partitions", "nobody owns the partitions 1"),
    "a partition of two": (
        {"partitions": [partition(0), partition(1), partition(1)]},
        "partitions",
        "two workers claim",
    ),
    "a take-over": ({"partitions": [partition(0), partition(1, phase="recovering")]}, "partitions", "being taken over"),
    "a stalled partition": ({"stalled": {"1": {"seconds": 12.0}}}, "partitions", "nothing in partition 1 for 12 s"),
    "unreadable offsets": (
        {"partitions": [partition(0), partition(1, unreadable=[[5, 8]])]},
        "partitions",
        "no replica of partition 1 has the offsets 5 to 7 whole",
    ),
    "partitions that were added": (
        {"workers": [worker(1, topics=["topic marq.queue has 9 partitions; mend: let no producer write there"])]},
        "topics",
        "topic marq.queue has 9 partitions",
    ),
    "a loss": (
        {"partitions": [partition(0, lost=[{"log": "queue", "start": 5, "stop": 8, "messages": 2}]), partition(1)]},
        "losses",
        "partition 0: offsets 5 to 7 of the queue topic were deleted before they were read; 2 messages among them",
    ),
    "a lag": ({"partitions": [partition(0, lag=10**6), partition(1)]}, "lag", "1,000,000 records behind the queue"),
    "a lag of the markers": (
        {"partitions": [partition(0, markers_lag=10**6), partition(1)]},
        "lag",
        "partition 0 is 1,000,000 records behind the markers topic",
    ),
    "a lag as memory is full": (
        {"partitions": [partition(0, lag=10**6, paused=True), partition(1)]},
        "lag",
        "behind the queue topic, reading pauses because memory is full",
    ),
    "an old checkpoint": (
        {"partitions": [partition(0, checkpoint_age_ms=120_000), partition(1)]},
        "checkpoints",
        "checkpoint of partition 0 is 2 min old",
    ),
    "dead letters": ({"queues": [queue("invoices", dead=173)]}, "dead letters", "invoices: 173 dead letters"),
    "nobody receives": (
        {"queues": [queue("orders", has_receiver=False, oldest_ms=3_600_000)]},
        "receivers",
        "nobody receives from orders (10, 1 h)",
    ),
    "a breaker that tries": (
        {"queues": [queue("orders", breaker={"state": "trying", "failures": 7})]},
        "circuit breakers",
        "of orders is trying, after 7 failures",
    ),
    "an open breaker": (
        {"queues": [queue("orders", breaker={"state": "open", "failures": 7})]},
        "circuit breakers",
        "of orders is open, after 7 failures",
    ),
}


def test_nothing_is_wrong_with_a_service_that_is_well() -> None:
    assert wrong(facts()) == []


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_check_finds_what_it_is_for_and_no_other_does(name: str) -> None:
    broken, check, said = BROKEN[name]
    found = wrong(facts(**broken))
    assert [one for one, _ in found] == [check], found
    assert said in found[0][1]


def test_each_unreadable_range_is_named_and_each_partition_that_has_none_is_not() -> None:
    partitions = [partition(0, unreadable=[]), partition(1, unreadable=[[5, 8], [20, 21]])]
    found = [one for one in examine(facts(partitions=partitions)) if one.level is Level.PROBLEM]

    assert [one.what for one in found] == [
        "no replica of partition 1 has the offsets 5 to 7 whole",
        "no replica of partition 1 has the offsets 20 to 20 whole",
    ]
    assert {one.mend for one in found} == {"start all brokers that have it, or `python -m app repair --partition 1`"}


def test_each_check_is_broken_once() -> None:
    checked = {finding.check for finding in examine(facts())}
    assert len(checked) == len(CHECKS)
    assert {check for _, check, _ in BROKEN.values()} == checked


def test_what_is_wrong_comes_with_what_to_do() -> None:
    for broken, _, _ in BROKEN.values():
        for finding in examine(facts(**broken)):
            assert bool(finding.mend) == (finding.level is not Level.OK), finding


def test_what_could_not_be_looked_at_is_not_said_to_be_well() -> None:
    found = examine(facts(refused="no", workers=None, partitions=None, queues=None))
    levels = {finding.check: finding.level for finding in found}
    assert {check for check, level in levels.items() if level is Level.OK} == {"address", "certificate", "ready"}


def test_what_only_a_part_was_seen_of_is_not_said_to_be_well() -> None:
    """A worker that did not answer, or a key for some queues: checks pass as far as was seen, and say so."""
    levels = {one.check: (one.level, one.what) for one in examine(facts(missing=["http://127.0.0.1:3"]))}
    for name in ("versions", "keys", "clocks", "disk", "partitions", "checkpoints", "dead letters", "receivers"):
        level, what = levels[name]
        assert level is Level.SKIPPED and "http://127.0.0.1:3 did not answer" in what, name
    narrow = {one.check: one for one in examine(facts(narrow="the key may inspect some of the queues only"))}
    assert {name for name, one in narrow.items() if one.level is Level.SKIPPED} == {
        "dead letters",
        "receivers",
        "circuit breakers",
    }


def test_an_installation_that_could_not_be_compared_is_not_said_to_be_the_right_one() -> None:
    def found(**values: Any) -> list[tuple[Level, str]]:
        return [(one.level, one.what) for one in examine(facts(**values)) if one.check == "installation"]

    here = {"name": "marq", "cluster": "kafka-1"}
    assert [level for level, _ in found(**here)] == [Level.OK]
    earlier = {"settings": {}, "cluster": ""}
    assert [level for level, _ in found(**here, workers=[worker(1, **earlier), worker(2)])] == [Level.OK]
    assert found(**here, workers=[worker(1, **earlier)]) == [
        (Level.SKIPPED, "the workers did not tell their installation"),
        (Level.SKIPPED, "the workers did not tell their Kafka cluster"),
    ]
    assert found(name="marq", cluster="") == [
        (Level.SKIPPED, "the Kafka cluster that the settings here name could not be asked for its id")
    ]


def test_a_kafka_at_which_nothing_answers_is_wrong_and_one_that_can_not_be_asked_is_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as other:
        lively = listening.getsockname()[1]
        dead = other.getsockname()[1]
        other.close()
        assert reached(f"kafka://127.0.0.1:{dead},127.0.0.1:{lively}").level is Level.SKIPPED
        assert show([reached(f"kafka://127.0.0.1:{lively}")], quiet=True) == 0
        found = reached(f"kafka://127.0.0.1:{dead}")
    assert (found.level, "Connection refused" in found.what) == (Level.PROBLEM, True)
    assert reached("kafka").level is Level.PROBLEM
    assert capsys.readouterr().out == "nothing is wrong; 1 check skipped\n"


def test_where_it_can_not_be_told_whose_clock_is_wrong_nobody_is_blamed() -> None:
    one = worker(1, clock_ms=NOW_MS + 60_000, brokers_ms={})
    ((_, what),) = wrong(facts(workers=[one], partitions=[partition(0), partition(1)]))
    assert what.endswith("ahead of that of this machine; which of them is wrong can't be told")


def test_clocks_that_were_read_while_a_worker_kept_all_waiting_are_not_wrong() -> None:
    late = {"clock_ms": NOW_MS + 9_000, "asked_ms": 9_500}
    assert not [what for name, what in wrong(facts(**late)) if name == "clocks"]


def test_an_idle_partition_needs_no_checkpoint() -> None:
    assert wrong(facts(partitions=[partition(0, unsaved=False, checkpoint_age_ms=10**8), partition(1)])) == []


def test_the_worse_it_is_the_louder_it_is_said() -> None:
    def level(**values: Any) -> Level:
        (finding,) = [one for one in examine(facts(**values)) if one.level is not Level.OK]
        return finding.level

    assert level(certificate_days=3.2) is Level.WARNING
    assert level(certificate_days=0.4) is Level.PROBLEM
    assert level(workers=[worker(1, disk_free_bytes=GIB + GIB // 2)]) is Level.WARNING
    assert level(workers=[worker(1, disk_free_bytes=GIB // 2)]) is Level.PROBLEM


def test_two_keys_and_none_are_two_problems() -> None:
    found = wrong(facts(workers=[worker(1, keys="a"), worker(2, keys="b"), worker(3)]))
    assert [what for _, what in found] == [
        "workers without keys: http://127.0.0.1:3",
        "workers have different keys: http://127.0.0.1:1; http://127.0.0.1:2",
    ]


def test_dead_letters_are_looked_for_where_the_queue_sends_them() -> None:
    queues = [queue("orders", dead=2), queue("graves", has_receiver=False, oldest_ms=10**9)]
    (found,) = [one for one in examine(facts(queues=queues, dead_letter_queues={"orders": "graves"})) if one.mend]
    assert (found.check, found.mend) == (
        "dead letters",
        "`marq peek graves` shows why; once that is mended, `marq redrive orders`",
    )


def test_few_dead_letters_are_named_and_many_counted() -> None:
    found = [what for _, what in wrong(facts(queues=[queue(f"q{n}", dead=n) for n in range(1, 9)]))]
    assert found[0] == "q8: 8 dead letters"
    assert found[-1] == "3 more queues have 6 dead letters"


def test_facts_are_those_that_a_worker_gives() -> None:
    from app.service.descriptions import PartitionView, QueueStats, WorkerView
    from app.service.vitals import Vitals

    def names(kind: Any) -> set[str]:
        return {field.name for field in msgspec.structs.fields(kind)}

    assert set(vitals()) == names(Vitals)
    assert set(worker(1)) <= names(WorkerView)
    assert set(partition(0)) <= names(PartitionView)
    assert set(queue("a")) <= names(QueueStats)
