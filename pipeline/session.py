"""Starts Spark for one job: settings for a laptop and a cluster alike, no log output, errors as one line.

Under `spark-submit` the driver's Java runs already, so jars and memory are options of spark-submit; `python -m pipeline
submit-options` prints them. Otherwise we start Java as a child of this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.folders import UMASK
from marq.errors import PipelineError
from pipeline import java as java_start
from pipeline.jars import install_spark_jars, java_home, zip_code

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"

#: Heap of the driver; with a local master the executor runs in it too.
DRIVER_MEMORY = "1g"

#: Parts to remove from an error message that came out of Java: class names, Spark's error class.
_CLASSES = re.compile(r"^(?:(?:[\w$]+\.)+[\w$]*(?:Exception|Error|Throwable)[\w$]*: ?)+")
_ERROR_CLASS = re.compile(r"^\[[A-Z0-9_.]+\] ")
_SQLSTATE = re.compile(r" SQLSTATE: \w+$")

#: Spark looks with a recursive pattern whether a query was interrupted. For a long Python error, Java's usual stack of
#: 1 MiB overflows, and Java prints that.
_STACK = "-Xss16m"

_PYTHON_CLASS = re.compile(r"^\w+(?:Error|Exception): ")
_RAISED = re.compile(r"^(?:Caused by: |: )?(?:[\w$]+\.)*[\w$]*(?:Error|Exception|Throwable)\b")
_TRACEBACK = "Traceback (most recent call last):"

_LOG4J2 = """\
status = error
rootLogger.level = {level}
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n%ex
# Spark sets the root's level to that of this one, and says so, if they differ.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = {level}
"""


def starts_slowly() -> bool:
    """Whether the file that makes Java's start short could be made, and is not there."""
    if is_submitted():
        return False
    with contextlib.suppress(PipelineError, OSError):
        return not java_start.class_cache(java_home()).exists()
    return False


def is_submitted() -> bool:
    """Whether this process was started by `spark-submit`."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextlib.contextmanager
def spark_session(
    name: str,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    lasting: bool = False,
    verbose: bool = False,
) -> Iterator[SparkSession]:
    """A Spark session for one job, ended with the block.

    Args:
        name: of the job, shown on Spark's pages.
        master: as for `spark-submit --master`. By default the one that spark-submit was given, else all cores here.
        conf: Spark settings that override ours.
        lasting: the job has work for minutes or more.
        verbose: show Spark's own log (warnings and above) on stderr.

    Raises:
        PipelineError: Java or Spark can't be started; the jars can't be downloaded; Java ended before the block did.
    """
    with tempfile.TemporaryDirectory(prefix="marq-spark-", ignore_cleanup_errors=True) as scratch:
        spark = start(name, Path(scratch), master=master, conf=conf, lasting=lasting, verbose=verbose)
        with contextlib.ExitStack() as end:
            end.callback(spark.stop)
            try:
                yield spark
            except Exception:
                if not _has_java_ended(spark):
                    raise
                end.pop_all()
                raise PipelineError(
                    "the Java in which Spark ran has ended: it was killed, or had too little memory; start the job "
                    "again, with more if need be: --set spark.driver.memory=2g"
                ) from None


def _has_java_ended(spark: SparkSession) -> bool:
    """Whether Spark's Java no longer answers."""
    from py4j.protocol import Py4JError

    try:
        spark.sparkContext._jsc.version()
    except (Py4JError, OSError):
        return True
    return False


