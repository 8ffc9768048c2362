"""Histories, which are made from the effects of the fold, agree with a recount of the raw logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest

from marq.core.history import Ended, Envelope, Histories, Unfinished, visible_ms
from marq.core.markers import End, Keepalive, Own, Purge, Release, Start, decode, encode
from marq.core.partition import Partition
from marq.core.rows import Record, decode_manifest
from marq.errors import RowError
from pipeline.reference import Fault, ReferenceFold
from tests.simulation.reference import Reference
from tests.simulation.simulator import Simulator, run

SEEDS = 60


def envelope(record: Record) -> Envelope:
    return Envelope(
        record.offset,
        record.timestamp,
        record.key,
        None,
        record.headers,
        -1 if record.value is None else len(record.value),
    )


class Walk:
    """Folds logs in a given mixture, with all observers."""

    def __init__(self, number: int = 0, queue_id: str | None = None, fifo: Mapping[str, int] | None = None) -> None:
        self.partition = Partition(number, queue_id=queue_id)
        self.histories = Histories(queue_id=queue_id)
        self.faults: list[Fault] = []
        self.reference = ReferenceFold(
            first=0,
            own=-1,
            queue_of=self.histories.queue_of,
            report=self.faults.append,
            compacted=False,
            fifo=fifo,
        )
        self.ended: list[Ended] = []
        self.stored: dict[str, bytes] = {}

    def read(self, record: Record) -> None:
        position = self.partition.position
        if record.offset > position:
            self.histories.absent(position, record.offset)
            self.reference.gone(position, record.offset)
        self.partition.ingest(position, record.offset + 1, [envelope(record)])
        self.histories.read([envelope(record)], self.partition)
        self.reference.read([envelope(record)])

    def fold(self, record: Record) -> None:
        batch = decode(record.value)
        effects = self.partition.fold(record.offset, record.timestamp, batch.markers)
        assert [sorted(e) for e in effects] == self.reference.fold(record.offset, record.timestamp, batch)
        self.histories.folded(record.offset, record.timestamp, batch.markers, effects)
        self.ended += self.histories.ended
        self.histories.ended.clear()

    def restart(self, run_number: int) -> None:
        """Write the whole state to rows, and restore it."""
        checkpoint = self.partition.checkpoint(run_number, 0, 0, 0, whole=True)
        assert checkpoint is not None
        self.stored.update(checkpoint.rows)
        self.partition = Partition.restore(
            self.partition.number,
            decode_manifest(checkpoint.manifest),
            self.stored.__getitem__,
            queue_id=self.partition.queue_id,
        )
        self.ended += self.histories.ended
        self.histories = Histories.load(self.histories.dump(), queue_id=self.partition.queue_id)


def in_time_order(queue: list[Record], markers: list[Record]) -> Iterator[tuple[str, Record]]:
    """Both logs by the greatest timestamp so far; within one, in their own order."""
    rows: list[tuple[int, int, int, str, Record]] = []
    for rank, (name, log) in enumerate((("queue", queue), ("markers", markers))):
        top = -1
        for record in log:
            top = max(top, record.timestamp)
            rows.append((top, rank, record.offset, name, record))
    for *_, name, record in sorted(rows, key=lambda row: row[:3]):
        yield name, record


def mixed(r: Random, queue: list[Record], markers: list[Record]) -> Iterator[tuple[str, Record]]:
    """Both logs in any mixture."""
    waiting = {"queue": list(reversed(queue)), "markers": list(reversed(markers))}
    while waiting["queue"] or waiting["markers"]:
        name = r.choice([name for name in waiting if waiting[name]])
        for _ in range(min(len(waiting[name]), r.choice((1, 1, 5, 40)))):
            yield name, waiting[name].pop()


def walked(simulator: Simulator, order: Iterator[tuple[str, Record]], restarts: Random | None = None) -> Walk:
    fifo = {name: 0 for name, settings in simulator.settings.items() if settings.fifo}
    walk = Walk(simulator.number, simulator.queue_id, fifo)
    for i, (name, record) in enumerate(order):
        if name == "queue":
            walk.read(record)
        else:
            walk.fold(record)
        if restarts is not None and restarts.random() < 0.03:
            walk.restart(i + 1)
    walk.ended += walk.histories.ended
    walk.reference.check_order_at_end(walk.partition.duplicates.__contains__)
    return walk


def recount(reference: Reference, offset: int) -> list[tuple[int, int, int, int, str | None]]:
    """Deliveries of a message by its states in the plain fold: epoch, delivery, attempt, extensions, end."""
    deliveries: list[list[Any]] = []
    for _, state in reference.history.get(offset, ()):
        if isinstance(state, str):
            break
        epoch, delivery, receives, _, leased = state
        if not deliveries or tuple(deliveries[-1][:2]) != (epoch, delivery):
            if deliveries and deliveries[-1][4] is None:
                deliveries[-1][4] = "expired_lease"
            deliveries.append([epoch, delivery, receives, 0, None])
        elif leased:
            deliveries[-1][3] += 1
        else:
            deliveries[-1][4] = "uncounted" if receives < deliveries[-1][2] else "released"
    return [tuple(d) for d in deliveries]


def deleted_unread(simulator: Simulator, reference: Any) -> set[int]:
    """In topic mode, messages that retention deleted before they were finished: they never end."""
    if simulator.queue_id is None:
        return set()
    return {offset for offset in reference.messages if offset not in reference.done and offset < simulator.queue.start}


@pytest.mark.parametrize("order", ["time", "any mixture", "any mixture, with restarts"])
def test_lives_are_what_a_recount_of_the_raw_logs_comes_to(order: str) -> None:
    for seed in range(SEEDS):
        simulator = run(seed, 300)
        reference, random = simulator.reference, Random(seed)
        queue, markers = simulator.queue.records, simulator.markers.records
        records = in_time_order(queue, markers) if order == "time" else mixed(random, queue, markers)
        walk = walked(simulator, records, random if "restarts" in order else None)
        found: dict[int, Ended] = {}
        for ended in walk.ended:
            for one in ended.envelopes:
                assert one.offset not in found, f"seed {seed}: {one.offset} ended twice"
                found[one.offset] = ended
        assert found.keys() == reference.done.keys(), f"seed {seed}"
        histories = walk.histories
        assert {*histories.last, *histories.sent, *histories.early} <= deleted_unread(simulator, reference), (
            f"seed {seed}"
        )
        for offset, ended in found.items():
            why = f"seed {seed}, offset {offset}"
            assert ended.outcome == reference.done[offset], why
            history = ended.history
            wanted = recount(reference, offset)
            got = [(d.epoch, d.delivery, d.attempt, d.extensions) for d in history.deliveries]
            assert got == [w[:4] for w in wanted], why
            before_the_end = [w[4] for w in wanted]
            assert all(
                d.end == w or d.end in (ended.outcome, "overtaken")
                for d, w in zip(history.deliveries, before_the_end, strict=True)
            ), why
            assert history.extensions == sum(w[3] for w in wanted), why
            assert history.releases == sum(w[4] == "released" for w in wanted), why
            assert history.receives == sum(w[4] != "uncounted" for w in wanted), why


def test_the_reference_agrees_with_the_fold_and_finds_nothing_wrong_with_what_can_happen() -> None:
    for seed in range(SEEDS, 3 * SEEDS):
        simulator = run(seed, 300)
        walk = walked(simulator, in_time_order(simulator.queue.records, simulator.markers.records))
        assert walk.faults == [], f"seed {seed}: {walk.faults[:3]}"
        deleted = deleted_unread(simulator, simulator.reference)
        assert {*walk.reference.open, *walk.reference.states} == deleted, f"seed {seed}"
        assert sum(walk.reference.done.values()) + len(deleted) == len(simulator.reference.messages), f"seed {seed}"


# ------------------------------------------------------------------ one history


def message(offset: int, at_ms: int = 0, queue: bytes = b"q", headers: Any = ()) -> Record:
    return Record(offset, at_ms, queue, b"12345", headers)


def marks(offset: int, at_ms: int, *markers: Any) -> Record:
    return Record(offset, at_ms, None, encode(list(markers)))


def only(walk: Walk) -> Ended:
    (ended,) = walk.ended + walk.histories.ended
    return ended


def began(*more: Record) -> Walk:
    """One message, owned by w1 since marker 0, its first delivery started at 1,000 ms for 500 ms."""
    walk = Walk()
    walk.read(message(0, 900))
    walk.fold(marks(0, 950, Own("w1", "w1/a")))
    walk.fold(marks(1, 1_000, Start(0, 1, [0, 1], 500, "shop.pay")))
    for record in more:
        walk.fold(record)
    return walk


def test_an_acknowledged_delivery_has_its_owner_receiver_and_times() -> None:
    ended = only(began(marks(2, 1_200, End(0, [0, 1], "acked", 1))))
    (delivery,) = ended.history.deliveries
    assert delivery == (1, 0, 1, "w1", "shop.pay", 1_000, 1_500, 0, 1_200, "acked")
    assert (ended.outcome, ended.ended_ms, ended.history.working_ms) == ("acked", 1_200, 200)


def test_an_extension_moves_the_deadline_of_its_delivery() -> None:
    walk = began(marks(2, 1_300, Keepalive(0, 1, [0, 1], 2_000)), marks(3, 2_000, End(0, [0, 1], "acked", 1)))
    (delivery,) = only(walk).history.deliveries
    assert (delivery.deadline_ms, delivery.extensions, delivery.end) == (3_300, 1, "acked")


def test_a_lease_that_ran_out_ends_without_a_time_and_the_next_attempt_is_the_second() -> None:
    walk = began(marks(2, 2_000, Start(0, 2, [0, 1], 500, "r2")), marks(3, 2_100, End(0, [0, 1], "acked", 2)))
    first, second = only(walk).history.deliveries
    assert (first.end, first.end_ms, second.attempt, second.end) == ("expired_lease", None, 2, "acked")
    assert only(walk).history.working_ms == 500 + 100


def test_an_uncounted_delivery_gives_its_attempt_back() -> None:
    walk = began(
        marks(2, 1_100, Release(0, 1, [0, 1], 0, counted=False)),
        marks(3, 1_200, Start(0, 2, [0, 1], 500)),
        marks(4, 1_300, End(0, [0, 1], "acked", 2)),
    )
    history = only(walk).history
    assert [(d.attempt, d.end) for d in history.deliveries] == [(1, "uncounted"), (1, "acked")]
    assert (history.receives, history.releases) == (1, 0)


def test_a_late_ack_ends_its_own_delivery_and_overtakes_the_last() -> None:
    walk = began(marks(2, 2_000, Start(0, 2, [0, 1], 500)), marks(3, 2_100, End(0, [0, 1], "acked", 1)))
    assert [(d.end, d.end_ms) for d in only(walk).history.deliveries] == [("acked", 2_100), ("overtaken", 2_100)]


def test_a_message_that_is_purged_before_it_is_read_ends_when_it_is_read() -> None:
    walk = Walk()
    walk.fold(marks(0, 950, Own("w1", "w1/a")))
    walk.fold(marks(1, 1_000, Purge(0, "q", 5)))
    walk.read(message(0, 900))
    ended = only(walk)
    assert (ended.outcome, ended.ended_ms, ended.history.deliveries) == ("purged", 1_000, [])
    walk.read(message(1, 900, queue=b"other"))
    assert 1 in walk.histories.sent


def test_an_unfinished_message_tells_what_has_happened_so_far() -> None:
    walk = began(marks(2, 1_100, Keepalive(0, 1, [0, 1], 500)))
    (one,) = walk.histories.unfinished(walk.partition)
    assert isinstance(one, Unfinished)
    assert (one.state, one.history.receives, one.history.extensions, one.history.deliveries[-1].end) == (
        "in_flight",
        1,
        1,
        None,
    )
    walk.fold(marks(3, 1_700))
    (one,) = walk.histories.unfinished(walk.partition)
    assert (one.state, one.history.deliveries[-1].end) == ("ready", "expired_lease")


def test_a_delay_header_says_when_a_message_is_visible() -> None:
    assert visible_ms(envelope(message(0, 900, headers=(("marq-delay-ms", b"250"),)))) == 1_150
    assert visible_ms(envelope(message(0, 900))) == 900


@pytest.mark.parametrize("value", [b"0", b"12", b"", b"-1", b" 1", b"1_0", b"1e3", b"9" * 15, b"9" * 16, b"\xb2", None])
@pytest.mark.parametrize("name", ["marq-delay-ms", "marq-ttl-ms"])
def test_a_header_is_malformed_where_the_core_says_so(name: str, value: bytes | None) -> None:
    walk = Walk()
    record = message(0, 900, headers=((name, value),))
    walk.read(record)
    assert (walk.histories.queue_of(envelope(record)) is None) == (0 in walk.partition.poison)


def test_messages_that_share_a_history_share_it_in_memory() -> None:
    walk = Walk()
    walk.fold(marks(0, 950, Own("w1", "w1/a")))
    for offset in range(1_000):
        walk.read(message(offset, 900))
    walk.fold(marks(1, 1_000, Start(0, 1, [0, 1_000], 500)))
    walk.fold(marks(2, 1_100, Keepalive(0, 1, [0, 500], 500)))
    assert len({id(event) for event in walk.histories.last.values()}) == 2
    walk.fold(marks(3, 1_200, End(0, [0, 1_000], "acked", 1)))
    assert [len(ended.envelopes) for ended in walk.ended] == [500, 500]


def test_what_is_no_dump_is_an_error() -> None:
    with pytest.raises(RowError, match="damaged histories"):
        Histories.load([b"nonsense"])


def test_a_purge_of_a_former_owner_ends_nothing_that_is_read_later() -> None:
    histories = Histories()
    histories.folded(0, 1, [Own("w1", "w1/1")], [[]])
    histories.folded(1, 2, [Own("w2", "w2/1")], [[]])

    histories.folded(2, 3, [Purge(0, "q", 10)], [[]])

    assert not histories.purges
