"""Decides which worker gets which partitions: evenly, and with as few moves as possible.

At each rebalance, Faust's assignor takes partitions away from workers until each has the smaller even share, and
assigns these anew, so partitions move although nothing has changed. Here a worker keeps partitions up to its share.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from faust.assignor.client_assignment import ClientAssignment, ClientMetadata
from faust.assignor.partition_assignor import PartitionAssignor


def share_out(count: int, had: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Assign `count` partitions to the members in `had`: member -> the partitions that it reported.

    No two shares differ by more than one, and as few partitions as possible move.
    """
    keeps: dict[str, list[int]] = {}
    taken: set[int] = set()
    # members with most partitions get the larger shares; a partition that two report (one was away) goes to the first
    for member in sorted(had, key=lambda member: (-len(set(had[member])), member)):
        keeps[member] = sorted(p for p in set(had[member]) if p < count and p not in taken)
        taken.update(keeps[member])
    least, larger = divmod(count, len(keeps))
    members = sorted(keeps, key=lambda member: (-len(keeps[member]), member))
    shares = {member: least + (i < larger) for i, member in enumerate(members)}
    for member, partitions in keeps.items():
        del partitions[shares[member] :]
    free = sorted(set(range(count)).difference(*keeps.values()))
    for member in reversed(members):  # members with the fewest first
        wanted = shares[member] - len(keeps[member])
        keeps[member] = sorted(keeps[member] + free[:wanted])
        del free[:wanted]
    return keeps


def url_of_member(assignment: bytes) -> str:
    """The URL of a worker, from its assignment in Kafka. Raises any error if it is no worker."""
    told = ConsumerProtocolMemberAssignment.decode(assignment).user_data
    return str(ClientMetadata.loads(zlib.decompress(told)).url)


class StickyAssignor(PartitionAssignor):
    """Faust's assignor, with the same format on the wire and another assignment. No standbys, no global tables."""

    def _perform_assignment(self, cluster: Any, member_metadata: Any) -> Any:
        metadata = {member: self._get_client_metadata(m) for member, m in member_metadata.items()}
        subscriptions = {member: m.subscription for member, m in member_metadata.items()}
        topics = {topic for subscription in subscriptions.values() for topic in subscription}
        self._update_member_urls(metadata)
        assignments = {member: ClientAssignment(actives={}, standbys={}) for member in member_metadata}
        groups: dict[str, int] = {}
        copartitioned = self._get_copartitioned_groups(topics, cluster, subscriptions)
        for number, (count, topic_sets) in enumerate(sorted(copartitioned.items())):
            for names in topic_sets:
                groups.update(dict.fromkeys(names, number))
                had = {
                    member: metadata[member].assignment.copartitioned_assignment(names).actives
                    for member in member_metadata
                    if names.issubset(subscriptions[member])
                }
                for member, partitions in share_out(count, had).items():
                    assignments[member].actives.update({name: list(partitions) for name in names})
        return self._protocol_assignments(
            assignments,
            self._get_changelog_distribution(assignments),
            self._get_external_topic_distribution(assignments),
            groups,
        )
