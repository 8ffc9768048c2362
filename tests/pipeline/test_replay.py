"""`replay`: archived messages, chosen with a SQL predicate, are sent again, each once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from marq.errors import PipelineError
from pipeline.dispatch import Dispatch, Outcome
from pipeline.ledger import Ledger, State
from pipeline.replay import What, run
from tests.pipeline.lab import Installation
from tests.pipeline.sending_lab import Here, Record, committed, ends, here, wait_for
from tests.pipeline.tables_lab import run_archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def archive(job: Here) -> None:
    """Archive the present records of Kafka."""
    assert job.spark is not None
    run_archive(job.spark, job)


def replayed(target: Installation, least: int) -> dict[bytes, Record]:
    """Messages that were sent again, by where they came from."""
    records = [record for record in committed(target, least) if "marq-replayed-from" in record.headers]
    found = {record.headers["marq-replayed-from"]: record for record in records}
    assert len(found) == len(records), "each once"
    return found


@pytest.mark.slow
def test_a_message_is_sent_again_with_all_that_its_sender_gave_it(
    target: Installation, job: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    user = [("to", b"JFK"), ("to", b"LAX"), ("none", None)]
    marq = [("marq-key", b"k"), ("marq-group", b"g"), ("marq-delay-ms", b"5000"), ("marq-ttl-ms", b"9000")]
    dead = [("marq-origin", b"0:0"), ("marq-dead-queue", b"x"), ("marq-dead-reason", b"y")]
    target.send(0, (b"orders", b"first", [*user, *marq, *dead]), (b"orders", b"second"), (b"others", b"third"))
    target.send(1, (b"orders", None), (None, b"poison"))
    archive(job)
    topic = target.settings.queue_topic

    run(job, What("attributes['to'] = 'LAX' OR payload_text = 'third'"), dry_run=True)
    assert "chosen: 2 messages" in capsys.readouterr().out
    with pytest.raises(PipelineError, match="nothing was sent: look at what was chosen, then add --yes"):
        run(job, What("queue = 'orders'"))
    assert len(committed(target, 5)) == 5

    assert run(job, What("queue = 'orders' OR queue IS NULL"), yes=True) == Outcome(3, 0, 0)
    found = replayed(target, 8)
    assert {place.decode(): (r.key, r.value) for place, r in found.items()} == {
        f"{topic}:0:0": (b"orders", b"first"),
        f"{topic}:0:1": (b"orders", b"second"),
        f"{topic}:1:0": (b"orders", b""),
    }
    assert found[f"{topic}:0:0".encode()].headers == {
        "to": b"LAX",
        "none": None,
        "marq-key": b"k",
        "marq-group": b"g",
        "marq-replayed-from": f"{topic}:0:0".encode(),
    }

    assert run(job, What("queue = 'orders' OR queue IS NULL"), yes=True) == Outcome(0, 3, 0)
    assert run(job, What("queue IS NULL", to="mended", delay_ms=70), name="poison", yes=True) == Outcome(1, 0, 0)
    mended = replayed(target, 9)[f"{topic}:1:1".encode()]
    assert (mended.key, mended.value, mended.headers["marq-delay-ms"]) == (b"mended", b"poison", b"70")


@pytest.mark.slow
def test_a_run_that_goes_on_sends_what_is_left_of_the_same_choice(
    target: Installation, job: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.send(0, *((b"orders", b"%d" % n) for n in range(20)))
    archive(job)
    send, write = Dispatch.send, Ledger.write

    def sends_ten(self: Dispatch, staged: DataFrame, state: State, skipped: int, total: int) -> Outcome:
        return send(self, staged.where("row < 10 * 16384"), state, skipped, total)

    def ends_before_it_is_done(self: Ledger, what: Any, value: Any) -> None:
        if what == "done":
            raise KeyboardInterrupt
        write(self, what, value)

    with monkeypatch.context() as patch:
        patch.setattr(Dispatch, "send", sends_ten)
        patch.setattr(Ledger, "write", ends_before_it_is_done)
        with pytest.raises(KeyboardInterrupt):
            run(job, What("true"), yes=True)
    target.send(0, (b"orders", b"later"))
    archive(job)
    assert run(job, What("true")) == Outcome(10, 10, 0), "it was agreed to before"
    assert sorted(int(record.value) for record in replayed(target, 41).values()) == list(range(20))
    assert not [*Path(job.path("jobs")).glob("*/rows-*")]


def test_a_predicate_that_is_none_is_an_error_of_one_line(target: Installation, job: Here) -> None:
    target.send(0, (b"orders", b"first"))
    archive(job)
    for where, message in (
        ("queu = 'orders'", "queu"),
        ("queue = ", "--where 'queue = '"),
        ("queue", "--where 'queue'"),
    ):
        with pytest.raises(PipelineError, match="is not a valid condition on these messages") as caught:
            run(job, What(where), yes=True)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert len(committed(target, 1)) == 1


def test_messages_of_a_queue_that_is_gone_are_not_sent_where_they_would_be_poison(
    installation: Callable[..., Installation], spark: SparkSession
) -> None:
    target = installation(partitions=1, auto_create=False)
    job = here(target, spark)
    target.send(0, (b"gone", b"first"))
    archive(job)
    with pytest.raises(PipelineError, match="its queue does not exist any more"):
        run(job, What("true"), yes=True)
    assert len(committed(target, 1)) == 1


@pytest.mark.slow
def test_killed_and_started_again_it_sends_each_once(target: Installation, job: Here) -> None:
    count = 5_000
    target.send(0, *((b"orders", b"%d" % n) for n in range(count)))
    archive(job)
    process = target.start_job("replay", "--where", "true", "--rate", "500", "--yes", "--master", "local[2]")
    try:
        wait_for(lambda: ends(target) > count + 500, "some are sent")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    outcome = run(job, What("true"))
    assert outcome.sent + outcome.already_sent == count
    assert outcome.sent
    assert outcome.already_sent
    assert {int(record.value) for record in replayed(target, 2 * count).values()} == set(range(count))


def test_without_an_archive_there_is_an_error_that_says_how_to_make_one(target: Installation, job: Here) -> None:
    with pytest.raises(PipelineError, match="archive/messages is not a table; `python -m pipeline archive` makes it"):
        run(job, What("true"), yes=True)
