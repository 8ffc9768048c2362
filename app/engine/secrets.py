"""Derives a key from the secret that a user sets. It is slow, because a receipt lets anybody try guesses offline."""

from __future__ import annotations

import hashlib
from functools import lru_cache

#: Cost of a guess: 32 MiB and about a tenth of a second of a processor.
_N, _R, _P = 1 << 15, 8, 1
_MEMORY_BYTES = 64 * 1024 * 1024


@lru_cache(8)
def derived(secret: str, installation: str) -> bytes:
    """32 bytes derived from a secret: the same in all workers of an installation, different in any other one."""
    salt = b"marq/" + installation.encode()
    return hashlib.scrypt(secret.encode(), salt=salt, n=_N, r=_R, p=_P, maxmem=_MEMORY_BYTES, dklen=32)
