"""Command line of the benchmarks."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from bench import backlog as backlog_bench
from bench import core as core_bench
from bench import cycle as cycle_bench
from bench import growth as growth_bench
from bench import hol as hol_bench
from bench import overload as overload_bench
from bench import pairs as pairs_bench
from bench import partitions as partitions_bench
from bench import pipeline as pipeline_bench
from bench import queues as queues_bench
from bench import rebalance as rebalance_bench
from bench import restart as restart_bench
from bench import restore as restore_bench
from bench import scale as scale_bench
from bench import service as service_bench
from bench import sqs as sqs_bench
from bench import takeover as takeover_bench
from bench import ui as ui_bench
from bench import workers as workers_bench


@click.group()
def bench() -> None:
    """Measure marq. Lines that begin with RESULT are for programs."""


@bench.command()
def scale() -> None:
    """What installations of some sizes need, predicted from what the other benches measure."""
    scale_bench.run()


@bench.command()
@click.option("--messages", default=300_000, show_default=True)
@click.option("--batches", default="1,10,500", show_default=True, help="Messages taken at once, comma-separated.")
@click.option("--queues", default=1, show_default=True, help="Logical queues, whose messages come mixed.")
def core(messages: int, batches: str, queues: int) -> None:
    """What the core takes of a message, without Kafka."""
    core_bench.run(messages=messages, batches=[int(size) for size in batches.split(",")], queues=queues)


@bench.command()
@click.option("--batch", default=500, show_default=True, help="Messages per handler call; 1: single messages.")
@click.option("--messages", default=500_000, show_default=True)
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--queues", default=1, show_default=True, help="Logical queues, of Zipf-distributed size.")
@click.option("--phases", default="process,redeliver,latency", show_default=True)
@click.option("--runs", default=1, show_default=True, help="Repeat each phase and take the median.")
@click.option("--rate", default=2000, show_default=True, help="Messages per second of the latency phase.")
@click.option("--seconds", default=15.0, show_default=True, help="Length of the latency phase.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(["share", "share-strict", "floor"]),
    help="Run a share group too: batch_optimized, or record_limit; floor: plain aiokafka with durable starts and ends.",
)
def cycle(
    batch: int,
    messages: int,
    size: int,
    queues: int,
    phases: str,
    runs: int,
    rate: int,
    seconds: float,
    peers: tuple[str, ...],
) -> None:
    """The whole cycle in one worker process."""
    cycle_bench.run(
        batch=batch,
        messages=messages,
        size=size,
        queues=queues,
        phases=phases.split(","),
        runs=runs,
        rate=rate,
        seconds=seconds,
        peers=[{"share": "batch_optimized", "share-strict": "record_limit"}.get(peer, peer) for peer in peers],
    )


@bench.command()
@click.option("--batch", default=500, show_default=True, help="Messages per request.")
@click.option("--messages", default=200_000, show_default=True)
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--phases", default="cycle,all,single", show_default=True)
@click.option("--runs", default=1, show_default=True, help="Repeat each phase and take the median.")
@click.option("--singles", default=2_000, show_default=True, help="Messages of the phase `single`.")
def client(batch: int, messages: int, size: int, phases: str, runs: int, singles: int) -> None:
    """The client library against one worker process."""
    service_bench.run_client(
        batch=batch, messages=messages, size=size, phases=phases.split(","), runs=runs, singles=singles
    )


@bench.command()
@click.option("--sizes", default="256,1024,8192", show_default=True, help="Payloads, bytes.")
@click.option("--seconds", default=5.0, show_default=True, help="Length of each run.")
@click.option("--batch", default=500, show_default=True, help="Messages per request, in the mode `batch`.")
@click.option("--runs", default=1, show_default=True, help="Repeat each run and take the median.")
def send(sizes: str, seconds: float, batch: int, runs: int) -> None:
    """Sends through the client: one after another, 256 at the same time, and in batches."""
    service_bench.run_send(sizes=[int(s) for s in sizes.split(",")], seconds=seconds, batch=batch, runs=runs)


@bench.command()
@click.option("--batch", default=10, show_default=True, help="Messages per request.")
@click.option("--messages", default=40_000, show_default=True)
@click.option("--size", default=100, show_default=True, help="Body, characters.")
@click.option("--phases", default="cycle,all,single", show_default=True)
@click.option("--runs", default=1, show_default=True, help="Repeat each phase and take the median.")
@click.option("--singles", default=1_000, show_default=True, help="Messages of the phase `single`.")
@click.option("--clients", default=4, show_default=True, help="Processes of clients of the phase `cycle`.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(["elasticmq", "elasticmq-disk"]),
    help="Run ElasticMQ beside: in memory, or on disk (H2).",
)
def sqs(
    batch: int,
    messages: int,
    size: int,
    phases: str,
    runs: int,
    singles: int,
    clients: int,
    peers: tuple[str, ...],
) -> None:
    """Amazon SQS's protocol against one worker process."""
    sqs_bench.run(
        batch=batch,
        messages=messages,
        size=size,
        phases=phases.split(","),
        runs=runs,
        singles=singles,
        clients=clients,
        peers=list(peers),
    )


