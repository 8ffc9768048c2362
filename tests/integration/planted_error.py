"""In the place of handlers: an error in the worker itself, once there is a file `raise` in the witness's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from app.engine.ownership import Ownership

_on_timer = Ownership.on_timer
_file = Path(os.environ["WITNESS_FOLDER"]) / "raise"


def on_timer(self: Any) -> None:
    if _file.exists():
        raise KeyError("planted")
    _on_timer(self)


Ownership.on_timer = on_timer  # type: ignore[method-assign]
