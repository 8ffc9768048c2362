"""The topics that marq needs: created if they are missing, checked if they are there.

A topic that is not what the rest relies on (as many partitions as the queue topic, broker time, room for 4 MiB, ...)
is an error before anything is read or written, with the command that mends it. Nothing that exists is ever changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from app.datadir import resolve_bootstrap
from app.settings import Settings, is_explicit
from marq.errors import BrokerError, TopicError

log = logging.getLogger(__name__)

#: Tables whose changelogs share the partitions of the queue topic.
TABLES = ("messages", "markers", "progress")

#: Largest record of the queue and markers topics.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
#: Largest changelog record: the largest message, and the row around it.
MAX_CHANGELOG_BYTES = MAX_MESSAGE_BYTES + 64 * 1024

#: Copies of each partition, if there are as many brokers.
REPLICATION = 3

#: Milliseconds for one request to Kafka.
REQUEST_TIMEOUT_MS = 10_000
#: Seconds that the end of a client may take when Kafka does not answer.
END_TIMEOUT_S = 1.0
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
    """What a topic of ours must be. `must` is checked and used to create it, `creation` only to create it."""

    name: str
    partitions: int | None
    must: Mapping[str, str] = field(default_factory=dict)
    creation: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a topic is."""

    partitions: int
    replication: int
    config: Mapping[str, str]


# -- connections --------------------------------------------------------------------------------------


def kafka_client_args(settings: Settings) -> dict[str, Any]:
    """Arguments for aiokafka clients: where Kafka is, and how to log in.

    Raises:
        BrokerError: no Kafka is set and no embedded broker runs.
    """
    args: dict[str, Any] = {
        "bootstrap_servers": resolve_bootstrap(settings),
        "security_protocol": ("SASL_" if settings.kafka_username else "")
        + ("SSL" if settings.uses_tls else "PLAINTEXT"),
    }
    if args["security_protocol"] == "PLAINTEXT":
        return args
    if settings.uses_tls:
        args["ssl_context"] = _ssl_context(settings)
    if settings.kafka_username:
        args["sasl_mechanism"] = settings.kafka_mechanism
        args["sasl_plain_username"] = settings.kafka_username
        args["sasl_plain_password"] = _password(settings)
    return args


def faust_broker(settings: Settings) -> list[str]:
    """Broker URLs for `faust.App(broker=...)`.

    Raises:
        BrokerError: no Kafka is set and no embedded broker runs.
    """
    return [f"kafka://{address}" for address in resolve_bootstrap(settings)]


def faust_credentials(settings: Settings) -> Any:
    """Credentials for `faust.App(broker_credentials=...)`; None where Kafka asks for none."""
    import faust

    if settings.kafka_username:
        return faust.SASLCredentials(
            username=settings.kafka_username,
            password=_password(settings),
            ssl_context=_ssl_context(settings) if settings.uses_tls else None,
            mechanism=settings.kafka_mechanism,
        )
    return faust.SSLCredentials(_ssl_context(settings)) if settings.uses_tls else None


def _password(settings: Settings) -> str:
    assert settings.kafka_password is not None
    return settings.kafka_password.get_secret_value()


def _ssl_context(settings: Settings) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(settings.kafka_ca_file) if settings.kafka_ca_file else None)


async def end_client(ending: Awaitable[None]) -> bool:
    """Await the end of a Kafka client (what its `stop()` or `close()` returned), but not for longer than it may take.

    aiokafka waits for Kafka without an end there, or lets out the cancellation of a task of its own, which would break
    off whatever else has to be ended. False if it has not ended.
    """
    task = asyncio.ensure_future(ending)
    await asyncio.wait({task}, timeout=END_TIMEOUT_S)
    if not task.done():
        return False
    if not task.cancelled() and task.exception() is not None:
        log.warning("a Kafka client did not end in order: %r", task.exception())
    return True


@contextlib.asynccontextmanager
async def admin_client(settings: Settings) -> AsyncIterator[AIOKafkaAdminClient]:
    """A connected admin client, closed at the end.

    Raises:
        BrokerError: Kafka can't be reached, or refuses us; also when that happens inside the block.
    """
    args = kafka_client_args(settings)
    admin = AIOKafkaAdminClient(**args, request_timeout_ms=REQUEST_TIMEOUT_MS)
    try:
        # The client logs each failed address, and then raises an error that has no reason.
        with _silenced("aiokafka"):
            await admin.start()
    except (KafkaError, OSError, TimeoutError) as error:
        await admin.close()
        raise BrokerError(await _why_unreachable(settings, args)) from error
    try:
        yield admin
    except (KafkaError, OSError, TimeoutError) as error:
        where = ", ".join(args["bootstrap_servers"])
        raise BrokerError(f"Kafka at {where} failed a request: {error or type(error).__name__}; try again") from error
    finally:
        await admin.close()