@bench.command()
@click.option("--messages", default=1_000_000, show_default=True, help="Messages of the queue that nobody reads.")
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--rate", default=2000, show_default=True, help="Messages per second of the other queue.")
@click.option("--seconds", default=10.0, show_default=True, help="How long they are sent.")
@click.option("--runs", default=1, show_default=True, help="Repeat, and take the median.")
def hol(messages: int, size: int, rate: int, seconds: float, runs: int) -> None:
    """Head of line: the effect of a queue that nobody reads on another one behind it."""
    hol_bench.run(messages=messages, size=size, rate=rate, seconds=seconds, runs=runs)


@bench.command()
@click.option("--times", default=20, show_default=True, help="How often a worker joins and leaves.")
@click.option("--parked", default=100_000, show_default=True, help="Messages of a queue that nobody reads.")
@click.option("--rate", default=2000, show_default=True, help="Messages per second.")
@click.option("--pause", default=3.0, show_default=True, help="Seconds between two changes.")
@click.option("--nice", default=0, show_default=True, help="Niceness of the worker that joins.")
@click.option("--control", is_flag=True, help="Compare with a worker of another installation that starts and stops.")
def rebalance(times: int, parked: int, rate: int, pause: float, nice: int, control: bool) -> None:
    """Gaps between deliveries while a fourth worker joins and leaves."""
    rebalance_bench.run(times=times, parked=parked, rate=rate, pause_s=pause, nice=nice, control=control)


@bench.command()
@click.option("--messages", default=1_000_000, show_default=True, help="Messages of a queue that nobody reads.")
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
def restore(messages: int, size: int) -> None:
    """Pauses of a worker's event loop while it takes parked messages over."""
    restore_bench.run(messages=messages, size=size)


@bench.command()
@click.option("--seconds", default=300.0, show_default=True, help="How long workers are restarted.")
@click.option("--rate", default=2000, show_default=True, help="Messages per second.")
@click.option("--pause", default=5.0, show_default=True, help="Seconds between a restart and the next one.")
def restart(seconds: float, rate: int, pause: float) -> None:
    """A rolling restart of three workers under load: losses, attempts, duplicates, latency."""
    restart_bench.run(seconds=seconds, rate=rate, pause_s=pause)


@bench.command()
@click.option("--messages", default=2_000_000, show_default=True)
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--markers", default=100_000, show_default=True, help="Records of the markers topic.")
@click.option("--set", "conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark.")
def archive(messages: int, size: int, markers: int, conf: tuple[str, ...]) -> None:
    """The pipeline's archive: both topics into tables, with its own command."""
    pipeline_bench.run_archive(messages=messages, size=size, markers=markers, conf=conf)


@bench.command()
@click.option("--messages", default=336_776, show_default=True)
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--queues", default=16, show_default=True, help="Logical queues, of Zipf-distributed size.")
@click.option("--drop", default=0.1, show_default=True, help="Share of messages that are not acknowledged at first.")
@click.option("--set", "conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark.")
def audit(messages: int, size: int, queues: int, drop: float, conf: tuple[str, ...]) -> None:
    """The pipeline's audit of a worker that processed this many messages: time and memory."""
    pipeline_bench.run_audit(messages=messages, size=size, queues=queues, drop=drop, conf=conf)


@bench.command()
@click.option("--messages", default=10_000_000, show_default=True, help="Parked in one partition.")
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--queues", default=1, show_default=True)
@click.option("--checkpoints", default=200, show_default=True, help="Of the steady phase.")
def growth(messages: int, size: int, queues: int, checkpoints: int) -> None:
    """Millions of parked messages in the core: memory, restore, bytes written. Needs no Kafka."""
    growth_bench.run(messages=messages, size=size, queues=queues, checkpoints=checkpoints)


