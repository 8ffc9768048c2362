"""Which queue accepts the dead letters of which, and which key may set that, over each protocol."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine.queue_records import QueueRecord, decode
from app.service.move_tasks import MoveTasks
from marq.core.policies import QueueSettings
from marq.core.settings import QueueSettingsError
from tests.unit.http_lab import Http, keep_catalog, run, serving, signed_request

ADMIN, EVIL, MANAGER, MOVER = (f"{name}-key-of-enough-length" for name in ("admin", "evil", "manager", "mover"))
SECRET = "s" * 20
KEYS = ",".join(
    (
        f"{ADMIN}:{SECRET}",
        f"{EVIL}:{SECRET}=send+receive+manage:evil*",
        f"{MANAGER}:{SECRET}=manage:*",
        f"{MOVER}:{SECRET}=receive:evil*",
        f"{MOVER}:{SECRET}=send:payroll",
    )
)
Answer = tuple[int, Any]


class Lab:
    """A worker with keys, whose queues are made by its owner."""

    def __init__(self, http: Http) -> None:
        self.http = http

    async def json(self, key: str, method: str, path: str, body: Any) -> Answer:
        status, _, answer = await self.http.request(
            method,
            path,
            json.dumps(body).encode(),
            Authorization=f"Bearer {key}:{SECRET}",
            Content_Type="application/json",
        )
        return status, json.loads(answer)

    async def sqs(self, key: str, action: str, **parameters: Any) -> Answer:
        body = json.dumps(parameters).encode()
        status, _, answer = await self.http.ask(signed_request(self.http.url, action, body, key, SECRET))
        return status, json.loads(answer)

    async def put(self, queue: str, **settings: Any) -> Answer:
        return await self.json(ADMIN, "PUT", f"/v1/queues/{queue}", settings)

    def arn(self, queue: str) -> str:
        return f"arn:aws:sqs:eu-west-1:000000000000:{queue}"

    def redrive(self, queue: str) -> dict[str, str]:
        policy = {"deadLetterTargetArn": self.arn(queue), "maxReceiveCount": 1}
        return {"RedrivePolicy": json.dumps(policy)}

    def target_of(self, queue: str) -> str:
        return self.http.app.operations.dead_letter_queue_of(queue)


def attack(folder: Path, test: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(folder, keys=KEYS) as http:
            keep_catalog(http)
            await test(Lab(http))

    run(main)


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_a_policy_that_was_set_over_sqs_counts_over_json(tmp_path: Path, method: str) -> None:
    async def test(lab: Lab) -> None:
        policy = {"RedriveAllowPolicy": '{"redrivePermission":"denyAll"}'}
        assert (await lab.sqs(ADMIN, "CreateQueue", QueueName="payroll", Attributes=policy))[0] == 200
        await lab.put("evil")

        status, answer = await lab.json(ADMIN, method, "/v1/queues/evil", {"dead_letter_queue": "payroll"})

        assert status == 400
        assert "takes no dead letters of 'evil'" in answer["detail"]
        assert lab.target_of("evil") == ""

    attack(tmp_path, test)


def test_a_policy_that_was_set_over_json_counts_over_sqs_and_is_told_there(tmp_path: Path) -> None:
    async def test(lab: Lab) -> None:
        assert (await lab.put("payroll", dead_letters_from=["wages"]))[0] == 201
        for queue, allowed in (("evil", False), ("wages", True)):
            status, answer = await lab.sqs(ADMIN, "CreateQueue", QueueName=queue, Attributes=lab.redrive("payroll"))
            assert (status == 200) is allowed, answer
        _, told = await lab.sqs(ADMIN, "GetQueueAttributes", QueueUrl="payroll", AttributeNames=["RedriveAllowPolicy"])
        assert json.loads(told["Attributes"]["RedriveAllowPolicy"]) == {
            "redrivePermission": "byQueue",
            "sourceQueueArns": [lab.arn("wages")],
        }
        await lab.put("payroll", dead_letters_from=[])
        _, told = await lab.sqs(ADMIN, "GetQueueAttributes", QueueUrl="payroll", AttributeNames=["RedriveAllowPolicy"])
        assert json.loads(told["Attributes"]["RedriveAllowPolicy"]) == {"redrivePermission": "denyAll"}

    attack(tmp_path, test)


def test_a_queue_that_nobody_named_is_asked_too(tmp_path: Path) -> None:
    """Without a name, dead letters go to the name of the queue with a suffix, which may be somebody else's."""

    async def test(lab: Lab) -> None:
        await lab.put("evil.dead", dead_letters_from=[])

        assert (await lab.put("evil"))[0] == 400

    attack(tmp_path, test)


def test_what_was_named_before_the_policy_stays(tmp_path: Path) -> None:
    async def test(lab: Lab) -> None:
        await lab.put("payroll")
        await lab.put("wages", dead_letter_queue="payroll")
        await lab.put("payroll", dead_letters_from=[])

        assert (await lab.json(ADMIN, "PATCH", "/v1/queues/wages", {"delay_ms": 5}))[0] == 200
        assert lab.target_of("wages") == "payroll"

    attack(tmp_path, test)


