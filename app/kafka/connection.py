"""How a process gets to Kafka: addresses, log-in and TLS for every client, and waiting for a Kafka that starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import BrokerResponseError, KafkaConnectionError, KafkaError, NodeNotReadyError

from app.kafka import internals as _internals  # noqa: F401 - errors of connections
from app.kafka.datadir import kafka_login, resolve_bootstrap
from app.kafka.probe import Trouble, find_trouble
from app.logs import silenced
from app.settings import Settings
from marq.errors import BrokerError, SettingError
from marq.text import reason_of

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

#: Milliseconds for one request to Kafka.
REQUEST_TIMEOUT_MS = 10_000
#: Seconds to wait for a client to close when Kafka does not answer.
END_TIMEOUT_S = 1.0
#: Seconds between two attempts to reach a Kafka that is away.
LOOK_INTERVAL_S = 0.5
#: Seconds for which we repeat a request at least while Kafka answers "try again": a busy Kafka may take minutes to
#: create some thousand partitions, and its groups have no coordinator until then.
SAYS_AGAIN_S = 600.0
#: Seconds for which a command repeats a request that Kafka can't answer yet: a broker that has just started may not
#: know of any broker, itself included.
COMMAND_S = 15.0


# -- addresses and credentials ------------------------------------------------------------------------


def is_kafka_here(settings: Settings) -> bool:
    """False if Kafka is on another machine: no address of a broker is one of this machine."""
    for server in settings.bootstrap_servers or ("localhost:0",):
        host = server.rpartition(":")[0].strip("[]")
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.bind(address)
                    return True
    return False


def kafka_client_args(settings: Settings) -> dict[str, Any]:
    """Arguments for aiokafka clients: where Kafka is, and how to log in.

    Raises:
        BrokerError: no Kafka is set and no embedded broker runs.
        SettingError: the file of certificates can't be used.
    """
    servers, login = resolve_bootstrap(settings), kafka_login(settings)
    args: dict[str, Any] = {
        "bootstrap_servers": servers,
        "security_protocol": ("SASL_" if login is not None else "") + ("SSL" if settings.uses_tls else "PLAINTEXT"),
    }
    if args["security_protocol"] == "PLAINTEXT":
        return args
    if settings.uses_tls:
        args["ssl_context"] = _ssl_context(settings)
    if login is not None:
        args["sasl_plain_username"], args["sasl_plain_password"], args["sasl_mechanism"] = login
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

    login = kafka_login(settings)
    if login is not None:
        return faust.SASLCredentials(
            username=login.username,
            password=login.password,
            ssl_context=_ssl_context(settings) if settings.uses_tls else None,
            mechanism=login.mechanism,
        )
    return faust.SSLCredentials(_ssl_context(settings)) if settings.uses_tls else None


def _ssl_context(settings: Settings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(settings.kafka_ca_file) if settings.kafka_ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"MARQ_KAFKA_CA_FILE={str(settings.kafka_ca_file)!r} can't be used: {error.strerror or error}; it must be "
            "a file of certificates in PEM"
        ) from None


# -- reaching Kafka -----------------------------------------------------------------------------------


async def trouble_with_kafka(settings: Settings) -> Trouble | None:
    """One line that says why Kafka can't be used; None if it can be."""
    args = kafka_client_args(settings)
    with silenced("aiokafka"):
        trouble = await find_trouble(settings, args, REQUEST_TIMEOUT_MS)
    if trouble is not None and settings.kafka is None:
        mend = f"look at {settings.data_dir / 'kafka' / 'broker.log'}"
        trouble = Trouble(trouble.where, trouble.what, mend, trouble.passing)
    return trouble


async def await_kafka(settings: Settings, wait_s: float, say: Callable[[str], None]) -> None:
    """Wait until Kafka answers. A Kafka that is starting is waited for; a refused password is an error at once.

    Args:
        say: gets one line, when it turns out that we have to wait.

    Raises:
        BrokerError: what is wrong and what to do about it.
    """
    deadline = time.monotonic() + wait_s
    said = False
    while (trouble := await trouble_with_kafka(settings)) is not None:
        if not trouble.passing or time.monotonic() >= deadline:
            raise BrokerError(str(trouble))
        if not said:
            say(f"waiting up to {wait_s:.0f} s for Kafka at {trouble.where}: {trouble.what}")
            said = True
        await asyncio.sleep(LOOK_INTERVAL_S)


