"""Decides which worker gets which partitions: evenly, and with as few moves as possible.

At each rebalance, Faust's assignor takes partitions away from workers until each has the smaller even share, and
assigns these anew, so partitions move although nothing has changed. Here a worker keeps partitions up to its share.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from faust.assignor.client_assignment import ClientAssignment, ClientMetadata
from faust.assignor.partition_assignor import PartitionAssignor

from marq.text import reason_of

log = logging.getLogger(__name__)

#: Most bytes of an assignment: for 10,000 partitions and hundreds of workers it has about a megabyte.
ASSIGNMENT_MAX_BYTES = 16 * 1024 * 1024


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
    """The address of a worker, from its assignment in Kafka. Raises any error if it is no worker."""
    told = ConsumerProtocolMemberAssignment.decode(assignment).user_data
    return str(ClientMetadata.loads(_decompressed(told)).url)


def _decompressed(data: bytes) -> bytes:
    """Decompress what a member sent. Raises `ValueError` for more than a worker sends, before it takes that memory."""
    stream = zlib.decompressobj()
    found = stream.decompress(data, ASSIGNMENT_MAX_BYTES)
    if stream.unconsumed_tail:
        raise ValueError(f"an assignment of more than {ASSIGNMENT_MAX_BYTES:,} bytes")
    return found


def _had(metadata: ClientMetadata, names: set[str], count: int) -> list[int]:
    """The partitions that a member says it had. What makes no sense is left out: anybody may join the group."""
    try:
        return [int(p) for p in metadata.assignment.copartitioned_assignment(names).actives if 0 <= int(p) < count]
    except Exception:
        return []


class StickyAssignor(PartitionAssignor):
    """Faust's assignor, with the same format on the wire and another assignment. No standbys, no global tables.

    The leader of the group, which is the member that has been there longest, gives a worker with another secret no
    partitions, and no list of members.
    """

    app: Any

    @property
    def _url(self) -> Any:
        return self.app.address

    @property
    def is_refused(self) -> bool:
        """True if the leader did not admit this worker."""
        return not self.changelog_distribution

    @classmethod
    def _decompress(cls, compressed: bytes) -> bytes:
        return _decompressed(compressed)

    def _perform_assignment(self, cluster: Any, member_metadata: Any) -> Any:
        read = {member: self._read(member, m) for member, m in member_metadata.items()}
        metadata = {member: found for member, found in read.items() if found is not None}
        subscriptions = {member: member_metadata[member].subscription for member in metadata}
        topics = {topic for subscription in subscriptions.values() for topic in subscription}
        self._update_member_urls(metadata)
        assignments = {member: ClientAssignment(actives={}, standbys={}) for member in metadata}
        groups: dict[str, int] = {}
        copartitioned = self._copartitioned(topics, cluster, subscriptions)
        for number, (count, topic_sets) in enumerate(sorted(copartitioned.items())):
            for names in topic_sets:
                groups.update(dict.fromkeys(names, number))
                had = {
                    member: _had(metadata[member], names, count)
                    for member in metadata
                    if names.issubset(subscriptions[member])
                }
                for member, partitions in share_out(count, had).items():
                    assignments[member].actives.update({name: list(partitions) for name in names})
        return self._protocol_assignments(
            assignments,
            self._get_changelog_distribution(assignments),
            self._get_external_topic_distribution(assignments),
            groups,
        ) | self._refusals(member_metadata, set(member_metadata) - set(metadata))

    def _copartitioned(self, topics: set[str], cluster: Any, subscriptions: Any) -> dict[int, Any]:
        """Topics by their number of partitions. Those whose partitions stay together are together at all times.

        Faust's method would give partitions of one number to different workers while one topic has more than others.
        """
        ours = topics & (self.app.chunked_topics | self._table_manager.changelog_topics)
        found: dict[int, Any] = dict(self._get_copartitioned_groups(topics - ours, cluster, subscriptions))
        count = self.app.partitions_among([len(cluster.partitions_for_topic(name) or ()) for name in ours])
        if count:
            found.setdefault(count, []).extend(self._group_co_subscribed(ours, subscriptions))
        return found

    def _read(self, member: str, told: Any) -> ClientMetadata | None:
        """What a member says of itself. Returns None if it gets no partitions."""
        try:
            found = self._get_client_metadata(told)
            if self.app.admits(found.url):
                return found
            reason = "it has another secret, or is no worker of this installation"
        except Exception as exc:
            reason = f"it is no worker: {reason_of(exc)}"
        log.error("Member %s of the group gets no partitions: %s", member, reason)
        return None

    def _refusals(self, member_metadata: Any, refused: set[str]) -> Any:
        """Assignments without partitions and members."""
        self._member_urls = {}
        for member in refused:
            with contextlib.suppress(Exception):
                self._member_urls[member] = str(self._get_client_metadata(member_metadata[member]).url)
            self._member_urls.setdefault(member, "")
        nothing = {member: ClientAssignment(actives={}, standbys={}) for member in refused}
        return self._protocol_assignments(nothing, {}, {}, {})
