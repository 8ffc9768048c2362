"""Rules of the worker around the core, each broken on purpose. The simulation must notice each.

Not here: that `ChunkConsumer.on_rebalance_end` opens what was opened while the rebalance lasted. Nobody does that for
the new assignment: `Ownership` opens all partitions once the rebalance is over, also those restored meanwhile. The gate
itself is tested on a real Kafka (`test_hazards.py`).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import app.cluster.seals
import app.engine.ownership
import app.engine.takeover
import app.service.receives
import app.service.sends
import gateway.auth
import gateway.json_api
from agents.runner import Runner
from agents.settlement import Settlement
from app.cluster.peers import peer_call
from app.cluster.seals import Seals
from app.engine.catalog import Catalog
from app.engine.changelogs import Changelogs
from app.engine.checkpoints import CheckpointWriter
from app.engine.copier import Copier
from app.engine.outbox import Outbox
from app.engine.ownership import Ownership
from app.engine.progress import Progress
from app.engine.read_up import ReadUp
from app.engine.takeover import TakeOver
from app.kafka.identity import Identity
from app.service.census import Census
from app.service.leases import Effects, Leases
from app.service.polling import PeerPolling
from app.service.purges import PurgeHere, Purges
from app.service.receives import Receives
from app.service.waiter import Waiter
from marq.core.markers import Release
from marq.core.owner import Owner, Phase
from marq.core.queue_clock import QueueClock
from tests.worksim.group import Thread
from tests.worksim.store import Table
from tests.worksim.truth import Violation
from tests.worksim.world import Shape, World


class Mutation(NamedTuple):
    """One broken rule."""

    rule: str  # what the design says
    patch: Callable[[], AbstractContextManager[Any]]
    theme: str | None = None  # of the runs in which it is looked for; None: as drawn


def _replaced(where: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(where, name, new)


def _nothing(*_: Any, **__: Any) -> None:
    pass


async def _nothing_soon(*_: Any, **__: Any) -> None:
    pass


def _of_one_who_stays(queue: str, limit: int, lease_ms: int, name: str, gone: Any, whole: bool, fifo: bool) -> Waiter:
    return Waiter(queue, limit, lease_ms, name, lambda: False, whole, fifo)


def _acks_alone_again(self: Outbox, entries: Any, error: Any) -> None:
    _refused(self, [entry for entry in entries if entry[1] is not None or type(entry[0]) is not Release], error)


_refused = Outbox._refused


def _forgets_who_got_nothing(self: PeerPolling, queue: str, url: str, got: int) -> None:
    if got:
        _has_taken(self, queue, url, got)


_has_taken = PeerPolling.has_taken


async def _nobody(*_: Any, **__: Any) -> list[str]:
    return []


@peer_call("purge")
async def _yes(self, asked: PurgeHere) -> bool:  # type: ignore[no-untyped-def]
    return True


def _left_without_a_word(self: Owner) -> list[Any]:
    self.phase = Phase.LEFT
    return []


async def _counted_twice(self: Census, queue: str) -> dict[str, int]:
    return {state: 2 * count for state, count in (await _counts_of(self, queue)).items()}


_counts_of = Census.counts_of


def _for_ever(self: Settlement, delivery: Any, messages: Any) -> None:
    delivery.until_ms = 1 << 60
    _begin(self, delivery, messages)


_begin = Settlement.begin


def _anywhere(key: bytes, group: bytes, settings: Any, count: int) -> int:
    return random.randrange(count)


async def _confirmed_or_not(self: Copier, owned: Any, copies: list[Any]) -> tuple[dict[int, Any], dict[int, Exception]]:
    done: dict[int, Any] = {}
    for offset, future in copies:
        try:
            done[offset] = await future
        except Exception:
            done[offset] = None
    return done, {}


async def _trimmed_at_the_end(self: Changelogs, owned: Any, topics: Any, position: int, markers_position: int) -> None:
    await _trim(self, owned, topics, position + 5, markers_position + 5)


_trim = Changelogs.trim


def _at_the_end_of_the_log(self: Ownership, owned: Any, topic: str, offset: int) -> None:
    _seek(self, owned, topic, self.app.kafka.log(topic, owned.number).end)  # type: ignore[attr-defined]


_seek = Ownership._seek


@peer_call("effects")
async def _effects_now(self, asked: Effects) -> list[bool]:  # type: ignore[no-untyped-def]
    self._owners.serving_here(asked.partition)
    return [True for _ in asked.deliveries]


async def _restored_unread(self: TakeOver, claim: Any) -> None:
    world = (await self.ownership.changelogs.identity(self.ownership.topics)).world(self.ownership.topics)

    async def unread() -> Any:
        return world

    self._read_tables = unread  # type: ignore[method-assign]
    try:
        await _restore(self, claim)
    finally:
        del self._read_tables


_restore = TakeOver._restore


def _complete_up_to(self: Table, partition: int, offset: int) -> None:
    self.data.set_persisted_offset(self._tp(partition), offset)


def _whoever_wrote(self: Table, partition: int, incarnation: object, done: Any, deleted: bytes | None) -> None:
    if not done.cancelled() and done.exception() is None and partition in self.data.owned:
        self.data.set_persisted_offset(self._tp(partition), done.result().offset)


def _still_blocked(self: Thread, tp: Any) -> None:
    self.wake()


def _removals_count(self: Catalog, old: Any, record: Any, counts: Any = Catalog._counts) -> bool:
    return record is None or counts(self, old, record)


MUTATIONS: dict[str, Mutation] = {
    "answers after the lease": Mutation(
        "Of messages whose lease is over nothing leaves a worker.",
        _replaced(Receives, "_drop_late", _nothing),
        "late",
    ),
    "calls after the lease": Mutation(
        "A handler is not called with messages whose lease is over.",
        _replaced(Settlement, "begin", _for_ever),
        "outboxes",
    ),
    "owner's markers are kept": Mutation(
        "Unsent markers of an owner are dropped when its partition leaves.",
        _replaced(Outbox, "drop_owners", _nothing),
        "outboxes",
    ),
    "nothing said at the end": Mutation(
        "What was started and not handed out is released when a partition leaves.",
        _replaced(Owner, "leave", _left_without_a_word),
        "outboxes",
    ),
    "counted twice": Mutation("Each worker's answer counts once.", _replaced(Census, "counts_of", _counted_twice)),
    "groups anywhere": Mutation(
        "A FIFO group has one partition.", _replaced(app.service.sends, "fifo_partition", _anywhere)
    ),
    "answers with what is read": Mutation(
        "A receive with room gets everything that was confirmed before it came.",
        _replaced(Receives, "_look", _nothing_soon),
        "calm",
    ),
    "asks only itself": Mutation(
        "A receive with room gets what other workers have.",
        _replaced(PeerPolling, "ready_at", _nobody),
        "calm",
    ),
    "takes part of a group": Mutation(
        "A receive gets as many messages of a group as were confirmed before it came.",
        _replaced(Receives, "_is_plenty", lambda *_: True),
        "calm",
    ),
    "handed to who is gone": Mutation(
        "What comes for a client that went away is given back.",
        _replaced(app.service.receives, "Waiter", _of_one_who_stays),
    ),
    "releases said once": Mutation(
        "Releases that Kafka did not confirm are repeated.",
        _replaced(Outbox, "_refused", _acks_alone_again),
    ),
    "no watch after an empty fetch": Mutation(
        "A worker that came for nothing is told of the next message.",
        _replaced(PeerPolling, "has_taken", _forgets_who_got_nothing),
    ),
    "not read up": Mutation("Who finds nothing asks where the logs end.", _replaced(ReadUp, "wait", _nothing_soon)),
    "nobody asks others": Mutation(
        "Who waits here is given what is elsewhere.", _replaced(PeerPolling, "poll_peers", _nothing)
    ),
    "nobody is woken": Mutation("Who watches a queue is told of a message.", _replaced(PeerPolling, "tell", _nothing)),
    "rows are lost": Mutation(
        "A row that was not confirmed is written again.",
        _replaced(CheckpointWriter, "_write_again", _nothing_soon),
        "rows",
    ),
    "rows in a rebalance": Mutation(
        "Rows are written in the event of an agent.", _replaced(app.engine.ownership, "current_event", lambda: 1)
    ),
    "seeks forward": Mutation(
        "After a gap a log is read again from its position.", _replaced(Ownership, "_seek", _at_the_end_of_the_log)
    ),
    "not read again": Mutation(
        "A partition that does not advance is read again.", _replaced(Progress, "read_again", _nothing)
    ),
    "not read on": Mutation("After a rebalance what stays is read on.", _replaced(Ownership, "_read_on", _nothing)),
    "not taken back": Mutation(
        "What another worker took, and is assigned here, is taken over again.",
        _replaced(Ownership, "_lost", _nothing),
        "outboxes",
    ),
    "tried once": Mutation("A take-over that fails is tried again.", _replaced(app.engine.takeover, "AGAIN_S", 1e9)),
    "extended, they say": Mutation(
        "An extension is confirmed when it took effect.",
        _replaced(Leases, "effects_here", _effects_now),
    ),
    "purged, they say": Mutation("A purge is answered when it is in force.", _replaced(Purges, "purge_here", _yes)),
    "ended without a copy": Mutation(
        "A dead letter is ended when its copy is durable.",
        _replaced(Copier, "confirmed", _confirmed_or_not),
        "refused",
    ),
    "deleted unread": Mutation(
        "Records are deleted below the positions of a manifest.", _replaced(Changelogs, "trim", _trimmed_at_the_end)
    ),
    "acks said once": Mutation(
        "Acks and releases that Kafka did not confirm are repeated.",
        _replaced(Outbox, "_say_again", _nothing),
        "outboxes",
    ),
    "receives wait for ever": Mutation(
        "A receive learns that the partition it asked has left.",
        _replaced(Receives, "forget", _nothing),
        "outboxes",
    ),
    "calls lose their leases": Mutation(
        "The lease of a call that runs is extended.",
        _replaced(Settlement, "extend", _nothing),
        "calm",
    ),
    "tables read too early": Mutation(
        "The tables are read to their end after the claim.",
        _replaced(TakeOver, "_restore", _restored_unread),
        "moves",
    ),
    "stores seem complete": Mutation(
        "A store is complete up to its persisted offset.",
        _replaced(Table, "_advance", _complete_up_to),
        "rows",
    ),
    "stores of former owners": Mutation(
        "A confirmation that comes late changes no store.", _replaced(Table, "_on_written", _whoever_wrote)
    ),
    "damaged stores are kept": Mutation(
        "A store with a row that can't be read is filled again.",
        _replaced(Table, "wipe", _nothing),
        "disks",
    ),
    "stores of other clusters": Mutation(
        "A local store of another cluster is not read.",
        _replaced(Identity, "of_store", lambda *_: None),
        "disks",
    ),
    "all stamps are believed": Mutation(
        "A stamp from before its message can have been sent is of a clock that is behind.",
        _replaced(QueueClock, "read", lambda *_: False),
        "clocks",
    ),
    "calls count twice": Mutation(
        "A call between workers counts once.", _replaced(Seals, "take", _nothing), "strangers"
    ),
    "any key will do": Mutation(
        "A key has the permissions of its entries.", _replaced(gateway.auth.Grants, "require", _nothing)
    ),
    "all queues are listed": Mutation(
        "A key sees the queues that it has a permission for.", _replaced(gateway.json_api, "may_see", lambda *_: True)
    ),
    "keys of nobody": Mutation(
        "A request has a key of the installation.",
        _replaced(gateway.auth.Keys, "digest_of", lambda keys, _: next(iter(keys.digests))),
    ),
    "done are called": Mutation(
        "A handler is not called with what ended while it waited for its turn.",
        _replaced(Runner, "_without_done", lambda _, __, messages: messages),
    ),
    "time begins with the clock": Mutation(
        "No call that was made to a worker before it began anew is of its time.",
        _replaced(app.cluster.seals, "BEGINNING_BITS", 0),
        "strangers",
    ),
    "any seal will do": Mutation(
        "A call has the seal of a worker.",
        _replaced(app.cluster.seals, "compare_digest", lambda *_: True),
        "strangers",
    ),
    "blocked for ever": Mutation(
        "A partition whose chunk found no room is looked at again.", _replaced(Thread, "unblock", _still_blocked)
    ),
    "forgotten whatever it is": Mutation(
        "The removal of a queue's record counts only while the queue is deleted.",
        _replaced(Catalog, "_counts", _removals_count),
        "jobs",
    ),
    "given back to nobody": Mutation(
        "What comes for a receive that is over is given back uncounted.",
        _replaced(Receives, "give_back", _nothing),
        "restarts",
    ),
}


def seeds_until_failure(name: str, seeds_max: int, start: int = 0) -> int | None:
    """The first seed that fails with a mutation; None if all pass."""
    found = None
    with MUTATIONS[name].patch():
        for seed in range(start, start + seeds_max):
            world = World(seed, Shape.of(seed, MUTATIONS[name].theme))
            try:
                world.run()
            except Violation:  # nothing else: an error in the mutation itself proves nothing
                found = seed
                break
    del world
    gc.collect()  # now: the ends of a run's coroutines confuse Python while it compiles something
    return found
