"""The libraries of others in `vendor/`: their versions, and a check of their hashes.

    python -m gateway.ui.vendored            compares every file with its hash
    python -m gateway.ui.vendored --fetch    fetches the versions below anew, with npm, and prints their hashes

Running marq needs no npm: the files are in the repository. For a new version, change it here, run `--fetch`, review the
changes, and write the printed hashes here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parent / "vendor"


class Library(NamedTuple):
    """A package of npm, and which of its files are here."""

    name: str
    version: str
    license: str
    files: dict[str, tuple[str, str]]  # name here -> path in the package, SHA-256


LIBRARIES = (
    Library(
        "preact",
        "10.29.8",
        "MIT",
        {
            "preact.js": ("dist/preact.min.umd.js", "aa558e32247d4ccea18c5addbb0311bc1771bf39734185be01dc0c3c4cf3fd6d"),
            "preact-hooks.js": (
                "hooks/dist/hooks.umd.js",
                "5c29238e5dc99df306d7f7fff038591a397cfcfabb59f81fbdef43d670aa0566",
            ),
            "preact.LICENSE": ("LICENSE", "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4"),
        },
    ),
    Library(
        "htm",
        "3.1.1",
        "Apache-2.0",
        {
            "htm.js": ("dist/htm.umd.js", "7a31776e04bd4afde0d4308177d26f377716fcf7e4bd70be590746d6aa594f08"),
            "htm.LICENSE": ("LICENSE", "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f"),
        },
    ),
    Library(
        "uplot",
        "1.6.32",
        "MIT",
        {
            "uplot.js": ("dist/uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
            "uplot.css": ("dist/uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
            "uplot.LICENSE": ("LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"),
        },
    ),
)


def problems() -> list[str]:
    """Returns the differences between the files and their hashes."""
    found = []
    known = {name for library in LIBRARIES for name in library.files}
    found += [f"{path.name} is of no library" for path in sorted(HOME.iterdir()) if path.name not in known]
    for library in LIBRARIES:
        for name, (_, wanted) in library.files.items():
            path = HOME / name
            actual = sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
            if actual != wanted:
                found.append(f"{name} of {library.name} {library.version} is {actual}, not {wanted}")
    return found


def fetch() -> None:
    """Fetch all libraries and replace their files."""
    HOME.mkdir(exist_ok=True)
    for library in LIBRARIES:
        with tempfile.TemporaryDirectory() as folder:
            wanted = f"{library.name}@{library.version}"
            subprocess.run(["npm", "pack", "--silent", wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            (archive,) = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as packed:
                for name, (path, _) in library.files.items():
                    member = packed.extractfile(f"package/{path}")
                    assert member is not None
                    data = member.read()
                    (HOME / name).write_bytes(data)
                    print(f"{name}  {sha256(data).hexdigest()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="fetch the files anew")
    if parser.parse_args().fetch:
        fetch()
    found = problems()
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