@pytest.mark.parametrize("key", [EVIL, MANAGER])
def test_naming_a_dead_letter_queue_needs_send_for_it(tmp_path: Path, key: str) -> None:
    async def test(lab: Lab) -> None:
        await lab.put("payroll")
        await lab.put("evil")

        for answer in (
            await lab.json(key, "PUT", "/v1/queues/evil", {"dead_letter_queue": "payroll"}),
            await lab.json(key, "PATCH", "/v1/queues/evil", {"dead_letter_queue": "payroll"}),
            await lab.sqs(key, "SetQueueAttributes", QueueUrl="evil", Attributes=lab.redrive("payroll")),
            await lab.sqs(key, "CreateQueue", QueueName="evil-new", Attributes=lab.redrive("payroll")),
        ):
            assert answer[0] == 403, answer
        assert lab.target_of("evil") == ""
        # other settings of a queue that names one are theirs to set
        await lab.put("evil", dead_letter_queue="payroll")
        body = {"dead_letter_queue": "payroll", "delay_ms": 5}
        assert (await lab.json(key, "PUT", "/v1/queues/evil", body))[0] == 200

    attack(tmp_path, test)


def test_who_may_not_name_a_dead_letter_queue_learns_nothing_of_it(tmp_path: Path) -> None:
    async def test(lab: Lab) -> None:
        await lab.put("open")
        await lab.put("closed", dead_letters_from=[])
        await lab.put("other-type", fifo=True)
        await lab.put("evil")

        told = set()
        for target in ("open", "closed", "other-type", "nowhere"):
            attributes = lab.redrive(target)
            for status, answer in (
                await lab.sqs(EVIL, "SetQueueAttributes", QueueUrl="evil", Attributes=attributes),
                await lab.sqs(EVIL, "CreateQueue", QueueName="evil-new", Attributes=attributes),
                await lab.sqs(EVIL, "CreateQueue", QueueName="evil", Attributes=attributes),
            ):
                told.add((status, answer["message"].replace(target, "…")))
        assert [status for status, _ in told] == [403], told

    attack(tmp_path, test)


def test_permissions_of_a_queue_do_not_grow_without_end(tmp_path: Path) -> None:
    async def test(lab: Lab) -> None:
        await lab.put("evil")

        async def add(label: str, accounts: list[str]) -> Answer:
            return await lab.sqs(
                EVIL, "AddPermission", QueueUrl="evil", Label=label, AWSAccountIds=accounts, Actions=["*"]
            )

        assert (await add("one", ["1"]))[0] == 200
        for accounts in (["1" * 10_000], ["1"] * 1_000):
            status, answer = await add("many", accounts)
            assert (status, answer["__type"]) == (403, "com.amazonaws.sqs#OverLimit")

    attack(tmp_path, test)


def test_who_may_send_there_may_name_it(tmp_path: Path) -> None:
    async def test(lab: Lab) -> None:
        await lab.put("evil-dead")

        assert (await lab.json(EVIL, "PUT", "/v1/queues/evil", {"dead_letter_queue": "evil-dead"}))[0] == 201

    attack(tmp_path, test)


def test_a_move_task_needs_receive_and_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    async def write(self: MoveTasks, queue: str, task: Any) -> None:
        begun.append((queue, task.to))

    async def counts(queue: str) -> dict[str, int]:
        return {}

    monkeypatch.setattr(MoveTasks, "_write", write)

    async def test(lab: Lab) -> None:
        lab.http.app.census.counts_of = counts  # type: ignore[method-assign, assignment]
        await lab.put("payroll")
        await lab.put("evil-dead")
        await lab.put("evil", dead_letter_queue="evil-dead", max_receives=1)
        source, to = lab.arn("evil-dead"), lab.arn("payroll")

        for key, target in ((MANAGER, to), (EVIL, to), (MANAGER, None), (EVIL, None), (MOVER, None)):
            wanted = {"SourceArn": source} | ({"DestinationArn": target} if target else {})
            assert (await lab.sqs(key, "StartMessageMoveTask", **wanted))[0] == 403, (key, target)
        status, answer = await lab.sqs(MOVER, "StartMessageMoveTask", SourceArn=source, DestinationArn=to)
        assert status == 200, answer
        assert (await lab.sqs(MANAGER, "CancelMessageMoveTask", TaskHandle=answer["TaskHandle"]))[0] == 403

    attack(tmp_path, test)
    assert begun == [("evil-dead", "payroll")]


def test_policies_of_records_of_an_earlier_version_count() -> None:
    def record(policy: Any) -> QueueSettings:
        value = {
            "v": 1,
            "version": 1,
            "by": "x",
            "settings": {},
            "attributes": {"sqs.RedriveAllowPolicy": json.dumps(policy) if policy is not None else "rubbish"},
        }
        found: QueueRecord = decode(json.dumps(value).encode())
        return found.settings

    arns = ["arn:aws:sqs:us-east-1:000000000000:orders"]
    assert record({"redrivePermission": "denyAll"}).dead_letters_from == ()
    assert record({"redrivePermission": "byQueue", "sourceQueueArns": arns}).dead_letters_from == ("orders",)
    assert record({"redrivePermission": "allowAll"}).dead_letters_from is None
    assert record(None).dead_letters_from is None


def test_a_declared_queue_obeys_too(tmp_path: Path) -> None:
    async def test(lab: Lab) -> None:
        await lab.put("payroll", dead_letters_from=[])
        with pytest.raises(QueueSettingsError, match="takes no dead letters"):
            await lab.http.app.catalog.declare({"evil": {"dead_letter_queue": "payroll"}})

    attack(tmp_path, test)
