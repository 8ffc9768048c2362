"""Workers among themselves, without a network: real `Peers` whose calls are handed over in this process."""

from __future__ import annotations

from collections.abc import Callable

from app.cluster.peers import MSGPACK, Peers
from app.settings import Settings


class Network:
    """Some workers that reach each other."""

    def __init__(self) -> None:
        self.peers: dict[str, LinkedPeers] = {}
        self.rebalancing = False
        self.gone = False  # whether workers that ask go away before they are answered

    def join(self, url: str, numbers: Callable[[], set[int]] = lambda: {0}) -> LinkedPeers:
        """One more worker, with the partitions that it was assigned."""
        found = self.peers[url] = LinkedPeers(self, url, numbers)
        return found


class LinkedPeers(Peers):
    """The others, as one worker of the network has them."""

    def __init__(self, network: Network, url: str, numbers: Callable[[], set[int]]) -> None:
        super().__init__(Settings(kafka="kafka://nowhere:1"), lambda purpose: (b"k" * 32,), _Members(network, url))
        self.network = network
        self.numbers = numbers
        self.called: list[str] = []  # what this worker asked others for

    def cut_off(self) -> None:
        """It no longer knows the others."""
        self._members = _Members(Network(), self.url)

    async def _send(self, url: str, name: str, body: bytes, timeout_s: float) -> tuple[str, bytes]:
        self.called.append(name)
        return MSGPACK, await self.network.peers[url].answer(name, body, lambda: self.network.gone)


class _Members:
    def __init__(self, network: Network, url: str) -> None:
        self.url = url
        self._network = network

    @property
    def rebalancing(self) -> bool:
        return self._network.rebalancing

    def partitions(self) -> dict[str, set[int]]:
        return {url: peers.numbers() for url, peers in self._network.peers.items()}


def alone() -> Peers:
    """The peers of a worker that is the only one."""
    return Network().join("here")
