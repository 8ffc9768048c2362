"""A header of 8 KB, the most that is read, costs no more than one of letters: no parser of it is quadratic."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from tests.unit.http_lab import SECRET, Http, run, serving

ROOT = Path(__file__).resolve().parents[2]
KEY = "k" * 24
SIZE = 8_000
#: Processor time of any header, in that of a harmless one. Quadratic parsers of the standard library take 50 to 3,000.
MOST = 25
HEADERS = (
    "Accept",
    "Accept-Encoding",
    "Authorization",
    "Content-Encoding",
    "Content-Type",
    "Cookie",
    "Host",
    "If-Modified-Since",
    "If-None-Match",
    "Origin",
    "Range",
    "Referer",
    "X-Amz-Target",
    "X-Forwarded-Host",
)
REPEATED = ("\\", '"', ";", "(", "<", "=", ",", "%41", "x;", '"a" ', "x*0=a;", "=?utf-8?q?", "[", "a=b; ", "W/", "-")
PREFIXES = ("", 'marq-marq="', "a/b; ", "AWS4-HMAC-SHA256 Credential=", "bytes=", "http://")
ROUTES = (("GET", "/ui/api/session"), ("POST", "/ui/api/session"), ("POST", "/"), ("POST", "/v1/ack"))


async def cost_s(http: Http, method: str, path: str, header: str, value: str) -> float:
    """Processor time of one request, client included. The least of three."""
    costs = []
    for _ in range(3):
        began = time.thread_time()
        await http.request(method, path, b"{}" if method == "POST" else b"", **{header.replace("-", "_"): value})
        costs.append(time.thread_time() - began)
        if costs[0] < 0.005:
            break
    return min(costs)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("keys", [None, KEY], ids=["open", "keys"])
def test_no_header_costs_much_more_than_its_length(tmp_path: Path, header: str, keys: str | None) -> None:
    async def main() -> None:
        async with serving(tmp_path, keys=keys, secret=SECRET) as http:
            for method, path in ROUTES:
                await cost_s(http, method, path, header, "a" * SIZE)
                harmless = max(0.001, await cost_s(http, method, path, header, "a" * SIZE))
                for prefix in PREFIXES:
                    for part in REPEATED:
                        value = (prefix + part * SIZE)[:SIZE]
                        cost = await cost_s(http, method, path, header, value)
                        assert cost < MOST * harmless, (method, path, header, value[:40], cost, harmless)

    run(main)


#: What aiohttp reads with `email` and `http.cookies`, which are quadratic.
COSTLY = {
    "content_type",
    "charset",
    "content_disposition",
    "cookies",
    "if_match",
    "if_none_match",
    "if_range",
    "forwarded",
}


def test_requests_are_not_read_with_costly_parsers() -> None:
    for file in sorted((ROOT / "gateway").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in COSTLY:
                assert not (isinstance(node.value, ast.Name) and node.value.id == "request"), f"{file}:{node.lineno}"
