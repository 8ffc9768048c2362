"""The network between the parts: a proxy on each connection, which can be cut or slowed down.

The proxies are Toxiproxy's, built from its source by Go into the cache folder. They work on TCP, so loss of packets
looks as TCP lets a program see it: data that comes late, and connections that are reset. (`tc netem` would lose
packets; many kernels lack it.)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from app.kafka.broker import LOOPBACK, free_port
from app.kafka.jars import default_cache_dir

MODULE = "github.com/Shopify/toxiproxy/v2/cmd/server@v2.5.0"
BUILD_TIMEOUT_S = 300.0
START_TIMEOUT_S = 10.0


class NoProxy(Exception):
    """There is no Toxiproxy on this machine, and it can't be built."""


def server() -> Path:
    """The program, built the first time. Raises `NoProxy`."""
    home = default_cache_dir() / "tests" / "toxiproxy"
    home.mkdir(parents=True, exist_ok=True)
    program = home / "server"
    with FileLock(home / "lock"):
        if not program.exists():
            go = shutil.which("go")
            if go is None:
                raise NoProxy("the network between the parts needs Go, to build Toxiproxy")
            built = subprocess.run(
                [go, "install", MODULE],
                env=os.environ | {"GOBIN": str(home), "GOFLAGS": "-mod=mod"},
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
            if built.returncode:
                raise NoProxy(f"Toxiproxy could not be built: {built.stderr.strip()[-500:]}")
    return program


class Link:
    """One direction of dialling: whoever connects to `port` reaches what listens on `to`."""

    def __init__(self, network: Network, name: str, port: int, to: int) -> None:
        self._network = network
        self.name = name
        self.port = port
        self.to = to

    def refuse(self) -> None:
        """Cut: connections are closed, and new ones refused."""
        self._set(enabled=False)

    def swallow(self, *streams: str) -> None:
        """Cut: nothing arrives any more, but connections stay open. `upstream`, `downstream`: one direction only."""
        for stream in streams or ("upstream", "downstream"):
            self._add("timeout", stream, timeout=0)

    def slow(self, ms: int) -> None:
        """All that is carried takes so much longer, there and back together."""
        for stream in ("upstream", "downstream"):
            self._add("latency", stream, latency=ms // 2 + ms % 2, jitter=ms // 10)

    def stutter(self) -> None:
        """As lost packets do: what is sent comes up to a quarter of a second late, each time anew."""
        for stream in ("upstream", "downstream"):
            self._add("latency", stream, latency=120, jitter=120)

    def reset(self) -> None:
        """Connections are reset, once; new ones are accepted."""
        self._add("reset_peer", "downstream", timeout=0)
        self._network.ask("DELETE", f"/proxies/{self.name}/toxics/reset_peer_downstream")

    def heal(self) -> None:
        """As before all faults."""
        for toxic in self._network.ask("GET", f"/proxies/{self.name}/toxics"):
            self._network.ask("DELETE", f"/proxies/{self.name}/toxics/{toxic['name']}")
        self._set(enabled=True)

    def _set(self, *, enabled: bool) -> None:
        self._network.ask("POST", f"/proxies/{self.name}", {"enabled": enabled})

    def _add(self, kind: str, stream: str, **attributes: int) -> None:
        toxic = {"name": f"{kind}_{stream}", "type": kind, "stream": stream, "attributes": attributes}
        self._network.ask("POST", f"/proxies/{self.name}/toxics", toxic)


class Network:
    """All links, in one process."""

    def __init__(self, folder: Path) -> None:
        self.links: dict[str, Link] = {}
        self._program = server()
        self._log = folder / "toxiproxy.log"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._program, "-host", LOOPBACK, "-port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.ask("GET", "/version")
            except (OSError, ValueError):
                if time.monotonic() > deadline:
                    self.__exit__()
                    raise NoProxy(f"Toxiproxy does not answer: {self._log.read_text()[-500:]}") from None
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def link(self, name: str, to: int) -> Link:
        """A new link to a port."""
        port = free_port()
        self.ask("POST", "/proxies", {"name": name, "listen": f"{LOOPBACK}:{port}", "upstream": f"{LOOPBACK}:{to}"})
        self.links[name] = Link(self, name, port, to)
        return self.links[name]

    def some(self, *parts: str) -> list[Link]:
        """The links whose names have all these parts, which are separated by dashes."""
        return [link for name, link in self.links.items() if set(parts) <= set(name.split("-"))]

    @contextlib.contextmanager
    def healed_after(self, links: Iterable[Link]) -> Any:
        """At the end of the block, these links are as before."""
        links = list(links)
        try:
            yield links
        finally:
            for link in links:
                link.heal()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                said = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(f"{method} {path}: {error.code} {error.read().decode(errors='replace')}") from None
        if path == "/version":
            return said.decode()
        return json.loads(said) if said else None
