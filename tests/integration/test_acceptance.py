"""The promises to a user of the queue, case by case, as in the tests of kmq, kafka-mq-go and kafka-relay.

One worker serves all of them; each uses queues of its own, whose names choose the handler (see `witness.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from app.kafka.broker import free_port
from tests.integration.cluster import Cluster, Worker, by_id, until
from tests.integration.sqs_client import Queue
from tests.kafka import unique

#: Milliseconds beyond its deadline in which a redelivery must have come.
LATE_MS = 1_500


@pytest.fixture(scope="module")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(kafka, tmp_path_factory.mktemp("acceptance"), backoff_ms=100) as cluster:
        cluster.start()
        yield cluster


def wait_gone(cluster: Cluster, counter: str, at_least: int) -> None:
    until(lambda: cluster.counters()[counter] >= at_least, f"{at_least} {counter}, has {cluster.counters()}")


def wait_acked(cluster: Cluster, queue: str) -> None:
    """Wait until nothing of a queue is left. The counters of partitions have acks of other tests' queues, too."""

    def is_done() -> bool:
        status, stats = cluster.workers[-1].get(f"/v1/queues/{queue}/stats")
        # a queue that its first message creates is known a moment later
        return status == 200 and not stats["ready"] + stats["delayed"] + stats["in_flight"]

    until(is_done, f"all of {queue} is acknowledged")


# -- acknowledged, or not -----------------------------------------------------------------------------


def test_every_message_is_delivered_once_and_not_again_after_its_ack(cluster: Cluster) -> None:
    queue = unique("work-once")
    sent = cluster.send(queue, 500)
    wait_acked(cluster, queue)
    time.sleep(1.0)
    begun = cluster.begun(queue)
    assert Counter(s.id for s in begun) == Counter(s.id for s in sent)
    assert {(s.id, s.partition, s.offset) for s in begun} == {(s.id, s.partition, s.offset) for s in sent}
    assert {s.attempt for s in begun} == {1}


def test_two_queues_do_not_see_each_others_messages(cluster: Cluster) -> None:
    one, two = unique("work-one"), unique("bulk-two")
    for _ in range(5):
        cluster.send(one, 20)
        cluster.send(two, 20)
    assert {s.id for s in cluster.wait_begun(one, 100)} == {s.id for s in cluster.sent if s.queue == one}
    assert {s.id for s in cluster.wait_begun(two, 100)} == {s.id for s in cluster.sent if s.queue == two}


def test_first_deliveries_of_a_partition_come_in_the_order_of_sending(cluster: Cluster) -> None:
    queue = unique("order-first")
    sent = cluster.send(queue, 300, partition=1)
    assert [s.id for s in cluster.wait_begun(queue, 300)] == [s.id for s in sent]


def test_what_is_not_acked_is_delivered_again_after_its_visibility_timeout(cluster: Cluster) -> None:
    queue = unique("drop-redelivery")
    before_s = time.time()
    cluster.send(queue, 100)
    deliveries = by_id(cluster.wait_begun(queue, 200))
    assert all([s.attempt for s in seen] == [1, 2] for seen in deliveries.values())
    waits_ms = [(seen[1].at_s - seen[0].at_s) * 1000 for seen in deliveries.values()]
    print(f"redelivered after {min(waits_ms):.0f} to {max(waits_ms):.0f} ms of a timeout of 1000")
    # a lease begins in the log: on a busy machine a call begins later than that
    assert min(seen[1].at_s for seen in deliveries.values()) >= before_s + 1
    assert max(waits_ms) <= 1000 + LATE_MS


def test_a_handler_that_runs_longer_than_its_visibility_timeout_keeps_its_message(cluster: Cluster) -> None:
    queue = unique("slow-keepalive")
    cluster.send(queue, 8)
    wait_acked(cluster, queue)
    assert sorted(Counter(s.id for s in cluster.begun(queue)).values()) == [1] * 8


def test_a_late_ack_is_honoured(cluster: Cluster) -> None:
    queue = unique("late-ack")
    cluster.send(queue, 4)
    wait_acked(cluster, queue)
    assert {s.attempt for s in cluster.begun(queue)} == {1, 2}
    count = len(cluster.begun(queue))
    time.sleep(1.2)
    assert len(cluster.begun(queue)) == count


