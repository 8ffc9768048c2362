"""The architecture: each folder's docstring says what it may import, no import goes in a circle, parts know no app.

Imports inside functions and under TYPE_CHECKING count, too.
"""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
FOLDERS = ("app", "agents", "tables", "gateway", "marq", "pipeline")
#: They put the worker together, and may import everything.
COMPOSITION = {"app.worker", "app.commands"}
MODULES = {
    ".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in sorted((HOME / folder).rglob("*.py"))
}
PACKAGES = {name: path for name, path in MODULES.items() if path.name == "__init__.py"}


def imports_of(name: str) -> set[str]:
    """Modules of ours that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.update({node.module} if any(f"{node.module}.{a.name}" not in MODULES for a in node.names) else ())
    return {module for module in found if module in MODULES} - {name}


IMPORTS = {name: imports_of(name) for name in MODULES}


def package_of(name: str) -> str:
    return name if name in PACKAGES else name.rpartition(".")[0]


def allowed_in(package: str) -> list[str]:
    """What a package's docstring says after "May import"."""
    text = " ".join((ast.get_docstring(ast.parse(PACKAGES[package].read_text())) or "").split())
    (said,) = re.findall(r"May import (.*?)\.(?:\s|$)", text) or [""]
    assert said, f"the docstring of {package} does not say what it may import"
    return re.findall(r"`([a-z_.]+)`", said)


def is_below(name: str, above: str) -> bool:
    return name == above or name.startswith(above + ".")


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_folder_imports_what_its_docstring_says(package: str) -> None:
    allowed = allowed_in(package)
    names = [name for name in MODULES if package_of(name) == package and name not in COMPOSITION]
    wrong = {
        f"{name} imports {other}"
        for name in names
        for other in IMPORTS[name]
        # the packages above it are imported anyway
        if package_of(other) != package
        and not is_below(package, other)
        and not any(is_below(other, a) for a in allowed)
    }
    assert not wrong


@pytest.mark.parametrize("package", [name for name, path in sorted(PACKAGES.items()) if "\n====" in path.read_text()])
def test_the_table_of_a_folder_names_each_of_its_files(package: str) -> None:
    _, table, _ = re.split(r"^=[= ]+$", PACKAGES[package].read_text(), flags=re.MULTILINE)

    assert set(re.findall(r"^`+(\w+)`", table, flags=re.MULTILINE)) == {
        name.rpartition(".")[2] for name in MODULES if name not in PACKAGES and package_of(name) == package
    }


def room_of(name: str) -> str:
    """The folder of a module; those directly in `app` and `marq` are on their own."""
    return name if package_of(name) in ("app", "marq") else package_of(name)


def test_no_import_goes_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for name, imported in IMPORTS.items():
        rooms.setdefault(room_of(name), set()).update(room_of(other) for other in imported)
    for graph in (IMPORTS, {room: others - {room} for room, others in rooms.items()}):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" imports ".join(reversed(error.args[1])))


def test_parts_do_not_know_the_worker_that_they_are_part_of() -> None:
    assert {name for name, imported in IMPORTS.items() if "app.worker" in imported} <= COMPOSITION
