"""HTTP: which address a request goes to, how long it may take, and when it is repeated."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay, wait_random_exponential
from yarl import URL

from marq.client.wire import MSGPACK, error_of_answer
from marq.clock import now_s
from marq.errors import (
    ClosedError,
    MarqError,
    NotAuthenticatedError,
    ServiceError,
    SettingError,
    UnavailableError,
    UnreachableError,
)

logger = logging.getLogger("marq.client")

#: Seconds for an answer to a request, besides the time that a receive waits.
TIMEOUT_S = 15.0
#: Seconds for an address to accept a connection.
CONNECT_TIMEOUT_S = 5.0
#: Seconds for which a request is repeated when the service can't be reached or is not available.
RETRY_FOR_S = 30.0
#: Longest pause in seconds between two attempts, unless the service asks for a longer one.
BACKOFF_MAX_S = 5.0
#: Longest pause in seconds that a service can ask for.
RETRY_AFTER_MAX_S = 60.0
#: Largest answer that is read. A worker's have at most half of it.
ANSWER_MAX_BYTES = 64 * 1024 * 1024
#: Seconds between two log lines about repeated requests.
LOG_EVERY_S = 1.0

T = TypeVar("T")

_backoff = wait_random_exponential(multiplier=0.1, min=0.02, max=BACKOFF_MAX_S)


class Connection:
    """A service that can be reached at several addresses.

    When the address in use fails, the next one in the given order is used, until it fails in turn.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        key: str | None = None,
        timeout: float = TIMEOUT_S,
        retry_for: float = RETRY_FOR_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.addresses = tuple(checked(a) for a in ([addresses] if isinstance(addresses, str) else addresses))
        if not self.addresses:
            raise SettingError("a service needs an address, such as http://localhost:9324")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise SettingError("a key has only printable ASCII characters; use it as the service's operator gave it")
        self.timeout = timeout
        self.retry_for = retry_for
        self.tls = tls
        self._headers = {"Content-Type": MSGPACK, "Accept": MSGPACK, "Accept-Encoding": "identity"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._current = 0
        self._logged_s = -LOG_EVERY_S
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        query: Mapping[str, str] | None = None,
        wait: float = 0.0,
        retry_for: float | None = None,
    ) -> bytes:
        """The body of the answer.

        Args:
            path: already quoted.
            wait: seconds that the service may wait before it answers.
            retry_for: seconds for which the request is repeated. None: as long as the connection was made with.

        Raises:
            UnavailableError: the service could not be reached, or was not available, for `retry_for` seconds.
            MarqError: the service refused the request.
        """

        async def attempt() -> bytes:
            return await self.once(method, path, body, query=query, wait=wait)

        return await self.retried(attempt, retry_for)

    async def retried(self, attempt: Callable[[], Awaitable[T]], retry_for: float | None = None) -> T:
        """Repeat `attempt` until it succeeds, for `retry_for` seconds (None: the connection's)."""
        retry_for = self.retry_for if retry_for is None else retry_for
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(UnavailableError),
            wait=self._wait,
            stop=stop_before_delay(retry_for),
            before_sleep=self._log,
            reraise=True,
        )
        return await retrying(attempt)

    async def once(
        self, method: str, path: str, body: bytes = b"", *, query: Mapping[str, str] | None = None, wait: float = 0.0
    ) -> bytes:
        """One attempt, at the address in use. Raises like `request`."""
        session = self._opened()
        used = self._current
        url = url_of(self.addresses[used], path)
        if query:
            url = url.with_query(query)
        try:
            async with session.request(
                method,
                url,
                data=body or None,
                timeout=aiohttp.ClientTimeout(total=self.timeout + wait, sock_connect=CONNECT_TIMEOUT_S),
                # a worker sends none; another server could make us send a message elsewhere, or in plain text
                allow_redirects=False,
            ) as response:
                answer = await _read(response)
                status = response.status
                if status < 300:
                    return answer
                if status < 400:
                    raise ServiceError(
                        f"{self.addresses[used]} redirects to {response.headers.get('Location', '')[:200]!r}, which is "
                        "not followed: use the address of a worker"
                    )
                error = error_of_answer(
                    status, answer, response.headers.get("Content-Type", ""), response.headers.get("Retry-After")
                )
        except (aiohttp.ClientConnectorSSLError, aiohttp.ClientConnectorCertificateError) as exc:
            raise NotAuthenticatedError(f"no secure connection to {self.addresses[used]}: {_tls_problem(exc)}") from exc
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as exc:
            error = UnreachableError(
                f"{self.addresses[used]} does not answer: {reason_of(exc)}; is a worker running there?", 0.0
            )
            error.__cause__ = exc
        except TimeoutError as exc:
            error = UnreachableError(
                f"{self.addresses[used]} did not answer within {self.timeout + wait:g} s; it may be overloaded", 0.0
            )
            error.__cause__ = exc
        except aiohttp.ClientError as exc:
            raise UnreachableError(f"the request to {self.addresses[used]} failed: {reason_of(exc)}", 0.0) from exc
        if isinstance(error, UnavailableError) and used == self._current:
            self._current = (used + 1) % len(self.addresses)
        raise error

    def _wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: 0 until each address was asked once, then growing, with jitter."""
        if state.attempt_number < len(self.addresses):
            return 0.0
        error = state.outcome.exception() if state.outcome is not None else None
        asked = min(getattr(error, "retry_after_s", 0.0), RETRY_AFTER_MAX_S)
        # added, so that clients that were told the same time don't come back at the same instant
        return asked + _backoff(state)

    def _log(self, state: RetryCallState) -> None:
        now = now_s()
        # all waiting callers repeat their own requests, and would log the same
        if state.attempt_number == len(self.addresses) and now - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now
            error = state.outcome.exception() if state.outcome is not None else None
            logger.warning("%s Trying again.", error)

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ClosedError("this service was closed; make a new Service")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                # no limit: waiting receives hold connections
                connector=aiohttp.TCPConnector(limit=0, ssl=self.tls if self.tls is not None else True),
            )
        return self._session

    async def close(self) -> None:
        """Close all connections. No request can be made afterwards."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
            # the transports close in the loop's next turns
            await asyncio.sleep(0)


