"""The errors when Kafka does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.engine.queues_topic import ends_of
from marq.errors import UnavailableError


def test_an_error_without_words_is_named() -> None:
    async def silent(_: Any) -> Any:
        raise TimeoutError

    with pytest.raises(UnavailableError, match="ends: TimeoutError"):
        asyncio.run(ends_of("topic", 1, silent))