async def _why_unreachable(settings: Settings, args: Mapping[str, Any]) -> str:
    security = {key: value for key, value in args.items() if key != "bootstrap_servers"}
    where = ", ".join(args["bootstrap_servers"])
    reasons = []
    for address in args["bootstrap_servers"]:
        host, _, port = address.rpartition(":")
        try:
            with _silenced("aiokafka"):
                connection = await create_conn(host, int(port), request_timeout_ms=REQUEST_TIMEOUT_MS, **security)
            connection.close()
            reasons.append("it does not answer requests")
        except (KafkaError, OSError, TimeoutError) as error:
            reasons.append(_reason(error))
    text = f"can't reach Kafka at {where}: {'; '.join(dict.fromkeys(reasons))}"
    if settings.kafka_username:
        return (
            f"{text}; if it runs there, the credentials are a likely cause: check MARQ_KAFKA_USERNAME, "
            f"MARQ_KAFKA_PASSWORD, MARQ_KAFKA_MECHANISM (now {settings.kafka_mechanism}) and MARQ_KAFKA_TLS"
        )
    if settings.kafka is None:
        return f"{text}; look at {settings.data_dir / 'kafka' / 'broker.log'}"
    return f"{text}; check MARQ_KAFKA, and MARQ_KAFKA_TLS and MARQ_KAFKA_USERNAME if that Kafka asks for them"


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = " ".join(str(error).split())
    # Some of the client's errors have nothing but its own connection object as their text.
    return text if text and "<AIOKafka" not in text else type(error).__name__


@contextlib.contextmanager
def _silenced(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


# -- creating and checking ----------------------------------------------------------------------------


async def ensure_topics(settings: Settings, app_id: str) -> Topics:
    """Create the topics that are missing, check all, and return their names.

    The number of partitions is that of the queue topic, if it exists: `MARQ_PARTITIONS` must then agree, if set.
    In topic mode (`MARQ_QUEUE_ID`) the queue topic belongs to the user: it must exist, and is not checked.

    Parameters:
        app_id: id of the Faust app; the changelogs of its tables are called `<app_id>-<table>-changelog`.

    Raises:
        TopicError: topics that are not what they must be (a line for each), or that could not be created.
        BrokerError: Kafka can't be reached, or refuses us.
    """
    async with admin_client(settings) as admin:
        existing = await _partition_counts(admin)
        partitions = _count_partitions(settings, existing)
        topics = Topics(
            queue=settings.queue_topic,
            markers=settings.markers_topic,
            poison=settings.poison_topic,
            queues=settings.queues_topic,
            dead_letter=settings.dead_letter_topic,
            changelogs={table: f"{app_id}-{table}-changelog" for table in TABLES},
            partitions=partitions,
        )
        needs = _needs(topics, topic_mode=settings.queue_id is not None)
        brokers = len((await admin.describe_cluster())["brokers"])
        replication = settings.replication or min(REPLICATION, brokers)
        await _create(admin, [need for need in needs if need.name not in existing], replication, brokers)
        found = await _describe(admin, [topics.queue, *(need.name for need in needs)])
    problems = [problem for need in needs for problem in _problems(need, found[need.name], replication)]
    if problems:
        tools = f"--bootstrap-server {resolve_bootstrap(settings)[0]}"
        raise TopicError("\n".join(problem.replace(".sh ", f".sh {tools} ") for problem in problems))
    if settings.queue_id is not None:
        _warn_about_foreign(topics.queue, found[topics.queue])
    return topics


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
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        # Old records are removed by DeleteRecords, when nothing needs them any more.
        "retention.ms": "-1",
        "retention.bytes": "-1",
    }
    compacted = {"cleanup.policy": "compact", "max.message.bytes": str(MAX_CHANGELOG_BYTES)}
    # Compaction leaves out the newest segment, and recovery reads all of it.
    small_segments = {"segment.bytes": str(64 * 1024 * 1024)}
    copies = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
    large = {"max.message.bytes": str(MAX_CHANGELOG_BYTES)}
    needs = [] if topic_mode else [_Need(topics.queue, topics.partitions, log_must)]
    needs.append(_Need(topics.markers, topics.partitions, log_must))
    needs.extend(_Need(name, topics.partitions, compacted, small_segments) for name in topics.changelogs.values())
    needs.append(_Need(topics.queues, 1, {"cleanup.policy": "compact"}))
    needs.append(_Need(topics.poison, None, large, copies))
    if topics.dead_letter is not None:
        needs.append(_Need(topics.dead_letter, None, {}, {**large, **copies}))
    return needs