def checked(address: str) -> str:
    """An address in its shortest form. Raises `SettingError` if it is invalid.

    >>> checked("http://localhost:9324/")
    'http://localhost:9324'
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError(
            f"address {address!r}: it has to begin with http:// or https://, as in http://localhost:9324"
        )
    try:
        _ = parts.port
    except ValueError:
        raise SettingError(
            f"address {address!r}: its port has to be a number up to 65535, as in http://localhost:9324"
        ) from None
    if parts.query or parts.fragment or parts.username:
        raise SettingError(f"address of {parts.hostname!r}: only a scheme, host, port and path; a key goes into `key`")
    return address.rstrip("/")


@lru_cache(10_000)
def url_of(address: str, path: str) -> URL:
    """The URL of an address and a path that is quoted already."""
    return URL(address + path, encoded=True)


def _tls_problem(error: BaseException) -> str:
    if "WRONG_VERSION_NUMBER" in str(error):
        return "it speaks no TLS on this port; use http://, or the port that speaks it"
    return f"{error}; check the address, and the certificates that are trusted"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises `ServiceError` if it is larger than any of marq's."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ServiceError("what is at this address compresses its answers, which marq does not; check the address")
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_MAX_BYTES:
            raise ServiceError(f"an answer of more than {ANSWER_MAX_BYTES} bytes; check the address")
        parts.append(part)
    return b"".join(parts)


def reason_of(error: BaseException | None) -> str:
    """Why a connection failed, in the system's words if there are any."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, socket.gaierror):
        return "its name is not known here"
    number = getattr(cause, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number).lower()
    if isinstance(cause, TimeoutError):
        return "it timed out"
    return str(cause).lower() or type(cause).__name__


def unwrap(result: Any) -> Any:
    """Return a result, or raise it if it is an error."""
    if isinstance(result, MarqError):
        raise result
    return result
