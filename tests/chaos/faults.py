"""What is done to the parts.

A fault is a generator with three parts: what it prepares (until its first `yield`, which says what is hit), the fault
itself (until the second one: then all is mended), and what it cleans up once everything goes well again. Targets are
chosen by the run's random numbers, so a seed gives the same faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import AlterPartitionReassignmentsRequest

from tests.chaos.parts import BROKER_SESSION_S, SESSION_S, Chapter, variables
from tests.faults import rot
from tests.faults.brokers import IDS
from tests.faults.clock import FAKE, Clock
from tests.faults.trio import NAMES
from tests.integration.cluster import until

Steps = Iterator[str]
#: Seconds that a part is away.
AWAY_S = 8.0
#: Seconds that a broker is gone without closing its connections: longer than any time-out of a client.
GONE_S = 40.0
#: Seconds that the network is disturbed.
DISTURBED_S = 15.0
MIB = 1024 * 1024
#: Size of the disk of a worker or broker that is going to be full.
DISK_MIB = 512
_CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    what: str
    steps: Callable[[Chapter], Steps]
    #: graceful: a deploy does it; single: one part fails; several: more than one.
    kind: str
    #: The part that is hit: faults of different parts can happen at the same time.
    part: str
    #: What it needs, besides processes.
    needs: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}


def fault(
    kind: str, part: str, *needs: str, name: str | None = None
) -> Callable[[Callable[[Chapter], Steps]], Callable[[Chapter], Steps]]:
    def note(steps: Callable[[Chapter], Steps]) -> Callable[[Chapter], Steps]:
        called = name or steps.__name__.replace("_", "-")
        FAULTS[called] = Fault(called, (steps.__doc__ or "").strip(), steps, kind, part, needs)
        return steps

    return note


@fault("none", "nothing")
def none(chapter: Chapter) -> Steps:
    """No fault, to compare with."""
    yield "nothing"
    time.sleep(DISTURBED_S)
    yield ""


# -- workers ------------------------------------------------------------------------------------------


def some_worker(chapter: Chapter) -> str:
    return chapter.random.choice(NAMES)


@fault("single", "worker")
def worker_kill(chapter: Chapter) -> Steps:
    """kill -9 of a worker, which is started again at once."""
    name = some_worker(chapter)
    yield f"worker {name}"
    chapter.worker(name).kill()
    chapter.start_worker(name)
    yield ""


@fault("graceful", "worker")
def worker_restart(chapter: Chapter) -> Steps:
    """SIGTERM to a worker, which is started again."""
    name = some_worker(chapter)
    yield f"worker {name}"
    chapter.restart_worker(name)
    yield ""


@fault("graceful", "worker")
def workers_rolling(chapter: Chapter) -> Steps:
    """All workers are restarted, one after the other."""
    yield "all workers"
    for name in NAMES:
        chapter.restart_worker(name)
        chapter.wait_recovered()
    yield ""


def stopped_worker(chapter: Chapter, seconds: float) -> Steps:
    name = some_worker(chapter)
    yield f"worker {name}, {seconds:.0f} s"
    chapter.worker(name).signal(signal.SIGSTOP)
    time.sleep(seconds)
    chapter.worker(name).signal(signal.SIGCONT)
    yield ""


@fault("single", "worker")
def worker_pause(chapter: Chapter) -> Steps:
    """SIGSTOP of a worker for half of its session."""
    yield from stopped_worker(chapter, SESSION_S / 2)


@fault("single", "worker")
def worker_stall(chapter: Chapter) -> Steps:
    """SIGSTOP of a worker for two sessions: others take its partitions over, then it goes on."""
    yield from stopped_worker(chapter, 2 * SESSION_S)


@fault("several", "worker")
def unserved(chapter: Chapter) -> Steps:
    """kill -9 of all workers: no partition is served for a while."""
    yield "all workers"
    for name in NAMES:
        chapter.worker(name).kill()
    time.sleep(AWAY_S)
    for name in NAMES:
        chapter.start_worker(name)
    yield ""


@fault("single", "worker")
def worker_memory(chapter: Chapter) -> Steps:
    """A worker may take only 16 MiB more memory (a cgroup, else RLIMIT_AS), and 40 MiB of messages come."""
    name = some_worker(chapter)
    limit, unlimit, how = _memory_limit(chapter)
    yield f"worker {name}, by {how}"
    pid = chapter.worker(name).pid
    try:
        limit(pid)
        with contextlib.suppress(KafkaError, TimeoutError):
            for _ in range(10):
                chapter.flood(16, 256 * 1024)
        time.sleep(AWAY_S)
    finally:
        unlimit(pid)
    yield ""


def _memory_limit(chapter: Chapter) -> tuple[Callable[[int], None], Callable[[int], None], str]:
    group = _CGROUPS / f"marq-{os.getpid()}-{chapter.name}"
    try:
        group.mkdir()
    except OSError:
        return _limit, _unlimit, "RLIMIT_AS"

    def limit(pid: int) -> None:
        # what it has already stays with the group that it came from
        (group / "memory.limit_in_bytes").write_text(f"{16 * MIB}")
        (group / "cgroup.procs").write_text(f"{pid}")

    def unlimit(pid: int) -> None:
        (group / "memory.limit_in_bytes").write_text("-1")
        for left in (group / "cgroup.procs").read_text().split():
            (_CGROUPS / "cgroup.procs").write_text(left)
        until(lambda: _removed(group), "the cgroup is empty")

    return limit, unlimit, "cgroup"


def _limit(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (_vm_size(pid) + 16 * MIB, -1))


def _unlimit(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (-1, -1))


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _vm_size(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


# -- brokers ------------------------------------------------------------------------------------------


def _killed(chapter: Chapter, n: int) -> Steps:
    yield f"broker {n}, {AWAY_S:.0f} s"
    chapter.brokers[n].kill()
    time.sleep(AWAY_S)
    chapter.brokers[n].start()
    yield ""


def _restarted(chapter: Chapter, n: int) -> Steps:
    yield f"broker {n}"
    chapter.brokers[n].stop()
    chapter.brokers[n].start()
    yield ""


def _stopped(chapter: Chapter, n: int, seconds: float) -> Steps:
    yield f"broker {n}, {seconds:.0f} s"
    pid = chapter.brokers[n].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    yield ""


def _rotten(chapter: Chapter, brokers: Collection[int]) -> Steps:
    yield "brokers " + ", ".join(map(str, brokers))
    hit = 0
    for _ in range(round(DISTURBED_S)):
        for topic in (f"{chapter.name}.queue", f"{chapter.name}.markers"):
            number = chapter.random.randrange(chapter.partitions)
            for n in brokers:
                there = list(rot.batches(chapter.brokers[n], topic, number))[-40:-10]  # the others have these
                if there:
                    rot.flip(chapter.brokers[n], topic, number, chapter.random.choice(there).first)
                    hit += 1
        time.sleep(1)
    assert hit, "no bit was flipped"
    yield ""


@fault("single", "broker")
def disk_rot(chapter: Chapter) -> Steps:
    """Bits of queue and markers flip on the disk of a broker, under load."""
    yield from _rotten(chapter, [chapter.lab.broker()])


@fault("several", "broker")
def disks_rot(chapter: Chapter) -> Steps:
    """Bits of queue and markers flip on the disks of two brokers, under load."""
    yield from _rotten(chapter, sorted(chapter.random.sample(IDS, 2)))


@fault("single", "broker")
def broker_kill(chapter: Chapter) -> Steps:
    """kill -9 of a broker, which is started again later."""
    yield from _killed(chapter, chapter.lab.broker())


@fault("graceful", "broker")
def broker_restart(chapter: Chapter) -> Steps:
    """SIGTERM to a broker, which is started again."""
    yield from _restarted(chapter, chapter.lab.broker())


@fault("single", "broker")
def broker_pause(chapter: Chapter) -> Steps:
    """SIGSTOP of a broker for half of its session."""
    yield from _stopped(chapter, chapter.lab.broker(), BROKER_SESSION_S / 2)


@fault("single", "broker")
def broker_stall(chapter: Chapter) -> Steps:
    """SIGSTOP of a broker for two sessions: others lead its partitions, then it goes on."""
    yield from _stopped(chapter, chapter.lab.broker(), 2 * BROKER_SESSION_S)


@fault("single", "broker")
def broker_gone(chapter: Chapter) -> Steps:
    """SIGSTOP of a broker for 40 s, as if its power had failed: it neither answers nor closes connections."""
    yield from _stopped(chapter, chapter.lab.broker(), GONE_S)


@fault("single", "broker")
def controller_kill(chapter: Chapter) -> Steps:
    """kill -9 of the broker that is the controller."""
    yield from _killed(chapter, chapter.lab.controller())


@fault("graceful", "broker")
def controller_restart(chapter: Chapter) -> Steps:
    """SIGTERM to the broker that is the controller."""
    yield from _restarted(chapter, chapter.lab.controller())


@fault("single", "broker")
def controller_stall(chapter: Chapter) -> Steps:
    """SIGSTOP of the broker that is the controller, for two sessions."""
    yield from _stopped(chapter, chapter.lab.controller(), 2 * BROKER_SESSION_S)


@fault("graceful", "broker")
def brokers_rolling(chapter: Chapter) -> Steps:
    """All brokers are restarted, one after the other."""
    yield "all brokers"
    for n in IDS:
        chapter.brokers[n].stop()
        chapter.brokers[n].start()
        chapter.wait_recovered()
    yield ""


@fault("graceful", "all")
def all_rolling(chapter: Chapter) -> Steps:
    """All brokers and all workers are restarted, one after the other."""
    yield "all"
    for n, name in zip(IDS, NAMES, strict=True):
        chapter.brokers[n].stop()
        chapter.brokers[n].start()
        chapter.wait_recovered()
        chapter.restart_worker(name)
        chapter.wait_recovered()
    yield ""


@fault("graceful", "broker")
def leaders_moved(chapter: Chapter) -> Steps:
    """The leaders of all partitions of queue and markers are moved to the next broker every two seconds."""
    yield "queue and markers"
    moved = 0
    for turn in range(round(DISTURBED_S / 2)):
        with contextlib.suppress(KafkaError, TimeoutError):
            moved += chapter.run(move_leaders(chapter, turn), 30)
        time.sleep(2)
    assert moved, "no leader was moved"
    yield ""


async def move_leaders(chapter: Chapter, turn: int) -> int:
    """Let another replica of each partition be the preferred leader, and elect it. Returns how many leaders moved."""
    topics = [f"{chapter.name}.queue", f"{chapter.name}.markers"]
    client = AIOKafkaAdminClient(bootstrap_servers=chapter.bootstrap, request_timeout_ms=5_000)
    await client.start()
    try:
        before = await _leaders(client, topics)
        wanted: dict[str, list[tuple[int, list[int], dict[str, bytes]]]] = {topic: [] for topic in topics}
        for topic, n in before:
            wanted[topic].append((n, [IDS[(n + turn + i) % len(IDS)] for i in range(len(IDS))], {}))
        given = [(topic, partitions, {}) for topic, partitions in wanted.items()]
        await client._send_request(AlterPartitionReassignmentsRequest(5_000, given, {}))
        await asyncio.to_thread(chapter.lab.elect_preferred, {t: [p[0] for p in ps] for t, ps in wanted.items()})
        await asyncio.sleep(0.5)
        after = await _leaders(client, topics)
    finally:
        await client.close()
    return sum(before[at] != after[at] for at in before)


async def _leaders(client: AIOKafkaAdminClient, topics: list[str]) -> dict[tuple[str, int], int]:
    described = await client.describe_topics(topics)
    return {(topic["topic"], p["partition"]): p["leader"] for topic in described for p in topic["partitions"]}


@fault("single", "broker", "faketime", name="clock-ahead")
def clock_ahead(chapter: Chapter) -> Steps:
    """The clock of a broker is an hour ahead for a while."""
    yield from _clock(chapter, 3600)


@fault("single", "broker", "faketime", name="clock-behind")
def clock_behind(chapter: Chapter) -> Steps:
    """The clock of a broker is an hour behind for a while."""
    yield from _clock(chapter, -3600)


def _clock(chapter: Chapter, by_s: int) -> Steps:
    n = chapter.lab.broker()
    clock = Clock(chapter.folder / f"clock-{n}-{time.time_ns()}")
    chapter.brokers[n].stop()
    with variables(**FAKE, FAKETIME_TIMESTAMP_FILE=str(clock.file)):
        chapter.brokers[n].start()
    try:
        chapter.wait_recovered()
        yield f"broker {n}, {by_s:+d} s"
        clock.set(by_s)
        time.sleep(DISTURBED_S)
        clock.set(0)
        yield ""
    finally:
        chapter.brokers[n].stop()
        chapter.brokers[n].start()
        chapter.wait_recovered()


# -- disks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """The contents of a folder are on a small disk during the block. Yields a file that may fill it."""
    aside = folder.with_name(f"{folder.name}-aside")
    folder.rename(aside)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "marq-chaos", folder], check=True)
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        yield folder / "ballast"
    finally:
        (folder / "ballast").unlink(missing_ok=True)
        shutil.rmtree(aside)
        shutil.copytree(folder, aside)
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()
        aside.rename(folder)


def fill(ballast: Path) -> None:
    """Write until the disk is full."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * MIB):
            pass


