"""Sends the flights, and processes them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from app.demo.flights import flights, queue_names
from app.demo.ledger import Ledger, count
from app.kafka.connection import kafka_client_args, unreachable
from app.logs import silenced
from app.settings import Settings
from marq.client import AsyncService
from marq.client.pace import Pace

#: Headers by which a message of a run is known.
H_RUN, H_NUMBER = "demo-run", "demo-number"
#: Messages in one batch of the sender, and in one receive.
BATCH = 500
#: Batches of the sender in progress.
SENDING = 8
#: Receives of one queue at once.
RECEIVERS = 2
#: Seconds that a receive waits for messages.
WAIT_S = 2.0


async def send(ledger: Ledger, settings: Settings, stopped: Callable[[], bool]) -> None:
    """Send what the ledger does not know as sent, straight into the queue topic, spread over its partitions."""
    producer = AIOKafkaProducer(
        enable_idempotence=True, acks="all", max_batch_size=512 * 1024, **kafka_client_args(settings)
    )
    try:
        with silenced("aiokafka"):
            await producer.start()
    except KafkaError as error:
        await producer.stop()
        raise await unreachable(settings, error) from None
    under_way: set[asyncio.Task[None]] = set()
    try:
        partitions = sorted(await producer.partitions_for(settings.queue_topic))
        turn = 0
        run = ledger.run.encode()
        batch = producer.create_batch()
        numbers: list[int] = []

        async def confirm(future: Any, numbers: list[int]) -> None:
            await future
            for number in numbers:
                ledger.sent[number] = 1

        async def ship() -> None:
            nonlocal batch, numbers, turn
            if numbers:
                batch.close()
                future = await producer.send_batch(
                    batch, settings.queue_topic, partition=partitions[turn % len(partitions)]
                )
                turn += 1
                under_way.add(asyncio.create_task(confirm(future, numbers)))
                batch, numbers = producer.create_batch(), []
            while len(under_way) >= SENDING:
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                under_way.difference_update(done)
                for task in done:
                    task.result()

        for number, (queue, line) in enumerate(flights(ledger.total)):
            if number % BATCH == 0:
                await asyncio.sleep(0)  # leases of what was received run on
            if ledger.sent[number]:
                continue
            headers = [(H_RUN, run), (H_NUMBER, str(number).encode())]
            while batch.append(key=queue, value=line, timestamp=None, headers=headers) is None:
                await ship()
            numbers.append(number)
            if len(numbers) >= BATCH:
                await ship()
            if stopped():
                break
        await ship()
        if under_way:
            await asyncio.gather(*under_way)
    finally:
        await producer.stop()


async def process(ledger: Ledger, url: str, drop: float, timeout_s: float, stopped: Callable[[], bool]) -> None:
    """Receive from every queue until all is acknowledged; of what comes, drop a part at random."""
    chance = random.Random()
    # all receivers together: the worker that is late is late for all of them
    pace = Pace(timeout_s, BATCH)

    async def receive(service: AsyncService, name: str) -> None:
        queue = service.queue(name)
        while ledger.missing and not stopped():
            messages = await queue.receive_many(pace.limit, timeout=WAIT_S, visibility_timeout=timeout_s)
            began = time.monotonic()
            kept, numbers, foreign = [], [], []
            for message in messages:
                if message.headers.get(H_RUN) != ledger.run.encode():
                    foreign.append(message)  # of an earlier demo
                    continue
                number = int(message.headers[H_NUMBER])
                if message.attempt > 1:
                    count(ledger.redelivered, number)
                if chance.random() < drop:
                    continue
                json.loads(message.payload)
                kept.append(message)
                numbers.append(number)
            if foreign:
                await queue.ack_many(foreign)
            if kept:
                failed = await queue.ack_many(kept)
                pace.took(len(messages), time.monotonic() - began)
                done = [number for number, error in zip(numbers, failed, strict=True) if error is None]
                for number in done:
                    count(ledger.acked, number)

    async with AsyncService(url) as service, asyncio.TaskGroup() as tasks:
        for name in queue_names():
            for _ in range(RECEIVERS):
                tasks.create_task(receive(service, name))
