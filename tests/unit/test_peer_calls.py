"""Calls between workers over real sockets: calls of others are refused unread, and their answers are not trusted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from app.cluster import peers as module
from app.cluster.addresses import announce
from app.cluster.peers import PeerError, Peers, peer_call
from app.cluster.seals import HEADER, Seals
from marq.errors import UnknownQueueError
from tests.unit.http_lab import Http, answer_of, head_of, run, serving

PATH = "/v1/peer/echo"
LARGE = 30 * 1024 * 1024
Test = Callable[[Http, Peers], Awaitable[None]]


class Part:
    """What every worker has."""

    @peer_call("echo")
    async def echo(self, argument: Any) -> Any:
        return argument

    @peer_call("refuse")
    async def refuse(self, argument: Any) -> Any:
        raise UnknownQueueError("there is no such queue")


PART = Part()


@contextlib.asynccontextmanager
async def two_workers(
    folder: Path, its_values: dict[str, Any] | None = None, **values: Any
) -> AsyncIterator[tuple[Http, Peers]]:
    """One that is called, and another that calls, which has values of its own."""
    async with serving(folder, **values) as called, serving(folder, **(its_values or {})) as other:
        for http in (called, other):
            http.app.peers.register(PART)
            await http.app.peers.on_start()
        try:
            yield called, other.app.peers
        finally:
            for http in (called, other):
                await http.app.peers.on_stop()


def attack(folder: Path, test: Test) -> None:
    async def main() -> None:
        async with two_workers(folder) as (called, caller):
            await caller.call(called.url, PART.echo, "the caller learns the time")
            await test(called, caller)

    run(main)


def meet(folder: Path, test: Test) -> None:
    """As `attack`, with workers that have not called each other yet."""

    async def main() -> None:
        async with two_workers(folder) as (called, caller):
            await test(called, caller)

    run(main)


def address_of(caller: Peers, url: str) -> str:
    """An address that a worker with the secret of `caller` announces."""
    return caller.announce(url, "worker")


def sealed(caller: Peers, url: str, body: bytes, method: str = "POST", path: str = PATH) -> str:
    return caller._seals.call(method, path, url, body)[1]


def test_workers_with_one_secret_understand_each_other(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        assert await caller.call(called.url, PART.echo, {"a": b"b"}) == {"a": b"b"}
        with pytest.raises(UnknownQueueError, match="no such queue"):
            await caller.call(called.url, PART.refuse, 1)

    attack(tmp_path, test)


@pytest.mark.parametrize(
    "header",
    ["", "0" * 64, "version=1,time=1,sender=a,number=1,body=b,seal=c", "version=2,time=1"],
    ids=["none", "old", "guess", "new"],
)
def test_an_unsealed_call_is_refused_before_a_byte_of_its_body_is_read(tmp_path: Path, header: str) -> None:
    async def test(called: Http, caller: Peers) -> None:
        reader, _ = await called.send(head_of("POST", PATH, LARGE, **{HEADER: header}))

        assert (await answer_of(reader))[0] == 401

    attack(tmp_path, test)


def test_a_body_that_says_that_it_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        head = head_of("POST", PATH, LARGE, **{HEADER: sealed(caller, called.url, b"")})
        reader, _ = await called.send(head)

        assert (await answer_of(reader))[0] == 413

    attack(tmp_path, test)


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_TIMEOUT_S", 0.2)

    async def test(called: Http, caller: Peers) -> None:
        reader, _ = await called.send(head_of("POST", PATH, 100, **{HEADER: sealed(caller, called.url, b"")}) + b"x")

        assert (await answer_of(reader))[0] == 408

    attack(tmp_path, test)


def test_a_call_that_was_heard_can_not_be_made_again(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        body = msgspec.msgpack.encode("x")
        header = sealed(caller, called.url, body)

        assert (await called.request("POST", PATH, body, **{HEADER: header}))[0] == 200
        assert (await called.request("POST", PATH, body, **{HEADER: header}))[0] == 401

    attack(tmp_path, test)


def test_a_call_that_was_heard_is_good_for_nothing_else(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        body = msgspec.msgpack.encode("x")
        for header, path, sent in (
            (sealed(caller, called.url, body), PATH, msgspec.msgpack.encode("y")),
            (sealed(caller, called.url, body), "/v1/peer/refuse", body),
            (sealed(caller, called.url, body, method="GET"), PATH, body),
            (sealed(caller, "http://another:9324", body), PATH, body),
        ):
            assert (await called.request("POST", path, sent, **{HEADER: header}))[0] == 401

    attack(tmp_path, test)


def test_a_worker_with_another_secret_is_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_workers(tmp_path, secret="another secret that is long enough") as (called, caller):
            with pytest.raises(PeerError, match="401"):
                await caller.call(called.url, PART.echo, 1)

    run(main)


def test_a_worker_that_has_stopped_calls_nobody(tmp_path: Path) -> None:
    """What was asked for before, as by a handler, may only now get to its call."""

    async def test(called: Http, caller: Peers) -> None:
        await caller.stop()
        with pytest.raises(PeerError, match="stops"):
            await caller.call(called.url, PART.echo, 1)

    attack(tmp_path, test)


def test_a_worker_that_began_anew_is_understood_and_takes_no_call_from_before(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        heard = sealed(caller, called.url, msgspec.msgpack.encode("heard"))
        seals: Seals = called.app.peers._seals
        began_anew = Seals(seals._keys, seals._now_ms)
        called.app.peers._seals = began_anew  # type: ignore[misc]

        status, _, _ = await called.request("POST", PATH, msgspec.msgpack.encode("heard"), **{HEADER: heard})
        assert status == 401
        assert await caller.call(called.url, PART.echo, 1) == 1
        assert await caller.call(called.url, PART.echo, 2) == 2

    attack(tmp_path, test)


@contextlib.asynccontextmanager
async def impostor(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Somebody else at the address of a worker."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_workers_of_two_versions_say_so_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(called: Http, caller: Peers) -> None:
        for _ in range(3):
            answer = await called.request("POST", PATH, b"", **{HEADER: "version=2,time=1,all=else"})
            assert (answer[0], answer[1][HEADER.lower()]) == (401, "version=1")
        lines = [r.getMessage() for r in caplog.records if "version" in r.getMessage()]
        assert len(lines) == 1 and "version 2 of calls between workers" in lines[0], lines

        async def of_another_version(request: web.Request) -> web.Response:
            return web.Response(status=401, headers={HEADER: "version=2"})

        async with impostor(of_another_version) as url:
            with pytest.raises(PeerError, match="version 2 of calls between workers"):
                await caller.call(url, PART.echo, 1)

    attack(tmp_path, test)


def test_redirects_are_not_followed(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        asked = []

        async def elsewhere(request: web.Request) -> web.Response:
            asked.append(request.path)
            raise web.HTTPTemporaryRedirect(f"{called.url}{PATH}")

        async with impostor(elsewhere) as url:
            with pytest.raises(PeerError, match="307"):
                await caller.call(address_of(caller, url), PART.echo, 1)
        assert asked == [PATH]

    attack(tmp_path, test)


@pytest.mark.parametrize("kind", ["application/msgpack", "application/problem+json"], ids=["answer", "problem"])
def test_an_answer_without_a_seal_is_not_believed(tmp_path: Path, kind: str) -> None:
    async def test(called: Http, caller: Peers) -> None:
        async def lie(request: web.Request) -> web.Response:
            body = b'{"type":"urn:marq:problem:unknown-queue","detail":"no"}' if "json" in kind else b"\x01"
            return web.Response(body=body, content_type=kind)

        async with impostor(lie) as url:
            with pytest.raises(PeerError, match="without a seal"):
                await caller.call(url, PART.echo, 1)

    attack(tmp_path, test)


def test_the_answer_to_another_call_is_not_believed(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        async def pass_on(request: web.Request) -> web.Response:
            """A man in the middle gives each call the answer that he got to the first one."""
            if not known:
                status, headers, body = await called.request(
                    "POST", PATH, msgspec.msgpack.encode("old"), **{HEADER: first}
                )
                known.append((status, headers[HEADER.lower()], body))
            status, header, body = known[0]
            return web.Response(body=body, status=status, headers={HEADER: header}, content_type="application/msgpack")

        known: list[Any] = []
        first = sealed(caller, called.url, msgspec.msgpack.encode("old"))
        async with impostor(pass_on) as url:
            with pytest.raises(PeerError, match="without a seal"):
                await caller.call(address_of(caller, url), PART.echo, "new")
        assert known[0][0] == 200

    attack(tmp_path, test)


def test_an_answer_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_MAX_BYTES", 1024 * 1024)

    async def test(called: Http, caller: Peers) -> None:
        async def flood(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(OSError):
                while True:
                    await response.write(bytes(65536))
            return response

        async with impostor(flood) as url:
            with pytest.raises(PeerError, match="more than"):
                await asyncio.wait_for(caller.call(address_of(caller, url), PART.echo, 1), 10)

    attack(tmp_path, test)


def announced(http: Http) -> str:
    """Let a worker announce its address, as at a start."""
    http.app.address = http.app.peers.announce(http.url, "its-name")
    return http.app.peers.url


def test_a_call_that_reaches_another_worker_than_meant_is_not_carried_out_and_says_who_answered(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        heard: list[Any] = []

        async def note(argument: Any) -> Any:
            heard.append(argument)

        called.app.peers._operations["echo"] = called.app.peers._operations["echo"]._replace(method=note)
        there = announced(called)
        meant = address_of(caller, called.url)

        with pytest.raises(PeerError, match=r"worker its-name-\w{12} answers at http://127.*, the address of worker"):
            await caller.call(meant, PART.echo, 1)
        assert not heard
        await caller.call(there, PART.echo, 2)
        assert heard == [2]

    meet(tmp_path, test)


def test_workers_at_one_address_are_both_named_with_what_to_do_and_the_lost_one_with_its_partitions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(called: Http, caller: Peers) -> None:
        here, there = announced(called), address_of(caller, called.url)
        peers = called.app.peers
        members = {here: {0, 2}, there: {1, 3}}
        peers.members = lambda: members  # type: ignore[method-assign]

        answers = await peers.everywhere(PART.echo, 1)
        peers.members_changed()
        peers.members_changed()

        assert answers[here] == 1
        assert peers.missing(answers) == [f"{called.url} (partitions 1, 3)"]
        (trouble,) = peers.troubles()
        assert trouble.what.startswith("worker its-name-") and " and worker worker-" in trouble.what
        assert trouble.what.endswith(f" announce the same address, {called.url}")
        assert "MARQ_WEB_URL" in trouble.mend
        lines = [r.getMessage() for r in caplog.records if f"{trouble.what}: {trouble.mend}" in r.getMessage()]
        assert len(lines) == 1

    meet(tmp_path, test)


def test_two_members_whose_urls_lead_to_one_worker_are_reported_once_both_are_members(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        there, elsewhere = announced(called), address_of(caller, called.url.replace("127.0.0.1", "localhost"))
        with pytest.raises(PeerError, match="answers at"):
            await caller.call(elsewhere, PART.echo, 1)

        caller.members = lambda: {elsewhere: {1}}  # type: ignore[method-assign]
        assert not caller.troubles()  # the worker there has just begun, and its predecessor is still a member
        caller.members = lambda: {elsewhere: {1}, there: {0}}  # type: ignore[method-assign]
        assert "the address of worker" in caller.troubles()[0].what

    meet(tmp_path, test)


def test_nothing_is_sent_to_an_address_that_the_secret_does_not_prove(tmp_path: Path) -> None:
    async def test(called: Http, caller: Peers) -> None:
        asked: list[bytes] = []

        async def listen(request: web.Request) -> web.Response:
            asked.append(await request.read())
            return web.Response()

        async with impostor(listen) as url:
            for address in (
                announce(url, "w-1", [b"another secret".ljust(32)]),
                address_of(caller, "http://a:1").rpartition("@")[0] + url.replace("http://", "@"),
                "ftp://a@b",
                f"{url}/private?x=",
            ):
                with pytest.raises(PeerError, match="is not called"):
                    await caller.call(address, PART.echo, "confidential")
                assert not caller.admits(address)
            assert asked == []
            # a worker of an earlier version has no seal, and its answer to a call that tells nothing shows what it is
            with pytest.raises(PeerError, match="without a seal"):
                await caller.call(url, PART.echo, "confidential")
            assert asked == [b""]
        assert await caller.call(called.url, PART.echo, 1) == 1

    meet(tmp_path, test)


def test_a_worker_of_the_version_before_calls_an_address_as_it_stands(tmp_path: Path) -> None:
    """It makes a header of user and password, and names the whole address in its seal."""

    async def test(called: Http, caller: Peers) -> None:
        there, body = announced(called), msgspec.msgpack.encode("x")
        assert called.app.peers._session is not None
        for _ in range(2):
            call, header = caller._seals.call("POST", PATH, there, body)
            async with called.app.peers._session.post(there + PATH, data=body, headers={HEADER: header}) as response:
                status, sealed = response.status, response.headers[HEADER]
            if status == 401:
                caller._seals.learn_time(call, sealed)
        assert status == 200

    meet(tmp_path, test)