@fault("single", "worker", "root")
def worker_disk_full(chapter: Chapter) -> Steps:
    """The disk of a worker's tables is full for a while."""
    name = some_worker(chapter)
    chapter.worker(name).stop(30)
    with small_disk(chapter.worker(name).data_dir) as ballast:
        chapter.start_worker(name)
        chapter.wait_recovered()
        yield f"worker {name}"
        fill(ballast)
        time.sleep(DISTURBED_S)
        ballast.unlink()
        yield ""
        chapter.worker(name).stop(30)
    chapter.start_worker(name)
    chapter.wait_recovered()


@fault("single", "broker", "root")
def broker_disk_full(chapter: Chapter) -> Steps:
    """The disk of a broker is full for a while. It ends by itself, and is started again when there is room."""
    n = chapter.lab.broker()
    broker = chapter.brokers[n]
    broker.stop()
    with small_disk(broker.home / "logs") as ballast:
        broker.start()
        chapter.wait_recovered()
        yield f"broker {n}"
        fill(ballast)
        time.sleep(DISTURBED_S)
        ballast.unlink()
        if broker.wait(0) is not None:
            broker.start()
        yield ""
        broker.stop()
    broker.start()
    chapter.wait_recovered()


# -- the network --------------------------------------------------------------------------------------


