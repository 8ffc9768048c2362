"""In the place of handlers: an error in the worker itself, once there is a file `raise` in the witness's folder.

If the file says `full`, it is the error of a full disk.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from app.engine.ownership import Ownership

_on_timer = Ownership.on_timer
_file = Path(os.environ["WITNESS_FOLDER"]) / "raise"


def on_timer(self: Any) -> None:
    if _file.exists():
        if _file.read_text() == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise KeyError("planted")
    _on_timer(self)


Ownership.on_timer = on_timer  # type: ignore[method-assign]
