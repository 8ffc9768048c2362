"""Which worker gets which partitions: as even as can be, and no partition moves without need.

Faust's assignor takes partitions from workers down to the lower of two even shares at each rebalance, and deals those
out anew, so partitions move although nothing has changed. Here a worker keeps what it has, up to its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from faust.assignor.client_assignment import ClientAssignment
from faust.assignor.partition_assignor import PartitionAssignor


def share_out(count: int, had: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Deal `count` partitions out to the members of `had`, of which each said what it had.

    No two shares differ by more than one, and as few partitions as possible change hands.
    """
    keeps: dict[str, list[int]] = {}
    taken: set[int] = set()
    # who has most gets the shares that are one larger; what two say they have (one was away) is the first one's
    for member in sorted(had, key=lambda member: (-len(set(had[member])), member)):
        keeps[member] = sorted(p for p in set(had[member]) if p < count and p not in taken)
        taken.update(keeps[member])
    least, larger = divmod(count, len(keeps))
    members = sorted(keeps, key=lambda member: (-len(keeps[member]), member))
    shares = {member: least + (i < larger) for i, member in enumerate(members)}
    for member, partitions in keeps.items():
        del partitions[shares[member] :]
    free = sorted(set(range(count)).difference(*keeps.values()))
    for member in reversed(members):  # those with the least first
        wanted = shares[member] - len(keeps[member])
        keeps[member] = sorted(keeps[member] + free[:wanted])
        del free[:wanted]
    return keeps


class StickyAssignor(PartitionAssignor):
    """Faust's assignor, on the wire as well, with another way to deal out. There are no standbys and global tables."""

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
