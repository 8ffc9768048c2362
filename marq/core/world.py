"""The world of a state: the cluster, and the topics whose logs it was made from. It means nothing for other logs.

Offsets do not tell logs apart. A changelog that was copied into another cluster, or that outlived its queue topic, has
manifests whose positions and rows point into logs that are not there.
"""

from __future__ import annotations

import msgspec


class World(msgspec.Struct, array_like=True, frozen=True):
    """Ids that Kafka gives to the cluster and to topics. Empty: it gives none (to topics before version 2.8)."""

    cluster: str
    queue: str = ""
    markers: str = ""

    def difference(self, now: World) -> str:
        """What `now` has in place of this world's cluster and topics, as text; empty if they are the same."""
        pairs = (
            ("cluster", self.cluster, now.cluster),
            ("queue topic", self.queue, now.queue),
            ("markers topic", self.markers, now.markers),
        )
        return ", ".join(f"{what} {ours}, now {its}" for what, ours, its in pairs if ours and its and ours != its)
