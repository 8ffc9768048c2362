"""The Faust application: settings, the app, chunked transport, ownership of partitions, commands, embedded broker.

`faust -A app …` finds the app as `app.app`; it is made when it is first asked for, so that importing a module of this
package neither reads settings nor registers commands. No module in here may be called `app`.

May import `app.kafka`, `app.streaming` and `marq`. `app.worker` puts everything together, and `app.commands` is what
users call: those two may import everything, and nothing imports them.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from app.commands import app_for_faust

    globals()["app"] = found = app_for_faust()
    return found
