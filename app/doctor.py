"""`python -m app doctor`: finds what is wrong with this machine, with Kafka, and with the workers that run here.

The checks of workers are those of `marq doctor`. Nothing is created or changed but a file in the data folder, which is
deleted at once.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

from app.kafka.access import DISPENSABLE
from app.kafka.connection import asked_again, trouble_with_kafka
from app.kafka.datadir import running_workers
from app.kafka.identity import cluster_id
from app.kafka.topics import topic_problems
from app.settings import Settings, is_explicit, load
from marq.cli.checks import DISK_FREE_BYTES, DISK_FREE_PART, FILES_KEPT, Finding, Level, examine
from marq.cli.doctor import facts_of
from marq.cli.service import Address, Connected
from marq.cli.values import number, size
from marq.errors import MarqError

#: What to do where Kafka does not grant a permission (`MARQ_KAFKA_WITHOUT`).
WITHOUT = {
    "Delete": "leave retention.ms at -1 all the same, as Kafka would also delete what no worker has read; let somebody "
    "who may delete the records below the offsets that the group has committed",
    "DescribeConfigs": "see that the settings are those of docs/kafka.md, above all retention.ms=-1",
}
#: A further check of the settings. Raises `MarqError` for what is wrong.
Check = Callable[[Settings], None]


def findings(others: Mapping[str, Check]) -> Iterator[Finding]:
    """The findings of all checks. `others`: further checks of the settings, by name."""
    try:
        settings = load()
    except MarqError as error:
        yield from _problems("settings", error)
        return
    yield Finding("settings", Level.OK, "each is known, and has a value that is allowed")
    for name, check in others.items():
        yield from _checked(name, check, settings)
    yield data_folder(settings.data_dir.resolve())
    yield file_limit(settings, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield port(settings)
    cluster = yield from kafka(settings)
    yield from workers(settings, cluster)


def _problems(check: str, error: MarqError) -> Iterator[Finding]:
    """A finding for each line of an error. The part after a semicolon says what to do."""
    for line in error.lines:
        what, _, mend = line.partition("; mend: ") if "; mend: " in line else line.partition("; ")
        yield Finding(check, Level.PROBLEM, what, mend or "correct the setting")


def _checked(name: str, check: Check, settings: Settings) -> Iterator[Finding]:
    try:
        check(settings)
    except MarqError as error:
        yield from _problems(name, error)
    else:
        yield Finding(name, Level.OK, "as they have to be")


# ---------------------------------------------------------------------- this machine


def data_folder(folder: Path) -> Finding:
    """Check that a worker could write its tables there."""
    mend = "set MARQ_DATA_DIR to a folder that can be written, on a disk with room"
    above = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=above, prefix=".marq-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
        disk = shutil.disk_usage(above)
    except OSError as error:
        return Finding("data folder", Level.PROBLEM, f"{folder} can't be written: {error.strerror}", mend)
    if disk.free < min(DISK_FREE_BYTES, disk.total // 2) or disk.free < disk.total * DISK_FREE_PART:
        return Finding("data folder", Level.WARNING, f"{folder} has {size(disk.free)} of {size(disk.total)} left", mend)
    return Finding("data folder", Level.OK, f"{folder} can be written, {size(disk.free)} are free")


def file_limit(settings: Settings, limit: int) -> Finding:
    """Check that a worker may open a file for each connection. `limit`: the hard limit."""
    needed = settings.max_connections + FILES_KEPT
    if limit != resource.RLIM_INFINITY and limit < needed:
        return Finding(
            "open files",
            Level.WARNING,
            f"the system allows {number(limit)} open files; {number(settings.max_connections)} connections need "
            f"{number(needed)}",
            f"raise the hard limit (LimitNOFILE={needed}, ulimit -Hn), or lower MARQ_MAX_CONNECTIONS",
        )
    return Finding("open files", Level.OK, "the limit leaves room for all connections")


def port(settings: Settings) -> Finding:
    """Check that a worker could listen, or already does."""
    ours = {worker.web_port for worker in running_workers(settings.data_dir)}
    if settings.web_port in ours or settings.web_port == 0:
        return Finding("port", Level.OK, "a worker listens on it" if settings.web_port else "any free one is taken")
    family = socket.AF_INET6 if ":" in settings.web_host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.web_host, settings.web_port))
            probe.listen(1)
        except OSError as error:
            level = Level.PROBLEM if is_explicit(settings, "web_port") else Level.WARNING
            return Finding(
                "port",
                level,
                f"nobody can listen on {settings.web_host} port {settings.web_port}: {error.strerror}",
                "end what has it, or set MARQ_WEB_HOST and MARQ_WEB_PORT",
            )
    return Finding("port", Level.OK, f"{settings.web_port} is free")


# ---------------------------------------------------------------------- Kafka


def kafka(settings: Settings) -> Generator[Finding, None, str]:
    """Check that Kafka lets us in and grants all permissions. Returns the cluster's id; "" if it is not known."""
    try:
        trouble = asyncio.run(trouble_with_kafka(settings))
        if trouble is not None:
            yield Finding("kafka", Level.PROBLEM, f"Kafka at {trouble.where}: {trouble.what}", trouble.mend)
            yield Finding("topics", Level.SKIPPED, "could not be looked at", "see the check of Kafka")
            return ""
        yield Finding("kafka", Level.OK, "it answers, and lets us in")
        absent, problems = asyncio.run(asked_again(lambda: topic_problems(settings, settings.name)))
        cluster = asyncio.run(asked_again(lambda: cluster_id(settings)))
    except MarqError as error:
        yield from _problems("kafka", error)
        return ""
    for line in problems:
        yield from _problems("topics", MarqError(line))
    if not problems:
        later = f"; a worker creates {', '.join(absent)}" if absent else ""
        checked = (
            "rights and partitions"
            if "DescribeConfigs" in settings.kafka_without
            else "rights, partitions and settings"
        )
        yield Finding("topics", Level.OK, f"{checked} are as they have to be{later}")
    yield from dispensed(settings)
    return cluster


def dispensed(settings: Settings) -> Iterator[Finding]:
    """What is lost by the permissions that this installation does without."""
    for permission in settings.kafka_without:
        yield Finding(
            "permissions", Level.WARNING, f"without {permission}, {DISPENSABLE[permission]}", WITHOUT[permission]
        )


# ---------------------------------------------------------------------- workers


def workers(settings: Settings, cluster: str) -> Iterator[Finding]:
    """The findings of `marq doctor`, from a worker of this data folder. `cluster`: the id of the settings' Kafka."""
    running = running_workers(settings.data_dir)
    if not running:
        yield Finding(
            "workers",
            Level.SKIPPED,
            f"none runs on {settings.data_dir.resolve()}",
            "`marq doctor --url …` asks one elsewhere",
        )
        return
    scheme = "http" if settings.web_tls_certificate_file is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.web_host, settings.web_host)
    urls = (settings.web_url,) if settings.web_url else tuple(f"{scheme}://{host}:{one.web_port}" for one in running)
    address = Address(urls, ca_file=settings.web_tls_ca_file, key=_key(settings))
    with Connected(address) as service:
        facts = facts_of(service)
    facts.name, facts.cluster = settings.name, cluster
    yield from examine(facts)


def _key(settings: Settings) -> str | None:
    """A key with all permissions, else the first one."""
    if settings.keys is None:
        return None
    entries = [entry.strip() for entry in settings.keys.get_secret_value().split(",") if entry.strip()]
    entries.sort(key=lambda entry: "=" in entry)
    return entries[0].partition("=")[0] if entries else None
