"""The live state of partitions: `/v1/state/{partition}` of any worker, for the whole cluster."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from marq.errors import PipelineError

#: Seconds for one answer: enough for digests of a million messages.
TIMEOUT_S = 60.0
#: Seconds for which a partition may have no owner, while it moves.
MOVING_S = 30.0


def states_of(url: str, key: str | None, partitions: int) -> dict[int, dict[str, Any]]:
    """The state of each partition, with the positions at which it was taken.

    Raises:
        PipelineError: the worker does not answer, or not with a state.
    """
    return {number: _state(url.rstrip("/"), key, number) for number in range(partitions)}


def _state(url: str, key: str | None, number: int) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/v1/state/{number}", headers=headers)
    deadline = time.monotonic() + MOVING_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                state: dict[str, Any] = json.load(response)
            if not {"queue_position", "markers_position", "digest", "queues", "counters"} <= state.keys():
                raise PipelineError(f"{url} answers, but not with the state of a worker of marq; correct --worker")
            return state
        except urllib.error.HTTPError as error:
            with error:
                detail = _detail(error.read())
            if error.code in (401, 403):
                raise PipelineError(f"{url} refuses to show its state ({detail}); give a key with --key-file") from None
            if error.code != 503 or time.monotonic() > deadline:
                raise PipelineError(f"{url} does not return the state of partition {number}: {detail}") from None
            time.sleep(0.5)
        except ValueError:
            raise PipelineError(f"{url} answers, but not as a worker of marq; correct --worker") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise PipelineError(f"{url} does not answer ({reason}); check that the worker runs, and --worker") from None


def _detail(body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"
