"""The checks of the doctor: pure functions of what a service told.

Each looks at one thing, and gives what it found: that it is as it should be, or what is wrong and what to do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from statistics import median_low
from typing import Any, NamedTuple

import msgspec

from marq.cli.values import duration, number, size
from marq.core.policies import QueueSettings, takes_dead_letters
from marq.waiting import forsaken, is_forsaken

#: Milliseconds by which clocks may differ.
CLOCK_MS = 5_000
#: Bytes and part of a disk that should be free.
DISK_FREE_BYTES = 2 * 1024**3
DISK_FREE_PART = 0.05
#: Open files of a worker that are not connections of clients.
FILES_KEPT = 1_024
#: Milliseconds for which something may be in no checkpoint.
CHECKPOINT_MS = 60_000
#: Records that an owner may be behind its logs.
LAG = 100_000
#: Days that a certificate should still be valid.
CERTIFICATE_DAYS = 14
#: Queues or partitions that a finding names.
NAMED = 5


#: What to do if not everything could be looked at.
UNSEEN_MEND = "look again when all workers answer, with a key that has the permission inspect:*"


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


class Finding(NamedTuple):
    """What a check found."""

    check: str
    level: Level
    what: str
    mend: str = ""


class Facts(msgspec.Struct):
    """What a service told. None: it was not asked, or did not tell; `refused` says why.

    The lists are those of the HTTP API (`/v1/workers`, `/v1/partitions`, `/v1/stats`).
    """

    url: str
    version: str = ""  # of the command
    unreachable: str = ""
    ready: bool | None = None
    health: str = ""  # what a worker that is not ready says
    refused: str = ""  # why the key, or the lack of one, does not let us look
    workers: list[dict[str, Any]] | None = None
    missing: list[str] = []
    troubles: list[dict[str, str]] = []
    partitions: list[dict[str, Any]] | None = None
    stalled: dict[str, Any] = {}
    queues: list[dict[str, Any]] | None = None
    dead_letter_queues: dict[str, str] = {}  # of queues that name one
    narrow: str = ""  # why only some of the queues are seen
    clock_ms: int = 0  # ours, when the workers had told theirs …
    asked_ms: int = 0  # … and how long they took
    certificate_days: float | None = None
    name: str = ""  # of the installation, by the settings here; empty: they name none
    cluster: str | None = None  # id of the Kafka that the settings here name; empty: Kafka could not be asked


Check = Callable[[Facts], Iterable[Finding]]
CHECKS: list[Check] = []


def check(name: str, needs: str = "url") -> Callable[[Callable[[Facts], Iterator[tuple[Level, str, str]]]], Check]:
    """Register a check. It yields level, what is wrong, and what to do; nothing if all is well.

    Args:
        needs: the fact without which it can't be made.
    """

    def decorate(function: Callable[[Facts], Iterator[tuple[Level, str, str]]]) -> Check:
        def run(facts: Facts) -> Iterator[Finding]:
            if getattr(facts, needs) is None:
                yield Finding(name, Level.SKIPPED, "could not be looked at")
                return
            found = [Finding(name, *one) for one in function(facts)]
            well, unseen = (function.__doc__ or "").strip(), _unseen(facts, needs)
            if found:
                yield from found
            elif unseen:
                yield Finding(name, Level.SKIPPED, f"{well}, as far as can be seen: {unseen}", UNSEEN_MEND)
            else:
                yield Finding(name, Level.OK, well)

        run.__name__ = function.__name__
        CHECKS.append(run)
        return run

    return decorate


def _unseen(facts: Facts, needs: str) -> str:
    """What a check could not look at, of those facts; "" if it saw all of them."""
    if needs in ("workers", "partitions", "queues") and facts.missing:
        return f"{_some(facts.missing)} did not answer"
    return facts.narrow if needs == "queues" else ""


def examine(facts: Facts) -> list[Finding]:
    """What all checks find."""
    if facts.unreachable:
        return list(address(facts))
    return [finding for one in CHECKS for finding in one(facts)]


Found = Iterator[tuple[Level, str, str]]


def _vitals(facts: Facts) -> list[tuple[str, dict[str, Any]]]:
    """Address and vitals of each worker that tells them."""
    return [(worker["url"], worker["vitals"]) for worker in facts.workers or () if worker.get("vitals")]


def _some(names: Iterable[object]) -> str:
    shown = [str(name) for name in names]
    more = len(shown) - NAMED
    return ", ".join(shown[:NAMED]) + (f" and {more} more" if more > 0 else "")


# ---------------------------------------------------------------------- getting there


@check("address")
def address(facts: Facts) -> Found:
    """a worker answers"""
    if facts.unreachable:
        yield Level.PROBLEM, facts.unreachable, "start a worker, or correct --url and MARQ_URL"


@check("certificate")
def certificate(facts: Facts) -> Found:
    """the certificate is valid for weeks, or there is none"""
    days = facts.certificate_days
    if days is not None and days < CERTIFICATE_DAYS:
        level = Level.PROBLEM if days < 1 else Level.WARNING
        yield (
            level,
            f"the certificate of {facts.url} ends in {max(0, days):.0f} days",
            "renew it and restart the workers",
        )


@check("key")
def key(facts: Facts) -> Found:
    """the key lets us look inside"""
    if facts.refused:
        mend = "give a key with the permission inspect:* (--key-file); without it only the checks above can be made"
        yield Level.PROBLEM, facts.refused, mend


@check("ready")
def ready(facts: Facts) -> Found:
    """the worker is ready"""
    if facts.ready is False:
        mend = "wait; if it stays so, see its log, and try `python -m app doctor` on its machine"
        yield Level.PROBLEM, f"the worker is not ready: {facts.health}", mend


# ---------------------------------------------------------------------- workers


@check("workers", needs="workers")
def workers(facts: Facts) -> Found:
    """all workers answer each other"""
    for url in facts.missing:
        yield (
            Level.PROBLEM,
            f"the worker at {url} did not answer",
            "check that it runs and that the others reach this address (MARQ_WEB_URL, firewall, certificate)",
        )
    for worker in facts.workers or ():
        if not worker["ready"]:
            yield Level.WARNING, f"the worker at {worker['url']} is not ready", "see its log"


@check("addresses", needs="workers")
def addresses(facts: Facts) -> Found:
    """each worker is reached at an address of its own"""
    for trouble in facts.troubles:
        yield Level.PROBLEM, trouble["what"], trouble["mend"]


@check("installation", needs="workers")
def installation(facts: Facts) -> Found:
    """the workers belong to the installation and the Kafka that the settings here name, if they name any"""
    vitals = _vitals(facts)
    names = [(url, one["settings"].get("name", "")) for url, one in vitals]
    clusters = [(url, one.get("cluster", "")) for url, one in vitals]
    for what, here, told in (
        ("installation", json.dumps(facts.name) if facts.name else None, names),
        ("Kafka cluster", facts.cluster, clusters),
    ):
        if here is None:
            continue
        if not here:
            mend = "see the check of Kafka"
            yield Level.SKIPPED, f"the {what} that the settings here name could not be asked for its id", mend
        elif not any(its for _, its in told):  # one speaks for all: workers find each other in their Kafka
            mend = "look again when they serve partitions; those of an earlier version don't tell it"
            yield Level.SKIPPED, f"the workers did not tell their {what}", mend
        for its in sorted({its for _, its in told if here and its and its != here}):
            urls = _some(url for url, one in told if one == its)
            yield (
                Level.PROBLEM,
                f"the workers at {urls} belong to the {what} {its}, the settings here name {here}",
                "correct --url and MARQ_URL, or MARQ_NAME and MARQ_KAFKA here",
            )


@check("versions", needs="workers")
def versions(facts: Facts) -> Found:
    """all run the same version"""
    found: dict[str, list[str]] = {}
    for worker in facts.workers or ():
        found.setdefault((worker.get("vitals") or {}).get("version", "an earlier one"), []).append(worker["url"])
    if len(found) > 1:
        said = "; ".join(f"{version}: {_some(urls)}" for version, urls in sorted(found.items()))
        yield Level.WARNING, f"workers run several versions: {said}", "finish the upgrade: restart the older ones"
    elif found and facts.version and facts.version not in found:
        yield (
            Level.WARNING,
            f"this command has version {facts.version}, the workers {next(iter(found))}",
            f'pip install "marq[cli]=={next(iter(found))}"',
        )


@check("settings", needs="workers")
def settings(facts: Facts) -> Found:
    """all workers have the same settings"""
    vitals = _vitals(facts)
    for name in sorted({name for _, one in vitals for name in one["settings"]}):
        values: dict[str, list[str]] = {}
        for url, one in vitals:
            if name in one["settings"]:
                values.setdefault(one["settings"][name], []).append(url)
        if len(values) > 1:
            said = "; ".join(f"{value} at {_some(urls)}" for value, urls in sorted(values.items()))
            mend = f"set MARQ_{name.upper()} to the same everywhere, and restart the others"
            yield Level.PROBLEM, f"workers disagree on {name}: {said}", mend


@check("keys", needs="workers")
def keys(facts: Facts) -> Found:
    """all workers have the same keys, or none"""
    found: dict[str, list[str]] = {}
    for url, one in _vitals(facts):
        found.setdefault(one["keys"], []).append(url)
    if len(found) > 1:
        without = found.get("")
        if without:
            yield Level.PROBLEM, f"workers without keys: {_some(without)}", "set MARQ_KEYS there, too"
        if len(found) - bool(without) > 1:
            said = "; ".join(_some(urls) for mark, urls in sorted(found.items()) if mark)
            mend = "set MARQ_KEYS to the same everywhere: a key works at some workers only"
            yield Level.PROBLEM, f"workers have different keys: {said}", mend


@check("clocks", needs="workers")
def clocks(facts: Facts) -> Found:
    """the clocks of workers, brokers and this machine agree"""
    found = [("this machine", facts.clock_ms)]
    told: dict[str, list[int]] = {}
    for url, one in _vitals(facts):
        found.append((f"the worker at {url}", one["clock_ms"]))
        for broker, at_ms in (one.get("brokers_ms") or {}).items():
            told.setdefault(broker, []).append(at_ms)
    found += [(f"broker {broker}", median_low(times)) for broker, times in sorted(told.items())]
    # a worker that did not answer holds up the others' answers: their clocks were read in this time
    room_ms = CLOCK_MS + facts.asked_ms
    agreeing = [[b for _, b in found if abs(a - b) <= room_ms] for _, a in found]
    majority: list[int] = max(agreeing, key=len)
    most = median_low(majority)
    if 2 * len(majority) <= len(found):
        first, last = min(found, key=lambda one: one[1]), max(found, key=lambda one: one[1])
        what = f"the clock of {last[0]} is {duration(last[1] - first[1])} ahead of that of {first[0]}"
        yield Level.WARNING, f"{what}; which of them is wrong can't be told", "correct the clocks (NTP)"
        return
    for whose, at_ms in found:
        off = at_ms - most
        if abs(off) > room_ms:
            way = "ahead of" if off > 0 else "behind"
            yield (
                Level.WARNING,
                f"the clock of {whose} is {duration(abs(off))} {way} the others",
                "correct the clock (NTP)"
                + ("; until then, messages may live and wait longer by that" if whose.startswith("broker") else ""),
            )


@check("disk", needs="workers")
def disk(facts: Facts) -> Found:
    """the workers' disks have room"""
    for url, one in _vitals(facts):
        free, total = one["disk_free_bytes"], one["disk_total_bytes"]
        if (total and free < min(DISK_FREE_BYTES, total // 2)) or free < total * DISK_FREE_PART:
            yield (
                Level.PROBLEM if free < total * 0.01 else Level.WARNING,
                f"the disk of the worker at {url} has {size(free)} of {size(total)} left",
                "make room, or give MARQ_DATA_DIR a larger disk: a worker whose disk is full stops",
            )


@check("open files", needs="workers")
def open_files(facts: Facts) -> Found:
    """the limits of open files leave room for the connections"""
    for url, one in _vitals(facts):
        limit = one["open_files"]
        if 0 < limit < one["max_connections"] + FILES_KEPT:
            yield (
                Level.WARNING,
                f"the worker at {url} may open {number(limit)} files, too few for {number(one['max_connections'])} "
                "connections",
                f"raise the limit (LimitNOFILE, ulimit -n {one['max_connections'] + FILES_KEPT}), or lower "
                "MARQ_MAX_CONNECTIONS",
            )


@check("memory", needs="workers")
def memory(facts: Facts) -> Found:
    """payloads fit in memory"""
    for worker in facts.workers or ():
        limit = (worker.get("vitals") or {}).get("memory_bytes", 0)
        if limit and worker["payload_bytes"] > limit:
            yield (
                Level.WARNING,
                f"the worker at {worker['url']} holds {size(worker['payload_bytes'])} of payloads, of {size(limit)}: "
                "it reads no further ahead",
                "receive faster, start another worker, or raise MARQ_MEMORY_BYTES",
            )


# ---------------------------------------------------------------------- partitions


@check("partitions", needs="partitions")
def partitions(facts: Facts) -> Found:
    """each partition is served once"""
    serving: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    for one in facts.partitions or ():
        if one["phase"] == "unserved":
            reasons[one["partition"]] = one.get("reason", "")
        else:
            serving[one["partition"]] += one["phase"] == "serving"
    for partition, reason in sorted(reasons.items()):
        if not serving[partition]:
            mend = f"`python -m app repair --partition {partition}` says what is missing; see docs/operations.md"
            yield Level.PROBLEM, f"partition {partition} is not served: {reason}", mend
    count = max((one["partitions"] for _, one in _vitals(facts)), default=0)
    nobody = [n for n in range(count) if n not in serving and n not in reasons]
    if nobody and not facts.missing:
        mend = "wait for the rebalance, or start a worker"
        yield Level.PROBLEM, f"nobody owns the partitions {_some(nobody)}", mend
    starting = sorted(n for n, times in serving.items() if not times and n not in reasons)
    if starting:
        yield Level.WARNING, f"partitions {_some(starting)} are being taken over", "wait; if it stays so, see the logs"
    twice = sorted(n for n, times in serving.items() if times > 1)
    if twice:
        yield (
            Level.WARNING,
            f"two workers claim the partitions {_some(twice)}",
            "wait for the rebalance, and look again",
        )
    for one in facts.partitions or ():
        for start, stop in one.get("unreadable", ()):
            what = f"no replica of partition {one['partition']} has the offsets {start} to {stop - 1} whole"
            mend = f"start all brokers that have it, or `python -m app repair --partition {one['partition']}`"
            yield Level.PROBLEM, what, mend
    for stuck, stall in sorted(facts.stalled.items()):
        seconds = stall.get("seconds", 0) if isinstance(stall, dict) else 0
        if isinstance(stall, dict) and stall.get("reason"):
            what, _, mend = str(stall["reason"]).rpartition(": ")
            yield Level.PROBLEM, f"partition {stuck} {what}", mend
            continue
        yield (
            Level.PROBLEM,
            f"Kafka has confirmed nothing in partition {stuck} for {seconds:.0f} s",
            "check the leader of this partition, and that enough copies are in sync (min.insync.replicas)",
        )


@check("topics", needs="workers")
def topics(facts: Facts) -> Found:
    """all topics have the same partitions"""
    for line in sorted({line for _, vitals in _vitals(facts) for line in vitals.get("topics", ())}):
        what, _, mend = line.partition("; mend: ")
        yield Level.PROBLEM, what, mend


@check("losses", needs="partitions")
def losses(facts: Facts) -> Found:
    """Kafka has deleted nothing unread within a day"""
    for one in facts.partitions or ():
        for loss in one.get("lost") or ():
            yield (
                Level.PROBLEM,
                f"partition {one['partition']}: offsets {loss['start']} to {loss['stop'] - 1} of the {loss['log']} "
                f"topic were deleted before they were read; {number(loss['messages'])} messages among them were not "
                "done",
                "raise retention.ms and retention.bytes of the topic, or receive faster",
            )


@check("lag", needs="partitions")
def lag(facts: Facts) -> Found:
    """the owners have read what is in the logs"""
    for one in facts.partitions or ():
        for name, log in (("lag", "queue"), ("markers_lag", "markers")):
            behind = one.get(name) or 0
            if behind > LAG:
                paused = ", reading pauses because memory is full" if one.get("paused") else ""
                yield (
                    Level.WARNING,
                    f"partition {one['partition']} is {number(behind)} records behind the {log} topic{paused}",
                    "receive faster, or start another worker",
                )


@check("checkpoints", needs="partitions")
def checkpoints(facts: Facts) -> Found:
    """checkpoints are young"""
    for one in facts.partitions or ():
        age = one.get("checkpoint_age_ms")
        if one.get("unsaved") and age is not None and age > CHECKPOINT_MS:
            yield (
                Level.WARNING,
                f"the last checkpoint of partition {one['partition']} is {duration(age)} old: a take-over will be slow",
                "see the worker's log; check that Kafka takes writes to the changelog topics",
            )


# ---------------------------------------------------------------------- queues


def _dead_letters_of(facts: Facts, queue: str) -> str:
    return QueueSettings(dead_letter_queue=facts.dead_letter_queues.get(queue, "")).dead_letters_of(queue)


@check("dead letters", needs="queues")
def dead_letters(facts: Facts) -> Found:
    """no dead letters"""
    dead = sorted((q for q in facts.queues or () if q["dead"]), key=lambda q: -q["dead"])
    for one in dead[:NAMED]:
        name = one["queue"]
        yield (
            Level.WARNING,
            f"{name}: {number(one['dead'])} dead letter{'' if one['dead'] == 1 else 's'}",
            f"`marq peek {_dead_letters_of(facts, name)}` shows why; once that is mended, `marq redrive {name}`",
        )
    if len(dead) > NAMED:
        rest = sum(one["dead"] for one in dead[NAMED:])
        yield (
            Level.WARNING,
            f"{len(dead) - NAMED} more queues have {number(rest)} dead letters",
            "`marq stats --sort dead`",
        )


@check("receivers", needs="queues")
def receivers(facts: Facts) -> Found:
    """somebody receives where messages wait"""
    named = set(facts.dead_letter_queues.values())
    found = [
        q
        for q in facts.queues or ()
        if is_forsaken(
            q["ready"],
            q["oldest_ms"],
            q["has_receiver"],
            q.get("takes_dead_letters", False) or takes_dead_letters(q["queue"], named),
        )
    ]
    if found:
        said = _some(f"{q['queue']} ({number(q['ready'])}, {duration(q['oldest_ms'])})" for q in found)
        yield Level.WARNING, forsaken(said), "start its receivers, or `marq purge` what nobody needs"


@check("circuit breakers", needs="queues")
def breakers(facts: Facts) -> Found:
    """no circuit breaker is open"""
    for one in facts.queues or ():
        breaker = one.get("breaker") or {}
        if breaker.get("state", "closed") != "closed":
            yield (
                Level.PROBLEM,
                f"the circuit breaker of {one['queue']} is {breaker['state']}, after {number(breaker['failures'])} "
                "failures",
                "its receivers fail: see their logs; a success closes it",
            )
