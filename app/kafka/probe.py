"""Finds out why Kafka can't be used, by talking to it: its client says only that it is "unable to bootstrap".

The probe opens one connection with the configured credentials, and sends one request. If that fails, the error says
what was refused. A listener that just closes the connection may be one without TLS that got TLS, or the other way
round: the probe then tries the other protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DescribeConfigsRequest,
    SaslHandShakeRequest,
)
from aiokafka.protocol.api import Request
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import JoinGroupRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from app.kafka.access import DISPENSABLE
from app.kafka.internals import known_versions, offered_versions
from app.settings import Settings

#: Seconds for one attempt to find out which protocol a listener speaks.
ATTEMPT_S = 3.0
#: The requests that a worker makes, and the lowest version of each that is enough. That of Produce is the first that
#: carries records in every codec (zstd). That of Fetch came with the first Kafka that lists our permissions.
NEEDED: tuple[tuple[type[Request[Any]], int], ...] = (
    (MetadataRequest, 0),
    (ProduceRequest, 7),
    (FetchRequest, 11),
    (JoinGroupRequest, 0),
    (InitProducerIdRequest, 0),
    (CreateTopicsRequest, 0),
    (DeleteRecordsRequest, 0),
    (DescribeConfigsRequest, 0),
)
#: The first version of Kafka that has all of these.
OLDEST = "2.3"
#: Requests that a worker can be told to do without, and the name of the permission for each.
PERMISSION_OF: dict[type[Request[Any]], str] = {
    DeleteRecordsRequest: "Delete",
    DescribeConfigsRequest: "DescribeConfigs",
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why Kafka can't be used."""

    where: str  # its addresses
    what: str
    mend: str
    passing: bool  # waiting may help: a broker may be starting

    def __str__(self) -> str:
        return f"can't use Kafka at {self.where}: {self.what}; {self.mend}"


async def find_trouble(settings: Settings, args: Mapping[str, Any], timeout_ms: int) -> Trouble | None:
    """Why Kafka can't be used at any of its addresses; None if one of them answers.

    Args:
        args: what every client gets (`kafka_client_args`).
        timeout_ms: milliseconds for each request.
    """
    addresses = args["bootstrap_servers"]
    security = {key: value for key, value in args.items() if key != "bootstrap_servers"}
    found: list[Trouble] = []
    for address in addresses:
        trouble = await _Probe(settings, address, security, timeout_ms / 1000).run()
        if trouble is None:
            return None
        found.append(trouble)
    # an error to fix is more useful than "this broker is away"
    worst = next((trouble for trouble in found if not trouble.passing), found[0])
    return worst if not worst.passing else Trouble(", ".join(addresses), worst.what, worst.mend, True)