async def _partition_counts(admin: AIOKafkaAdminClient) -> dict[str, int]:
    # All topics, because asking for one by name would create it where Kafka creates topics by itself.
    return {topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics()}


async def _create(admin: AIOKafkaAdminClient, needs: list[_Need], replication: int, brokers: int) -> None:
    if not needs:
        return
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
        # Another worker that starts now may have been quicker.
        if code not in (0, TopicAlreadyExistsError.errno):
            raise TopicError(
                f"topic {name} could not be created with {replication} copies on {brokers} brokers: "
                f"{message or for_code(code).__name__}; give the user the right to create topics, create it "
                "yourself, or set MARQ_REPLICATION"
            )
    created = [name for name, code, _message in answer.topic_errors if code == 0]
    log.info("created topics: %s", ", ".join(created) or "none")


async def _describe(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, _Found]:
    """What the topics are; waits for those that were just created."""
    deadline = asyncio.get_running_loop().time() + VISIBLE_TIMEOUT_S
    while True:
        metadata = {topic["topic"]: topic for topic in await admin.describe_topics()}
        configs = await _configs(admin, names)
        missing = [name for name in names if name not in configs or not _has_leaders(metadata.get(name))]
        if not missing:
            break
        if asyncio.get_running_loop().time() > deadline:
            raise TopicError(
                f"topic {missing[0]} has partitions without a leader, {VISIBLE_TIMEOUT_S:.0f} s after it was looked "
                "for; check that all brokers run"
            )
        await asyncio.sleep(0.1)
    found = {}
    for name in names:
        parts = metadata[name]["partitions"]
        found[name] = _Found(len(parts), min(len(part["replicas"]) for part in parts), configs[name])
    return found


def _has_leaders(topic: Mapping[str, Any] | None) -> bool:
    return topic is not None and bool(topic["partitions"]) and all(part["leader"] >= 0 for part in topic["partitions"])


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
    """A line for each thing that is wrong: what it is, what it must be, how to mend it."""
    if need.partitions is not None and found.partitions != need.partitions:
        if found.partitions < need.partitions:
            mend = f"kafka-topics.sh --alter --topic {need.name} --partitions {need.partitions}"
        else:
            mend = "set MARQ_NAME (or the name of this topic) to start anew under another name"
        yield f"topic {need.name} has {found.partitions} partitions, must have {need.partitions}; mend: {mend}"
    wanted = dict(need.must)
    if found.replication >= 3:
        wanted["min.insync.replicas"] = "2"
    if found.config.get("unclean.leader.election.enable") == "true":
        wanted["unclean.leader.election.enable"] = "false"
    for key, value in wanted.items():
        actual = found.config.get(key, "unset")
        if not _fits(key, actual, value, found.replication):
            yield (
                f"topic {need.name} has {key}={actual}, must be {_AT_LEAST.get(key, '')}{value}; mend: "
                f"kafka-configs.sh --alter --entity-type topics --entity-name {need.name} --add-config {key}={value}"
            )
    if found.replication < replication:
        yield (
            f"topic {need.name} has {found.replication} copies of a partition, must have {replication}; mend: "
            f"kafka-reassign-partitions.sh, or accept it with MARQ_REPLICATION={found.replication}"
        )


_AT_LEAST = {"max.message.bytes": "at least ", "min.insync.replicas": "at least "}


def _fits(key: str, actual: str, wanted: str, replication: int) -> bool:
    if key == "max.message.bytes":
        return actual.isdigit() and int(actual) >= int(wanted)
    if key == "min.insync.replicas":
        # With as many as there are copies, the loss of one broker would stop all writes.
        return actual.isdigit() and int(wanted) <= int(actual) < replication
    return actual == wanted


def _warn_about_foreign(name: str, found: _Found) -> None:
    if found.config.get("message.timestamp.type") != "LogAppendTime":
        log.warning(
            "topic %s has CreateTime: delays and times to live count from the time that each producer wrote into its "
            "record, and a producer with a wrong clock gets wrong ones",
            name,
        )
    if "compact" in found.config.get("cleanup.policy", ""):
        log.warning(
            "topic %s is compacted: a message that a later one with its key replaces may never be delivered", name
        )
    if int(found.config.get("max.message.bytes", "0")) > MAX_MESSAGE_BYTES:
        log.warning(
            "topic %s allows messages above %d bytes: such a message can't be kept while it is unfinished for long",
            name,
            MAX_MESSAGE_BYTES,
        )
