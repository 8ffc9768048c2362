"""Real workers as processes, a sender that knows what Kafka confirmed, and the total-queue check.

    with Cluster(kafka, tmp_path) as cluster:
        worker = cluster.start()
        cluster.send("work-a", 100)
        cluster.check_total(cluster.settle())

The handlers of these workers are in `tests.integration.witness`: they write down what they get, so that the record of a
killed worker remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from app.kafka.connection import end_client
from app.kafka.topics import Topics, ensure_topics
from app.settings import Settings
from tests.integration.duplicates import Done, Explained, Place, explain
from tests.kafka import unique

logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # of the sender, while its broker is away

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a worker gets from its start, or from a rebalance, until it serves.
READY_S = 40.0
#: Seconds that one request to a worker may take.
REQUEST_S = 5.0
#: Seconds that Kafka gets to confirm a send before it counts as not confirmed.
SEND_TIMEOUT_S = 60.0


def until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """Wait until `condition` is true, and return its value; an error that says `what` if it is not in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


class Seen(NamedTuple):
    """One message in a call of a handler, as the witness wrote it down."""

    event: str  # "begin" of the call, "end" if it returned, "fail" if it raised
    queue: str
    partition: int
    offset: int
    attempt: int
    id: str
    at_s: float
    pid: int
    batch: int  # messages in the call
    headers: dict[str, str]
    payload_crc: int


@dataclass(frozen=True)
class Sent:
    """One confirmed send."""

    id: str
    queue: str
    partition: int
    offset: int


@dataclass
class Total:
    """What became of all messages."""

    lost: list[str] = field(default_factory=list)  # confirmed, but no handler has finished it
    unexpected: list[str] = field(default_factory=list)  # in a handler, but never sent
    duplicates: int = 0  # calls that finished a message that another call had finished too
    redelivered: int = 0  # deliveries after the first
    sent: int = 0

    def __str__(self) -> str:
        return (
            f"sent={self.sent} lost={len(self.lost)} unexpected={len(self.unexpected)} "
            f"redelivered={self.redelivered} duplicates={self.duplicates}"
        )


def by_id(seen: list[Seen]) -> dict[str, list[Seen]]:
    """What was seen of each message."""
    found: dict[str, list[Seen]] = {}
    for one in seen:
        found.setdefault(one.id, []).append(one)
    return found


class Worker:
    """One worker process."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        code: Path = ROOT,
        command: Sequence[str] = (sys.executable, "-m", "app", "worker"),
    ) -> None:
        self.folder = folder
        self.environment = environment
        self.code = code
        self.data_dir = Path(environment["MARQ_DATA_DIR"])
        self.log_file = folder / "log"
        self.ending = False  # on purpose: killed or asked to stop
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=code,
                env=_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    @property
    def place(self) -> Path | None:
        """Its folder inside the data folder, once it has claimed one."""
        for pid_file in self.data_dir.glob("worker-*/pid"):
            with contextlib.suppress(OSError, ValueError):
                if int(pid_file.read_text()) == self.pid:
                    return pid_file.parent
        return None

    @property
    def url(self) -> str:
        place = self.place
        assert place is not None, f"worker {self.pid} has no folder"
        return f"http://127.0.0.1:{int((place / 'web_port').read_text())}"

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET; (0, None) if it does not answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=REQUEST_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except (OSError, AssertionError, ValueError):
            return 0, None

    def ready(self) -> bool:
        assert self.running, f"worker {self.pid} ended, {self.process.returncode}:\n{self.log[-4000:]}"
        return self.get("/health/ready")[0] == 200

    def wait_ready(self, timeout_s: float = READY_S) -> Worker:
        until(self.ready, f"worker {self.pid} is ready\n{self.log[-3000:]}", timeout_s)
        return self

    def partitions(self) -> dict[int, dict[str, Any]]:
        """`/v1/partitions`, by number; empty if it does not answer."""
        status, state = self.get("/v1/partitions")
        return {p["partition"]: p for p in state["partitions"]} if status == 200 else {}

    def serving(self) -> set[int]:
        return {n for n, p in self.partitions().items() if p["phase"] == "serving"}

    def signal(self, number: signal.Signals) -> None:
        self.ending = self.ending or number in (signal.SIGKILL, signal.SIGTERM)
        if self.running:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout_s: float = 15.0) -> float:
        """SIGTERM; seconds until the process had ended."""
        began = time.monotonic()
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"worker did not stop within {timeout_s} s:\n{self.log[-3000:]}") from None
        return time.monotonic() - began


def _environment(variables: dict[str, str]) -> dict[str, str]:
    """These variables and those of this process, without its own settings of marq."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MARQ_")} | variables


