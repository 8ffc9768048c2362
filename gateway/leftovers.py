"""Answers whose client went away while they were sent are freed soon.

Such an answer is held by a garbage cycle, of the exception and the frames that it went through. Python looks for cycles
after so many new objects, not bytes: hundreds of answers of megabytes would come together first.
"""

from __future__ import annotations

import gc
from typing import Any

from aiohttp import web

#: Bytes of answers after which young garbage is looked for.
LOOK_BYTES = 32 * 1024 * 1024


def freed() -> Any:
    """Middleware that looks for what is left of answers."""
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
