"""Which records of a later version count: those with a seal of the installation.

A record of a later version stops its readers, because they can't know what it changes. So a worker of a later version
seals it, and anybody else who may write to the topic can't make one. The record is a JSON object that ends with its
seal, without blanks:

    {"v":2, … ,"seal":"<24 hexadecimal digits>"}

The seal is made of its place and of all bytes before ``,"seal":``. This version writes no seal: it only checks them.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest

#: The purpose of the keys that seal records of later versions (`app.engine.catalog.Catalog.keys_for`).
VERSIONS = b"marq-version"

#: Bytes of a seal. It is written as twice as many hexadecimal digits.
SEAL_BYTES = 12

_BEFORE, _AFTER = b',"seal":"', b'"}'
_END_BYTES = len(_BEFORE) + 2 * SEAL_BYTES + len(_AFTER)


def place_of_markers(partition: int) -> str:
    """The place of the records of the markers topic in a partition."""
    return f"markers/{partition}"


def place_of_queue(queue: str) -> str:
    """The place of the records of a queue in the queues topic."""
    return f"queues/{queue}"


def version_seal(content: bytes, place: str, key: bytes) -> bytes:
    """The seal of a record at ``place``, made with ``key``; ``content`` is all of its value before ``,"seal":``."""
    where = place.encode()
    return blake2b(b"%d:%b%b" % (len(where), where, content), key=key, digest_size=SEAL_BYTES).hexdigest().encode()


def is_of_installation(value: bytes, place: str, keys: Iterable[bytes]) -> bool:
    """True if a record of a later version counts, because its seal was made with one of the ``keys``.

    Args:
        keys: those of the secret and of the previous one. A reader that does not know the secret (a job, `repair`) has
            none, and takes every record with a seal as one of the installation, so as not to write beside it.
    """
    content, end = value[:-_END_BYTES], value[-_END_BYTES:]
    if not (end.startswith(_BEFORE) and end.endswith(_AFTER)):
        return False
    seal, keys = end[len(_BEFORE) : -len(_AFTER)], tuple(keys)
    return not keys or any(compare_digest(seal, version_seal(content, place, key)) for key in keys)