async def until_kafka_takes_it(
    ask: Callable[[], Awaitable[Answer]], wait_s: float, say: Callable[[str], None]
) -> Answer:
    """Returns Kafka's answer. Asks again while a broker can't be reached: one of several may be restarting.
    While Kafka itself says "try again", asks for `SAYS_AGAIN_S`, if that is longer.

    Args:
        ask: makes the request. Raises `BrokerError` from the client's error.
        say: gets one line, when it turns out that we have to wait.

    Raises:
        BrokerError: waiting would not help, or has not helped for `wait_s`.
    """

    def patience_s(cause: BaseException | None) -> float:
        if not _is_passing(cause):
            return 0.0
        return max(wait_s, SAYS_AGAIN_S) if _says_again(cause) else wait_s

    return await _repeated(ask, patience_s, lambda cause: say(f"waiting up to {wait_s:.0f} s for a broker: {cause}"))


async def asked_again(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Returns Kafka's answer to a command. Asks again for `COMMAND_S` while Kafka answers, but can't tell yet.

    Args:
        ask: makes the request. Raises `BrokerError` from the client's error.

    Raises:
        BrokerError: Kafka can't be reached, refuses, or could not tell for so long.
    """

    def patience_s(cause: BaseException | None) -> float:
        return COMMAND_S if isinstance(cause, NodeNotReadyError) or _says_again(cause) else 0.0

    return await _repeated(ask, patience_s, lambda _: None)


async def _repeated(
    ask: Callable[[], Awaitable[Answer]],
    patience_s: Callable[[BaseException | None], float],
    on_wait: Callable[[BaseException | None], None],
) -> Answer:
    """Returns Kafka's answer. Asks again for as many seconds as `patience_s` has for the client's error; 0 if waiting
    would not help. `on_wait` is called once, with the error, when it turns out that we have to wait.
    """
    began = time.monotonic()
    said = False
    while True:
        try:
            return await ask()
        except BrokerError as error:
            if time.monotonic() - began >= patience_s(error.__cause__):
                raise
            if not said:
                on_wait(error.__cause__)
                said = True
        await asyncio.sleep(LOOK_INTERVAL_S)


def _says_again(error: BaseException | None) -> bool:
    return isinstance(error, BrokerResponseError) and bool(error.retriable)


def _is_passing(error: BaseException | None) -> bool:
    return isinstance(error, OSError | KafkaConnectionError) or bool(getattr(error, "retriable", False))


async def start_consumer(settings: Settings, **options: Any) -> AIOKafkaConsumer:
    """Start a consumer that is in no group. Raises `KafkaError`.

    Args:
        options: of `AIOKafkaConsumer`.
    """
    consumer = AIOKafkaConsumer(enable_auto_commit=False, **options, **kafka_client_args(settings))
    try:
        await consumer.start()
    except BaseException:
        await end_client(consumer.stop())
        raise
    return consumer


async def end_client(ending: Awaitable[None]) -> bool:
    """Wait for a Kafka client to close (await what `stop()` or `close()` returned), for `END_TIMEOUT_S` at most.

    There aiokafka may wait for Kafka for ever, or raise the cancellation of one of its tasks, which would break off the
    rest of a shutdown. Returns False if the client has not closed.
    """
    task = asyncio.ensure_future(ending)
    await asyncio.wait({task}, timeout=END_TIMEOUT_S)
    if not task.done():
        return False
    if not task.cancelled() and task.exception() is not None:
        log.warning("a Kafka client failed to close: %r", task.exception())
    return True


@contextlib.asynccontextmanager
async def admin_client(settings: Settings) -> AsyncIterator[AIOKafkaAdminClient]:
    """A connected admin client, closed at the end.

    Raises:
        BrokerError: Kafka can't be reached, or refuses us, at first or inside the block.
    """
    admin = AIOKafkaAdminClient(**kafka_client_args(settings), request_timeout_ms=REQUEST_TIMEOUT_MS)
    try:
        # The client logs each failed address, and then raises an error without the reason.
        with silenced("aiokafka"):
            await admin.start()
    except (KafkaError, OSError, TimeoutError) as error:
        await admin.close()
        raise await unreachable(settings, error) from error
    try:
        yield admin
    except (KafkaError, OSError, TimeoutError) as error:
        raise await unreachable(settings, error) from error
    finally:
        await admin.close()


async def unreachable(settings: Settings, error: BaseException) -> BrokerError:
    """The error to raise for an error of a Kafka client, with the cause, which clients don't report."""
    trouble = await trouble_with_kafka(settings)
    if trouble is not None:
        return BrokerError(str(trouble))
    where = ", ".join(resolve_bootstrap(settings))
    return BrokerError(f"Kafka at {where} failed a request: {reason_of(error)}; try again")
