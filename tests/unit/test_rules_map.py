"""The table of docs/protocol.md that says where each rule lives names code that exists."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = (ROOT / "docs" / "protocol.md").read_text().split("## Where each rule lives")[1].splitlines()
RULES = [row for row in ROWS if row.startswith("|")][2:]


@pytest.mark.parametrize("rule", RULES, ids=[rule.split("|")[1].strip() for rule in RULES])
def test_the_code_of_a_rule_is_where_the_table_says(rule: str) -> None:
    module = None
    found = 0
    for path, name in re.findall(r"`(?:([\w/]+)\.py: )?([A-Za-z_]\w*(?:\.\w+)?)`", rule.split("|")[2]):
        module = importlib.import_module(path.replace("/", ".")) if path else module
        assert module is not None, "a place begins with a file"
        assert reduce(getattr, name.split("."), module) is not None
        found += 1
    assert found
