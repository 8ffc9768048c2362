"""The Faust application: settings, the app, chunked transport, ownership of partitions, commands, embedded broker.

`faust -A app …` finds the app as `app.app`; it is made when it is first asked for, so that importing a module of this
package neither reads settings nor registers commands. No module in here may be called `app`.

May import `app.kafka`, `app.streaming` and `marq`. `app.worker` puts everything together, and `app.commands` is what
users call: those two may import everything, and nothing imports them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The console script `faust` has the current folder on its path only while it imports this file. Our other packages
    # and the modules of handlers are imported later; `python -m app` finds them in the same two folders.
    folders = dict.fromkeys((str(Path.cwd()), str(Path(__file__).parents[1])))
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    from app.commands import app_for_faust

    globals()["app"] = found = app_for_faust()
    return found