class _Probe:
    """One address of Kafka."""

    def __init__(self, settings: Settings, address: str, security: Mapping[str, Any], timeout_s: float) -> None:
        self.settings = settings
        self.address = address
        host, _, port = address.rpartition(":")
        self.host, self.port = host, int(port)
        self.security = security
        self.timeout_s = timeout_s

    async def run(self) -> Trouble | None:
        try:
            connection = await self._connect(**self.security)
        except (KafkaError, OSError, TimeoutError) as error:
            return await self._connect_failed(error)
        if odd := self._version_trouble(offered_versions(connection)):
            connection.close()
            return odd
        try:
            # this version lists topics by name; we name none
            metadata = await connection.send(MetadataRequest([]))
        except (KafkaError, OSError, TimeoutError) as error:
            return await self._request_failed(error)
        finally:
            connection.close()
        return await self._advertised([(broker[1], broker[2]) for broker in metadata.brokers])

    async def _connect(self, **security: Any) -> AIOKafkaConnection:
        return await create_conn(self.host, self.port, request_timeout_ms=int(self.timeout_s * 1000), **security)

    def _version_trouble(self, offered: Mapping[int, tuple[int, int]]) -> Trouble | None:
        """The trouble with a broker that is too old, or so new that the client knows none of its versions.

        Args:
            offered: the lowest and highest version of each request that it takes.
        """
        for request, first in NEEDED:
            permission = PERMISSION_OF.get(request)
            if permission in self.settings.kafka_without:
                continue
            known = known_versions(request)
            name = request.__name__.removesuffix("Request")
            lowest, highest = offered.get(request.API_KEY, (0, -1))
            if highest < 0 and permission is not None:
                return self._lasting(
                    f"it knows no {name}", f"set MARQ_KAFKA_WITHOUT={permission}: {DISPENSABLE[permission]}"
                )
            if highest < first:
                return self._lasting(
                    f"it is too old: it has no {name} of version {first}", f"use Kafka {OLDEST} or later"
                )
            if not any(lowest <= version <= highest and version >= first for version in known):
                return self._lasting(
                    f"it is too new: it takes {name} from version {lowest} on, and our client knows {max(known)}",
                    "install a version of marq that supports it",
                )
        return None

    def _lasting(self, what: str, mend: str) -> Trouble:
        return Trouble(self.address, what, mend, passing=False)

    def _passing(self, what: str, mend: str) -> Trouble:
        return Trouble(self.address, what, mend, passing=True)

    # -- what an error means

    async def _connect_failed(self, error: BaseException) -> Trouble:
        user, mechanism = self.settings.kafka_username, self.settings.kafka_mechanism
        if isinstance(error, SaslAuthenticationFailed):
            return self._lasting(
                f"it refused user {user!r} or the password ({mechanism})",
                "check MARQ_KAFKA_USERNAME and MARQ_KAFKA_PASSWORD, and that the user was made for this mechanism",
            )
        if isinstance(error, UnsupportedSaslMechanismError):
            offered = await self._mechanisms()
            return self._lasting(
                f"it does not let anybody log in by {mechanism}{f', only by {offered}' if offered else ''}",
                "set MARQ_KAFKA_MECHANISM to one that it has",
            )
        if isinstance(error, IllegalSaslStateError):
            return self._lasting(
                "it takes no user name and password on this port",
                "unset MARQ_KAFKA_USERNAME and MARQ_KAFKA_PASSWORD, or use the port of a SASL listener in MARQ_KAFKA",
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            trust = self.settings.kafka_ca_file or "the system's certificates"
            return self._lasting(
                f"its certificate is not to be trusted ({error.verify_message}; trusted: {trust})",
                "set MARQ_KAFKA_CA_FILE to the certificate of the authority that signed it, and MARQ_KAFKA to a host "
                "name that the certificate has",
            )
        if not isinstance(error, (socket.gaierror, ConnectionRefusedError)):
            if other := await self._other_protocol():
                return other
            if stranger := await self._other_server():
                return stranger
        return self._away(error)

    async def _request_failed(self, error: BaseException) -> Trouble:
        if not self.settings.kafka_username and (offered := await self._mechanisms()):
            return self._lasting(
                f"it wants a user name and a password ({offered})",
                "set MARQ_KAFKA_USERNAME, MARQ_KAFKA_PASSWORD and MARQ_KAFKA_MECHANISM",
            )
        return self._away(error)

    def _away(self, error: BaseException) -> Trouble:
        return self._passing(reason_of(error), "check that it runs, and MARQ_KAFKA")

    async def _other_protocol(self) -> Trouble | None:
        """The trouble with a listener that speaks TLS while we don't, or the other way round."""
        if self.settings.uses_tls:
            with contextlib.suppress(KafkaError, OSError, TimeoutError):
                async with asyncio.timeout(ATTEMPT_S):
                    (await self._connect()).close()
                return self._lasting(
                    "it speaks no TLS on this port",
                    "unset MARQ_KAFKA_TLS and MARQ_KAFKA_CA_FILE, or use the port of a TLS listener in MARQ_KAFKA",
                )
        elif await self._speaks_tls():
            return self._lasting(
                "it speaks TLS on this port",
                "set MARQ_KAFKA_TLS=true, or MARQ_KAFKA_CA_FILE if its authority is not one of the system's",
            )
        return None

    async def _other_server(self) -> Trouble | None:
        """The trouble with a port that accepts connections, but is no Kafka. Its answer to a line of text tells."""
        try:
            async with asyncio.timeout(ATTEMPT_S):
                reader, writer = await asyncio.open_connection(self.host, self.port)
        except (OSError, TimeoutError):
            return None
        said = b""
        try:
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            async with asyncio.timeout(ATTEMPT_S):
                said = await reader.read(100)
        except TimeoutError:
            return self._passing(
                "it takes connections and answers nothing",
                "check MARQ_KAFKA: it may be the port of something else, or a broker that hangs",
            )
        except OSError:
            pass
        finally:
            writer.close()
        if not said.isascii() or not said.strip():
            return None
        what = "HTTP" if said.startswith(b"HTTP/") else repr(said.decode().splitlines()[0][:40])
        return self._lasting(
            f"it speaks no Kafka on this port, it answers {what}", "set MARQ_KAFKA to a broker's address"
        )

    async def _speaks_tls(self) -> bool:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            async with asyncio.timeout(ATTEMPT_S):
                _reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _mechanisms(self) -> str:
        """The SASL mechanisms of the listener; empty if it has none or does not list them."""
        security = {key: value for key, value in self.security.items() if not key.startswith("sasl_")}
        security["security_protocol"] = "SSL" if self.settings.uses_tls else "PLAINTEXT"
        with contextlib.suppress(KafkaError, OSError, TimeoutError):
            connection = await self._connect(**security)
            try:
                # no listener has this mechanism: the answer lists the existing ones
                answer = await connection.send(SaslHandShakeRequest("NONE"))
            finally:
                connection.close()
            return ", ".join(sorted(answer.enabled_mechanisms))
        return ""

    async def _advertised(self, brokers: list[tuple[str, int]]) -> Trouble | None:
        """Checks the addresses that brokers advertise: clients connect to these, so at least one must be right."""
        failed: list[str] = []
        for host, port in brokers:
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    _reader, writer = await asyncio.open_connection(host, port)
            except (OSError, TimeoutError) as error:
                failed.append(f"{host}:{port} ({reason_of(error)})")
            else:
                writer.close()
                return None
        if not failed:
            return self._passing("no broker has registered yet", "check that its brokers run")
        return self._passing(
            f"it sends us to {', '.join(failed)}",
            "correct advertised.listeners of its brokers to names that can be reached from here",
        )


def reason_of(error: BaseException) -> str:
    """The text of an error in one line."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    text = " ".join(str(error).split())
    # The text of some client errors is only the connection object.
    return text if text and "<AIOKafka" not in text else type(error).__name__
