"""The topics that marq needs: created if they are missing, checked if they are there.

A topic with a wrong property (as many partitions as the queue topic, broker time, records of 4 MiB, ...) is an error
before anything is read or written; the error has the command that mends it. Existing topics are never changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    InvalidPartitionsError,
    KafkaError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)

from app.kafka.access import as_lines, missing_rights
from app.kafka.connection import admin_client
from app.kafka.datadir import resolve_bootstrap
from app.settings import Settings, is_explicit
from marq.errors import TopicError
from marq.protocol.limits import MESSAGE_MAX_BYTES, RECORD_MAX_BYTES
from marq.text import reason_of

log = logging.getLogger(__name__)

#: Tables whose changelogs share the partitions of the queue topic.
TABLES = ("messages", "markers", "progress")

#: Copies of each partition, if there are as many brokers.
REPLICATION = 3

#: Seconds until topics that were just created are known everywhere.
VISIBLE_TIMEOUT_S = 20.0

_UNKNOWN_TOPIC = 3


@dataclass(frozen=True, slots=True)
class Topics:
    """Names of the topics in use, and the number of partitions (N) that the co-partitioned ones share."""

    queue: str
    markers: str
    poison: str
    queues: str
    dead_letter: str | None
    changelogs: Mapping[str, str]
    partitions: int


@dataclass(frozen=True, slots=True)
class _Need:
    """The properties of one of our topics. `must` is checked, and used to create it; `creation` only to create it."""

    name: str
    partitions: int | None
    must: Mapping[str, str] = field(default_factory=dict)
    creation: Mapping[str, str] = field(default_factory=dict)
    may_have_more: bool = False  # partitions, which are not used


@dataclass(frozen=True, slots=True)
class _Found:
    """The properties of an existing topic."""

    partitions: int
    replication: int
    config: Mapping[str, str] | None  # None: we may not read it
    leaderless: tuple[int, ...] = ()  # partitions without a leader


async def ensure_topics(settings: Settings, app_id: str) -> Topics:
    """Create the topics that are missing, check all, and return their names.

    The number of partitions is that of the queue topic, if it exists: `MARQ_PARTITIONS` must then agree, if set.
    In topic mode (`MARQ_QUEUE_ID`) the queue topic belongs to the user: it must exist, and is not checked.

    Args:
        app_id: id of the Faust app, and so the consumer group; the changelogs of its tables are called
            `<app_id>-<table>-changelog`.

    Raises:
        TopicError: topics that are not what they must be, that could not be created, or that we lack rights on
            (a line for each).
        BrokerError: Kafka can't be reached, or refuses us.
    """
    async with admin_client(settings) as admin:
        existing = await counts_of(admin)
        topics = _topics(settings, app_id, existing)
        refused = await grow(admin, topics, existing) if settings.queue_id is not None else []
        if refused:
            raise TopicError(*refused)
        needs = _needs(topics, topic_mode=settings.queue_id is not None)
        brokers = len((await admin.describe_cluster())["brokers"])
        replication = settings.replication or min(REPLICATION, brokers)
        absent = [need for need in needs if need.name not in existing]
        denied = await _create(admin, absent, replication, brokers)
        rights = _rights(settings, topics)
        missing = await missing_rights(admin, rights, _groups(settings, app_id))
        missing = {("topic", name): ["Create", *missing.pop(("topic", name), [])] for name in denied} | missing
        if missing:
            raise TopicError(*as_lines(missing, settings.kafka_username, resolve_bootstrap(settings)[0]))
        names = [topics.queue, *(need.name for need in needs)]
        found = await _describe(admin, names, {need.name for need in absent}, _may_read_configs(settings))
    problems = _all_problems(settings, needs, found, replication)
    if problems:
        raise TopicError(*problems)
    _warn(settings, topics, needs, found)
    for line in (*_leaderless(found), *surplus(settings, topics, existing)):
        log.warning("%s", line)
    return topics


async def topic_problems(settings: Settings, app_id: str) -> tuple[list[str], list[str]]:
    """Check the topics, without creating any. Returns those that do not exist, and a line for each problem.

    Raises:
        TopicError: the queue topic is not what the settings say.
        BrokerError: Kafka can't be reached, or refuses us.
    """
    async with admin_client(settings) as admin:
        existing = await counts_of(admin)
        topics = _topics(settings, app_id, existing)
        topic_mode = settings.queue_id is not None
        needs = _needs(topics, topic_mode=topic_mode)
        absent = [need.name for need in needs if need.name not in existing]
        replication = settings.replication or min(REPLICATION, len((await admin.describe_cluster())["brokers"]))
        rights = {name: asked for name, asked in _rights(settings, topics).items() if name in existing}
        missing = await missing_rights(admin, rights, _groups(settings, app_id))
        lines = list(as_lines(missing, settings.kafka_username, resolve_bootstrap(settings)[0]))
        # topics that we may not describe are named above
        seen = [n for n in needs if n.name in existing and "DescribeConfigs" not in missing.get(("topic", n.name), ())]
        names = [need.name for need in seen]
        found = await _describe(admin, names, set(), _may_read_configs(settings)) if seen else {}
    lines += [*_all_problems(settings, seen, found, replication), *_leaderless(found)]
    return absent, [*lines, *surplus(settings, topics, existing)]


def _topics(settings: Settings, app_id: str, existing: Mapping[str, int]) -> Topics:
    return Topics(
        queue=settings.queue_topic,
        markers=settings.markers_topic,
        poison=settings.poison_topic,
        queues=settings.queues_topic,
        dead_letter=settings.dead_letter_topic,
        changelogs={table: f"{app_id}-{table}-changelog" for table in TABLES},
        partitions=_count_partitions(settings, existing),
    )


def _groups(settings: Settings, app_id: str) -> dict[str, str]:
    """The operation that we need on each consumer group."""
    return {app_id: "Read", settings.archive_group: "Describe"}


def _all_problems(settings: Settings, needs: list[_Need], found: Mapping[str, _Found], replication: int) -> list[str]:
    tools = f"--bootstrap-server {resolve_bootstrap(settings)[0]}"
    problems = [problem for need in needs for problem in _problems(need, found[need.name], replication)]
    return [problem.replace(".sh ", f".sh {tools} ") for problem in problems]


def _count_partitions(settings: Settings, existing: Mapping[str, int]) -> int:
    count = existing.get(settings.queue_topic)
    if settings.queue_id is not None:
        if count is None:
            raise TopicError(
                f"topic {settings.queue_topic} does not exist; in topic mode (MARQ_QUEUE_ID={settings.queue_id}) "
                "MARQ_QUEUE_TOPIC must name a topic of yours: create it, or correct the name"
            )
        return count
    if count is None:
        return settings.partitions
    count = min(count, existing.get(settings.markers_topic, count))  # see `surplus`
    if is_explicit(settings, "partitions") and settings.partitions != count:
        raise TopicError(
            f"topic {settings.queue_topic} has {count} partitions, but MARQ_PARTITIONS={settings.partitions}, and the "
            f"number is fixed for life; set MARQ_PARTITIONS={count}, or MARQ_NAME to start anew under another name"
        )
    return count


def _needs(topics: Topics, *, topic_mode: bool) -> list[_Need]:
    log_must = {
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(MESSAGE_MAX_BYTES),
        # Old records are removed with DeleteRecords once nothing needs them.
        "retention.ms": "-1",
        "retention.bytes": "-1",
    }
    compacted = {"cleanup.policy": "compact", "max.message.bytes": str(RECORD_MAX_BYTES)}
    # Compaction skips the newest segment, and recovery reads all of it.
    small_segments = {"segment.bytes": str(64 * 1024 * 1024)}
    copies = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
    large = {"max.message.bytes": str(RECORD_MAX_BYTES)}
    # a dead letter or a moved message has more headers than its original
    needs = [] if topic_mode else [_Need(topics.queue, topics.partitions, log_must | large, may_have_more=True)]
    needs.append(_Need(topics.markers, topics.partitions, log_must))
    needs.extend(_Need(name, topics.partitions, compacted, small_segments) for name in topics.changelogs.values())
    needs.append(_Need(topics.queues, 1, {"cleanup.policy": "compact"}))
    needs.append(_Need(topics.poison, None, large, copies))
    if topics.dead_letter is not None:
        needs.append(_Need(topics.dead_letter, None, {}, {**large, **copies}))
    return needs


def _rights(settings: Settings, topics: Topics) -> dict[str, tuple[str, ...]]:
    """The operations that we need on each topic."""
    used = ("Read", "Write", "DescribeConfigs")
    rights: dict[str, tuple[str, ...]] = dict.fromkeys((topics.queues, *topics.changelogs.values()), used)
    # for DeleteRecords, once nothing needs the records
    rights[topics.markers] = rights[topics.queue] = (*used, "Delete")
    if settings.queue_id is not None:
        rights[topics.queue] = ("Read", "DescribeConfigs")
    for copies in (topics.poison, topics.dead_letter):
        if copies is not None:
            rights[copies] = ("Write", "DescribeConfigs")
    return {name: tuple(one for one in asked if one not in settings.kafka_without) for name, asked in rights.items()}


def _may_read_configs(settings: Settings) -> bool:
    return "DescribeConfigs" not in settings.kafka_without


def names_of(topics: Topics) -> list[str]:
    """The topics that share their partitions, the queue topic first."""
    return [topics.queue, topics.markers, *topics.changelogs.values()]


async def grow(admin: AIOKafkaAdminClient, topics: Topics, counts: Mapping[str, int]) -> list[str]:
    """Topic mode: give our topics as many partitions as the user's has. Returns a line for each that Kafka refuses."""
    wanted, refused = counts.get(topics.queue, 0), []
    for name in names_of(topics)[1:]:
        if not 0 < counts.get(name, 0) < wanted:
            continue
        try:
            await admin.create_partitions({name: NewPartitions(wanted)})
            log.info("topic %s has %s partitions now, as many as %s", name, wanted, topics.queue)
        except InvalidPartitionsError:
            pass  # another worker was faster
        except KafkaError as exc:
            refused.append(
                f"topic {name} has {counts[name]} partitions, must have {wanted}, as many as {topics.queue}, and Kafka "
                f"refuses to add them ({reason_of(exc)}); mend: give the user the right to alter the topic, or "
                f"kafka-topics.sh --alter --topic {name} --partitions {wanted}"
            )
    return refused


