"""Damages the log of a partition on the disk of a broker: a bit flips, or the rest of a segment is gone."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from app.kafka.broker import EmbeddedBroker

_HEADER = struct.Struct(">qiibIhi")  # up to the distance of the last offset
_HEADER_BYTES = 61


class Batch(NamedTuple):
    """A batch on a disk: its offsets, and the place of its bytes."""

    segment: Path
    at: int
    end: int
    first: int
    last: int


def batches(broker: EmbeddedBroker, topic: str, number: int) -> Iterator[Batch]:
    """The batches of one partition, as one broker has them."""
    for segment in sorted(broker.home.rglob(f"{topic}-{number}/*.log")):
        data, at = segment.read_bytes(), 0
        while at + _HEADER.size <= len(data):
            base, length, _, _, _, _, last = _HEADER.unpack_from(data, at)
            if length <= 0:
                break
            yield Batch(segment, at, at + 12 + length, base, base + last)
            at += 12 + length


def batch_of(broker: EmbeddedBroker, topic: str, number: int, offset: int) -> Batch:
    """The batch that has an offset."""
    return next(b for b in batches(broker, topic, number) if b.first <= offset <= b.last)


def flip(broker: EmbeddedBroker, topic: str, number: int, offset: int, at: int = -1) -> Batch:
    """Flip one bit of the batch that has an offset, in its last byte or at another place of it."""
    batch = batch_of(broker, topic, number, offset)
    with batch.segment.open("r+b") as file:
        place = batch.end + at if at < 0 else batch.at + at
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
    return batch


def cut(broker: EmbeddedBroker, topic: str, number: int, offset: int) -> Batch:
    """Cut a segment in front of the batch that has an offset."""
    batch = batch_of(broker, topic, number, offset)
    os.truncate(batch.segment, batch.at)
    return batch
