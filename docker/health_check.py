"""Exit status 0 if the worker in this container answers that it is ready.

Imports nothing of marq: it runs every 10 seconds.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request


def answer(url: str) -> str:
    """What is wrong, or nothing."""
    # No proxy, and no check of the certificate, which is for another name.
    tls = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
    try:
        with direct.open(url, timeout=4) as got:
            got.read()
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read(2000).decode(errors='replace')}"
    except OSError as error:
        return str(error)
    return ""


def main() -> int:
    host = os.environ.get("MARQ_WEB_HOST", "0.0.0.0")
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    address = f"{host}:{os.environ.get('MARQ_WEB_PORT', '9324')}/health/ready"
    # Whether it has a certificate may stand in a file of settings: ask both ways.
    wrong = [answer(f"{scheme}://{address}") for scheme in ("http", "https")]
    if all(wrong):
        print(wrong[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