def disturbed(chapter: Chapter, what: str, parts: tuple[str, ...], do: str, *values: object) -> Steps:
    yield what
    with chapter.network.healed_after(chapter.network.some(*parts)) as links:
        assert links, parts
        for link in links:
            getattr(link, do)(*values)
        time.sleep(DISTURBED_S)
    yield ""


@fault("single", "network", "network")
def net_worker_cut(chapter: Chapter) -> Steps:
    """A worker is cut off from all brokers: nothing arrives, connections stay open."""
    name = some_worker(chapter)
    yield from disturbed(chapter, f"worker {name}", ("broker", name), "swallow")


@fault("single", "network", "network")
def net_worker_refused(chapter: Chapter) -> Steps:
    """A worker is cut off from all brokers: its connections are closed and refused."""
    name = some_worker(chapter)
    yield from disturbed(chapter, f"worker {name}", ("broker", name), "refuse")


@fault("single", "network", "network")
def net_one_link_cut(chapter: Chapter) -> Steps:
    """A worker can't reach one of the brokers."""
    name, n = some_worker(chapter), chapter.lab.broker()
    yield from disturbed(chapter, f"worker {name}, broker {n}", ("broker", name, str(n)), "swallow")


@fault("single", "network", "network")
def net_half_open(chapter: Chapter) -> Steps:
    """What a worker sends arrives, what the brokers answer does not."""
    name = some_worker(chapter)
    yield from disturbed(chapter, f"worker {name}", ("broker", name), "swallow", "downstream")


