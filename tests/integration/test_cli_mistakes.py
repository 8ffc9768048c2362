"""What `marq` says to mistakes: one line that says what to do, and an exit status."""

from __future__ import annotations

import pytest

from tests.integration.cluster import Cluster
from tests.integration.marq_command import Command
from tests.kafka import unique


@pytest.fixture
def marq(shared_cluster: Cluster) -> Command:
    return Command(shared_cluster.workers[0].url)


@pytest.fixture
def queue() -> str:
    return unique("orders")


def test_without_a_worker_one_line_says_so_at_once() -> None:
    done = Command("http://127.0.0.1:1")("stats")
    assert done.status == 2
    assert done.err == (
        "marq: no worker answers at http://127.0.0.1:1: connection refused; start one with `python -m app up`, or name "
        "another with --url or MARQ_URL\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("stat",), "did you mean stats?"),
        (("send", "orders"), "- stands for lines of standard input"),
        (("send", "", "a"), "the name of a queue is empty"),
        (("receive", "orders", "--wait", "soon"), "'soon' is no duration"),
        (("receive", "orders", "--follow"), "--follow needs --ack or --exec"),
        (("message", "7"), "'7' is no place of a message"),
        (("message", "orders", "0:0"), "it is PARTITION:OFFSET, as in 3:1042, without the name of its queue"),
        (("stats", "--url", "localhost:9324"), "it has to begin with http:// or https://"),
        (("stats", "--url", "http://127.0.0.1:99999"), "its port has to be a number up to 65535"),
        (("stats", "--url", "http://127.0.0.1:abc"), "its port has to be a number up to 65535"),
        ((), "Usage: marq [OPTIONS] COMMAND"),
        (("list",), "did you mean queues?"),
        (("help",), "did you mean --help?"),
        (("extend", "x", "--for", "30d"), "'30d' is too long; at most 7 d"),
        (("extend", "x", "--for", "1ms"), "'1ms' is too short; at least 100 ms"),
        (("receive", "q", "--visibility-timeout", "8d"), "'8d' is too long; at most 7 d"),
        (("release", "x", "--delay", "400d"), "'400d' is too long; at most 366 d"),
        (("send", "q", "a", "--delay", "400d"), "'400d' is too long; at most 366 d"),
        (("peek", "orders", "--state", "dead"), "dead letters are in a queue of their own, QUEUE.dead"),
        (("stats", "--key-file", "/nonexistent"), "No such file or directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "none",
)
def test_what_was_mistyped_is_explained(args: tuple[str, ...], said: str) -> None:
    done = Command("http://127.0.0.1:1")(*args)
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_an_address_that_is_no_workers_is_explained(marq: Command, kafka: str) -> None:
    for url, said in (
        (f"{marq.url}/v1", "does not answer like a worker (404: Not Found); give the address of one"),
        (marq.url.replace("http:", "https:"), "it speaks no TLS on this port; use http://"),
        (f"http://{kafka}", "server disconnected; start one with"),
    ):
        done = marq("stats", "--url", url)
        assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1), done
        assert said in done.err


def test_a_receive_from_a_queue_that_does_not_exist_says_so(marq: Command, queue: str) -> None:
    done = marq("receive", queue)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"marq: there is no queue {queue!r}")
    assert marq("create", queue).status == 0
    done = marq("receive", queue)
    assert (done.status, done.err) == (1, f"marq: no message in {queue!r}\n")


def test_one_raw_payload_is_written_byte_for_byte(marq: Command, queue: str) -> None:
    for payload in ("a", "b", "c"):
        assert marq("send", queue, payload).status == 0
    assert len(marq("receive", queue, "--raw", "--ack", "--wait", "10s").out) == 1
    line = marq("receive", queue, "--raw", "--ack", "--wait", "10s", "--max", "1").out
    assert len(line) == 2 and line.endswith("\n")


def test_states_have_the_names_of_the_api_too(marq: Command, queue: str) -> None:
    assert marq("send", queue, "a").status == 0
    assert marq("receive", queue, "--wait", "10s").status == 0
    for name in ("in-flight", "in_flight"):
        assert len(marq("peek", queue, "--state", name, "--json").objects) == 1


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (("message", "0:999999999"), 2, "has no message at offset 999999999 yet: its next one gets"),
        (("message", "0:999999999"), 2, "`marq peek QUEUE` lists the places of messages"),
        (("message", "77:0"), 2, "there are partitions 0 to"),
        (("set", "{queue}", "max_recieves=5"), 2, "did you mean 'max_receives'?"),
        (("create", "{queue}-new", "max_recieves=5"), 2, "did you mean 'max_receives'?"),
        (("set", "{queue}", "ttl_ms=10s"), 2, "ttl_ms: expected a whole number of milliseconds, got text"),
        (("move", "{queue}", "--to", "{queue}"), 2, "can't be moved to the queue they are in"),
        (("stats", "{queue}-none"), 2, "; `marq queues` lists those that there are"),
        (("move", "{queue}", "0:77777", "--to", "{queue}-2"), 1, "marq: 0:77777 is not ready in"),
        (
            ("ack", "abc"),
            1,
            "not a receipt: 'abc' has 3 characters, not 60 as those of this version; each message that is received "
            "comes with one",
        ),
    ],
)
def test_what_a_worker_can_not_do_is_explained(
    marq: Command, queue: str, args: tuple[str, ...], status: int, said: str
) -> None:
    assert marq("send", queue, "a").status == 0
    done = marq(*(arg.format(queue=queue) for arg in args))
    assert done.status == status, done
    assert done.out in ("", f"0 moved from {queue!r} to '{queue}-2'\n"), done
    assert said in done.err
    assert len(done.err.splitlines()) == 1
