"""A base for the Dockerfile where no image registry can be reached: this Python, and what it is linked with.

Packed by `tar | docker import`, like the image of the broker. What pip needs to reach its index comes along: the
certificates of this machine and the `PIP_` variables.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

APPLETS = ("sh", "mkdir", "chown", "ls", "cat", "id", "sleep")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def pack(image: tarfile.TarFile, busybox: str) -> None:
    """Add everything to a tar."""
    for name, mode in (("tmp", 0o1777), ("etc", 0o755), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755)):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        image.addfile(entry)
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}").resolve()
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    image.add(python, str(python)[1:])
    image.add(library, str(library)[1:], filter=_needed)
    bundled = Path("/usr/share/python-wheels")  # where Debian keeps pip for venv
    if library.is_relative_to("/usr/lib") and bundled.is_dir():
        image.add(bundled, str(bundled)[1:])
    image.add(busybox, "bin/busybox")
    for name, target in (
        *((f"bin/{applet}", "busybox") for applet in APPLETS),
        ("bin/python", str(python)),
        ("bin/python3", str(python)),
    ):
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        image.addfile(link)
    certificates = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if certificates and Path(certificates).is_file():
        image.add(Path(certificates).resolve(), CERTIFICATES[1:])
    # Every base has the libraries that wheels are linked with; the wheels of this environment show which.
    packages = [Path(sysconfig.get_path("platlib")) / name for name in ("rocksdict", "uvloop", "cramjam")]
    binaries = [python, *library.glob("lib-dynload/*.so"), *(so for folder in packages for so in folder.glob("*.so"))]
    for path in libraries(binaries):
        image.add(path.resolve(), str(path)[1:])


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(entry.name).parts
    return None if {"site-packages", "dist-packages", "test", "tests", "__pycache__"} & set(parts) else entry


def libraries(binaries: list[Path]) -> list[Path]:
    """Libraries of this machine that some binaries are linked with."""
    listing = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=True).stdout
    words = (word for line in listing.splitlines() for word in line.split())
    roots = ("/lib", "/usr/lib", f"{sys.base_prefix}/lib")  # the last: a Python with a library of its own
    return sorted({Path(word) for word in words if word.startswith(roots) and ":" not in word})


def environment() -> list[str]:
    """Arguments of `docker import`: pip's settings, as on this machine."""
    found = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    found |= {"PATH": "/bin", "PIP_CERT": CERTIFICATES, "SSL_CERT_FILE": CERTIFICATES}
    return [part for name, value in found.items() for part in ("--change", f"ENV {name}={value}")]
