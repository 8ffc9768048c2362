"""One connection to a service, and the views that the client does not have."""

from __future__ import annotations

import ssl
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import msgspec

from marq.cli.values import Place
from marq.client import Queue, wire
from marq.client.connection import reason_of
from marq.client.loop_thread import Runner
from marq.client.operations import Action, Operations
from marq.errors import MarqError, RequestError, ServiceError, SettingError, UnavailableError, UnreachableError

#: Queues, messages or rows that are asked for at once.
PAGE = 1_000
#: Seconds that a request is tried again for, once a worker has answered at all.
RETRY_FOR_S = 15.0

T = TypeVar("T")

_anything = msgspec.msgpack.Decoder()


class Address(NamedTuple):
    """Where a service is, and how to get in."""

    urls: tuple[str, ...]
    key_file: Path | None = None
    ca_file: Path | None = None
    key: str | None = None  # instead of a file


class Answer(dict[str, Any]):
    """An object of an answer. A field that is missing is an error of whatever answered."""

    def __missing__(self, name: str) -> Any:
        raise ServiceError(f"what is at this address did not answer like marq: {name!r} is missing; check the address")


def _answer_of(value: Any) -> Any:
    if isinstance(value, dict):
        return Answer((name, _answer_of(one)) for name, one in value.items())
    return [_answer_of(one) for one in value] if isinstance(value, list) else value


class Connected:
    """A service; asked first when something is wanted of it. Use as a context manager."""

    def __init__(self, address: Address, *, as_json: bool = False, retry_for: float = RETRY_FOR_S) -> None:
        self.address = address
        self.as_json = as_json
        self.tls = _context(address.ca_file)
        self._has_answered = False
        self._operations = Operations(
            address.urls,
            key=address.key or key_in(address.key_file),
            retry_for=retry_for,
            tls=self.tls,
        )
        self._runner = Runner(self._operations)

    def __enter__(self) -> Connected:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._runner.close()

    @property
    def operations(self) -> Operations:
        """What can be asked. Raises `UnreachableError` at once if no worker answers."""
        if not self._has_answered:
            self.require_answer()
        return self._operations

    def run(self, asked: Coroutine[Any, Any, T]) -> T:
        """Wait for what one of the operations answers."""
        return self._runner.run(asked)

    @property
    def url(self) -> str:
        """The first of its addresses."""
        return self._operations.connection.addresses[0]

    def require_answer(self) -> None:
        """One try at each address. Raises `UnreachableError` at once if nobody answers: nobody wants to wait for it."""
        failure: UnreachableError | None = None
        for _ in self.address.urls:
            try:
                self._runner.run(self._operations.connection.once("GET", "/health/live"))
                break
            except UnreachableError as error:
                failure = failure or error
            except UnavailableError:
                break  # somebody answers; the command itself is tried again for a while
            except RequestError as error:
                raise SettingError(
                    f"what is at {' and '.join(self.address.urls)} does not answer like a worker ({error}); give the "
                    "address of one, such as http://localhost:9324"
                ) from None
        else:
            assert failure is not None
            raise UnreachableError(
                f"no worker answers at {' and '.join(self.address.urls)}: {reason_of(failure.__cause__)}; start one "
                "with `python -m app up`, or name another with --url or MARQ_URL",
                0.0,
            )
        self._has_answered = True

    # ------------------------------------------------------------------ what is asked

    def queue(self, name: str) -> Queue:
        """A queue."""
        return Queue(self.operations, self._runner, name)

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> Any:
        """What the service answers; `path` is quoted already. Raises `MarqError`."""
        encoded = b"" if body is None else wire.encode(body)
        values = {name: str(value) for name, value in (query or {}).items() if value not in (None, "")}
        answer = self.run(self.operations.connection.request(method, path, encoded, query=values))
        found = wire.decoded(_anything, answer)
        if not isinstance(found, dict):
            raise ServiceError("what is at this address did not answer like marq; check the address")
        return _answer_of(found)

    def readiness(self) -> str:
        """What a worker that is not ready says of itself; empty if it is ready. Raises `UnreachableError`."""
        try:
            self.run(self.operations.connection.once("GET", "/health/ready"))
        except UnreachableError:
            raise
        except MarqError as error:
            return str(error).rpartition("address: ")[2]
        return ""

    def pages(self, path: str, query: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """The answers of a list that comes in pages."""
        after = ""
        while True:
            page = self.ask(path, query={"limit": PAGE, **(query or {}), "after": after})
            yield page
            after = page.get("after", "")
            if not after:
                return

    def settle(self, action: Action, receipts: list[str]) -> list[MarqError | None]:
        """Per receipt None, or why it was not carried out."""
        return self.run(self.operations.settle(action, receipts))

    def message(self, place: Place) -> dict[str, Any]:
        """One message with everything that its owner knows."""
        found: dict[str, Any] = self.ask(f"/v1/messages/{place.partition}/{place.offset}")
        return found


def key_in(file: Path | None) -> str | None:
    """The key that a file holds. Raises `SettingError`."""
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingError(f"the key file {str(file)!r} can't be read: {why}") from None
    if not key:
        raise SettingError(f"the key file {str(file)!r} is empty; put the key into its first line")
    if "\n" in key:
        raise SettingError(f"the key file {str(file)!r} has several lines; a key is one")
    return key


def _context(ca_file: Path | None) -> ssl.SSLContext | None:
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"the file of certificates {str(ca_file)!r} can't be used: {error.strerror or error}; it must be PEM"
        ) from None