def test_a_released_message_comes_back_after_the_delay_that_was_asked_for(cluster: Cluster) -> None:
    queue = unique("release-delay")
    cluster.send(queue, 10)
    for seen in by_id(cluster.wait_begun(queue, 30)).values():
        assert [s.attempt for s in seen] == [1, 2, 3]
        assert all(250 <= (b.at_s - a.at_s) * 1000 <= 300 + LATE_MS for a, b in pairwise(seen))


def test_a_function_in_a_thread_is_a_handler_too(cluster: Cluster) -> None:
    queue = unique("thread-plain")
    sent = cluster.send(queue, 40)
    until(lambda: len(cluster.finished(queue)) == 40, "all in threads")
    assert {s.id for s in cluster.finished(queue)} == {s.id for s in sent}


# -- failures -----------------------------------------------------------------------------------------


def test_a_failing_handler_is_retried_with_growing_delays_then_its_message_is_dead(cluster: Cluster) -> None:
    queue = unique("fail-always")
    before = cluster.counters()["dead"]
    sent = cluster.send(queue, 10, headers={"colour": "blue", "marq-key": "k1"})
    wait_gone(cluster, "dead", before + 10)
    deliveries = by_id(cluster.begun(queue))
    for seen in deliveries.values():
        assert [s.attempt for s in seen] == [1, 2, 3]
        first, second = ((b.at_s - a.at_s) * 1000 for a, b in pairwise(seen))
        assert 95 <= first <= 200 + LATE_MS
        assert 195 <= second <= 400 + LATE_MS
    dead_letters = {
        json.loads(r.value)["id"]: r
        for r in cluster.read(cluster.queue_topic, cluster.partitions)
        if r.key == f"{queue}.dead".encode()
    }
    assert dead_letters.keys() == {s.id for s in sent}
    for message in sent:
        dead_letter = dead_letters[message.id]
        headers = dict(dead_letter.headers)
        assert dead_letter.partition == message.partition
        assert headers["marq-origin"] == f"{message.partition}:{message.offset}".encode()
        assert headers["marq-dead-queue"] == queue.encode()
        assert headers["marq-dead-reason"] == b"max-receives"
        assert headers["marq-dead-receives"] == b"3"
        assert int(headers["marq-dead-sent-ms"]) < int(headers["marq-dead-at-ms"])
        assert headers["colour"] == b"blue"
        assert headers["marq-key"] == b"k1"


def test_a_handler_that_fails_once_gets_its_message_again(cluster: Cluster) -> None:
    queue = unique("flaky-once")
    cluster.send(queue, 20)
    until(lambda: len(cluster.finished(queue)) == 20, "all finished at the second attempt")
    assert Counter(s.attempt for s in cluster.begun(queue)) == {1: 20, 2: 20}


def test_a_handler_says_when_it_wants_its_message_again(cluster: Cluster) -> None:
    queue = unique("later-retry")
    cluster.send(queue, 5)
    for seen in by_id(cluster.wait_begun(queue, 10)).values():
        assert 450 <= (seen[1].at_s - seen[0].at_s) * 1000 <= 500 + LATE_MS


def test_one_poisonous_message_takes_no_others_of_its_batch_to_the_dead_letters(cluster: Cluster) -> None:
    queue = unique("batch-poison")
    before = cluster.counters()["dead"]

    async def send() -> None:
        producer = await cluster._producing()
        for i in range(48):
            value = b"poison" if i == 20 else b"fine %d" % i
            await producer.send_and_wait(cluster.queue_topic, value, key=queue.encode(), partition=2)

    cluster.run(send())
    wait_gone(cluster, "dead", before + 1)
    until(lambda: len({s.id for s in cluster.finished(queue)}) == 47, "all others are finished")
    assert not any(s.id == "poison" for s in cluster.finished(queue))
    last = [s for s in cluster.begun(queue) if s.id == "poison"][-1]
    assert last.batch == 1, "at its last attempt it is alone"
    assert cluster.counters()["dead"] == before + 1


