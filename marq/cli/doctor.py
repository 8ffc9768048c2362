"""`marq doctor`: asks the service, and says what is wrong and what to do."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.text import Text

from marq import __version__
from marq.cli.checks import CHECKPOINT_MS, Facts, Finding, Level, examine
from marq.cli.console import out, out_json
from marq.cli.group import command
from marq.cli.queues import stats_of
from marq.cli.service import Connected
from marq.errors import MarqError, NotAllowedError, NotAuthenticatedError, UnavailableError, UnreachableError
from marq.text import cleaned, plural, reason_of

#: Seconds until partitions whose checkpoint seems old are looked at again: one may have been idle until just now.
LOOK_AGAIN_S = 6.0
#: Seconds that a handshake may take.
HANDSHAKE_S = 5.0
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red", Level.SKIPPED: "dim"}


@command("doctor")
@click.option("--quiet", is_flag=True, help="Only what is wrong.")
def doctor(service: Connected, quiet: bool) -> int:
    """Look for what is wrong, and say what to do.

    Exit status 0: nothing. 1: something. On a worker's machine `python -m app doctor` looks at Kafka, too.
    """
    facts = facts_of(service)
    facts.name = os.environ.get("MARQ_NAME", "")
    found = examine(facts)
    if kafka := os.environ.get("MARQ_KAFKA"):
        found.append(reached(kafka))
    return show(found, as_json=service.as_json, quiet=quiet)


def show(findings: Iterable[Finding], *, as_json: bool = False, quiet: bool = False) -> int:
    """Print findings; the exit status."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True) if sys.stdout.isatty() else None
    wrong = skipped = 0
    for finding in findings:
        bad = finding.level in (Level.WARNING, Level.PROBLEM)
        wrong += bad
        skipped += finding.level is Level.SKIPPED
        if as_json:
            out_json({"check": finding.check, "level": finding.level.value, "what": finding.what, "mend": finding.mend})
            continue
        if quiet and not bad:
            continue
        line = f"{finding.level.value:<8} {finding.check}: {finding.what}"
        if console is None:
            out(line)
        else:
            console.print(Text(cleaned(line), style=_STYLES[finding.level]))
        if finding.mend:
            out(f"         → {finding.mend}")
    if not as_json:
        said = f"{plural(wrong, 'thing')} {'is' if wrong == 1 else 'are'} wrong" if wrong else "nothing is wrong"
        out(f"{said}; {plural(skipped, 'check')} skipped" if skipped else said)
    return 1 if wrong else 0


def facts_of(service: Connected) -> Facts:
    """Ask the service for all that the checks look at."""
    facts = Facts(url=service.url, version=__version__)
    try:
        service.require_answer()
        facts.certificate_days = certificate_days(service.url, service.tls)
        _look(service, facts)
    except (UnreachableError, UnavailableError) as error:
        facts.unreachable = str(error)
    except (NotAuthenticatedError, NotAllowedError) as error:
        facts.refused = str(error)
    return facts


def _look(service: Connected, facts: Facts) -> None:
    facts.health = service.readiness()
    facts.ready = not facts.health
    began_s = time.monotonic()
    answer = service.ask("/v1/workers")
    facts.clock_ms, facts.asked_ms = round(time.time() * 1000), round((time.monotonic() - began_s) * 1000)
    facts.workers, facts.missing, facts.troubles = answer["workers"], answer["missing"], answer.get("troubles", [])
    facts.partitions = _partitions(service)
    if any(one.get("unsaved") and (one.get("checkpoint_age_ms") or 0) > CHECKPOINT_MS for one in facts.partitions):
        time.sleep(LOOK_AGAIN_S)
        facts.partitions = _partitions(service)
    facts.stalled = service.ask("/v1/stats", query={"limit": 1}).get("stalled", {})
    facts.queues, _ = stats_of(service, None)
    try:
        service.ask("/v1/tables/progress/0", query={"limit": 1})  # needs the permission for all queues
    except NotAllowedError:
        facts.narrow = "the key may inspect some of the queues only"
    except MarqError:
        pass  # the partition is elsewhere, or not served
    facts.dead_letter_queues = {
        queue["name"]: queue["settings"]["dead_letter_queue"]
        for page in service.pages("/v1/queues")
        for queue in page["queues"]
        if queue["settings"].get("dead_letter_queue")
    }


def reached(kafka: str) -> Finding:
    """Whether anything answers at the addresses of `MARQ_KAFKA`. This command can't ask Kafka which one it is."""
    failure = ""
    for address in kafka.removeprefix("kafka://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), HANDSHAKE_S).close()
        except (OSError, ValueError, OverflowError) as error:
            failure = failure or f"nothing answers at {kafka} (MARQ_KAFKA): {reason_of(error)}"
        else:
            what = f"whether the workers use the Kafka at {kafka} (MARQ_KAFKA) could not be looked at"
            return Finding("kafka", Level.SKIPPED, what, "`python -m app doctor` asks Kafka, too")
    return Finding("kafka", Level.PROBLEM, failure, "correct MARQ_KAFKA, or unset it where only workers are asked")


def _partitions(service: Connected) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.ask("/v1/partitions", query={"scope": "cluster"})["partitions"]
    return found


def certificate_days(url: str, context: ssl.SSLContext | None) -> float | None:
    """Days until the certificate of an address ends; None without TLS, or where nobody can tell."""
    parts = urlsplit(url)
    if parts.scheme != "https" or parts.hostname is None:
        return None
    with (
        contextlib.suppress(OSError, MarqError, ValueError),
        socket.create_connection((parts.hostname, parts.port or 443), HANDSHAKE_S) as plain,
        (context or ssl.create_default_context()).wrap_socket(plain, server_hostname=parts.hostname) as secure,
    ):
        ends = (secure.getpeercert() or {}).get("notAfter")
        if isinstance(ends, str):
            return (ssl.cert_time_to_seconds(ends) - time.time()) / 86_400
    return None
