"""What `make test-kafka` runs is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.kafka.broker import KAFKA_VERSION
from app.kafka.probe import OLDEST
from tests.every_kafka import AREAS, REFUSAL
from tests.other_kafka import locked_versions, parsed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("test", [REFUSAL, *(test for tests in AREAS.values() for test in tests)])
def test_each_test_that_is_named_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert (ROOT / file).is_file()
    if name:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_versions_on_both_sides_of_the_oldest_supported_one_can_be_run() -> None:
    versions = locked_versions()
    assert versions[-1] == KAFKA_VERSION
    assert parsed(versions[0]) < parsed(OLDEST)
    assert {"2.8.2", "3.3.2", "3.9.1", "4.0.0"} <= set(versions)


def test_the_document_has_a_row_for_each() -> None:
    text = (ROOT / "docs" / "kafka.md").read_text()
    assert [version for version in locked_versions() if not re.search(rf"^\| {version}", text, re.MULTILINE)] == []