def _variables(settings: dict[str, Any]) -> dict[str, str]:
    """The environment for these settings: those of marq by their names, those of the witness by its variables."""
    return {
        name if name.startswith("WITNESS_") else f"MARQ_{name.upper()}": str(value) for name, value in settings.items()
    }


class Cluster:
    """A separate installation on a Kafka: topics with a random name, worker processes, a sender."""

    def __init__(self, bootstrap: str, folder: Path, *, partitions: int = 4, **settings: Any) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        self.partitions = partitions
        self.name = unique("c")
        self.witness = folder / "witness"
        self.workers: list[Worker] = []
        self.sent: list[Sent] = []
        self.tried: set[str] = set()  # ids of all sends, confirmed or not
        self.environment = {
            "MARQ_KAFKA": f"kafka://{bootstrap}",
            "MARQ_NAME": self.name,
            "MARQ_PARTITIONS": str(partitions),
            "MARQ_WEB_PORT": "0",
            "MARQ_HANDLERS": "tests.integration.witness",
            "MARQ_LOG_LEVEL": "INFO",
            "MARQ_CHECKPOINT_MS": "500",
            "WITNESS_FOLDER": str(self.witness),
        } | _variables(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()
        self._reader: AIOKafkaConsumer | None = None
        self._serial = 0

    def __enter__(self) -> Self:
        self.witness.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        with contextlib.suppress(Exception):
            self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    # -- workers

    def start(
        self,
        name: str | None = None,
        *,
        ready: bool = True,
        code: Path = ROOT,
        command: Sequence[str] = (sys.executable, "-m", "app", "worker"),
        **settings: Any,
    ) -> Worker:
        """Start a worker; one with the `name` of an earlier one goes on in its data folder.

        `code`: another checkout, of another version.
        """
        name = name or f"w{len(self.workers)}"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        environment = {"MARQ_DATA_DIR": str(folder / "data")} | self.environment
        environment |= _variables(settings)
        worker = Worker(folder, environment, code, command)
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    def start_many(self, count: int) -> list[Worker]:
        """Start several at once; all serve, and have shared the partitions among them."""
        workers = [self.start(ready=False) for _ in range(count)]
        self.wait_served()
        return workers

    @property
    def running(self) -> list[Worker]:
        """The running workers. Fails if one has ended that no test has stopped."""
        running = [w for w in self.workers if not w.ending]
        for worker in running:
            assert worker.running, f"worker {worker.pid} ended, {worker.process.returncode}:\n{worker.log[-4000:]}"
        return running

    def partition_states(self) -> dict[int, dict[str, Any]]:
        """What the workers say of the partitions that they serve."""
        states: dict[int, dict[str, Any]] = {}
        for worker in self.running:
            states |= {n: p for n, p in worker.partitions().items() if p["phase"] == "serving"}
        return states

    def wait_served(self, timeout_s: float = READY_S) -> float:
        """Wait until all workers are ready and all partitions served; seconds it took."""
        began = time.monotonic()
        until(
            lambda: (
                all(w.ready() for w in self.running)
                and sorted(n for w in self.running for n in w.serving()) == list(range(self.partitions))
            ),
            f"all of {self.partitions} partitions served once",
            timeout_s,
        )
        return time.monotonic() - began

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m app` with the settings of these workers."""
        return subprocess.run(
            [sys.executable, "-m", "app", *arguments],
            cwd=ROOT,
            env=_environment(self.environment),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def wipe(self, worker: Worker) -> None:
        """Delete the data folder of a worker that has ended."""
        assert not worker.running
        with contextlib.suppress(FileNotFoundError):  # it may have been killed before it made it
            shutil.rmtree(worker.data_dir)

    # -- Kafka, in a loop of its own thread

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 90.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _close(self) -> None:
        for client in (self._producer, self._reader):
            if client is not None:
                await end_client(client.stop())

    def create_topics(self) -> Topics:
        """Create the topics as a worker does at its start, for sends before the first worker."""
        settings = Settings(kafka=f"kafka://{self.bootstrap}", name=self.name, partitions=self.partitions)
        return self.run(ensure_topics(settings, self.name))

    def configure_topics(self, names: list[str], setting: str, value: str) -> None:
        """Set a setting of topics, and leave the others as they are."""
        from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        resources = [ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry]) for name in names]
        for future in admin.incremental_alter_configs(resources).values():
            future.result(15)

    @property
    def queue_topic(self) -> str:
        return self.environment.get("MARQ_QUEUE_TOPIC", f"{self.name}.queue")

    async def _producing(self) -> AIOKafkaProducer:
        async with self._starting:  # otherwise simultaneous sends would each make a producer, and lose its records
            if self._producer is None:
                producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, enable_idempotence=True, acks="all")
                await producer.start()
                self._producer = producer
        return self._producer

    def next_id(self) -> str:
        self._serial += 1
        return f"m{self._serial}"

    async def _send(
        self,
        queue: str | None,
        ids: list[str],
        partition: int | None = None,
        headers: dict[str, str] | None = None,
        size: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> list[Sent]:
        producer = await self._producing()
        confirmed = []
        key = None if queue is None else queue.encode()
        raw = [(name, value.encode()) for name, value in (headers or {}).items()]
        futures = {}
        for i, message_id in enumerate(ids):
            self.tried.add(message_id)
            number = i % self.partitions if partition is None else partition
            value = json.dumps({"id": message_id, **(extra or {})}).ljust(size).encode()
            with contextlib.suppress(KafkaError):
                futures[message_id] = await producer.send(
                    self.queue_topic, value, key=key, partition=number, headers=raw
                )
        for message_id, future in futures.items():
            try:
                done = await asyncio.wait_for(future, SEND_TIMEOUT_S)
            except (KafkaError, TimeoutError):
                continue
            confirmed.append(Sent(message_id, queue or "", done.partition, done.offset))
        self.sent += confirmed
        return confirmed

    def send(
        self,
        queue: str | None,
        count: int = 1,
        *,
        partition: int | None = None,
        headers: dict[str, str] | None = None,
        size: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> list[Sent]:
        """Send messages, over all partitions in turn or to one, and wait until Kafka has confirmed them."""
        ids = [self.next_id() for _ in range(count)]
        return self.run(self._send(queue, ids, partition, headers, size, extra))

    @contextlib.contextmanager
    def load(self, queues: list[str], per_second: int) -> Iterator[None]:
        """Send all the while, in small batches, each to the next of the queues; at the end all are confirmed or not."""
        stop = threading.Event()

        async def run() -> None:
            turns, waiting = 0, set()
            while not stop.is_set():
                ids = [self.next_id() for _ in range(max(1, per_second // 50))]
                task = asyncio.ensure_future(self._send(queues[turns % len(queues)], ids, turns % self.partitions))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                turns += 1
                await asyncio.sleep(0.02)
            await asyncio.gather(*waiting)

        future: Future[None] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            yield
        finally:
            stop.set()
            future.result(SEND_TIMEOUT_S + 30)

    async def _reading(self) -> AIOKafkaConsumer:
        if self._reader is None:
            reader = AIOKafkaConsumer(bootstrap_servers=self.bootstrap, auto_offset_reset="earliest")
            await reader.start()
            self._reader = reader
        return self._reader

    def ends(self, topic: str | None = None, partitions: int | None = None) -> dict[int, int]:
        """End offsets of a topic (default: the queue topic)."""
        tps = [TopicPartition(topic or self.queue_topic, n) for n in range(partitions or self.partitions)]

        async def read() -> dict[int, int]:
            return {tp.partition: end for tp, end in (await (await self._reading()).end_offsets(tps)).items()}

        return self.run(read())

    def read(self, topic: str, partitions: int = 1) -> list[Any]:
        """All records of a topic."""
        tps = [TopicPartition(topic, n) for n in range(partitions)]

        async def read() -> list[Any]:
            consumer, records = await self._reading(), []
            ends = await consumer.end_offsets(tps)
            consumer.assign(tps)
            await consumer.seek_to_beginning(*tps)
            for tp in tps:
                while await consumer.position(tp) < ends[tp]:
                    for batch in (await consumer.getmany(timeout_ms=200)).values():
                        records += batch
            return records

        return self.run(read())

    def committed(self) -> dict[tuple[str, int], int]:
        """Offsets that the group of the workers has committed."""

        async def ask() -> dict[tuple[str, int], int]:
            admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
            await admin.start()
            try:
                found = await admin.list_consumer_group_offsets(self.name)
            finally:
                await admin.close()
            return {(tp.topic, tp.partition): o.offset for tp, o in found.items() if o.offset >= 0}

        return self.run(ask())

    # -- what happened

    def seen(self, queue: str | None = None) -> list[Seen]:
        """What all handlers have written down, in the order of time."""
        found: list[Seen] = []
        for file in self.witness.glob("*.log"):
            pid = int(file.stem)
            for line in file.read_text().splitlines():
                try:
                    event, messages = json.loads(line)
                except ValueError:
                    continue  # the last line of a killed process
                found += [Seen(event, *m[:6], pid, len(messages), *m[6:]) for m in messages]  # type: ignore[call-arg]
        return sorted((s for s in found if queue is None or s.queue == queue), key=lambda s: s.at_s)

    def begun(self, queue: str | None = None) -> list[Seen]:
        """The deliveries to handlers."""
        return [s for s in self.seen(queue) if s.event == "begin"]

    def finished(self, queue: str | None = None) -> list[Seen]:
        """The deliveries that handlers returned from."""
        return [s for s in self.seen(queue) if s.event == "end"]

    def wait_begun(self, queue: str, count: int, timeout_s: float = 20.0) -> list[Seen]:
        """Wait for so many deliveries of a queue."""
        until(
            lambda: len(self.begun(queue)) >= count,
            f"{count} deliveries of {queue}, has {len(self.begun(queue))}",
            timeout_s,
        )
        return self.begun(queue)

    def counters(self) -> Counter[str]:
        """Sum of the counters of all partitions."""
        total: Counter[str] = Counter()
        for state in self.partition_states().values():
            total.update(state["counters"])
        return total

    def unsettled(self) -> str:
        """Why not everything in the queue topic is finished; empty when it is."""
        ends, states = self.ends(), self.partition_states()
        if len(states) < self.partitions:
            return f"only partitions {sorted(states)} of {self.partitions} are served"
        for number, state in sorted(states.items()):
            if state["position"] < ends[number]:
                return f"partition {number} is read up to {state['position']} of {ends[number]}"
            left = {name: state[name] for name in ("in_memory", "held", "parked") if state[name]}
            if left:
                return f"partition {number}: {left}, {state}"
        return ""

    def settle(self, timeout_s: float = 60.0) -> Total:
        """Wait until every message is finished; what became of them."""
        deadline = time.monotonic() + timeout_s
        while reason := self.unsettled():
            assert time.monotonic() < deadline, f"not settled within {timeout_s} s: {reason}"
            time.sleep(0.1)
        # an end may be in the log a moment before the last lines of its handler are in the file
        time.sleep(0.1)
        return self.total()

    def total(self) -> Total:
        """The total-queue check on what handlers saw."""
        begun, finished = Counter(), Counter()
        for one in self.seen():
            (begun if one.event == "begin" else finished)[one.id] += 1
        return Total(
            lost=[s.id for s in self.sent if not finished[s.id]],
            unexpected=sorted(set(begun) - self.tried),
            duplicates=sum(finished.values()) - len(finished),
            redelivered=sum(begun.values()) - len(begun),
            sent=len(self.sent),
        )

    def assert_nothing_lost(self, timeout_s: float = 60.0) -> Total:
        """Everything is finished: a handler returned from each confirmed message, and each was acknowledged."""
        total = self.settle(timeout_s)
        print(f"total-queue check: {total}")
        assert not total.lost, total.lost[:20]
        assert not total.unexpected, total.unexpected[:20]
        explained = self.explained([Done(*s[2:5], s.pid, s.queue.startswith("thread-")) for s in self.finished()])
        print(f"done twice because: {explained}")
        assert not explained.unexplained, explained.unexplained[:20]
        twice = [key for key, times in Counter((s.id, s.attempt) for s in self.begun()).items() if times > 1]
        assert not twice, f"deliveries of one number: {twice[:20]}"
        ends, states = self.ends(), self.partition_states()
        for number, end in ends.items():
            counters = states[number]["counters"]
            finished = sum(counters.get(outcome, 0) for outcome in ("acked", "dead", "expired", "purged", "poison"))
            assert finished == end, f"partition {number}: {finished} of {end} finished: {counters}"
        return total

    def explained(self, done: list[Done], refused: Collection[Place] = ()) -> Explained:
        """Why messages were done more than once, according to the log; `refused`: see `explain`."""
        if len({one[:2] for one in done}) == len(done):
            return Explained()
        markers: dict[int, list[Any]] = {n: [] for n in range(self.partitions)}
        for record in self.read(self.environment.get("MARQ_MARKERS_TOPIC", f"{self.name}.markers"), self.partitions):
            markers[record.partition].append(record)
        assert all(records and records[0].offset == 0 for records in markers.values()), "the logs were trimmed"
        # a worker that ended by its own error explains nothing
        killed = {w.pid for w in self.workers if (w.process.poll() or 0) < 0}
        return explain(done, markers, killed=killed, refused=refused)

    def errors_logged(self) -> list[str]:
        """Lines of ERROR and above in the logs of all workers."""
        level = re.compile(r"\[(ERROR|CRITICAL)\]")
        return [line for w in self.workers for line in w.log.splitlines() if level.search(line)]
