"""Writes the locks of the jars: `python -m requirements.lock_jars` (part of `make lock`), or only those that are named.

Resolves what Kafka asks for at Maven Central, and writes each jar with its SHA-256 into `requirements/*-jars.txt`.
Hashes that Maven Central publishes beside a jar are compared with what was fetched.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jgo
from jgo.maven import MavenContext

from app.kafka.broker import KAFKA_VERSION
from app.kafka.jars import MAVEN_CENTRAL, Jar
from pipeline.jars import DELTA_VERSION, SPARK_VERSION

HERE = Path(__file__).parent

# Resolved one by one: in a common resolution the managed versions of log4j's parent replace
# Kafka's own, down to kafka-clients, and the broker does not start.
KAFKA = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.apache.kafka:kafka-tools:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
)
#: In place of 3.4, whose client finds no server with a Java after 13.
ZOOKEEPER = "org.apache.zookeeper:zookeeper:3.5.9"
#: The other versions that `make test-kafka` runs on, with what they log with: before 4.0 that is log4j 1, of which
#: reload4j is the version that is maintained.
OTHER_KAFKAS = {
    "2.0.1": (f"org.apache.kafka:kafka_2.12:2.0.1+{ZOOKEEPER}", "org.slf4j:slf4j-reload4j:1.7.36"),
    "2.1.1": (f"org.apache.kafka:kafka_2.12:2.1.1+{ZOOKEEPER}", "org.slf4j:slf4j-reload4j:1.7.36"),
    "2.8.2": ("org.apache.kafka:kafka_2.13:2.8.2", "org.slf4j:slf4j-reload4j:1.7.36"),
    "3.3.2": ("org.apache.kafka:kafka_2.13:3.3.2", "org.slf4j:slf4j-reload4j:1.7.36"),
    "3.9.1": ("org.apache.kafka:kafka_2.13:3.9.1", "org.slf4j:slf4j-reload4j:1.7.36"),
    "4.0.0": ("org.apache.kafka:kafka_2.13:4.0.0", "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3"),
}
#: Without what they ask for, because pyspark has the rest, in versions that fit it.
SPARK = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_VERSION}",
    # Delegation tokens only, which we don't use; the newest release there is. The connector's classes refer to it.
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
    f"io.delta:delta-spark_4.2_2.13:{DELTA_VERSION}",
    f"io.delta:delta-storage:{DELTA_VERSION}",
    f"io.delta:delta-kernel-api:{DELTA_VERSION}",
    f"io.delta:delta-kernel-defaults:{DELTA_VERSION}",
    f"io.delta:delta-kernel-unitycatalog:{DELTA_VERSION}",
)
#: The compiler of the benchmark's Java driver.
BENCH = ("org.eclipse.jdt:ecj:3.44.0",)
#: The peer of `bench sqs`.
ELASTICMQ = ("org.elasticmq:elasticmq-server_2.13:1.7.1",)


def resolve(endpoints: tuple[str, ...], work: Path) -> set[Jar]:
    """The jars, and all that they need."""
    found = set()
    for endpoint in endpoints:
        environment = jgo.build(endpoint, cache_dir=work)
        if environment.lockfile is None:
            raise SystemExit(f"{endpoint}: the resolver made no list of its jars")
        for one in environment.lockfile.dependencies:
            if one.packaging != "jar" or one.classifier or one.sha256 is None:
                raise SystemExit(f"{one} of {endpoint} is no plain jar with a hash")
            found.add(Jar(one.groupId, one.artifactId, one.version, one.sha256))
        if len(environment.lockfile.dependencies) != len(environment.all_jars):
            raise SystemExit(f"{endpoint}: not all of its jars are in the list of the resolver")
    return found


def pin(coordinates: tuple[str, ...], work: Path) -> set[Jar]:
    """The jars alone."""
    maven, found = MavenContext(repo_cache=work, timeout=60), set()
    for coordinate in coordinates:
        group, artifact, version = coordinate.split(":")
        jar = Path(maven.project(group, artifact).at_version(version).artifact().resolve())
        found.add(Jar(group, artifact, version, hashlib.sha256(jar.read_bytes()).hexdigest()))
    return found


def write(name: str, jars: set[Jar]) -> None:
    files = [jar.file for jar in jars]
    if same := {file for file in files if files.count(file) > 1}:
        raise SystemExit(f"{name}: more than one jar is called {same}")
    published = 0
    for jar in jars:
        try:
            with urllib.request.urlopen(f"{MAVEN_CENTRAL}/{jar.path}.sha256", timeout=60) as answer:
                said = answer.read(200).decode().split()[0]
        except urllib.error.HTTPError:
            continue  # older releases have none
        if said != jar.sha256:
            raise SystemExit(f"{jar.file}: Maven Central says {said}, the file has {jar.sha256}")
        published += 1
    # By name: of classes that are in two jars, every machine takes the same one.
    lines = [f"{j.group}:{j.artifact}:{j.version} sha256:{j.sha256}\n" for j in sorted(jars, key=lambda jar: jar.file)]
    file = HERE / f"{name}-jars.txt"
    file.write_text("# Written by `make lock`. Each jar is compared with its hash before each use.\n" + "".join(lines))
    print(f"{file.name}: {len(jars)} jars, {published} of their hashes are published")


LOCKS: dict[str, Callable[[Path], set[Jar]]] = {
    "kafka": lambda work: resolve(KAFKA, work),
    **{f"kafka-{version}": partial(resolve, asked) for version, asked in OTHER_KAFKAS.items()},
    "spark": lambda work: pin(SPARK, work / "spark"),
    "bench": lambda work: pin(BENCH, work / "bench"),
    "elasticmq": lambda work: resolve(ELASTICMQ, work / "elasticmq"),
}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="marq-jars-") as folder:
        for name in sys.argv[1:] or LOCKS:
            write(name, LOCKS[name](Path(folder)))


if __name__ == "__main__":
    main()
