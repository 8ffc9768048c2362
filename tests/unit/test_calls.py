"""Calls with many arguments name them."""

from __future__ import annotations

import ast

from tests.unit.test_imports import MODULES

#: Positional arguments that a call may have.
MOST = 7
#: Made for each message or step of the fold, where names would cost more than the rest; lists of columns and fields.
WITHOUT_NAMES = {"Received", "Event", "State", "select", "concat", "CompactArray", "Schema"}


def test_a_call_with_many_arguments_names_them() -> None:
    wrong = [
        f"{path}:{call.lineno}"
        for path in MODULES.values()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and sum(not isinstance(argument, ast.Starred) for argument in call.args) > MOST
        and ast.unparse(call.func).rpartition(".")[2].rpartition(")")[2] not in WITHOUT_NAMES
    ]
    assert not wrong
