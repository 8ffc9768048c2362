"""`python -m bench scale`: what an installation needs, from constants that were measured one by one.

Every constant names the bench that measures it; `docs/scale.md` has the table.
"""

from __future__ import annotations

from typing import NamedTuple

KIB, MIB, GIB = 1024, 1024**2, 1024**3
DAY_S = 86_400


class Cost(NamedTuple):
    """What one thing takes of a worker and of Kafka, on the machine of `bench/README.md`."""

    worker_us: float  #: processor time of a worker for a message sent, received and acknowledged
    batch: int  #: messages a request or a handler's call


#: Microseconds of a worker for a message, by the way it takes: `bench pairs`.
WAYS = {
    "handler": Cost(worker_us=2.8, batch=500),
    "client": Cost(worker_us=11.7, batch=500),
    "json": Cost(worker_us=20.0, batch=100),
    "sqs": Cost(worker_us=87.0, batch=10),
}
#: Of a core: a worker with nothing to do, and what each partition adds. `bench pairs`, `bench partitions`.
IDLE_CORE, IDLE_CORE_A_PARTITION = 0.006, 0.000_009
#: Bytes: a worker that is ready, and what each partition adds. `bench partitions`.
WORKER_BYTES, PARTITION_BYTES = 93 * MIB, 63 * KIB
#: Bytes of a message in flight, and of one that waits in a table. `bench cycle`, `growth`.
IN_FLIGHT_BYTES, PARKED_BYTES = 560, 12
#: Bytes of a queue in each worker. `tests/unit/test_queue_records.py`, `bench queues`.
QUEUE_BYTES = 240
#: Seconds from the start of a worker until it is ready, and for each of its partitions. `bench partitions`.
START_S, START_S_A_PARTITION = 1.8, 0.005
#: Seconds of a worker for each message in flight or parked that it takes over. `bench restore`, `bench takeover`.
TAKE_OVER_S_A_MESSAGE = 0.3e-6
#: Bytes of a start and an end, each with its batch header: once for each batch of each partition. `marq.core.markers`.
START_BYTES, END_BYTES, BATCH_BYTES = 157, 92, 80
#: Bytes that a record adds to its payload.
RECORD_BYTES = 40
#: Calls between workers: seconds between two to each other worker, and microseconds of a core on each side of one.
CALLS_EVERY_S, CALL_US = (1.0, 2.0, 5.0), 300.0


class Installation(NamedTuple):
    """What is asked of marq."""

    workers: int
    partitions: int
    messages_a_second: float
    payload: int = 1_000
    way: str = "json"
    queues: int = 100
    in_flight: int = 100_000
    parked: int = 0
    replicas: int = 3


class Needs(NamedTuple):
    """What it takes. Per worker unless said otherwise."""

    cores: float
    memory_mib: float
    ready_s: float
    take_over_s: float
    kafka_mb_a_second: float  #: written by all together, with replicas
    kafka_gib_a_day: float  #: of the queue topic and the markers, with replicas


def needs(asked: Installation) -> Needs:
    """Predict."""
    way, workers = WAYS[asked.way], asked.workers
    rate, partitions = asked.messages_a_second / workers, asked.partitions / workers
    calls_a_second = sum(2 * (workers - 1) / every_s for every_s in CALLS_EVERY_S)  # made and answered
    cores = IDLE_CORE + partitions * IDLE_CORE_A_PARTITION + rate * way.worker_us / 1e6 + calls_a_second * CALL_US / 1e6
    memory = (
        WORKER_BYTES
        + partitions * PARTITION_BYTES
        + asked.queues * QUEUE_BYTES
        + asked.in_flight / workers * IN_FLIGHT_BYTES
        + asked.parked / workers * PARKED_BYTES
    )
    # a batch of messages comes from several partitions: each has a start and an end of its own
    batches = asked.messages_a_second / max(1, way.batch / max(1, partitions))
    written = (
        asked.messages_a_second * (asked.payload + RECORD_BYTES) + batches * (START_BYTES + END_BYTES + 2 * BATCH_BYTES)
    ) * asked.replicas
    to_take_over = (asked.in_flight + asked.parked) / max(1, workers)
    return Needs(
        cores,
        memory / MIB,
        START_S + partitions * START_S_A_PARTITION,
        to_take_over * TAKE_OVER_S_A_MESSAGE,
        written / 1e6,
        written * DAY_S / GIB,
    )


#: What `docs/scale.md` shows.
ASKED = [
    Installation(1, 8, 1e7 / DAY_S),
    Installation(1, 1_000, 1e8 / DAY_S, queues=10_000),
    Installation(10, 1_000, 1e9 / DAY_S, queues=10_000, in_flight=1_000_000, parked=10_000_000),
    Installation(100, 1_000, 1e9 / DAY_S, way="sqs", queues=100_000, in_flight=1_000_000, parked=10_000_000),
    Installation(100, 10_000, 1e10 / DAY_S, queues=100_000, in_flight=10_000_000, parked=100_000_000),
]


def run() -> None:
    """Print the table."""
    print(
        "| workers | partitions | messages a day | by | cores each | MiB each "
        "| ready, taken over, s | Kafka MB/s, GiB/day |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for asked in ASKED:
        found = needs(asked)
        print(
            f"| {asked.workers} | {asked.partitions:,} | {asked.messages_a_second * DAY_S:.0e} | {asked.way} | "
            f"{found.cores:.2f} | {found.memory_mib:,.0f} | {found.ready_s:.0f}, {found.take_over_s:.1f} | "
            f"{found.kafka_mb_a_second:,.1f}, {found.kafka_gib_a_day:,.0f} |"
        )