# -- what the sender asks for -------------------------------------------------------------------------


def test_a_delayed_message_comes_when_its_delay_is_over(cluster: Cluster) -> None:
    queue = unique("work-delay")
    began = time.time()
    cluster.send(queue, 5, headers={"marq-delay-ms": "1500"})
    for seen in cluster.wait_begun(queue, 5):
        assert 1450 <= (seen.at_s - began) * 1000 <= 1500 + LATE_MS + 500


def test_a_message_past_its_time_to_live_is_not_delivered(cluster: Cluster) -> None:
    queue = unique("work-ttl")
    before = cluster.counters()["expired"]
    # the delay keeps it from being delivered before
    cluster.send(queue, 5, headers={"marq-ttl-ms": "600", "marq-delay-ms": "1200"})
    wait_gone(cluster, "expired", before + 5)
    assert cluster.begun(queue) == []


def test_records_that_are_no_messages_go_to_the_poison_topic_with_the_reason(cluster: Cluster) -> None:
    before = cluster.counters()["poison"]
    mark = unique("bad")
    cluster.send(None, 1, headers={"mark": mark})
    cluster.send(unique("work-bad"), 1, headers={"marq-delay-ms": "soon", "mark": mark})
    wait_gone(cluster, "poison", before + 2)
    copies = [r for r in cluster.read(f"{cluster.name}.poison") if dict(r.headers).get("mark") == mark.encode()]
    reasons = sorted(dict(r.headers)["marq-poison-reason"].decode() for r in copies)
    assert reasons == ["header marq-delay-ms is not a number of milliseconds", "no queue: the key is null"]
    assert all(b":" in dict(r.headers)["marq-origin"] for r in copies)


# -- settings of a queue ------------------------------------------------------------------------------


# -- through Amazon SQS: one worker that serves all partitions ---------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_what_was_sent_one_after_the_other_to_an_idle_queue_comes_oldest_first(cluster: Cluster, limit: int) -> None:
    queue = Queue.make(cluster.workers[0])
    for _ in range(3):
        before = cluster.ends()
        sent = [queue.send(f"{i}")["MessageId"] for i in range(8)]
        assert sum(end > before[number] for number, end in cluster.ends().items()) > 1, "all are in one partition"
        got: list[str] = []
        while len(got) < 8:
            messages = queue.receive(limit, wait_s=0)
            assert messages
            got += [message["MessageId"] for message in messages]
            queue.delete(*messages)
        assert got == sent


def test_what_handlers_fail_at_too_often_is_a_dead_letter_as_soon_as_it_is_counted_no_more(cluster: Cluster) -> None:
    dead = Queue.make(cluster.workers[0])
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 2})
    queue = Queue.make(cluster.workers[0], unique("fail-sqs"), RedrivePolicy=policy)
    for i in range(5):
        sent = queue.send(f"{i}")
        queue.wait_for(visible=0, in_flight=0, delayed=0)
        (dead_letter,) = dead.receive(1, wait_s=0)
        assert (dead_letter["Body"], dead_letter["MessageId"]) == (f"{i}", sent["MessageId"])
        assert dead_letter["Attributes"]["DeadLetterQueueSourceArn"] == queue.arn
        assert dead_letter["Attributes"]["ApproximateReceiveCount"] == "3"
        dead.delete(dead_letter)
    assert [s.attempt for s in cluster.begun(queue.name)] == [1, 2] * 5


def test_settings_of_a_queue_are_changed_by_a_command_and_hold_at_once(cluster: Cluster) -> None:
    queue = unique("fail-set")
    done = cluster.command("queue", queue, "max_receives=1", "dead_letter_queue=order-graves")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["max_receives"] == 1
    before = cluster.counters()["dead"]
    sent = cluster.send(queue, 3)
    wait_gone(cluster, "dead", before + 3)
    assert {s.attempt for s in cluster.begun(queue)} == {1}
    # the dead letters are messages of the queue that was named, and its handler gets them
    dead_letters = cluster.wait_begun("order-graves", 3)
    assert {s.id for s in dead_letters} == {s.id for s in sent}
    assert {s.headers["marq-dead-queue"] for s in dead_letters} == {queue}


