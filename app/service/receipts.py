"""Receipts, with which a receiver acknowledges, extends or releases one delivery of one message.

A receipt is 45 bytes in base64: the place of the message, the delivery, the queue, and a keyed hash of them. Making one
takes the installation's secret, so a receipt with a valid hash was given out by a worker. All workers share the secret.
A later format needs another length, or another `_PERSON`, so that this one refuses it.
"""

from __future__ import annotations

import itertools
import struct
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from hashlib import blake2b
from hmac import compare_digest

from app.engine.queue_records import QUEUE_ID_BYTES, id_of_queue
from marq.core.markers import Marker, split
from marq.core.ranges import ranges_of
from marq.errors import BadReceiptError

#: partition, epoch, delivery, offset, attempt, id of the queue
_BODY = struct.Struct(f">HQIQB{QUEUE_ID_BYTES}s")
_HASH_BYTES = 12
_PERSON = b"marq-receipt"
#: Characters of a receipt.
LENGTH = (_BODY.size + _HASH_BYTES) // 3 * 4
#: Characters of what is not one that its error repeats.
SHOWN = 60
#: The highest attempt in a receipt: only back-offs need it, and they don't grow beyond that.
_ATTEMPT_MAX = 255
#: Receipts given out here that are accepted without computing their hash.
_REMEMBERED = 50_000

#: The fields of a receipt: partition, epoch, delivery, offset, attempt, id of the queue. A plain tuple, because one is
#: made for each message.
Receipt = tuple[int, int, int, int, int, bytes]


#: `id_of_queue`, for the queues that are in use.
queue_id = lru_cache(10_000)(id_of_queue)


class Receipts:
    """Makes receipts with one secret, and also reads those of earlier secrets. Gets the secrets when first needed."""

    def __init__(self, secret: Callable[[], bytes], previous: Callable[[], Iterable[bytes]] = tuple) -> None:
        self._secret = secret
        self._previous = previous
        self._given: dict[str, Receipt] = {}  # most come back to the worker that gave them out

    @cached_property
    def _key(self) -> bytes:
        return _key_of(self._secret())

    @cached_property
    def _hasher(self) -> blake2b:
        """One that has taken the key in, which is half of the work for a receipt."""
        return blake2b(key=self._key, digest_size=_HASH_BYTES)

    @cached_property
    def _other_keys(self) -> tuple[bytes, ...]:
        return tuple(_key_of(secret) for secret in self._previous())

    def make(self, partition: int, epoch: int, delivery: int, offset: int, attempt: int, queue: bytes) -> str:
        """The receipt of one message of a delivery."""
        if attempt > _ATTEMPT_MAX:
            attempt = _ATTEMPT_MAX
        body = _BODY.pack(partition, epoch, delivery, offset, attempt, queue)
        hasher = self._hasher.copy()
        hasher.update(body)
        receipt = b2a_base64(body + hasher.digest(), newline=False).decode()
        if len(self._given) >= _REMEMBERED:
            self._given.clear()
        self._given[receipt] = (partition, epoch, delivery, offset, attempt, queue)
        return receipt

    def read(self, receipt: str) -> Receipt:
        """Inverse of `make`. Raises `BadReceiptError` for a receipt that it did not make."""
        given = self._given.get(receipt)
        if given is not None:
            return given
        if len(receipt) != LENGTH:
            shown = receipt if len(receipt) <= SHOWN else receipt[:SHOWN] + "…"
            raise BadReceiptError(
                f"not a receipt: {shown!r} has {len(receipt)} characters, not {LENGTH} as those of this version; each "
                "message that is received comes with one"
            )
        try:
            data = a2b_base64(receipt, strict_mode=True)
        except (Error, ValueError):
            raise BadReceiptError(
                f"not a receipt: {receipt!r} is damaged; it has to be given as it was received"
            ) from None
        body, hashed = data[: _BODY.size], data[_BODY.size :]
        for key in (self._key, *self._other_keys):
            if compare_digest(hashed, blake2b(body, key=key, digest_size=_HASH_BYTES).digest()):
                return _BODY.unpack(body)
        raise BadReceiptError(
            f"{receipt!r} was not given out by this installation, or by a later version of marq, or is damaged; its "
            "message comes again"
        )


def _key_of(secret: bytes) -> bytes:
    return blake2b(secret, digest_size=32, person=_PERSON).digest()


def read_unchecked(receipt: str) -> Receipt:
    """Decode a receipt without checking its hash."""
    return _BODY.unpack(a2b_base64(receipt)[: _BODY.size])


def by_delivery(
    receipts: Iterable[Receipt], marker: Callable[[int, int, list[int]], Marker]
) -> dict[int, list[Marker]]:
    """One marker for each delivery in `receipts`, by partition. `marker` gets epoch, delivery and ranges."""
    deliveries: dict[tuple[int, ...], list[int]] = {}
    for receipt in receipts:
        deliveries.setdefault(receipt[:3], []).append(receipt[3])
    markers: dict[int, list[Marker]] = {}
    for (number, epoch, delivery), offsets in deliveries.items():
        offsets.sort()
        if any(a == b for a, b in itertools.pairwise(offsets)):
            offsets = sorted(set(offsets))
        markers.setdefault(number, []).extend(split(marker(epoch, delivery, ranges_of(offsets))))
    return markers
