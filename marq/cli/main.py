"""The entry point of the command `marq`."""

from __future__ import annotations

import sys

#: What the extra brings, and the client does not have.
LIBRARIES = ("click", "rich")


def main() -> None:
    """Run the command; say what is missing if its libraries are not installed."""
    try:
        from marq.cli import commands
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LIBRARIES:
            raise
        print(f'marq: the command needs the package {missing}; pip install "marq[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    commands.run()
