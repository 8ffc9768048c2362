"""Shows and changes the settings of a queue without a worker, for the command `queue`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError

from app.engine.catalog import READ_UP_S, Catalog
from app.kafka.connection import asked_again, unreachable
from app.kafka.datadir import resolve_bootstrap
from app.logs import silenced
from marq.core.settings import check_name, settings_with, told
from marq.errors import UnknownQueueError

if TYPE_CHECKING:
    from app.settings import Settings


async def _catalog(settings: Settings) -> Catalog:
    catalog = Catalog(settings, lambda: settings.queues_topic)
    try:
        with silenced("aiokafka"):
            await catalog.start()
    except KafkaError as error:
        raise await unreachable(settings, error) from error
    return catalog


async def change_settings(settings: Settings, queue: str, values: dict[str, Any]) -> dict[str, Any]:
    """Set some values of a queue, if any are given, and return all of them.

    Raises:
        QueueSettingsError: an invalid name or value; nothing is changed.
        UnknownQueueError: no values, and there is no such queue.
        BrokerError: Kafka can't be reached.
    """
    resolve_bootstrap(settings)
    check_name(queue)
    catalog = await asked_again(lambda: _catalog(settings))
    try:
        async with asyncio.timeout(READ_UP_S):
            await catalog.read_up.wait()
        record = catalog.records.get(queue)
        base = record.settings if record is not None and record.active else catalog.default
        if not values and not catalog.exists(queue):
            raise UnknownQueueError(f"there is no queue {queue!r}; a message makes it, or NAME=VALUE does")
        if values:
            settings_with(queue, base, values)
            if record is None or not record.active:
                await catalog.create(queue, values)
            else:
                await catalog.update(queue, values)
            base = catalog.records[queue].settings
    finally:
        await catalog.stop()
    return told(base)
