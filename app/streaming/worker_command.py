"""Faust's command `worker`, without the banner: the first line of a worker's log has its contents."""

from __future__ import annotations

from typing import Any

from faust.cli.worker import worker as worker_of_faust


class worker(worker_of_faust):  # the name of the class is that of the command, which replaces Faust's
    """Start worker instance for given app."""

    def on_worker_created(self, worker: Any) -> None:
        """Print nothing."""
