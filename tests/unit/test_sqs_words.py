"""What SQS says, word for word, where no queue is needed to say it: sizes, names, ids, errors, answers."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from itertools import pairwise
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from app.engine.queue_records import Draft
from gateway.sqs import query_protocol as query
from gateway.sqs.attributes import POLICY_MAX, Attributes, Queues
from gateway.sqs.errors import KINDS, SqsError, bad_value
from gateway.sqs.limits import STRICT
from gateway.sqs.messages import (
    TRACE_HEADER_MAX,
    Attribute,
    MessageIds,
    attributes_of,
    body_of,
    select,
    size_of,
    text_of,
    trace_in,
)
from gateway.sqs.model import actions, identity_action
from gateway.sqs.urls import Place, queue_of

PLACE = Place("http://localhost", "1" * 12, "eu-central-1")


class Value:
    """A message attribute, as the service model has it."""

    def __init__(self, kind: str, text: str | None = None, data: bytes | None = None) -> None:
        self.DataType, self.StringValue, self.BinaryValue = kind, text, data
        self.StringListValues = self.BinaryListValues = None


def error_of(call: Any, *args: Any) -> tuple[str, str]:
    with pytest.raises(SqsError) as caught:
        call(*args)
    return caught.value.kind.code, str(caught.value)


# -- sizes and names


def test_a_message_is_as_large_as_its_body_and_names_types_and_values_of_its_attributes() -> None:
    attributes = [Attribute("näme", "String.custom", b"12345"), Attribute("b", "Binary", b"\x00\xff")]

    assert size_of(b"body", attributes) == 4 + (5 + 13 + 5) + (1 + 6 + 2)
    assert size_of(b"body", ()) == 4


def test_a_body_has_the_characters_that_aws_permits_and_no_others() -> None:
    permitted = {0x9, 0xA, 0xD, *range(0x20, 0xD800), *range(0xE000, 0xFFFE), *range(0x10000, 0x110000)}
    for code in (*range(0x300), *range(0xD7F0, 0xE010), *range(0xFFF0, 0x10010), 0x10FFFF):
        for text in (chr(code), f"some text {chr(code)}", f"ä{chr(code)}"):
            if code in permitted:
                assert body_of(text) == text.encode(), hex(code)
                assert text_of(text.encode()) == (text, False), hex(code)
            else:
                assert error_of(body_of, text)[0] == "InvalidMessageContents", hex(code)
                payload = text.encode(errors="surrogatepass")
                assert text_of(payload) == (b64encode(payload).decode(), True), hex(code)


@pytest.mark.parametrize("name", ["a", "ø", "Łódź", "a.b-c_d", "x" * 256])
def test_letters_with_accents_are_letters_in_names_of_attributes(name: str) -> None:
    assert attributes_of({name: Value("String", "x")}) == [Attribute(name, "String", b"x")]


@pytest.mark.parametrize("name", ["", "a b", "×", "日本", "x" * 257, "a..b", ".a", "AWS.a", "amazon.a"])
def test_other_names_are_not(name: str) -> None:
    assert error_of(attributes_of, {name: Value("String", "x")})[0] == "InvalidParameterValue"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Value("String", ""), "Message (user) attribute 'X' must contain a non-empty value of type 'String'."),
        (Value("Number"), "Message (user) attribute 'X' must contain a non-empty value of type 'Number'."),
        (Value("Binary", data=b""), "Message (user) attribute 'X' must contain a non-empty value of type 'Binary'."),
        (
            Value("String", "a\x01"),
            "Invalid characters found. Valid unicode characters are #x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to "
            "#xFFFD | #x10000 to #x10FFFF",
        ),
    ],
)
def test_values_that_attributes_can_not_have_get_the_words_of_aws(value: Value, message: str) -> None:
    assert error_of(attributes_of, {"X": value}) == ("InvalidParameterValue", message)


@pytest.mark.parametrize("names", [["All"], ["*"], [".*"], ["nothing", "*"]])
def test_a_star_asks_for_all_attributes(names: list[str]) -> None:
    attributes = [Attribute("a", "String", b"1"), Attribute("b.c", "String", b"2")]

    assert select(attributes, names) == attributes
    assert select(attributes, ["b.*"]) == attributes[1:]


def test_a_header_gives_a_trace_unless_it_can_be_none() -> None:
    assert trace_in("Root=1-5759e988-bd862e3fe1be46a994272793") == b"Root=1-5759e988-bd862e3fe1be46a994272793"
    assert trace_in("x" * TRACE_HEADER_MAX) is not None
    assert [trace_in(text) for text in ("a\x01", "\udcff", "x" * (TRACE_HEADER_MAX + 1))] == [None, None, None]


# -- ids


@pytest.fixture
def ids() -> MessageIds:
    return MessageIds(lambda: b"secret")


PLACES = [(0, 0), (0, 1), (1, 0), (7, 123_456_789), (65_535, (1 << 60) - 1)]


@pytest.mark.parametrize("place", PLACES)
def test_an_id_is_a_random_uuid_that_tells_its_place_to_who_knows_the_secret(
    ids: MessageIds, place: tuple[int, int]
) -> None:
    found = ids.of(*place)

    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", found)
    assert MessageIds(lambda: b"secret").of(*place) == found
    assert ids.place_of(found) == place
    assert MessageIds(lambda: b"another").place_of(found) is None


def test_ids_have_nothing_in_common(ids: MessageIds) -> None:
    found = [ids.of(number, offset).replace("-", "") for number in range(4) for offset in range(500)]

    assert len(set(found)) == len(found)
    assert len({one[:8] for one in found}) > 1_990
    assert not any("0000000" in one for one in found)
    # each digit of the first ones is about as frequent as the others
    assert all(80 < sum(one[0] == digit for one in found) < 180 for digit in "0123456789abcdef")


@pytest.mark.parametrize("text", ["", "nonsense", "0" * 36, "00000000-0000-4000-8000-000000000000"])
def test_what_is_no_id_of_ours_has_no_place(ids: MessageIds, text: str) -> None:
    assert ids.place_of(text) is None


def test_an_id_in_other_letters_is_none_of_ours(ids: MessageIds) -> None:
    assert ids.place_of(ids.of(0, 1)[:-1] + "g") is None
    changed = f"{int(ids.of(0, 1)[-1], 16) ^ 1:x}"
    assert ids.place_of(ids.of(0, 1)[:-1] + changed) is None


def test_sequence_numbers_have_20_digits_and_grow_with_the_offset(ids: MessageIds) -> None:
    offsets = [0, 1, 2, 1000, 10**12, (1 << 54) - 1]
    for partition in (0, 1, 500):
        numbers = [ids.sequence_number(partition, offset) for offset in offsets]
        assert {len(number) for number in numbers} == {20}
        assert all(int(a) < int(b) for a, b in pairwise(numbers))
    assert ids.sequence_number(0, 0) != ids.sequence_number(1, 0)
    assert ids.sequence_number(0, 5) == MessageIds(lambda: b"secret").sequence_number(0, 5)


# -- attributes of queues


@pytest.fixture
def attributes() -> Attributes:
    return Attributes(STRICT, Queues(lambda queue: True, lambda queue: None))


def made(attributes: Attributes, name: str = "q", **given: str) -> Draft:
    return attributes.new(name, given, {})


@pytest.mark.parametrize("true", ["true", "True"])
def test_booleans_are_taken_as_python_writes_them(attributes: Attributes, true: str) -> None:
    queue = made(attributes, "q.fifo", FifoQueue=true, ContentBasedDeduplication=true)
    assert queue.settings.fifo and queue.settings.content_deduplication
    changed = attributes.changed("q.fifo", queue, {"FifoQueue": true, "ContentBasedDeduplication": true})
    assert changed == queue
    false = {"true": "false", "True": "False"}[true]
    assert not attributes.changed("q.fifo", queue, {"ContentBasedDeduplication": false}).settings.content_deduplication
    standard = made(attributes, SqsManagedSseEnabled=false)
    assert attributes.told("q", None, standard.settings, PLACE)["SqsManagedSseEnabled"] == "true"
    assert standard.attributes == {"sqs.SqsManagedSseEnabled": "false"}
    assert error_of(lambda: made(attributes, FifoQueue=false)) == (
        "InvalidAttributeName",
        "Unknown Attribute FifoQueue.",
    )
    assert error_of(lambda: made(attributes, "q.fifo", FifoQueue="TRUE"))[0] == "InvalidAttributeValue"


@pytest.mark.parametrize("value", ["true", "false", "True", "nonsense"])
def test_a_standard_queue_knows_no_attribute_fifo_queue(attributes: Attributes, value: str) -> None:
    assert error_of(attributes.changed, "q", made(attributes), {"FifoQueue": value}) == (
        "InvalidAttributeName",
        "Unknown Attribute FifoQueue.",
    )


@pytest.mark.parametrize("name", ["ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit"])
def test_attributes_of_fifo_queues_need_one(attributes: Attributes, name: str) -> None:
    words = f"You can specify the {name} only when FifoQueue is set to true."
    if name == "ContentBasedDeduplication":
        words = f"Unknown Attribute {name}."
    expected = ("InvalidAttributeName", words)

    assert error_of(lambda: made(attributes, **{name: "queue"})) == expected
    assert error_of(attributes.changed, "q", made(attributes), {name: "queue"}) == expected


@pytest.mark.parametrize("name", ["Policy", "RedriveAllowPolicy"])
def test_a_policy_has_a_largest_size(attributes: Attributes, name: str) -> None:
    def padded(size: int) -> str:
        return '{"Id":"' + "x" * (size - 9) + '"}'

    made(attributes, **{name: padded(POLICY_MAX)})
    assert error_of(lambda: made(attributes, **{name: padded(POLICY_MAX + 1)}))[0] == "InvalidAttributeValue"


def test_the_attribute_that_differs_is_named(attributes: Attributes) -> None:
    queue = made(attributes, VisibilityTimeout="30", DelaySeconds="5")

    def differing(**given: str) -> str | None:
        return attributes.difference("q", queue, given, PLACE)

    assert differing(VisibilityTimeout="30", DelaySeconds="6") == "DelaySeconds"
    assert differing(VisibilityTimeout="30", DelaySeconds="5", Policy="", SqsManagedSseEnabled="true") is None
    policy = json.dumps({"deadLetterTargetArn": PLACE.arn_of("dead"), "maxReceiveCount": 1})
    assert differing(RedrivePolicy=policy) == "RedrivePolicy"
    fifo = made(attributes, "q.fifo", FifoQueue="true")
    given = {"FifoQueue": "true", "DeduplicationScope": "messageGroup"}
    assert attributes.difference("q.fifo", fifo, given, PLACE) == "DeduplicationScope"


def test_no_key_means_no_encryption(attributes: Attributes) -> None:
    encrypted = made(attributes, KmsMasterKeyId="alias/aws/sqs", KmsDataKeyReusePeriodSeconds="60")
    changed = attributes.changed("q", encrypted, {"KmsMasterKeyId": ""})

    assert changed.attributes == {"sqs.SqsManagedSseEnabled": "false"}
    changed = attributes.changed("q", encrypted, {"KmsDataKeyReusePeriodSeconds": "61", "KmsMasterKeyId": ""})
    assert changed.attributes == {"sqs.SqsManagedSseEnabled": "false", "sqs.KmsDataKeyReusePeriodSeconds": "61"}
    changed = attributes.changed("q", changed, {"KmsMasterKeyId": "alias/x"})
    assert changed.attributes == {"sqs.KmsMasterKeyId": "alias/x", "sqs.KmsDataKeyReusePeriodSeconds": "61"}


# -- errors and answers


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("PurgeQueueInProgress", 403),
        ("OverLimit", 403),
        ("ResourceNotFoundException", 404),
        ("ReceiptHandleIsInvalid", 404),
        ("InvalidAddress", 404),
        ("QueueDoesNotExist", 400),
        ("InvalidParameterValue", 400),
    ],
)
def test_both_protocols_have_the_same_status(name: str, status: int) -> None:
    from gateway.sqs import json_protocol

    error = SqsError(name, "x")

    assert json_protocol.problem(error).status == query.problem(error, "id").status == status


def test_only_an_unknown_operation_has_a_status_of_its_own_in_json() -> None:
    assert [name for name, kind in KINDS.items() if kind.json_status is not None] == ["UnknownOperation"]


def test_a_queue_is_unknown_in_the_words_of_the_protocol() -> None:
    error = SqsError("QueueDoesNotExist", "The specified queue does not exist.")

    assert "The specified queue does not exist for this wsdl version." in str(query.problem(error, "id").text)


@pytest.mark.parametrize("url", ["", "http://localhost:9324", "http://localhost:9324/", "http://localhost/1/"])
def test_a_url_without_a_queue_names_none(url: str) -> None:
    assert error_of(queue_of, url)[0] == "AWS.SimpleQueueService.NonExistentQueue"


@pytest.mark.parametrize("name", ["CreateQueue", "ListQueues"])
def test_what_is_no_action_of_a_queue_can_not_be_asked_of_its_url(name: str) -> None:
    body = f"Action={name}&QueueName=q".encode()

    assert query.read("", body, None)[0].name == name
    expected = ("InvalidAction", f"The action {name} is not valid for this endpoint.")
    assert error_of(query.read, "", body, "http://localhost/1/q") == expected


def test_an_empty_result_is_an_empty_element() -> None:
    text = str(query.answer(actions()["ReceiveMessage"], {}, "id").text)

    assert text == (
        '<?xml version="1.0"?><ReceiveMessageResponse xmlns="http://queue.amazonaws.com/doc/2012-11-05/">'
        "<ReceiveMessageResult/><ResponseMetadata><RequestId>id</RequestId></ResponseMetadata></ReceiveMessageResponse>"
    )


def told(name: str, result: dict[str, Any] | None) -> Any:
    body = query.answer(actions()[name], result, "id", as_json=True).body
    assert isinstance(body, bytes)
    return json.loads(body)[f"{name}Response"]


def test_answers_in_json_have_all_members_and_lists_for_maps() -> None:
    metadata = {"ResponseMetadata": {"RequestId": "id"}}

    assert told("DeleteMessage", None) == metadata
    assert told("ReceiveMessage", {}) == {"ReceiveMessageResult": {"messages": None}, **metadata}
    assert told("ListQueues", {"QueueUrls": ["u"]})["ListQueuesResult"] == {"queueUrls": ["u"], "NextToken": None}
    found = told("GetQueueAttributes", {"Attributes": {"DelaySeconds": "0"}})["GetQueueAttributesResult"]
    assert found == {"Attributes": [{"Name": "DelaySeconds", "Value": "0"}]}
    (message,) = told(
        "ReceiveMessage",
        {"Messages": [{"Body": "b", "MessageAttributes": {"x": {"DataType": "Binary", "BinaryValue": b"\xff"}}}]},
    )["ReceiveMessageResult"]["messages"]
    assert (message["Body"], message["Attributes"]) == ("b", None)
    (attribute,) = message["MessageAttributes"]
    assert (attribute["Name"], attribute["Value"]["BinaryValue"]) == ("x", "/w==")


def test_errors_in_json_are_those_of_xml() -> None:
    response = query.problem(SqsError("QueueDoesNotExist", "The specified queue does not exist."), "id", as_json=True)
    assert isinstance(response.body, bytes)
    message = "The specified queue does not exist for this wsdl version."

    assert json.loads(response.body) == {
        "Error": {"Code": "AWS.SimpleQueueService.NonExistentQueue", "Message": message, "Type": "Sender"},
        "RequestId": "id",
    }


@pytest.mark.parametrize("text", ['{"foo": "ba\rr"}', '"{\\"foo\\": \\"ba\\rr\\"}"', "ba&quot;r&quot; <é>"])
def test_the_text_of_an_error_is_read_as_it_was_written(text: str) -> None:
    from botocore.parsers import create_parser

    from gateway.sqs import json_protocol

    error = bad_value(text, "RedrivePolicy", "Invalid value.")
    told, form = json_protocol.problem(error), query.problem(error, "id", as_json=True)
    assert isinstance(told.body, bytes) and isinstance(form.body, bytes)
    # AWS's member is `message`: botocore shows it besides `Error` for the errors that its model has
    assert json.loads(told.body) == {"__type": error.kind.type, "message": str(error)}
    assert json.loads(form.body)["Error"]["Message"] == str(error)
    xml = query.problem(error, "id")
    assert isinstance(xml.body, bytes)
    for protocol, response in (("json", told), ("query", xml)):
        answer = {"status_code": 400, "headers": dict(response.headers), "body": response.body}
        assert create_parser(protocol).parse(answer, None)["Error"]["Message"] == str(error)


def test_json_is_for_those_who_ask_for_it() -> None:
    def wants(**headers: str) -> bool:
        return query.wants_json(make_mocked_request("GET", "/", headers=headers))

    assert wants(Accept="application/json")
    assert wants(Accept="application/json, text/plain, */*")
    assert not wants() and not wants(Accept="*/*") and not wants(Accept="text/html,application/xhtml+xml")


def test_the_identity_is_told_in_the_words_of_its_own_service() -> None:
    action, _ = query.read("", b"Action=GetCallerIdentity&Version=2011-06-15", None)

    assert action is identity_action()
    text = str(query.answer(action, {"UserId": "u", "Account": "a", "Arn": "arn"}, "id").text)
    assert '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">' in text
    assert "<UserId>u</UserId><Account>a</Account><Arn>arn</Arn>" in text
    assert error_of(query.read, "", b"Action=GetCallerIdentity&Version=2012-11-05", None)[0] == "InvalidParameterValue"


# -- forms


@given(st.lists(st.tuples(st.text(), st.text())), st.booleans())
def test_a_form_is_read_as_it_was_written(pairs: list[tuple[str, str]], blank_as_plus: bool) -> None:
    written = urlencode(pairs, quote_via=quote_plus if blank_as_plus else quote).encode()

    assert list(query._pairs(written)) == pairs


@pytest.mark.parametrize("form", [b"a=%", b"a=%4", b"a=%4z", b"a=%%41", b"%=a", b"a=%ff", b"a=\xff"])
def test_a_form_with_an_invalid_escape_is_refused(form: bytes) -> None:
    with pytest.raises(SqsError, match="can't be read"):
        query.read("", b"Action=ListQueues&" + form, None)
    with pytest.raises(SqsError, match="can't be read"):
        query.read(form.decode("latin-1").replace("\xff", "%ff"), b"Action=ListQueues", None)
