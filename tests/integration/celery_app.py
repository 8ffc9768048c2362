"""A Celery application on SQS, as docs/sqs.md says. Its tasks write down what they do, a line each."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from celery import Celery, Task

#: Visibility timeout of a task, in seconds.
VISIBILITY_S = 4
#: Longest delay that kombu asks SQS for.
DELAY_MAX_S = 900


class DelayedTask(Task):
    """Tasks with a countdown or ETA wait in the queue, not in a worker: so a visibility timeout may be shorter."""

    def apply_async(
        self, args: Any = None, kwargs: Any = None, countdown: float | None = None, eta: Any = None, **options: Any
    ) -> Any:
        delay_s = countdown if countdown is not None else (eta - datetime.now(UTC)).total_seconds() if eta else 0
        if delay_s > 0:
            options.setdefault("DelaySeconds", min(round(delay_s), DELAY_MAX_S))
        return super().apply_async(args, kwargs, countdown=countdown, eta=eta, **options)


app = Celery("tests", task_cls=DelayedTask)
app.conf.update(
    broker_url=os.environ.get("TEST_BROKER_URL", "sqs://"),
    broker_transport_options={
        "region": "us-east-1",
        "is_secure": False,
        "visibility_timeout": VISIBILITY_S,
        "wait_time_seconds": 1,
        "polling_interval": 0,
        "queue_name_prefix": os.environ.get("TEST_QUEUE_PREFIX", ""),
    },
    task_default_queue="celery",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=False,
    enable_utc=True,
)


def _note(what: str) -> None:
    with Path(os.environ["TEST_NOTES"]).open("a") as notes:
        notes.write(f"{what} {os.getpid()} {time.time():.3f}\n")


@app.task
def note(number: int) -> None:
    _note(f"note-{number}")


@app.task
def slow(number: int, seconds: float) -> None:
    _note(f"begin-{number}")
    time.sleep(seconds)
    _note(f"end-{number}")


@app.task(bind=True, max_retries=3)
def fails_twice(self: Any, number: int) -> None:
    _note(f"try-{number}-{self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=1)