@bench.command()
@click.option("--messages", default=1_000_000, show_default=True)
@click.option("--receivers", default=64, show_default=True, help="Each takes 500, under a lease of 5 s.")
@click.option("--loops", default=4, show_default=True, help="Busy loops of the phase `busy`.")
@click.option("--demo-loops", default=8, show_default=True, help="Busy loops of the phase `demo`.")
@click.option("--phases", default="quiet,busy,demo", show_default=True)
def overload(messages: int, receivers: int, loops: int, demo_loops: int, phases: str) -> None:
    """More work than the machine can do: that must not make anything be done twice."""
    overload_bench.run(
        messages=messages, receivers=receivers, loops=loops, demo_loops=demo_loops, phases=phases.split(",")
    )


@bench.command()
@click.option("--count", default=100_000, show_default=True, help="Queues.")
@click.option("--connections", default=64, show_default=True)
def queues(count: int, connections: int) -> None:
    """Many queues: how fast they are made, their memory, what it costs to list them."""
    queues_bench.run(count=count, connections=connections)


@bench.command()
@click.option("--messages", default=10_000_000, show_default=True)
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--measured", default=500_000, show_default=True, help="Messages of which the rate is measured.")
def backlog(messages: int, size: int, measured: int) -> None:
    """Messages that have waited for long: memory, restart, first delivery, rate."""
    backlog_bench.run(messages=messages, size=size, measured=measured)


@bench.command()
@click.option("--messages", default=1_000_000, show_default=True, help="In flight when their worker dies.")
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
def takeover(messages: int, size: int) -> None:
    """How long it takes until another worker serves the partitions of one that died."""
    takeover_bench.run(messages=messages, size=size)


@bench.command()
@click.option("--count", default=1_000, show_default=True, help="Partitions.")
@click.option("--seconds", default=30.0, show_default=True, help="How long the idle worker is watched.")
@click.option("--messages", default=500_000, show_default=True, help="Of the phase `traffic`.")
@click.option("--warm-up", default=100_000, show_default=True, help="Messages before these; 0 shows new logs of Kafka.")
@click.option("--phases", default="start,idle,traffic", show_default=True)
@click.option("--profile", type=click.Path(path_type=Path, exists=True), help="Folder for what py-spy records.")
def partitions(count: int, seconds: float, messages: int, warm_up: int, phases: str, profile: Path | None) -> None:
    """One worker with many partitions: its start, what it costs while idle, its rate with messages in all."""
    partitions_bench.run(
        count=count, seconds=seconds, messages=messages, warm_up=warm_up, phases=phases.split(","), profile=profile
    )


@bench.command()
@click.option("--counts", default="1,2", show_default=True, help="Worker processes; the first number is compared with.")
@click.option("--messages", default=1_000_000, show_default=True, help="Of the phase `handlers`.")
@click.option("--sqs-messages", default=40_000, show_default=True, help="Of the phase `sqs`.")
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--runs", default=3, show_default=True, help="Repeat, in turns, and take the medians.")
@click.option("--phases", default="handlers,sqs", show_default=True)
def workers(counts: str, messages: int, sqs_messages: int, size: int, runs: int, phases: str) -> None:
    """Several worker processes at one address: their rate, and the processor time of a message, against one."""
    workers_bench.run(
        counts=[int(count) for count in counts.split(",")],
        messages=messages,
        sqs_messages=sqs_messages,
        size=size,
        runs=runs,
        phases=phases.split(","),
    )


@bench.command()
@click.option("--queues", default=10_000, show_default=True, help="Of Zipf-distributed size.")
@click.option("--messages", default=1_000_000, show_default=True)
@click.option("--size", default=100, show_default=True, help="Payload, bytes.")
@click.option("--seconds", default=20.0, show_default=True, help="Length of each turn.")
@click.option("--rounds", default=4, show_default=True, help="Turns without pages, and as many with ten.")
@click.option("--in-process", is_flag=True, help="Without Kafka: messages that are in memory.")
def ui(queues: int, messages: int, size: int, seconds: float, rounds: int, in_process: bool) -> None:
    """The cockpit: what ten open pages cost a worker, and whether they delay sends and deliveries."""
    if in_process:
        asyncio.run(ui_bench.run_in_process(queues, messages, seconds, rounds))
    else:
        ui_bench.run(queues=queues, messages=messages, size=size, seconds=seconds, rounds=rounds)


@bench.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.option("--phases", default="sqs,client,json,cycle", show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--python", default=sys.executable, help="Interpreter of the worker of this tree.")
def pairs(other: Path, phases: str, rounds: int, python: str) -> None:
    """What a message costs a worker here and one of the tree OTHER, in alternating rounds."""
    pairs_bench.run(other=other, phases=phases.split(","), rounds=rounds, python=python)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    bench(prog_name="python -m bench")