def surplus(settings: Settings, topics: Topics, counts: Mapping[str, int]) -> list[str]:
    """A line if partitions were added to our own queue topic."""
    found, used = counts.get(topics.queue, 0), topics.partitions
    if settings.queue_id is not None or found <= used:
        return []
    return [
        f"topic {topics.queue} has {found} partitions, and only the first {used} are read: their number is fixed for "
        f"life; mend: let no producer write to the others, or start anew under another MARQ_NAME with "
        f"MARQ_PARTITIONS={found}"
    ]


async def counts_of(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """The number of partitions of each topic."""
    # All topics: asking for one by name creates it where Kafka creates topics automatically.
    return {topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics()}


async def _create(admin: AIOKafkaAdminClient, needs: list[_Need], replication: int, brokers: int) -> list[str]:
    """Create topics. Returns the names of those that Kafka does not allow us to create."""
    if not needs:
        return []
    safety = {"unclean.leader.election.enable": "false"}
    if replication >= 3:
        safety["min.insync.replicas"] = "2"
    answer = await admin.create_topics(
        [
            NewTopic(
                need.name, need.partitions or 1, replication, topic_configs={**need.creation, **need.must, **safety}
            )
            for need in needs
        ]
    )
    for name, code, message in answer.topic_errors:
        # Another worker may have created it in the meantime.
        if code not in (0, TopicAlreadyExistsError.errno, TopicAuthorizationFailedError.errno):
            raise TopicError(
                f"topic {name} could not be created with {replication} copies on {brokers} brokers: "
                f"{message or for_code(code).__name__}; create it yourself, or set MARQ_REPLICATION"
            )
    created = [name for name, code, _message in answer.topic_errors if code == 0]
    if created:
        log.info("created topics: %s", ", ".join(created))
    return [name for name, code, _message in answer.topic_errors if code == TopicAuthorizationFailedError.errno]


async def _describe(
    admin: AIOKafkaAdminClient, names: list[str], created: Collection[str], with_configs: bool
) -> dict[str, _Found]:
    """Describes the topics. Waits for those that were just created, with all their leaders.

    Others may lack a leader for long: a worker has to start all the same, for the other partitions.
    """
    deadline = asyncio.get_running_loop().time() + VISIBLE_TIMEOUT_S
    while True:
        metadata = {topic["topic"]: topic for topic in await admin.describe_topics()}
        configs = await _configs(admin, names) if with_configs else dict.fromkeys(names)
        unknown = [name for name in names if name not in configs or not metadata.get(name, {}).get("partitions")]
        unknown += [name for name in created if name in metadata and _without_leader(metadata[name])]
        if not unknown:
            break
        if asyncio.get_running_loop().time() > deadline:
            raise TopicError(
                f"topic {unknown[0]} is not there, or is new and has partitions without a leader, "
                f"{VISIBLE_TIMEOUT_S:.0f} s after it was looked for; check that all brokers run"
            )
        await asyncio.sleep(0.1)
    found = {}
    for name in names:
        parts = metadata[name]["partitions"]
        replication = min(len(part["replicas"]) for part in parts)
        found[name] = _Found(len(parts), replication, configs[name], _without_leader(metadata[name]))
    return found


def _without_leader(topic: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(part["partition"] for part in topic["partitions"] if part["leader"] < 0))


def _leaderless(found: Mapping[str, _Found]) -> Iterator[str]:
    """A line for each topic of which partitions have no leader."""
    for name, topic in found.items():
        if topic.leaderless:
            numbers = ", ".join(map(str, topic.leaderless[:10])) + (" and others" if topic.leaderless[10:] else "")
            yield f"topic {name} has partitions without a leader: {numbers}; check that all brokers run"


async def _configs(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, dict[str, str]]:
    answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    configs = {}
    for answer in answers:
        for code, message, _type, name, entries in answer.resources:
            if code == 0:
                configs[name] = {entry[0]: entry[1] for entry in entries}
            elif code != _UNKNOWN_TOPIC:
                raise TopicError(
                    f"the settings of topic {name} can't be read: {message or for_code(code).__name__}; give the user "
                    "the right to describe its configuration"
                )
    return configs


def _problems(need: _Need, found: _Found, replication: int) -> Iterator[str]:
    """One line per problem: the value, the required value, and the command that sets it."""
    if need.partitions is not None and found.partitions != need.partitions and not need.may_have_more:
        if found.partitions < need.partitions:
            mend = f"kafka-topics.sh --alter --topic {need.name} --partitions {need.partitions}"
        else:
            mend = "set MARQ_NAME (or the name of this topic) to start anew under another name"
        yield f"topic {need.name} has {found.partitions} partitions, must have {need.partitions}; mend: {mend}"
    if found.config is not None:
        yield from _wrong_settings(need, found.config, found.replication)
    if found.replication < replication:
        yield (
            f"topic {need.name} has {found.replication} copies of a partition, must have {replication}; mend: "
            f"kafka-reassign-partitions.sh, or accept it with MARQ_REPLICATION={found.replication}"
        )


def _wrong_settings(need: _Need, config: Mapping[str, str], replication: int) -> Iterator[str]:
    wanted = dict(need.must)
    if replication >= 3:
        wanted["min.insync.replicas"] = "2"
    if config.get("unclean.leader.election.enable") == "true":
        wanted["unclean.leader.election.enable"] = "false"
    for key, value in wanted.items():
        actual = config.get(key, "unset")
        if not _fits(key, actual, value, replication):
            yield (
                f"topic {need.name} has {key}={actual}, must be {_AT_LEAST.get(key, '')}{value}; mend: "
                f"kafka-configs.sh --alter --entity-type topics --entity-name {need.name} --add-config {key}={value}"
            )


_AT_LEAST = {"max.message.bytes": "at least ", "min.insync.replicas": "at least "}


def _fits(key: str, actual: str, wanted: str, replication: int) -> bool:
    if key == "max.message.bytes":
        return actual.isdigit() and int(actual) >= int(wanted)
    if key == "min.insync.replicas":
        # If all replicas had to be in sync, the loss of one broker would stop all writes.
        return actual.isdigit() and int(wanted) <= int(actual) < replication
    return actual == wanted


def _warn(settings: Settings, topics: Topics, needs: list[_Need], found: Mapping[str, _Found]) -> None:
    """Log what is lost for want of a permission, and what is odd about a topic of the user's."""
    if "Delete" in settings.kafka_without:
        log.warning(
            "MARQ_KAFKA_WITHOUT=Delete: no record of %s is deleted, so the disks of Kafka fill up; delete old ones by "
            "other means, up to the offsets that group %s has committed, and no further",
            topics.markers if settings.queue_id is not None else f"{topics.queue} and {topics.markers}",
            settings.name,
        )
    if not _may_read_configs(settings):
        log.warning("MARQ_KAFKA_WITHOUT=DescribeConfigs: the settings of topics are not checked; they must be")
        for need in needs:
            if need.must:
                listed = ", ".join(f"{key}={_AT_LEAST.get(key, '')}{value}" for key, value in need.must.items())
                log.warning("  %s: %s", need.name, listed)
    config = found[topics.queue].config
    if settings.queue_id is not None and config is not None:
        _warn_about_foreign(topics.queue, config)


def _warn_about_foreign(name: str, config: Mapping[str, str]) -> None:
    if config.get("message.timestamp.type") != "LogAppendTime":
        log.warning(
            "topic %s has CreateTime: delays and times to live count from the time that each producer wrote into its "
            "record, and a producer with a wrong clock gets wrong ones",
            name,
        )
    if "compact" in config.get("cleanup.policy", ""):
        log.warning(
            "topic %s is compacted: a message that a later one with its key replaces may never be delivered", name
        )
    if int(config.get("max.message.bytes", "0")) > MESSAGE_MAX_BYTES:
        log.warning(
            "topic %s allows messages above %d bytes: such a message is not delivered, but is poison at once, and its "
            "beginning goes to the poison topic",
            name,
            MESSAGE_MAX_BYTES,
        )
