"""Sends numbers with a plain Kafka producer: the key of a record is its queue, the partition is chosen evenly."""

import asyncio
import sys

from aiokafka import AIOKafkaProducer

from app.kafka.datadir import resolve_bootstrap
from app.settings import load


async def main(count: int) -> None:
    """Send `count` messages to the queue `numbers`."""
    settings = load()
    producer = AIOKafkaProducer(
        bootstrap_servers=resolve_bootstrap(settings), enable_idempotence=True, acks="all", linger_ms=5
    )
    await producer.start()
    try:
        partitions = sorted(await producer.partitions_for(settings.queue_topic))
        sends = [
            await producer.send(
                settings.queue_topic, str(n).encode(), key=b"numbers", partition=partitions[n % len(partitions)]
            )
            for n in range(count)
        ]
        await asyncio.gather(*sends)
    finally:
        await producer.stop()
    print(f"sent {count}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
