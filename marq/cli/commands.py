"""All commands of `marq`, put together."""

from __future__ import annotations

from marq.cli import doctor, messages, queues, receiving, sending, top
from marq.cli.group import cli, run

__all__ = ["cli", "doctor", "messages", "queues", "receiving", "run", "sending", "top"]
