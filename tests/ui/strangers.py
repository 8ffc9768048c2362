"""Pages of other origins, and their attacks on the cockpit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def stranger(html: str) -> Iterator[str]:
    """A page of another origin on this machine: to a browser the same site, so that cookies come along."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


#: Asks, in every way that a page has, to drop the messages of a queue; returns the answers that it could read.
FORGE = """async ([url, queue]) => {
  const tries = {
    form: {method: "POST", mode: "no-cors", body: new URLSearchParams({a: "1"})},
    text: {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}, body: "{}"},
    json: {method: "POST", headers: {"Content-Type": "application/json"}, body: "{}"},
    token: {method: "POST", headers: {"X-Marq-Token": "a"}, body: "{}"},
  };
  const read = [];
  for (const [name, options] of Object.entries(tries)) {
    await fetch(`${url}/v1/queues/${queue}/purge`, {credentials: "include", ...options}).catch(() => 0);
  }
  await fetch(`${url}/v1/queues/${queue}`, {method: "DELETE", credentials: "include"}).catch(() => 0);
  for (const path of ["/ui/api/session", "/ui/api/overview", `/v1/queues/${queue}/messages`, "/v1/queues"]) {
    await fetch(url + path, {credentials: "include"}).then((r) => r.text()).then((t) => read.push(t)).catch(() => 0);
  }
  return read;
}"""
