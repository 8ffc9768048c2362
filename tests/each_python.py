"""Runs the unit tests with every Python that is found: `python -m tests.each_python [pytest arguments]`.

Each gets a separate environment in a temporary folder, with only the packages of `requirements/unit.txt`. The last
lines have the result of each; exit status 1 if tests failed with one of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def find(version: str) -> str | None:
    """A Python of that version that runs, from the PATH or from pyenv."""
    pyenv = Path.home() / ".pyenv" / "versions"
    for candidate in (f"python{version}", *sorted(map(str, pyenv.glob(f"{version}.*/bin/python3")), reverse=True)):
        try:  # a name on the PATH may be a shim that does not run
            done = subprocess.run(
                [candidate, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2], sep='.')"],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def run(python: str, arguments: list[str]) -> str:
    """The result of the unit tests with one Python."""
    with tempfile.TemporaryDirectory(prefix="marq-python-") as folder:
        own = f"{folder}/bin/python"
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        for command in (
            [python, "-m", "venv", folder],
            [own, *install, "--require-hashes", "--only-binary", ":all:", "-r", "requirements/unit.txt"],
            [own, *install, "--no-index", "--no-build-isolation", "-e", "."],
            [own, "-B", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "tests/unit", *arguments],
        ):
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                return "tests failed" if "pytest" in command else f"`{' '.join(command[1:])}` failed"
    return "ok"


def main(arguments: list[str]) -> int:
    results = {}
    for version in VERSIONS:
        python = find(version)
        print(f"== Python {version}: {python or 'not found'}", flush=True)
        results[version] = run(python, arguments) if python else "not found"
    for version, result in results.items():
        print(f"Python {version}: {result}")
    return 0 if set(results.values()) <= {"ok", "not found"} and "ok" in results.values() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
