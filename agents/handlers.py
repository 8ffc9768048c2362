"""The handlers of this worker: which one gets a queue's messages, and when they take messages.

`agents.runner` makes the calls of a handler, `agents.settlement` acknowledges and releases its messages.
"""

from __future__ import annotations

import asyncio
import importlib
import traceback
from typing import Any

from mode import Service

from agents.elsewhere import Elsewhere
from agents.remote_handlers import Taken
from agents.runner import Runner
from agents.settlement import Settle
from app.cluster.peers import Peers
from app.engine.owned_partition import OwnedPartition
from app.engine.ownership import Ownership
from app.service.meters import Meters
from app.settings import Settings
from marq import handlers as registry
from marq.core.agenda import Handout
from marq.core.segments import Segment
from marq.errors import HandlerError
from marq.message import ManualMessage, Message

#: Seconds between two looks at leases of messages whose calls wait or run, and at breakers that are open.
EXTEND_S = 0.2


class Handlers(Service):
    """All handlers of this worker. To the ownership they are a receiver."""

    def __init__(self, ownership: Ownership, settings: Settings, meters: Meters, peers: Peers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ownership = ownership
        self.settings = settings
        self.meters = meters
        self.closing = False
        self.runners = [Runner(handler, self) for handler in registry.registered()]
        meters.handlers += [runner.meter for runner in self.runners]
        self.elsewhere = Elsewhere(ownership, peers, self.runners)
        self.remote_handlers = self.elsewhere.remote_handlers
        self._busy = asyncio.Event()  # a runner may have something to look after
        for runner in self.runners:
            runner.on_busy = self._busy.set
        self._routes: dict[str, Runner | None] = {}
        self._names: dict[bytes, str] = {}
        ownership.receivers.append(self)
        ownership.catalog.max_receives_of = self._max_receives_of

    def route(self, queue: str) -> Runner | None:
        """The runner of the first handler that matches `queue`."""
        try:
            return self._routes[queue]
        except KeyError:
            if len(self._routes) > 100_000:
                self._routes.clear()
            found = next((r for r in self.runners if r.handler.matches(queue)), None)
            self._routes[queue] = found
            return found

    def _max_receives_of(self, queue: str) -> int:
        runner = self.route(queue)
        return runner.handler.max_receives if runner is not None else self.remote_handlers.max_receives_of(queue)

    def messages_taken(self, taken: Taken, settle: Settle | None) -> list[Message]:
        """The handler's messages of a delivery that another worker started."""
        topic, number, is_topic_mode = self.ownership.topics.queue, taken.partition, self.settings.queue_id is not None
        return [
            Message(topic, number, queue, record, receives, is_topic_mode)
            if settle is None
            else ManualMessage(topic, number, queue, record, receives, is_topic_mode, settle)
            for record, queue, receives in taken.messages
        ]

    def messages(self, owned: OwnedPartition, offsets: list[int], settle: Settle | None) -> list[Message]:
        """The handler's messages for `offsets`. With `settle`, they can be acknowledged one by one."""
        partition, names = owned.owner.partition, self._names
        topic, number, topic_mode = self.ownership.topics.queue, owned.number, self.settings.queue_id
        deliveries, records, is_topic_mode = partition.deliveries, partition.messages, topic_mode is not None
        made: list[Message] = []
        for offset in offsets:
            record = records[offset]
            if type(record) is Segment:  # its payload is on disk
                record = partition.record(offset)
            queue = topic_mode
            if queue is None:
                queue = names.get(record.key)
                if queue is None:
                    if len(names) > 100_000:
                        names.clear()
                    queue = names[record.key] = record.key.decode()
            receives = deliveries[offset].receives
            if settle is None:
                made.append(Message(topic, number, queue, record, receives, is_topic_mode))
            else:
                made.append(ManualMessage(topic, number, queue, record, receives, is_topic_mode, settle))
        return made

    # -- receiver

    def handed(self, owned: OwnedPartition, handout: Handout) -> None:
        raise AssertionError("deliveries go to the Ask that took them")

    def wake(self, owned: OwnedPartition) -> None:
        if not self.closing:
            for runner in self.runners:
                runner.woken(owned)
            self.remote_handlers.wake()

    def starving(self, owned: OwnedPartition) -> bool:
        if any(runner.room > 0 and not runner.has_ready(owned) for runner in self.runners):
            return True
        return self.remote_handlers.starving(owned)

    def wants(self, queue: str) -> bool:
        return self.is_handled(queue) or self.remote_handlers.is_handled(queue)

    def is_handled(self, queue: str) -> bool:
        """Whether a handler of this worker gets the messages of `queue`."""
        return self.route(queue) is not None

    def forget(self, owned: OwnedPartition) -> None:
        for runner in self.runners:
            runner.forget(owned.number)
        self.remote_handlers.forget(owned)

    # -- service

    @Service.task
    async def _extend(self) -> None:
        while not self.should_stop:
            if all(runner.is_idle for runner in self.runners):
                self._busy.clear()
                await self.wait(self._busy.wait())
                continue
            await asyncio.sleep(EXTEND_S)
            for runner in self.runners:
                runner.extend()

    @Service.task
    async def _renew(self) -> None:
        await self.elsewhere.renew()

    async def close(self) -> None:
        """Stop taking messages, and settle those that were taken."""
        self.closing = True
        self.elsewhere.close()
        await asyncio.gather(*(runner.close() for runner in self.runners))


def import_modules(names: tuple[str, ...]) -> None:
    """Import the modules that register handlers. Raises `HandlerError`."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as exc:
            raise HandlerError(f"MARQ_HANDLERS names {name!r}, which can't be imported: {exc}") from exc
        except KeyboardInterrupt:
            raise  # Ctrl-C
        except BaseException as exc:
            trace = traceback.format_exc(limit=-3).splitlines()
            raise HandlerError(f"MARQ_HANDLERS names {name!r}, which failed when it was imported:", *trace) from exc
