"""One request, as the actions get it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from aiohttp import web

from gateway.auth import Grants
from gateway.sqs.messages import trace_in
from gateway.sqs.signature import region_of
from gateway.sqs.urls import REGION, Place, place_of


class Call:
    """One request: its key, its address and its permissions."""

    def __init__(self, request: web.Request, grants: Grants, sender: str | None, account: str) -> None:
        self.request = request
        self.grants = grants
        self.sender = sender  # access key id; None where keys are not checked
        self._account = account

    @cached_property
    def place(self) -> Place:
        """The address by which the client reached this worker."""
        return place_of(self.request, self._account, region_of(self.request) or REGION)

    @cached_property
    def trace(self) -> bytes | None:
        """The value of `X-Amzn-Trace-Id`: the trace of the messages that it sends."""
        text = self.request.headers.get("X-Amzn-Trace-Id")
        return trace_in(text) if text else None

    @property
    def gone(self) -> Callable[[], bool]:
        """Tells whether the client went away."""
        request = self.request

        def gone() -> bool:
            transport = request.transport
            return transport is None or transport.is_closing()

        return gone