@fault("several", "network", "network")
def net_slow_3ms(chapter: Chapter) -> Steps:
    """Each request of a worker to a broker, and of a broker to another, takes 3 ms longer."""
    yield from _slow(chapter, 3)


@fault("several", "network", "network")
def net_slow_50ms(chapter: Chapter) -> Steps:
    """The same with 50 ms."""
    yield from _slow(chapter, 50)


@fault("several", "network", "network")
def net_slow_500ms(chapter: Chapter) -> Steps:
    """The same with 500 ms."""
    yield from _slow(chapter, 500)


def _slow(chapter: Chapter, ms: int) -> Steps:
    yield from disturbed(chapter, f"all, {ms} ms", ("broker",), "slow", ms)


@fault("several", "network", "network")
def net_lossy(chapter: Chapter) -> Steps:
    """Between workers and brokers, data comes up to a quarter of a second late, and connections are reset at random."""
    yield "all"
    workers = [link for name in NAMES for link in chapter.network.some("broker", name)]
    with chapter.network.healed_after(workers):
        for link in workers:
            link.stutter()
        until_s = time.monotonic() + DISTURBED_S
        while time.monotonic() < until_s:
            chapter.random.choice(workers).reset()
            time.sleep(0.5)
    yield ""


@fault("single", "network", "network")
def net_replication_cut(chapter: Chapter) -> Steps:
    """No other broker can reach one of them: it leads partitions that nobody can follow."""
    n = chapter.lab.broker()
    yield from disturbed(chapter, f"broker {n}", ("replica", "broker", str(n)), "swallow")


