"""Frees the memory of answers whose client went away while they were sent.

Such an answer is part of a garbage cycle, made of the exception and its frames. Python looks for cycles after a number
of new objects, whatever their size, so hundreds of answers of several megabytes could come together before it does.
"""

from __future__ import annotations

import gc
from typing import Any

from aiohttp import web

#: Bytes of answers after which young garbage is collected.
LOOK_BYTES = 32 * 1024 * 1024


def collected() -> Any:
    """Middleware that collects such garbage."""
    given = 0

    @web.middleware
    async def count(request: web.Request, handler: Any) -> Any:
        nonlocal given
        response = await handler(request)
        given += response.content_length or 0
        if given > LOOK_BYTES:
            given = 0
            gc.collect(1)
        return response

    return count
