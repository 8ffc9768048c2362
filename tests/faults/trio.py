"""Three workers that keep their names and addresses when one is stopped, killed or started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.kafka.broker import free_port
from tests.integration.cluster import Cluster, Worker

NAMES = ("a", "b", "c")


class Trio(Cluster):
    """A cluster whose workers are called by `NAMES`."""

    def __init__(self, bootstrap: str, folder: Path, **settings: Any) -> None:
        super().__init__(bootstrap, folder, **settings)
        self._ports = {name: free_port() for name in NAMES}

    def worker(self, name: str) -> Worker:
        """The process that runs under a name now."""
        (worker,) = [w for w in self.running if w.folder.name == name]
        return worker

    def start_up(self, *names: str) -> None:
        """Start the workers of these names, and wait until all partitions are served."""
        for name in names:
            self.start(name, ready=False, web_port=self._ports[name])
        self.wait_served()