def start(
    name: str,
    scratch: Path,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    lasting: bool = False,
    verbose: bool = False,
    java_options: str | None = None,
) -> SparkSession:
    """Like `spark_session`, but the caller stops the session.

    Args:
        scratch: a folder that can be deleted after `stop()`.
        java_options: options of Java instead of ours.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    # its logger would print an error with a trace before we see the exception
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL + 1)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_submitted():
        # only spark-submit's Java knows the settings that were given to it
        SparkContext._ensure_initialized()
        submitted = dict(SparkConf().getAll())
        settings = _common(scratch) | submitted
    else:
        java = java_home()
        os.environ["JAVA_HOME"] = str(java)
        options = java_start.java_options(java, lasting=lasting) if java_options is None else java_options
        settings = _common(scratch) | _own(master or "local[*]", scratch, options, verbose=verbose)
    settings |= conf or {}
    local = settings["spark.master"].startswith("local")
    if local:
        settings = _small() | settings
    settings["spark.app.name"] = f"marq {name}"
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        if SparkContext._gateway is None and not is_submitted():
            # in a session of its own: a signal to our process group reaches only us, and we stop things in order
            before = SparkConf().setAll(list(settings.items()))
            gateway = launch_gateway(before, {"start_new_session": True})  # type: ignore[no-untyped-call]
            SparkContext._ensure_initialized(gateway=gateway)
        spark = builder.getOrCreate()
    except Exception as error:
        raise PipelineError(
            f"Spark could not be started: {explain(error)}; --verbose shows its log, and JAVA_HOME names another Java"
        ) from None
    if not local:
        spark.sparkContext.addPyFile(str(zip_code(scratch)))
    return spark


def _common(scratch: Path) -> dict[str, str]:
    """Settings that every job relies on, however it was started."""
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # A row belongs to the same day wherever that is computed.
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        # Rows are of one day, or two at midnight: both files are open at once. With more, rows are first sorted by day.
        "spark.sql.maxConcurrentOutputFileWriters": "2",
        # Bytes that an open file keeps in memory.
        # Hadoop sets the permissions of what it writes, whatever the umask of the process
        "spark.hadoop.fs.permissions.umask-mode": f"{UMASK:03o}",
        "spark.hadoop.parquet.block.size": str(32 * 1024 * 1024),
        # The logs of our tables are short; by default each read of one is 50 tasks.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


def _own(master: str, scratch: Path, java_options: str, *, verbose: bool) -> dict[str, str]:
    """Settings that must be known before Java starts."""
    log4j2 = scratch / "log4j2.properties"
    log4j2.write_text(_LOG4J2.format(level="warn" if verbose else "off"))
    jars = [str(jar) for jar in install_spark_jars()]
    settings = {
        "spark.master": master,
        "spark.driver.memory": DRIVER_MEMORY,
        # On the driver's class path from the start; executors on other machines download them from the driver.
        "spark.driver.extraClassPath": os.pathsep.join(jars),
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile=file:{log4j2}" {_STACK} {java_options}',
    }
    if not master.startswith("local"):
        settings["spark.jars"] = ",".join(jars)
        return settings
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    return settings | {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.local.dir": str(scratch / "local"),
    }


def _small() -> dict[str, str]:
    """For one machine: as many tasks as cores. Spark's defaults would make hundreds of tiny ones."""
    cores = str(os.cpu_count() or 2)
    return {
        "spark.sql.shuffle.partitions": cores,
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": cores,
    }


def submit_options() -> list[str]:
    """Arguments of `spark-submit` that prepare a cluster for our jobs."""
    return ["--jars", ",".join(str(jar) for jar in install_spark_jars()), "--driver-memory", DRIVER_MEMORY]


#: Compiling code for a query takes about half a second: with so few bytes or records, longer than running it as it is.
FEW_BYTES = 1024 * 1024
FEW_RECORDS = 20_000

_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # It would run each stage as a job of its own, to look at what came out.
    "spark.sql.adaptive.enabled": "false",
}


@contextlib.contextmanager
def interpreted(spark: SparkSession, wanted: bool = True) -> Iterator[None]:
    """Within the block, queries are run as they are, neither compiled nor adapted. Only few rows gain from it."""
    if not wanted:
        yield
        return
    before = {key: spark.conf.get(key, None) for key in _INTERPRETED}
    for key, value in _INTERPRETED.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, was in before.items():
            if was is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, was)


# -- errors ---------------------------------------------------------------------------------------------


def explain(error: BaseException) -> str:
    """The message of the root cause as one line, without class names and trace."""
    text = ""
    for cause in _causes(error):
        _, is_trace, trace = cause.rpartition(_TRACEBACK)
        # A Python trace in an error of Java ends with the exception.
        raised = [line for line in reversed(trace.splitlines()) if _RAISED.match(line)]
        lines = raised if is_trace else cause.splitlines()
        for line in lines:
            line = line.strip().removeprefix("Caused by: ").removeprefix(": ")
            line = _SQLSTATE.sub("", _ERROR_CLASS.sub("", _CLASSES.sub("", line))).strip()
            if is_trace:
                line = _PYTHON_CLASS.sub("", line)
            if line and not line.startswith(("at ", "===")):
                text = line
                break
    return text or type(error).__name__


def _causes(error: BaseException) -> Iterator[str]:
    """Messages from the outermost error to the root cause, through Java's and Python's."""
    from py4j.protocol import Py4JJavaError

    java = (
        getattr(error, "java_exception", None) if isinstance(error, Py4JJavaError) else getattr(error, "_origin", None)
    )
    if java is None:
        yield str(error)
        if error.__cause__ is not None:
            yield from _causes(error.__cause__)
        return
    seen = 0
    while java is not None and seen < 20:
        message = java.getMessage()
        if message:
            yield str(message)
        java, seen = java.getCause(), seen + 1