def test_a_setting_that_a_queue_can_not_have_is_one_line_and_changes_nothing(cluster: Cluster) -> None:
    queue = unique("work-none")
    done = cluster.command("queue", queue, "max_recieves=1")
    assert done.returncode == 2
    assert "max_recieves" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    done = cluster.command("queue", queue)
    assert done.returncode == 2
    assert "there is no queue" in done.stderr and queue in done.stderr


def test_the_time_to_live_of_a_queue_holds_for_messages_without_one(cluster: Cluster) -> None:
    queue = unique("work-short")
    assert cluster.command("queue", queue, "ttl_ms=700").returncode == 0
    before = cluster.counters()["expired"]
    cluster.send(queue, 3, headers={"marq-delay-ms": "1500"})
    wait_gone(cluster, "expired", before + 3)
    assert cluster.begun(queue) == []


# -- topic mode ---------------------------------------------------------------------------------------


@pytest.fixture
def user_topic(kafka: str, tmp_path: Path) -> Iterator[Cluster]:
    """A topic of a user's, with records in it, as one queue."""
    name = unique("theirs")
    with Cluster(
        kafka,
        tmp_path,
        partitions=2,
        queue_topic=name,
        queue_id="fail-theirs",
        dead_letter_topic=f"{name}.dead",
        backoff_ms=100,
    ) as cluster:

        async def create() -> None:
            admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
            await admin.start()
            await admin.create_topics([NewTopic(name, 2, 1)])
            await admin.close()

        cluster.run(create())
        yield cluster


def test_a_topic_of_the_users_is_one_queue_and_is_never_written_to(user_topic: Cluster) -> None:
    for key in (None, "a", "b"):
        user_topic.send(key, 4)
    worker = user_topic.start()
    assert "CreateTime" in worker.log
    until(lambda: user_topic.counters()["dead"] == 12, "all are dead after their attempts")
    until(lambda: worker.get("/v1/queues/fail-theirs/stats")[1]["dead"] == 12, "dead letters are counted")
    seen = user_topic.begun("fail-theirs")
    assert {s.id for s in seen} == {s.id for s in user_topic.sent}
    assert Counter(s.attempt for s in seen) == {1: 12, 2: 12, 3: 12}
    assert sum(user_topic.ends().values()) == 12, "nothing was written to it"
    dead_letters = user_topic.read(user_topic.environment["MARQ_DEAD_LETTER_TOPIC"])
    assert {json.loads(r.value)["id"] for r in dead_letters} == {s.id for s in user_topic.sent}
    assert {r.key for r in dead_letters} == {None, b"a", b"b"}
    assert {dict(r.headers)["marq-origin"].decode() for r in dead_letters} == {
        f"{s.partition}:{s.offset}" for s in user_topic.sent
    }


# -- many consumers -----------------------------------------------------------------------------------


def test_many_consumers_share_the_messages(kafka: str, tmp_path: Path) -> None:
    with Cluster(kafka, tmp_path) as cluster:
        cluster.start_many(2)
        cluster.send("work-many", 2000)
        total = cluster.assert_nothing_lost()
        assert total.duplicates == 0
        shares = Counter(s.pid for s in cluster.begun())
        assert len(shares) == 2, shares


def test_the_worker_logs_no_errors_of_its_own(cluster: Cluster) -> None:
    """Of what the tests before have brought about, only the failing handlers are an error to log."""
    worker: Worker = cluster.workers[0]
    unexpected = [line for line in cluster.errors_logged() if "failed on <Message" not in line]
    assert unexpected == [], worker.log_file


def test_a_kafka_that_is_away_is_one_line() -> None:
    away = {"MARQ_KAFKA": f"kafka://127.0.0.1:{free_port()}"}
    done = subprocess.run(
        [sys.executable, "-m", "app", "queue", "orders"],
        env=os.environ | away,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"can't use Kafka at {away['MARQ_KAFKA'].removeprefix('kafka://')}: Connection refused" in line
