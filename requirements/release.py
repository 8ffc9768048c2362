"""`make release`: wheel, source distribution and image of the version that the changelog has as its newest, tried out.

    python -m requirements.release [--check]

`--check` only compares version and changelog. The image is built and tried where a Docker engine answers or can be
started (see `tests.containers.build_image`); without one, that is said, and the status is 3.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
_HEADING = re.compile(r"## (?P<version>\d+\.\d+\.\d+)(?: \((?P<date>\d{4}-\d{2}-\d{2})\))?")


def problems(version: str, changelog: str) -> list[str]:
    """What keeps this version from being released, by the changelog."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"marq.__version__ is {version}, which is no release; set it to {version.partition('.dev')[0]}"]
    headings = [line for line in changelog.splitlines() if line.startswith("## ")]
    if not headings:
        return ["the changelog has no heading"]
    found = _HEADING.fullmatch(headings[0])
    if found is None:
        return [f"the newest heading of the changelog is {headings[0]!r}; a release is '## {version} (YYYY-MM-DD)'"]
    wrong = []
    if found["version"] != version:
        wrong.append(f"marq.__version__ is {version}, the newest heading of the changelog is {found['version']}")
    if found["date"] is None:
        wrong.append(f"the heading of {found['version']} has no date")
    undated = [line for line in headings[1:] if not (older := _HEADING.fullmatch(line)) or older["date"] is None]
    return wrong + [f"the heading {line!r} is no version with a date" for line in undated]


def main(arguments: list[str]) -> int:
    from marq import __version__

    wrong = problems(__version__, (ROOT / "CHANGELOG.md").read_text())
    for line in wrong:
        print(f"no release: {line}", file=sys.stderr)
    if wrong or "--check" in arguments:
        return 1 if wrong else 0
    shutil.rmtree(DIST, ignore_errors=True)
    build()
    packages = sorted(DIST.iterdir())
    if [package.suffix for package in packages] != [".whl", ".gz"]:
        print(f"no release: a wheel and a source distribution were to be built, not {packages}", file=sys.stderr)
        return 1
    for package in packages:
        try_out(package, __version__)
        print(f"{package.name}: installed in an environment with nothing else, and runs")
    return 3 if subprocess.run([sys.executable, "-m", "tests.containers.build_image"], cwd=ROOT).returncode else 0


def build() -> None:
    """Build both from a copy of what is committed, with the setuptools of the lock."""
    with tempfile.TemporaryDirectory() as scratch:
        source = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", scratch], input=source, check=True)
        # setuptools changes the arguments
        make = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
        DIST.mkdir()
        subprocess.run([sys.executable, "-c", make, str(DIST)], cwd=scratch, check=True, stdout=subprocess.DEVNULL)


def try_out(package: Path, version: str) -> None:
    """Install a package alone, and run what it brings. Its dependencies come from the index, as for any user."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python, marq = (str(Path(scratch) / "bin" / name) for name in ("python", "marq"))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"marq[cli] @ file://{package}"], check=True, cwd=scratch)
        code = "import marq.client, marq.core.partition; print(marq.__version__)"
        for command, said in (
            ([python, "-c", code], version),
            ([marq, "--version"], f"marq {version}"),
        ):
            out = subprocess.run(command, check=True, cwd=scratch, capture_output=True, text=True).stdout.strip()
            if out != said:
                raise SystemExit(f"{package.name} says {out!r}, not {said!r}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
