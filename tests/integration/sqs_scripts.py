"""Random, seeded sequences of boto3 calls against two servers, side by side, and comparisons of what they answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from tests.integration.moto_differences import DIFFERENCES, PREFIX
from tests.integration.sqs_client import Queue
from tests.kafka import unique

ACCOUNT = "123456789012"  # moto's


class Outcome(NamedTuple):
    """Of one call: `ok` or the code of the error, and what was answered."""

    code: str
    answer: Any


class Side:
    """One of the two, with its own receipt handles."""

    def __init__(self, sqs: Any) -> None:
        self.sqs = sqs
        self.urls: dict[str, str] = {}
        self.handles: dict[tuple[str, str], str] = {}  # queue, body

    def call(self, action: str, **values: Any) -> Outcome:
        try:
            answer = getattr(self.sqs, action)(**values)
        except ClientError as error:
            return Outcome(error.response["Error"]["Code"], None)
        answer.pop("ResponseMetadata")
        return Outcome("ok", answer)


class Script:
    """Does the same to both and compares."""

    def __init__(self, seed: int, marq: Side, moto: Side) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.sides = (marq, moto)
        self.queues: list[str] = []
        self.given_back: set[tuple[str, str]] = set()
        self.deleted: set[tuple[str, str]] = set()
        self.serial = 0
        self.log: list[str] = []
        self.differed: set[str] = set()
        #: For requests that moto refuses but does half: it keeps such messages and policies, and fails later.
        self.scrap = self.make_apart("scrap")
        #: For permissions, which moto forgets when an attribute is set.
        self.shared = self.make_apart("shared")

    def make_apart(self, what: str) -> str:
        """A queue that other steps don't take."""
        name = unique(f"{what}{self.seed}")
        for side in self.sides:
            side.urls[name] = side.sqs.create_queue(QueueName=name)["QueueUrl"]
        return name

    # -- the two sides

    def both(
        self, action: str, what: str = "", plain: Callable[[Any], Any] = lambda a: a, **values: Any
    ) -> tuple[Outcome, Outcome]:
        """Call both; `values` that can be called are made for each side. `what` is a key of `DIFFERENCES`."""
        outcomes = [
            side.call(action, **{k: v(side) if callable(v) else v for k, v in values.items()}) for side in self.sides
        ]
        told = {k: v(self.sides[0])[-30:] if callable(v) else v for k, v in values.items()}
        self.log.append(f"{action} {what} {told} -> {outcomes[0].code}, {outcomes[1].code}"[:300])
        marq, moto = outcomes
        if what:
            self.differed.add(what)
            assert (marq.code, moto.code) == DIFFERENCES[what][:2], self.report()
        else:
            assert marq.code == moto.code, self.report()
            if marq.code == "ok":
                assert plain(marq.answer) == plain(moto.answer), self.report()
        return marq, moto

    def report(self) -> str:
        return f"seed {self.seed}, after\n" + "\n".join(self.log[-25:])

    def url(self, queue: str) -> Callable[[Side], str]:
        return lambda side: side.urls[queue]

    def handle(self, queue: str, body: str) -> Callable[[Side], str]:
        return lambda side: side.handles[queue, body]

    def pick(self, *what: Any) -> Any:
        return self.random.choice(what)

    # -- steps

    def create(self) -> None:
        name = unique(f"d{self.seed}")
        attributes = self.pick({}, {"VisibilityTimeout": "600"}, {"DelaySeconds": "0", "MaximumMessageSize": "2048"})
        self.both("create_queue", QueueName=name, Attributes=attributes, plain=_name_of)
        for side in self.sides:
            side.urls[name] = side.sqs.get_queue_url(QueueName=name)["QueueUrl"]
        self.queues.append(name)
        self.both("set_queue_attributes", QueueUrl=self.url(name), Attributes={"VisibilityTimeout": "600"})

    def create_again(self) -> None:
        queue = self.pick(*self.queues)
        attributes = self.pick({}, {"VisibilityTimeout": "600"}, {"VisibilityTimeout": "601"})
        self.both("create_queue", QueueName=queue, Attributes=attributes, plain=_name_of)

    def create_wrong(self) -> None:
        attributes = self.pick({"MaximumMessageSize": "1023"}, {"MaximumMessageSize": "1048577"})
        self.both("create_queue", QueueName=unique("x"), Attributes=attributes)
        self.both("create_queue", QueueName=self.pick("a b", "é", "x" * 81, "a.b"))

    def find(self) -> None:
        queue = self.pick(*self.queues, unique("nothing"))
        self.both("get_queue_url", QueueName=queue, plain=_name_of)
        self.both("list_queues", QueueNamePrefix=queue, plain=lambda a: [_name(u) for u in a.get("QueueUrls", [])])

    def send(self) -> None:
        queue = self.pick(*self.queues)
        self.serial += 1
        body = f"{self.serial} " + self.pick("", "é\r\n\t", "<&>'\"", "x" * 500)
        values: dict[str, Any] = {}
        if self.random.random() < 0.5:
            values["MessageAttributes"] = self.attributes()
        if self.random.random() < 0.1:
            values["DelaySeconds"] = self.pick(900, 0)
        self.both("send_message", QueueUrl=self.url(queue), MessageBody=body, plain=_without("MessageId"), **values)

    def attributes(self) -> dict[str, Any]:
        kinds = (
            {"DataType": "String", "StringValue": "tëxt"},
            {"DataType": "Number", "StringValue": "-3.14"},
            {"DataType": "Binary", "BinaryValue": b"\x00\x01"},
            {"DataType": "String.custom", "StringValue": "{}"},
            {"DataType": "Binary.gif", "BinaryValue": b"GIF"},
        )
        return {f"a.{i}-{self.random.randint(0, 9)}": self.pick(*kinds) for i in range(self.random.randint(1, 4))}

    def send_wrong(self) -> None:
        queue = self.url(self.pick(*self.queues))
        text = {"DataType": "String", "StringValue": "x"}
        self.both("send_message", QueueUrl=queue, MessageBody="x", DelaySeconds=901)
        self.both("send_message", QueueUrl=queue, MessageBody="x" * (1024 * 1024 + 1))
        queue = self.url(self.scrap)
        for name, value in (
            ("x", {"DataType": "Text", "StringValue": "x"}),
            ("x", {"DataType": "", "StringValue": "x"}),
            ("a b", text),
        ):
            self.both("send_message", QueueUrl=queue, MessageBody="x", MessageAttributes={name: value})

    def send_batch(self) -> None:
        queue = self.pick(*self.queues)
        entries = []
        for i in range(self.random.randint(1, 10)):
            self.serial += 1
            entries.append({"Id": f"e{i}", "MessageBody": f"{self.serial} batch"})
        if self.random.random() < 0.3:
            entries[0]["DelaySeconds"] = 901  # type: ignore[assignment]
        self.both("send_message_batch", QueueUrl=self.url(queue), Entries=entries, plain=_batch)
        wrong = self.pick(
            [],
            [{"Id": f"{i}", "MessageBody": "x"} for i in range(11)],
            [{"Id": "a", "MessageBody": "x"}, {"Id": "a", "MessageBody": "x"}],
            [{"Id": "a b", "MessageBody": "x"}],
            [{"Id": "a", "MessageBody": "x" * 1_048_577}],
        )
        marq, moto = (side.call("send_message_batch", QueueUrl=side.urls[queue], Entries=wrong) for side in self.sides)
        assert marq.code.removeprefix(PREFIX) == moto.code.removeprefix(PREFIX), (wrong, marq, moto, self.report())

    def receive(self) -> None:
        """All that is visible."""
        queue = self.pick(*self.queues)
        marq, moto = self.sides
        expected = self.drained(moto, queue, 0)
        found = self.drained(marq, queue, len(expected))
        self.log.append(f"receive of {queue} -> {len(found)}, {len(expected)}")
        assert found == expected, f"{queue}: {found}\n{expected}\n{self.report()}"
        self.given_back -= {(queue, body) for body in found}

    def drained(self, side: Side, queue: str, count: int) -> dict[str, Any]:
        """Messages by body: it is waited for `count` of them, and then looked if there are more."""
        messages: dict[str, Any] = {}
        while got := side.sqs.receive_message(
            QueueUrl=side.urls[queue],
            MaxNumberOfMessages=10,
            WaitTimeSeconds=5 if len(messages) < count else 0,
            AttributeNames=["ApproximateReceiveCount", "SentTimestamp"],
            MessageAttributeNames=["All"],
        ).get("Messages"):
            for message in got:
                assert message["Body"] not in messages, self.report()
                messages[message["Body"]] = message
                side.handles[queue, message["Body"]] = message.pop("ReceiptHandle")
                assert int(message["Attributes"].pop("SentTimestamp")) > 0
                message.pop("MessageId")
        return messages

    def receive_wrong(self) -> None:
        queue = self.url(self.pick(*self.queues))
        for values in ({"MaxNumberOfMessages": 11}, {"MaxNumberOfMessages": 0}, {"WaitTimeSeconds": 21}):
            self.both("receive_message", QueueUrl=queue, **values)  # type: ignore[arg-type]
        self.both("receive_message", QueueUrl=queue, VisibilityTimeout=43_201)
        self.both("receive_message", QueueUrl=lambda side: next(iter(side.urls.values())) + "-not-there")

    def in_work(self) -> tuple[str, str] | None:
        known = sorted(k for k in self.sides[0].handles if k not in self.deleted and k not in self.given_back)
        return self.pick(*known) if known else None

    def delete(self) -> None:
        place = self.in_work()
        if place is not None:
            for _ in range(self.random.randint(1, 2)):
                self.both("delete_message", QueueUrl=self.url(place[0]), ReceiptHandle=self.handle(*place))
            self.deleted.add(place)
        self.both("delete_message", QueueUrl=self.url(self.queues[0]), ReceiptHandle="nonsense")

    def delete_batch(self) -> None:
        place = self.in_work()
        if place is not None:

            def entries(side: Side) -> list[Any]:
                return [
                    {"Id": "good", "ReceiptHandle": side.handles[place]},
                    {"Id": "bad", "ReceiptHandle": "nonsense"},
                ]

            self.both("delete_message_batch", QueueUrl=self.url(place[0]), Entries=entries, plain=_batch)
            self.deleted.add(place)

    def change(self) -> None:
        place = self.in_work()
        if place is not None:
            queue, handle = self.url(place[0]), self.handle(*place)
            seconds = self.pick(0, 600, 43_201)
            self.both("change_message_visibility", QueueUrl=queue, ReceiptHandle=handle, VisibilityTimeout=seconds)
            if seconds == 0:
                self.given_back.add(place)
        queue = self.url(self.queues[0])
        self.both("change_message_visibility", QueueUrl=queue, ReceiptHandle="nonsense", VisibilityTimeout=1)

    def get_attributes(self) -> None:
        queue = self.pick(*self.queues)
        names = self.pick(
            ["VisibilityTimeout", "DelaySeconds", "QueueArn"],
            ["MessageRetentionPeriod", "MaximumMessageSize", "ReceiveMessageWaitTimeSeconds", "RedrivePolicy"],
            ["Policy", "KmsMasterKeyId"],
            ["Nothing"],
        )
        self.both("get_queue_attributes", QueueUrl=self.url(queue), AttributeNames=names, plain=_attributes)

    def set_attributes(self) -> None:
        queue = self.pick(*self.queues)
        others = [q for q in self.queues if q != queue]
        attributes = self.pick(
            {"MessageRetentionPeriod": "86400"},
            {"ReceiveMessageWaitTimeSeconds": "0"},
            {"KmsMasterKeyId": "alias/k"},
            {"MaximumMessageSize": "4096"},
        )
        self.both("set_queue_attributes", QueueUrl=self.url(queue), Attributes=attributes)
        if others:
            arn = f"arn:aws:sqs:eu-central-1:{ACCOUNT}:{others[0]}"
            policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 100})
            self.both("set_queue_attributes", QueueUrl=self.url(queue), Attributes={"RedrivePolicy": policy})
            self.both(
                "list_dead_letter_source_queues",
                QueueUrl=self.url(others[0]),
                plain=lambda a: sorted(_name(u) for u in a["queueUrls"]),
            )
        wrong = self.pick('{"maxReceiveCount": 1}', '{"deadLetterTargetArn": "arn:aws:sqs:x:y:z"}')
        self.both("set_queue_attributes", QueueUrl=self.url(self.scrap), Attributes={"RedrivePolicy": wrong})

    def tags(self) -> None:
        queue = self.url(self.pick(*self.queues))
        self.both("tag_queue", QueueUrl=queue, Tags={self.pick("a", "b", "c"): self.pick("1", "2", "")})
        self.both("untag_queue", QueueUrl=queue, TagKeys=[self.pick("a", "b", "x")])
        self.both("list_queue_tags", QueueUrl=queue, plain=lambda a: a.get("Tags", {}))

    def permissions(self) -> None:
        queue, label = self.url(self.shared), self.pick("one", "two")
        actions = self.pick(["SendMessage"], ["*"], ["CreateQueue"], ["SendMessage"] * 8)
        self.both("add_permission", QueueUrl=queue, Label=label, AWSAccountIds=["1" * 12], Actions=actions)
        self.both("get_queue_attributes", QueueUrl=queue, AttributeNames=["Policy"], plain=_attributes)
        self.both("remove_permission", QueueUrl=queue, Label=self.pick("one", "two"))

    def counts(self) -> None:
        """Both come to the same counts."""
        queue = self.pick(*self.queues)
        marq, moto = (Queue(side.sqs, side.urls[queue]) for side in self.sides)
        names = [f"ApproximateNumberOfMessages{which}" for which in ("", "NotVisible", "Delayed")]
        found = moto.attributes(*names)
        visible, in_flight, delayed = (int(found[name]) for name in names)
        self.log.append(f"counts of {queue} -> {found}")
        marq.wait_for(visible=visible, in_flight=in_flight, delayed=delayed)

    def delete_queue(self) -> None:
        if len(self.queues) < 3:
            return
        queue = self.queues.pop(self.random.randrange(len(self.queues)))
        self.both("delete_queue", QueueUrl=self.url(queue))
        self.both("send_message", QueueUrl=self.url(queue), MessageBody="x")
        self.both("get_queue_attributes", QueueUrl=self.url(queue), AttributeNames=["All"])
        self.both("purge_queue", QueueUrl=self.url(queue))
        for side in self.sides:
            side.handles = {k: v for k, v in side.handles.items() if k[0] != queue}

    def run(self, steps: int) -> None:
        choices = [
            *(self.send,) * 6,
            *(self.receive,) * 3,
            *(self.send_batch, self.delete, self.delete_batch, self.change, self.find) * 2,
            *(self.create_again, self.create_wrong, self.send_wrong, self.receive_wrong, self.get_attributes),
            *(self.set_attributes, self.tags, self.permissions, self.counts, self.delete_queue),
        ]
        self.create()
        self.create()
        for _ in range(steps):
            if len(self.queues) < 3 and self.random.random() < 0.1:
                self.create()
            self.random.choice(choices)()


