"""The command `marq` against real workers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, until
from tests.integration.marq_command import Command
from tests.kafka import unique

EVIL = "evil \x1b]0;owned\x07\x1b[2J\r\u202e\x9b31m"


@pytest.fixture
def marq(shared_cluster: Cluster) -> Command:
    return Command(shared_cluster.workers[0].url)


@pytest.fixture
def queue() -> str:
    return unique("orders")


def is_harmless(text: str) -> bool:
    """Whether nothing in it does something to a terminal."""
    return all(character.isprintable() or character in "\n\t" for character in text)


def test_a_message_is_sent_seen_received_and_acknowledged(marq: Command, queue: str) -> None:
    sent = marq("send", queue, '{"book": 7}', "--header", "source=shop")
    assert sent.status == 0, sent.err
    place = sent.out.strip()

    (seen,) = marq("peek", queue, "--json").objects
    assert (seen["state"], seen["text"]) == ("ready", '{"book": 7}')
    assert f"{seen['partition']}:{seen['offset']}" == place
    assert '{"book": 7}' in marq("message", place).out

    (message,) = marq("receive", queue, "--wait", "10s", "--json").objects
    assert message["text"] == '{"book": 7}'
    assert message["headers"] == {"source": "shop"}
    assert marq("extend", message["receipt"], "--for", "5m").out == "1 extended\n"
    assert marq("ack", message["receipt"]).out == "1 acknowledged\n"
    assert marq("peek", queue).status == 1
    assert marq("message", place).status == 1


def test_what_a_stranger_sent_does_nothing_to_a_terminal(marq: Command, queue: str) -> None:
    assert marq("send", queue, EVIL, "--header", f"note={EVIL}").status == 0
    shown = [marq("peek", queue), marq("peek", queue, "--json"), marq("receive", queue, "--wait", "10s")]
    shown += [marq("stats", EVIL), marq("queues", EVIL), marq("ack", EVIL), marq(EVIL)]
    for ran in shown:
        assert is_harmless(ran.out + ran.err), ran
    assert "evil" in shown[0].out
    assert "evil" in shown[2].out


def test_each_line_of_standard_input_is_a_message_also_the_last_without_an_end(marq: Command, queue: str) -> None:
    done = marq("send", queue, "-", given=b"one\r\n\n" + "zwölf".encode() + b"\n\xff half")
    assert done.status == 0, done.err
    assert f"4 sent to '{queue}'" in done.err
    got = marq("receive", queue, "--max", "4", "--wait", "10s", "--json", "--ack").objects
    assert sorted(message.get("text", message.get("payload")) for message in got) == ["", "/yBoYWxm", "one", "zwölf"]
    assert marq("stats", queue, "--json").objects[0]["in_flight"] == 0


def test_a_line_is_sent_when_it_is_there_and_not_when_input_ends(marq: Command, queue: str) -> None:
    sending = marq.start("send", queue, "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert sending.stdin is not None
    sending.stdin.write(b"now\nlat")
    sending.stdin.flush()
    (message,) = marq("receive", queue, "--wait", "20s", "--ack", "--json").objects
    assert message["text"] == "now"
    sending.stdin.write(b"er\n")
    sending.stdin.close()
    (message,) = marq("receive", queue, "--wait", "20s", "--ack", "--json").objects
    assert message["text"] == "later"
    assert sending.wait(20) == 0


def test_a_line_that_is_too_long_is_refused_and_the_others_are_sent(marq: Command, queue: str) -> None:
    done = marq("send", queue, "-", given=b"a\n" + b"x" * (4 * 1024 * 1024 + 1) + b"\nb\n")
    assert done.status == 1
    assert "line 2 was refused" in done.err
    assert marq("stats", queue, "--json").objects[0]["ready"] == 2


def test_a_command_acknowledges_what_it_ends_well_for_and_gives_the_rest_back(
    marq: Command, queue: str, tmp_path: Path
) -> None:
    assert marq("send", queue, "good", "bad").status == 0
    done = marq(
        *("receive", queue, "--max", "2", "--wait", "10s", "--retry-delay", "1h", "--exec"),
        f"tee {tmp_path}/$MESSAGE_PLACE | grep -q good",
    )
    assert done.status == 1
    assert "the command ended with status 1; attempt 1 is given back for 1 h" in done.err
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["bad", "good"]
    (left,) = marq("peek", queue, "--json").objects
    assert (left["text"], left["state"]) == ("bad", "delayed")


def test_following_ends_with_ctrl_c_and_gives_back_what_a_command_was_at(
    marq: Command, queue: str, tmp_path: Path
) -> None:
    assert marq("send", queue, "long").status == 0
    following = marq.start(
        *("receive", queue, "--follow", "--exec", f"touch {tmp_path}/begun; exec sleep 60"),
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    until((tmp_path / "begun").exists, "the command runs", 30)
    os.killpg(following.pid, signal.SIGINT)
    _, said = following.communicate(timeout=20)
    assert following.returncode == 130, said
    assert b"Traceback" not in said
    assert marq("receive", queue, "--wait", "10s", "--json").objects[0]["attempt"] == 2


def test_what_nobody_reads_any_more_goes_back_uncounted(marq: Command, queue: str) -> None:
    assert marq("send", queue, "-", given=b"x" * 200 + b"\n" + b"\n".join([b"y" * 20_000] * 40)).status == 0
    receiving = marq.start(
        "receive", queue, "--max", "100", "--wait", "10s", "--raw", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert receiving.stdout is not None
    receiving.stdout.read(10)
    receiving.stdout.close()
    assert receiving.wait(30) == 128 + signal.SIGPIPE
    assert receiving.stderr is not None
    assert receiving.stderr.read() == b""
    (stats,) = marq("stats", queue, "--json").objects
    assert stats["ready"] > 0
    assert stats["ready"] + stats["in_flight"] == 41


def test_dead_letters_go_back_to_where_they_came_from(marq: Command, queue: str) -> None:
    assert marq("create", queue, f"dead_letter_queue={queue}-graves").status == 0
    assert marq("send", queue, "book").status == 0
    (message,) = marq("receive", queue, "--wait", "10s", "--json").objects
    assert marq("reject", message["receipt"], "--reason", "out of print").status == 0
    until(lambda: marq("stats", queue, "--json").objects[0]["dead"] == 1, "it is a dead letter")

    done = marq("redrive", queue, "--json")
    assert done.status == 0, done.err
    assert done.objects[0]["moved"] == 1
    assert marq("receive", queue, "--wait", "10s", "--ack", "--json").objects[0]["text"] == "book"
    again = marq("redrive", queue)
    assert (again.status, again.out) == (0, f"0 sent back from '{queue}-graves'\n")


def test_a_queue_that_never_had_dead_letters_has_none_to_send_back(marq: Command, queue: str) -> None:
    assert marq("create", queue).status == 0
    done = marq("redrive", queue)
    assert (done.status, done.out, done.err) == (0, f"0 sent back from '{queue}.dead'\n", "")
    assert marq("redrive", f"{queue}-mistyped").status != 0


def test_messages_are_moved_by_place_or_by_number(marq: Command, queue: str) -> None:
    places = marq("send", queue, *"abcd").out.split()
    assert marq("move", queue, places[2], "--to", f"{queue}-2").status == 0
    assert marq("peek", f"{queue}-2", "--json").objects[0]["text"] == "c"
    assert "2 moved" in marq("move", queue, "--max", "2", "--to", f"{queue}-2").out
    assert "1 moved" in marq("move", queue, "--to", f"{queue}-2").out


def test_settings_are_shown_changed_and_refused(marq: Command, queue: str) -> None:
    assert marq("create", queue, "max_receives=5", "--fifo").status == 0
    assert marq("create", queue).status == 2
    (info,) = marq("set", queue, "ttl_ms=1000", "--json").objects
    assert (info["settings"]["max_receives"], info["settings"]["ttl_ms"], info["settings"]["fifo"]) == (5, 1000, True)
    wrong = marq("set", queue, "max_receives=many")
    assert (wrong.status, len(wrong.err.splitlines())) == (2, 1)
    assert "max_receives=5" in marq("queues", queue).out


def test_what_destroys_asks_and_does_nothing_where_nobody_can_be_asked(marq: Command, queue: str) -> None:
    assert marq("send", queue, "a").status == 0
    for command in ("purge", "delete"):
        refused = marq(command, queue)
        assert refused.status == 2
        assert "1 message" in refused.err
        assert "--yes" in refused.err
    assert marq("stats", queue, "--json").objects[0]["ready"] == 1
    assert marq("delete", queue, "--yes").status == 0
    assert marq("stats", queue).status == 2


def test_workers_and_partitions_are_listed(marq: Command, shared_cluster: Cluster) -> None:
    assert {worker["url"] for worker in marq("workers", "--json").objects} == {w.url for w in shared_cluster.workers}
    partitions = marq("partitions", "--json").objects
    assert [one["partition"] for one in partitions] == [0, 1]
    assert {one["phase"] for one in partitions} == {"serving"}


def test_a_look_without_a_terminal_is_one_and_rates_come_with_the_second(marq: Command, queue: str) -> None:
    assert marq("send", queue, "a").status == 0
    assert queue in marq("top", "--prefix", queue).out
    first, second = marq("top", "--json", "--count", "2", "--interval", "200ms", "--prefix", queue).objects
    assert first["rates"]["sent"] is None
    assert second["rates"]["sent"] is not None
    assert second["queues"][0]["queue"] == queue


def test_top_on_a_terminal_ends_with_q_and_leaves_the_terminal_as_it_was(marq: Command, queue: str) -> None:
    assert marq("send", queue, "a").status == 0
    ours, theirs = pty.openpty()
    top = marq.start("top", "--prefix", queue, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while queue.encode() not in seen:
        seen += os.read(ours, 65536)
    os.write(ours, b"q")
    while b"\x1b[?1049l" not in seen:
        seen += os.read(ours, 65536)
    assert top.wait(20) == 0
    os.close(ours)


def test_on_a_terminal_a_bar_shows_how_much_was_sent(marq: Command, queue: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    sending = marq.start("send", queue, "-", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    assert sending.stdin is not None
    sending.stdin.write(b"one\ntwo\n")
    sending.stdin.flush()
    seen = b""
    while b"2 sent" not in seen:
        seen += os.read(ours, 65536)
    assert b"bytes" in seen
    sending.stdin.close()
    while f"2 sent to '{queue}'".encode() not in seen:
        seen += os.read(ours, 65536)
    assert sending.wait(20) == 0
    os.close(ours)


def test_top_fits_into_a_small_terminal_sorts_and_gives_it_back_after_ctrl_c(marq: Command, queue: str) -> None:
    names = [f"{queue}-{i:02}" for i in range(30)]
    for name in (*names, names[17]):
        assert marq("send", name, "a").status == 0
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (16, 100))
    before = termios.tcgetattr(theirs)
    top = marq.start(
        *("top", "--prefix", queue, "--interval", "300ms"),
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=lambda: _own(0),
    )  # fmt: skip
    seen = b""
    while b"by depth" not in seen:
        seen += os.read(ours, 65536)
    screen = seen.decode()
    assert re.search(r"by depth, 2[0-9] more", screen), screen
    assert screen.index(f"{queue}-17") < screen.index(f"{queue}-00"), "the fullest is the first"
    for order in ("ready", "in-flight", "dead", "oldest", "name"):
        os.write(ours, b"s")
        seen = b""
        while f"by {order}".encode() not in seen:
            seen += os.read(ours, 65536)
    assert f"{queue}-17" not in seen.decode(), "by name it is beyond the end"
    os.write(ours, b"\x03")
    while b"\x1b[?1049l" not in seen:
        seen += os.read(ours, 65536)
    assert top.wait(20) == 130
    assert b"Traceback" not in seen
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    os.close(ours)


def _own(descriptor: int) -> None:
    """Make a terminal the controlling one of this process, so that its Ctrl-C arrives here."""
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


# -- keys, shells, JSON --------------------------------------------------------------------------------


def test_a_key_is_taken_from_its_file_and_a_wrong_one_is_refused(kafka: str, tmp_path: Path) -> None:
    right, wrong, looks = "k" * 24, "w" * 24, "i" * 24
    for name, key in (("right", right), ("wrong", wrong), ("looks", looks)):
        (tmp_path / name).write_text(f"{key}\n")
    with Cluster(kafka, tmp_path / "c", partitions=1, handlers="", keys=f"{right},{looks}=inspect:*") as cluster:
        worker = cluster.start(ready=False)
        until(lambda: worker.place is not None and worker.get("/health/ready")[0] == 200, "it is ready", 40)
        marq = Command(worker.url)
        assert marq("send", "orders", "a", "--key-file", str(tmp_path / "right")).status == 0
        assert marq("stats", MARQ_KEY_FILE=str(tmp_path / "looks")).status == 0
        for args in (("stats",), ("stats", "--key-file", str(tmp_path / "wrong"))):
            done = marq(*args)
            assert (done.status, len(done.err.splitlines())) == (2, 1), done.err
        refused = marq("purge", "orders", "--yes", "--key-file", str(tmp_path / "looks"))
        assert refused.status == 2
        assert not any(key in done.err + refused.err for key in (right, wrong, looks))


def test_a_shell_completes_commands_options_and_queues(marq: Command, queue: str) -> None:
    assert marq("send", queue, "a").status == 0

    def completed(words: str, index: int) -> list[str]:
        done = marq(_MARQ_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(index))
        return [line.partition(",")[2] for line in done.out.splitlines()]

    assert "redrive" in completed("marq re", 1)
    assert "--follow" in completed("marq receive orders --fo", 3)
    assert completed(f"marq receive {queue[:-1]}", 2) == [queue]
    assert "_MARQ_COMPLETE" in marq("completion", "zsh").out


def test_json_is_ascii_that_any_reader_takes(marq: Command, queue: str) -> None:
    assert marq("send", queue, "\x7f\u2028ö").status == 0
    done = marq("peek", queue, "--json")
    assert done.out.strip().isprintable()
    assert done.out.isascii()
    assert json.loads(done.out)["text"] == "\x7f\u2028ö"