@fault("single", "network", "network")
def net_peers_cut(chapter: Chapter) -> Steps:
    """Other workers can't reach a worker."""
    name = some_worker(chapter)
    yield from disturbed(chapter, f"worker {name}", ("peer", name, chapter.number), "swallow")


@fault("single", "network", "network")
def net_clients_cut(chapter: Chapter) -> Steps:
    """Clients can't reach a worker, and their connections stay open."""
    name = some_worker(chapter)
    yield from disturbed(chapter, f"worker {name}", ("client", name, chapter.number), "swallow")


# -- several at once ----------------------------------------------------------------------------------


def mixed(chapter: Chapter, faults: list[Fault]) -> Steps:
    """These faults at the same time, each beginning within some seconds."""
    prepared = []
    errors: list[BaseException] = []

    def do(steps: Steps, after_s: float) -> None:
        try:
            time.sleep(after_s)
            next(steps)
        except BaseException as error:
            errors.append(error)

    try:
        what = []
        for one in faults:
            steps = one.steps(chapter)
            prepared.append(steps)
            what.append(f"{one.name} {next(steps)}")
        yield "; ".join(what)
        threads = [threading.Thread(target=do, args=(steps, chapter.random.uniform(0, 4))) for steps in prepared]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        yield ""
    finally:
        for steps in prepared:
            for _ in steps:
                pass
