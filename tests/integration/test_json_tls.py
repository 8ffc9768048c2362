"""HTTPS, with workers that call each other over it."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, until

OPENSSL = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=marq -addext subjectAltName=IP:127.0.0.1"
KEY = "key-for-everything-0001"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate"),
]


def test_two_workers_serve_each_others_messages_over_tls(kafka: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [*OPENSSL.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    files = {"web_tls_certificate_file": certificate, "web_tls_key_file": key, "web_tls_ca_file": certificate}
    trust = ssl.create_default_context(cafile=str(certificate))

    def call(url: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            url.replace("http:", "https:") + path,
            json.dumps(body).encode() if body is not None else None,
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=20, context=trust) as response:
            return json.load(response)

    with Cluster(kafka, tmp_path, partitions=2, handlers="", keys=KEY, **files) as cluster:
        for _ in range(2):
            cluster.start(ready=False)

        def shared() -> bool:
            try:
                answers = [call(w.url, "/v1/partitions") for w in cluster.workers]
            except (OSError, AssertionError):
                return False
            serving = [sum(p["phase"] == "serving" for p in a["partitions"]) for a in answers]
            return serving == [1, 1]

        until(shared, "each worker serves one partition", 60)
        payloads = [b64encode(b"%d" % i).decode() for i in range(10)]
        for payload in payloads:
            call(cluster.workers[0].url, "/v1/queues/q/messages", {"messages": [{"payload": payload}]})
        got: list[str] = []
        while len(got) < 10:
            messages = call(cluster.workers[1].url, "/v1/queues/q/receive", {"max": 10, "wait_ms": 5000})["messages"]
            assert messages
            call(cluster.workers[1].url, "/v1/ack", {"receipts": [m["receipt"] for m in messages]})
            got += [m["payload"] for m in messages]
        assert sorted(got) == sorted(payloads)
