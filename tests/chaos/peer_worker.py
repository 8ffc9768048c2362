"""A consumer of another system, as a process.

    python -m tests.chaos.peer_worker share|rabbitmq ADDRESSES QUEUE FOLDER

It writes down each message when it comes and when it is finished, in the manner of `tests.integration.witness`, then
acknowledges it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

#: Records of a poll, and messages that RabbitMQ sends ahead of acknowledgements.
AHEAD = 100
#: Seconds without a word from the other side until a connection of RabbitMQ is dead; as the session of marq's workers.
HEARTBEAT_S = 6


class Witness:
    """The file of this process."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(Path(folder) / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.stops = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self.stops = True

    def work(self, partition: int, offset: int, attempt: int, body: bytes) -> None:
        """Nothing but the two lines."""
        for event in ("begin", "end"):
            row = ["", partition, offset, attempt, json.loads(body)["id"], time.time()]
            os.write(self._file, (json.dumps([event, [row]]) + "\n").encode())


def share(addresses: str, queue: str, witness: Witness) -> None:
    """A member of a share group (KIP-932) that acknowledges each record, and commits each poll before the next."""
    from confluent_kafka import KafkaException, ShareConsumer

    config = {"bootstrap.servers": addresses, "group.id": queue, "share.acknowledgement.mode": "explicit"}
    consumer = ShareConsumer({**config, "max.poll.records": AHEAD})
    consumer.subscribe([queue])
    while not witness.stops:
        try:
            for message in consumer.poll(0.2):
                if message.error() is None:
                    partition, offset = message.partition(), message.offset()
                    assert partition is not None and offset is not None
                    witness.work(partition, offset, message.delivery_count() or 1, message.value() or b"")
                    consumer.acknowledge(message)
            consumer.commit_sync(10)
        except KafkaException as error:
            print(error, file=sys.stderr, flush=True)
            time.sleep(0.2)
    consumer.close()


def rabbitmq(addresses: str, queue: str, witness: Witness) -> None:
    """A consumer that acknowledges each message, at one node after the other."""
    import pika
    from pika.exceptions import AMQPError

    nodes = addresses.split(",")
    while not witness.stops:
        host, _, port = random.choice(nodes).partition(":")
        try:
            with pika.BlockingConnection(
                pika.ConnectionParameters(host, int(port), heartbeat=HEARTBEAT_S, socket_timeout=5)
            ) as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=AHEAD)
                for method, properties, body in channel.consume(queue, inactivity_timeout=0.2):
                    if witness.stops:
                        break
                    if method is not None:
                        attempt = 1 + (properties.headers or {}).get("x-delivery-count", 0)
                        witness.work(0, int(json.loads(body)["id"].rpartition(":")[2]), attempt, body)
                        channel.basic_ack(method.delivery_tag)
                channel.cancel()
        except (AMQPError, OSError) as error:
            print(repr(error), file=sys.stderr, flush=True)
            time.sleep(0.2)


if __name__ == "__main__":
    {"share": share, "rabbitmq": rabbitmq}[sys.argv[1]](sys.argv[2], sys.argv[3], Witness(sys.argv[4]))
