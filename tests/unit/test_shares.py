"""The share of a worker that one key may use, so that others have theirs; and long lists, which are read in slices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.bodies import Room
from app.engine.queue_records import next_record
from app.service import paging
from app.service.descriptions import MessagesWanted
from app.service.paging import page_of, smallest
from gateway import shares
from gateway.shares import ALL_UNPROVEN, Share, Unproven
from gateway.sqs import server
from marq.errors import UnavailableError
from tests.unit.http_lab import Http, answer_of, head_of, keep_catalog, run, serving, signed_request
from tests.unit.test_state_views import Desk
from tests.unit.test_state_views import run as look

GREEDY, OTHER = "greedy-key-of-enough-length", "other-key-of-enough-length"
SECRET = "s" * 20
KEYS = f"{GREEDY}:{SECRET},{OTHER}:{SECRET}"
Answer = tuple[int, dict[str, str], bytes]


def attack(folder: Path, test: Callable[[Http], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(folder, keys=KEYS) as http:
            keep_catalog(http)
            await test(http)

    run(main)


def head(key: str, method: str, path: str, length: int) -> bytes:
    return head_of(method, path, length, Authorization=f"Bearer {key}:{SECRET}", Content_Type="application/json")


async def ask(http: Http, key: str, method: str, path: str, body: Any = None) -> Answer:
    data = json.dumps(body).encode() if body is not None else b""
    return await http.ask(head(key, method, path, len(data)) + data)


async def sqs(http: Http, key: str, action: str, **parameters: Any) -> Answer:
    return await http.ask(signed_request(http.url, action, json.dumps(parameters).encode(), key, SECRET))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


# -- over HTTP


def test_receives_of_one_key_that_wait_leave_room_for_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "KEY_WAITING_MAX", 3)

    async def test(http: Http) -> None:
        receive = json.dumps({"wait_ms": 20_000}).encode()
        url = f"{http.url}/000000000000/q"
        assert (await sqs(http, GREEDY, "CreateQueue", QueueName="q"))[0] == 200
        held = [await http.send(head(GREEDY, "POST", "/v1/queues/q/receive", len(receive)) + receive) for _ in range(3)]
        await until(lambda: http.app.operations.receives.count == 3)

        refused = await ask(http, GREEDY, "POST", "/v1/queues/q/receive", {"wait_ms": 20_000})
        assert (refused[0], refused[1]["retry-after"]) == (503, "1")
        assert (await sqs(http, GREEDY, "ReceiveMessage", QueueUrl=url, WaitTimeSeconds=5))[0] == 503
        # without a wait it takes no place, and another key has its own places
        assert (await ask(http, GREEDY, "POST", "/v1/queues/q/receive", {}))[0] == 200
        held.append(await http.send(head(OTHER, "POST", "/v1/queues/q/receive", len(receive)) + receive))
        await until(lambda: http.app.operations.receives.count == 4)

        held[0][1].close()
        await http.app.operations.receives.close()
        for reader, _ in held[1:]:
            assert (await answer_of(reader))[0] == 200

    attack(tmp_path, test)


def test_requests_of_one_key_under_way_leave_room_for_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "REQUESTS_MAX", 2)

    async def test(http: Http) -> None:
        held = [await http.send(head(GREEDY, "POST", "/v1/ack", 100) + b" ") for _ in range(2)]
        await until(lambda: http.app.room.used_bytes == 2)

        assert (await ask(http, GREEDY, "GET", "/v1/queues"))[0] == 503
        assert (await sqs(http, GREEDY, "ListQueues"))[0] == 503
        assert (await ask(http, OTHER, "GET", "/v1/queues"))[0] == 200
        assert (await sqs(http, OTHER, "ListQueues"))[0] == 200
        for reader, writer in held:
            writer.write(b" " * 99)
            assert (await answer_of(reader))[0] == 400
        assert (await ask(http, GREEDY, "GET", "/v1/queues"))[0] == 200

    attack(tmp_path, test)


def test_who_knows_the_id_of_a_key_alone_takes_nothing_of_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "REQUESTS_MAX", 1)

    async def test(http: Http) -> None:
        whole = signed_request(http.url, "ListQueues", b" " * 1000, GREEDY, "wrong" * 4)
        held = await http.send(whole[:-10])
        await until(lambda: http.app.room.used_bytes > 900)

        assert (await sqs(http, GREEDY, "ListQueues"))[0] == 200
        held[1].close()

    attack(tmp_path, test)


def test_who_knows_the_id_of_a_key_alone_leaves_room_for_the_bodies_of_others(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        http.app.room.most_bytes = 400_000
        keep_catalog(http)
        whole = signed_request(http.url, "SendMessage", b" " * 90_000, GREEDY, "wrong" * 4)
        held = await http.send(whole[:-10])
        await until(lambda: http.app.room.used_bytes > 89_000)

        # an address has a quarter of the memory, however many ids it knows, and the key itself its half
        for key in (GREEDY, OTHER):
            reader, _ = await http.send(signed_request(http.url, "SendMessage", b" " * 90_000, key, "wrong" * 4)[:-10])
            assert (await answer_of(reader))[0] == 503
        start = head(GREEDY, "POST", "/v1/queues/q/messages", 190_000)
        assert (await http.ask(start + b" " * 190_000))[0] == 400
        held[1].close()
        await until(lambda: not http.app.room.used_bytes)
        assert (await sqs(http, OTHER, "SendMessage", QueueUrl="q" * 40_000))[0] in (400, 404)

    attack(tmp_path, test)


def test_one_address_leaves_room_for_unproven_bodies_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(http: Http) -> None:
        http.app.room.most_bytes = 200_000
        address = "192.0.2.1"
        monkeypatch.setattr(server, "address_of", lambda peer: address)
        held = [
            await http.send(signed_request(http.url, "SendMessage", b" " * 20_000, key, "wrong" * 4)[:-10])
            for key in (GREEDY, OTHER)
        ]
        await until(lambda: http.app.room.used_bytes > 39_000)
        large = json.dumps({"QueueUrl": "q" * 25_000})
        assert (await sqs(http, OTHER, "SendMessage", **json.loads(large)))[0] == 503
        address = "192.0.2.2"
        assert (await sqs(http, OTHER, "SendMessage", **json.loads(large)))[0] in (400, 404)
        for _, writer in held:
            writer.close()
        await until(lambda: not http.app.room.used_bytes)

    attack(tmp_path, test)


def test_a_new_address_finds_room_however_much_others_have() -> None:
    room = Room(2 * 1024)
    found = []
    for number in range(6):
        sender = Unproven(f"192.0.2.{number}")
        found.append(max(size for size in range(1024) if not size or room.has(size, sender)))
        room.add(found[-1], sender)
    assert found == [512, 256, 128, 64, 32, 16]
    assert room.held_by(ALL_UNPROVEN) == room.used_bytes == 1008
    for number, size in enumerate(found):
        room.add(-size, Unproven(f"192.0.2.{number}"))
    assert not room._held


def test_a_body_that_was_signed_counts_as_that_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(http: Http) -> None:
        seen = []
        credential = http.app.keys.credential(GREEDY)
        share, unproven, room = credential.grants.share, Unproven("127.0.0.1"), http.app.room
        real = Share.begin

        def begin(self: Share) -> None:
            seen.append((room.held_by(share), room.held_by(unproven)))
            real(self)

        monkeypatch.setattr(Share, "begin", begin)
        await sqs(http, GREEDY, "ListQueues", QueueNamePrefix="x" * 1000)
        assert seen[0][0] > 1000 and seen[0][1] == 0
        assert (room.held_by(share), room.held_by(unproven), room.used_bytes) == (0, 0, 0)

    attack(tmp_path, test)


def test_bodies_of_one_key_leave_room_for_those_of_another(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        http.app.room.most_bytes = 200_000
        start = head(GREEDY, "POST", "/v1/queues/q/messages", 90_000)
        held = await http.send(start + b" " * 89_000)
        await until(lambda: http.app.room.used_bytes == 89_000)

        reader, _ = await http.send(start + b" " * 89_000)
        assert (await answer_of(reader))[0] == 503
        reader, _ = await http.send(head(OTHER, "POST", "/v1/queues/q/messages", 90_000) + b" " * 90_000)
        assert (await answer_of(reader))[0] == 400
        held[1].close()

    attack(tmp_path, test)


def test_answers_that_a_key_does_not_read_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(http: Http) -> None:
        async def much(*_: Any) -> tuple[list[str], str]:
            # too much for what the system buffers
            return ["x" * 15_000_000], ""

        async def ask_for_much(key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await http.send(b"")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(head(key, "GET", "/v1/queues", 0))
            return reader, writer

        monkeypatch.setattr(type(http.app.operations), "list_queues", much)
        answers = http.app.connections.answers
        answers.most_bytes = 50_000_000  # of which a key gets half
        share = http.app.keys.grants_of({"Authorization": f"Bearer {GREEDY}:{SECRET}"}).share
        assert share is not None and (await ask(http, GREEDY, "PUT", "/v1/queues/q", {}))[0] == 201
        held = [await ask_for_much(GREEDY)]
        await until(lambda: answers.held_by(share) > 15_000_000)

        refused = await ask(http, GREEDY, "GET", "/v1/queues", None)
        assert (refused[0], refused[1]["retry-after"]) == (503, "1")
        assert answers.used_bytes < 16_000_000
        answers.most_bytes = 30_000_000
        assert (await ask(http, GREEDY, "POST", "/v1/queues/q/receive", {}))[0] == 503
        url = f"{http.url}/000000000000/q"
        assert (await sqs(http, GREEDY, "ReceiveMessage", QueueUrl=url))[0] == 503
        assert (await ask(http, GREEDY, "POST", "/v1/ack", {"receipts": ["x"]}))[0] == 200
        assert (await ask(http, OTHER, "POST", "/v1/queues/q/receive", {}))[0] == 200

        held[0][1].transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await answer_of(held[0][0]))[2]) > 15_000_000
        await until(lambda: not answers.used_bytes)
        assert (await ask(http, GREEDY, "POST", "/v1/queues/q/receive", {}))[0] == 200
        held.append(await ask_for_much(GREEDY))
        await until(lambda: answers.held_by(share) > 15_000_000)
        held[1][1].transport.abort()
        await until(lambda: not answers.used_bytes)
        held[0][1].close()

    attack(tmp_path, test)


def test_one_key_makes_so_many_queues_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "QUEUES_A_MINUTE", 2)

    async def test(http: Http) -> None:
        assert (await ask(http, GREEDY, "PUT", "/v1/queues/a", {}))[0] == 201
        assert (await sqs(http, GREEDY, "CreateQueue", QueueName="b"))[0] == 200

        assert (await ask(http, GREEDY, "PUT", "/v1/queues/c", {}))[0] == 503
        assert (await sqs(http, GREEDY, "CreateQueue", QueueName="c"))[0] == 503
        send = await ask(http, GREEDY, "POST", "/v1/queues/c/messages", {"messages": [{"payload": ""}]})
        assert send[0] == 503
        move = await ask(http, GREEDY, "POST", "/v1/queues/a/move", {"to": "c", "max": 1})
        assert move[0] == 503
        assert not http.app.catalog.exists("c")
        # an existing queue does not count, and another key has its own limit
        assert (await ask(http, GREEDY, "PUT", "/v1/queues/a", {"delay_ms": 1}))[0] == 200
        assert (await ask(http, OTHER, "PUT", "/v1/queues/c", {}))[0] == 201

    attack(tmp_path, test)


# -- the share itself


def test_queues_may_be_made_again_as_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "QUEUES_A_MINUTE", 60)
    now = 1000.0
    share = Share(lambda: now)
    for _ in range(60):
        share.make_queue()
    with pytest.raises(UnavailableError):
        share.make_queue()
    now += 1.0
    share.make_queue()
    with pytest.raises(UnavailableError):
        share.make_queue()
    now += 3600.0
    for _ in range(60):
        share.make_queue()
    with pytest.raises(UnavailableError):
        share.make_queue()


def test_a_request_that_was_refused_took_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "REQUESTS_MAX", 1)
    share = Share()
    share.begin()
    with pytest.raises(UnavailableError):
        share.begin()
    with share.wait(5):
        assert (share.requests, share.waiting) == (0, 1)
    share.end()
    assert (share.requests, share.waiting) == (0, 0)


# -- long lists


async def turns(work: Awaitable[Any]) -> int:
    """The number of turns that other tasks had meanwhile."""
    count = 0

    async def others() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(others())
    await asyncio.sleep(0)
    await work
    beside.cancel()
    return count


def test_a_page_of_names_is_looked_for_in_turns() -> None:
    names = [f"q{i:06}" for i in range(50_000)]

    async def main() -> None:
        assert await turns(page_of(names, 10, lambda name: False)) >= 50
        assert await page_of(names, 2, lambda name: name > "q000100") == (["q000101", "q000102"], "q000102")
        assert await page_of(names[:2], 2, lambda name: True) == (names[:2], "")

    asyncio.run(main())


def test_the_smallest_of_many_are_found_without_keeping_the_others() -> None:
    async def items() -> AsyncIterator[int]:
        for i in range(10_000):
            yield i * 7919 % 10_000

    async def main() -> None:
        assert await smallest(items(), 5, lambda item: item) == [0, 1, 2, 3, 4]
        assert await smallest(items(), 20_000, lambda item: item) == list(range(10_000))
        assert await smallest(items(), 0, lambda item: item) == []

    asyncio.run(main())


def test_a_page_of_messages_is_looked_for_in_turns_and_in_order() -> None:
    async def scenario(desk: Desk) -> None:
        desk.worker.send(30_000)
        desk.worker.send(10, queue="other")
        desk.worker.send(10)
        found: list[int] = []

        async def look_for(after: int) -> None:
            page = await desk.inspection.messages_here(MessagesWanted("q", None, (0, after), 5))
            found.extend(m.offset for m in page)

        assert await turns(look_for(-1)) >= 10
        await look_for(29_997)
        assert found == [0, 1, 2, 3, 4, 29_998, 29_999, 30_010, 30_011, 30_012]

    look(scenario)


def test_names_are_in_order_after_each_change(tmp_path: Path) -> None:
    async def test(http: Http) -> None:
        for name in ("b", "a", "ab", "c"):
            await ask(http, OTHER, "PUT", f"/v1/queues/{name}", {})
            assert http.app.catalog.names() == sorted(http.app.catalog.records)
        assert list(http.app.catalog.names_from("a", "")) == ["a", "ab"]
        assert list(http.app.catalog.names_from("", "ab")) == ["b", "c"]
        assert list(http.app.catalog.names_from("a", "b")) == []
        old = http.app.catalog.records["b"]
        http.app.catalog._put("b", next_record(old, settings=old.settings, state="deleted"))
        http.app.catalog._put("b", None)
        assert http.app.catalog.names() == ["a", "ab", "c"]

    attack(tmp_path, test)
    assert paging.TURN_NAMES
