"""Where moto is not like AWS, with AWS's word for it."""

from __future__ import annotations

PREFIX = "AWS.SimpleQueueService."

#: What happens -> marq's outcome, moto's outcome, and AWS's word.
DIFFERENCES: dict[str, tuple[str, str, str]] = {
    "a body with a character that is not allowed": (
        "InvalidMessageContents",
        "ok",
        "SendMessage: If a message contains characters outside the allowed set, Amazon SQS rejects the message and "
        "returns an InvalidMessageContents error.",
    ),
    "an empty body": (
        "MissingParameter",
        "ok",
        "SendMessage, MessageBody: The minimum size is one character.",
    ),
    "an attribute without a value": (
        "InvalidParameterValue",
        "ok",
        "Developer guide, message attributes: Name, type, value and the message body must not be empty or null.",
    ),
    "a number that is none": (
        "InvalidParameterValue",
        "ok",
        "Developer guide, message attributes: Number attributes can store positive or negative numerical values.",
    ),
    "an attribute that begins with AWS.": (
        "InvalidParameterValue",
        "ok",
        "ReceiveMessage, MessageAttributeNames: The name must not start with AWS-reserved prefixes such as AWS. or "
        "Amazon.",
    ),
    "eleven attributes": (
        "InvalidParameterValue",
        "ok",
        "Developer guide, message attributes: Each message can have up to 10 attributes.",
    ),
    "a negative delay": (
        "InvalidParameterValue",
        "ok",
        "SendMessage, DelaySeconds: Valid values: 0 to 900.",
    ),
    "the timeout of a message that was given back": (
        PREFIX + "MessageNotInflight",
        "ok",
        "ChangeMessageVisibility, errors: MessageNotInflight. The specified message isn't in flight.",
    ),
    "the timeout of a message that was deleted": (
        "InvalidParameterValue",
        "ReceiptHandleIsInvalid",
        "ChangeMessageVisibility of a deleted message: Value … for parameter ReceiptHandle is invalid. Reason: Message "
        "does not exist or is not available for visibility timeout change.",
    ),
    "a batch without entries": (
        PREFIX + "EmptyBatchRequest",
        "ok",
        "ChangeMessageVisibilityBatch, errors: EmptyBatchRequest. The batch request doesn't contain any entries.",
    ),
    "a group with a space in its name": (
        "InvalidParameterValue",
        "ok",
        "SendMessage, MessageGroupId: Valid values: alphanumeric characters and punctuation.",
    ),
    "a redrive policy whose target does not exist": (
        "InvalidParameterValue",
        PREFIX + "NonExistentQueue",
        "AWS answers: Value … for parameter RedrivePolicy is invalid. Reason: Dead letter target does not exist.",
    ),
    "a redrive policy that is no JSON": (
        "InvalidParameterValue",
        "500",
        "AWS answers: Value … for parameter RedrivePolicy is invalid. Reason: Redrive policy is not a valid JSON map.",
    ),
    "a permission, after another attribute was set": (
        "ok",
        "InvalidParameterValue",
        "SetQueueAttributes sets the attributes that it names. (moto sets the policy to nothing.)",
    ),
    "an attribute out of range": (
        "InvalidAttributeValue",
        "ok",
        "SetQueueAttributes: VisibilityTimeout is an integer from 0 to 43,200 seconds (12 hours); errors: "
        "InvalidAttributeValue. A queue attribute value is invalid.",
    ),
    "an attribute of the queue that nobody knows": (
        "InvalidAttributeName",
        "ok",
        "SetQueueAttributes, errors: InvalidAttributeName. The specified attribute doesn't exist.",
    ),
}
