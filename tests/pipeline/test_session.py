"""Errors of Spark as one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.java import java_options
from pipeline.session import explain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRACE = (
    "An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):\n"
    '  File "clientserver.py", line 644, in _call_proxy\n'
    "    return_value = getattr(self.pool[obj_id], method)(*params)\n"
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03", "Path does not exist: file:/x."),
        ("java.lang.RuntimeException: java.io.IOException: disk full\n\tat a.b(C.java:1)", "disk full"),
        (TRACE + "OSError: [Errno 28] No space left\n", "[Errno 28] No space left"),
        (
            TRACE + "py4j.protocol.Py4JJavaError: An error occurred while calling o1.save.\n"
            ": org.apache.spark.SparkException: Job aborted.\n\tat a.b(C.java:1)\n"
            "Caused by: java.io.IOException: No space left on device\n\tat a.b(C.java:1)\n\t... 34 more\n",
            "No space left on device",
        ),
        (
            TRACE + "pyspark.errors.exceptions.captured.AnalysisException: [UNRESOLVED_COLUMN] no column `x`.\n"
            "'Project ['x]\n+- Range (0, 1)\n",
            "no column `x`.",
        ),
        ("", "RuntimeError"),
    ],
)
def test_an_error_is_explained_in_the_words_of_its_first_cause(message: str, line: str) -> None:
    assert explain(RuntimeError(message)) == line


def test_java_gets_no_signal_of_our_process_group(spark: SparkSession) -> None:
    java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    assert os.getpgid(java) == java != os.getpgrp()


def test_java_has_its_second_compiler_only_where_there_is_work_for_it() -> None:
    nowhere = Path("/nowhere")
    assert "TieredStopAtLevel=1" in java_options(nowhere)
    assert "TieredStopAtLevel" not in java_options(nowhere, lasting=True)
