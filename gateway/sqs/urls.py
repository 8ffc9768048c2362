"""Queue URLs, ARNs, and the address that a request was sent to."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from aiohttp import web

from gateway.sqs.errors import NO_QUEUE, SqsError, bad_value

#: Region of requests that name none.
REGION = "us-east-1"

_HOST = re.compile(r"[A-Za-z0-9._\-]{1,255}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,64}\](:\d{1,5})?")
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_ACCOUNT = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Place(NamedTuple):
    """The address by which a client reached us: the beginning of queue URLs and ARNs."""

    base: str  # scheme and host as the client wrote them
    account: str
    region: str

    def url_of(self, queue: str, account: str | None = None) -> str:
        """The URL of a queue."""
        return f"{self.base}/{account or self.account}/{quote(queue, safe='')}"

    def arn_of(self, queue: str) -> str:
        """The ARN of a queue."""
        return f"arn:aws:sqs:{self.region}:{self.account}:{queue}"


def place_of(request: web.Request, default_account: str, region: str | None) -> Place:
    """The address that a request was sent to."""
    headers = request.headers
    host = headers.get("X-Forwarded-Host") or ""
    if not _HOST.fullmatch(host):
        host = headers.get("Host", "")
        if not _HOST.fullmatch(host):
            host = "localhost"
    scheme = headers.get("X-Forwarded-Proto", "")
    if scheme not in ("http", "https"):
        scheme = request.scheme
    account = request.match_info.get("account", "")
    if not _ACCOUNT.fullmatch(account):
        account = default_account
    if region is None or not _REGION.fullmatch(region):
        region = REGION
    return Place(f"{scheme}://{host}", account, region)


def queue_of(url: str) -> str:
    """The queue in a URL of any host and account, or a bare name. Raises `SqsError`."""
    try:
        name = unquote(urlsplit(url).path.rpartition("/")[2], errors="strict")
    except ValueError:
        raise SqsError("InvalidAddress", f"The address {url} is not valid for this endpoint.") from None
    if not name:
        raise SqsError("QueueDoesNotExist", NO_QUEUE)
    return name


def queue_of_arn(arn: str, parameter: str) -> str:
    """The queue in an ARN of any region and account. Raises `SqsError`."""
    parts = arn.split(":", 5)
    if len(parts) != 6 or parts[0] != "arn" or parts[2] != "sqs" or not parts[5]:
        raise bad_value(arn, parameter, "Invalid ARN.")
    return parts[5]
