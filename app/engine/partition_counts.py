"""Watches how many partitions the topics have: they may be added, and topics deleted, while workers run.

A partition is used once all of its topics have it. In topic mode, the markers topic and the changelogs, which are ours,
get as many as the topic of the user's. The number of our own queue topic is fixed: what others add there is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mode import Service

from app.kafka.connection import admin_client
from app.kafka.topics import Topics, counts_of, grow, names_of, surplus
from marq.errors import MarqError

if TYPE_CHECKING:
    from app.engine.ownership import Ownership

#: Seconds between two looks at the topics. Each asks one broker for what this worker's consumer knows of them.
LOOK_S = 10.0


class PartitionCounts(Service):
    """Runs as long as the worker."""

    def __init__(self, ownership: Ownership, use: Callable[[int], None], **kwargs: Any) -> None:
        """
        Args:
            use: called with the number of partitions, if there are more than were in use.
        """
        super().__init__(**kwargs)
        self._ownership = ownership
        self._use = use

    @Service.task
    async def _run(self) -> None:
        while not self.should_stop:
            await self.sleep(LOOK_S)
            self._ownership.app.consumer.renew_metadata()
            try:
                await self.look()
            except MarqError as exc:
                self.log.warning("The partitions of topics are not known: %s", exc)

    async def look(self) -> None:
        """Compare the topics with what is in use, and do what they need."""
        ownership = self._ownership
        topics = ownership.topics
        counts: Mapping[str, int] = ownership.app.consumer.partition_counts(names_of(topics))
        lines: list[str] = []
        if set(counts.values()) != {topics.partitions} or ownership.gone:
            async with admin_client(ownership.settings) as admin:  # what the consumer knows may be old
                counts = await counts_of(admin)
                if ownership.settings.queue_id is not None:
                    lines += await grow(admin, topics, counts)
            self._look_for_gone(topics, counts)
            lines += surplus(ownership.settings, topics, counts)
            found = min(counts.get(name, 0) for name in names_of(topics))
            if found > topics.partitions:
                self._use(found)
                self.log.info("There are %s partitions now, %s before", found, topics.partitions)
        for line in lines:
            if line not in ownership.topic_lines:
                self.log.warning("%s", line)
        ownership.topic_lines = lines

    def _look_for_gone(self, topics: Topics, counts: Mapping[str, int]) -> None:
        ownership = self._ownership
        gone = ownership.gone = {
            number: f"topic {name} was deleted" if not counts.get(name) else f"topic {name} has no partition {number}"
            for name in reversed(names_of(topics))
            for number in range(counts.get(name, 0), topics.partitions)
        }
        for number in gone.keys() & ownership.owned.keys():
            ownership.recover_again(ownership.owned[number], f"{gone[number]}; trying again")