class FifoScript(Script):
    """The same on FIFO queues: what is in which order, and what counts as the same."""

    def create_fifo(self, **attributes: str) -> str:
        name = unique(f"d{self.seed}") + ".fifo"
        given = {"FifoQueue": "true", "VisibilityTimeout": "600", **attributes}
        self.both("create_queue", QueueName=name, Attributes=given, plain=_name_of)
        for side in self.sides:
            side.urls[name] = side.sqs.get_queue_url(QueueName=name)["QueueUrl"]
        return name

    def send_some(self, queue: str, ids: bool) -> None:
        for _ in range(self.random.randint(5, 25)):
            values: dict[str, Any] = {"MessageBody": f"{self.random.randint(0, 30)}"}
            if ids or self.random.random() < 0.2:
                values["MessageDeduplicationId"] = f"id-{self.random.randint(0, 30)}"
            self.both(
                "send_message",
                QueueUrl=self.url(queue),
                MessageGroupId=self.pick("a", "b", "c"),
                plain=_without("MessageId", "SequenceNumber"),
                **values,
            )

    def send_wrong(self, queue: str = "", ids: bool = False) -> None:
        self.both("send_message", QueueUrl=self.url(queue), MessageBody="x", MessageDeduplicationId="x")
        if ids:
            self.both("send_message", QueueUrl=self.url(queue), MessageBody="x", MessageGroupId="x")

    def taken(self, side: Side, queue: str) -> dict[str, list[tuple[str, str]]]:
        """Receive everything, and delete it or give it back. Returns body and deduplication id of each, by group."""
        found: dict[str, list[tuple[str, str]]] = {}
        source, chance = Queue(side.sqs, side.urls[queue]), random.Random(self.seed)
        while messages := source.receive(10, 1):
            if chance.random() < 0.3:
                for message in reversed(messages):
                    source.change(message, 0)
                continue
            for message in messages:
                system = message["Attributes"]
                one = (message["Body"], system["MessageDeduplicationId"])
                found.setdefault(system["MessageGroupId"], []).append(one)
            source.delete(*messages)
        return found

    def run(self, steps: int) -> None:
        for _ in range(steps):
            ids = self.random.random() < 0.5
            queue = self.create_fifo(ContentBasedDeduplication="false" if ids else "true")
            self.send_some(queue, ids)
            self.send_wrong(queue, ids)
            marq, moto = (self.taken(side, queue) for side in self.sides)
            assert marq == moto, f"{marq}\n{moto}\n{self.report()}"


def _name(url: str) -> str:
    return url.rpartition("/")[2]


def _name_of(answer: Any) -> str:
    return _name(answer["QueueUrl"])


def _without(*names: str) -> Callable[[Any], Any]:
    return lambda answer: {k: v for k, v in answer.items() if k not in names}


def _batch(answer: Any) -> Any:
    good = [_without("MessageId")(one) for one in answer.get("Successful", [])]
    return good, [(one["Id"], one["Code"], one["SenderFault"]) for one in answer.get("Failed", [])]


def _attributes(answer: Any) -> Any:
    found = dict(answer.get("Attributes", {}))
    for name in ("Policy", "RedrivePolicy"):
        if name in found:
            found[name] = json.loads(found[name])
    if "Policy" in found:
        del found["Policy"]["Version"]  # AWS: 2008-10-17, moto: 2012-10-17
    return found
