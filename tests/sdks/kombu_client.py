"""kombu's SimpleQueue. Arguments: see programs.py."""

from __future__ import annotations

import json
import logging
import sys
from queue import Empty
from typing import Any
from urllib.parse import urlsplit

from kombu import Connection  # type: ignore[attr-defined]

endpoint, url, scenario, argument = sys.argv[1:]
count = int(argument)
name = url.rpartition("/")[2]
logging.basicConfig(level=logging.WARNING)


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def got(message: Any) -> None:
    about = message.delivery_info["sqs_message"]
    system = about["Attributes"]
    say(
        got=message.payload,
        id=about["MessageId"],
        receives=system["ApproximateReceiveCount"],
        group=system.get("MessageGroupId"),
        n=message.headers["n"],
    )


options = {
    "region": "us-east-1",
    "is_secure": False,
    "wait_time_seconds": 5,
    "polling_interval": 0,
    "fetch_message_attributes": ["MessageGroupId"],
}
with Connection(f"sqs://x:x@{urlsplit(endpoint).netloc}//", transport_options=options) as connection:
    queue = connection.SimpleQueue(name)
    if scenario == "send":
        for i in range(count):
            fifo = {"MessageGroupId": f"g{i % 7}", "MessageDeduplicationId": f"d{i}"} if name.endswith(".fifo") else {}
            queue.put(f"m-{i}", headers={"n": f"{i}"}, **fifo)
            say(sent=f"m-{i}", id=None)
    elif scenario == "work":
        say(ready=True)
        while count > 0:
            try:
                message = queue.get(timeout=5)
            except Empty:
                continue
            got(message)
            message.ack()
            say(deleted=message.delivery_info["sqs_message"]["MessageId"])
            count -= 1
    elif scenario == "fail":
        for _ in range(count):
            message = queue.get(timeout=30)
            got(message)
            message.reject()  # only this: the queue has a RedrivePolicy
        try:
            queue.get(timeout=20)
            say(left=1)
        except Empty:
            say(left=0)
