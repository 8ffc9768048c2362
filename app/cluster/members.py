"""The members of the installation, as the group's leader sent them with the newest assignment."""

from __future__ import annotations

from typing import Protocol

from app.streaming.faust_app import MarqApp
from app.streaming.raw_table import SegmentTable


class Members(Protocol):
    """The workers."""

    @property
    def url(self) -> str:
        """Address at which the other workers reach this one (`app.cluster.addresses`)."""

    @property
    def rebalancing(self) -> bool:
        """True while partitions change hands."""

    def partitions(self) -> dict[str, set[int]]:
        """Every worker by its address, and the partitions that it was assigned."""


class GroupMembers:
    """The members of the worker's consumer group."""

    def __init__(self, app: MarqApp, table: SegmentTable) -> None:
        self._app = app
        self._table = table  # a worker has all partitions of one number, so one topic tells
        self._told: object = None  # what the leader sent …
        self._found: dict[str, set[int]] = {}  # … and what it says: each receive asks

    @property
    def url(self) -> str:
        return self._app.address

    @property
    def rebalancing(self) -> bool:
        return bool(self._app.rebalancing)

    def partitions(self) -> dict[str, set[int]]:
        told = self._app.assignor.changelog_distribution
        if told is not self._told or self.url not in self._found:
            topic = self._table.changelog_topic_name
            found = {url: {int(n) for n in topics.get(topic, ())} for url, topics in told.items()}
            found.setdefault(self.url, set())
            self._told, self._found = told, found
        return self._found
