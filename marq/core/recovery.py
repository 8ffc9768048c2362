"""Takes the state of a partition from its tables, and goes on without records that were deleted unread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

from marq.core import rows
from marq.core.partition import Partition
from marq.core.ranges import count
from marq.errors import DeletedError

#: Losses that a manifest has one by one. When there are more, the two oldest of a log become one.
LOSSES_MAX = 1_000


class Recovered(NamedTuple):
    """The state at the newest manifest, and what the next checkpoint has to delete."""

    partition: Partition
    orphans: list[str]  # rows that no manifest names
    old_manifests: list[str]


def recovering(
    number: int,
    manifests: dict[str, bytes],
    row_keys: Iterable[str],
    load: Callable[[str], bytes],
    log_start: tuple[int, int],
    *,
    own_offset: int = -1,
    queue_id: str | None = None,
    origin_keys: tuple[bytes, ...] = (),
    accept_loss: bool = False,
) -> Generator[None, None, Recovered | None]:
    """The state of partition ``number``, in slices of a few rows; None if the newest manifest is of a later epoch.

    For the arguments see :meth:`~marq.core.owner.Owner.restore`.
    """
    decoded = {key: rows.decode_manifest(value) for key, value in manifests.items()}
    newest = max(decoded, key=lambda key: decoded[key].epoch, default=None)
    if newest is None:
        partition = Partition(number, queue_id=queue_id, load=load, origin_keys=origin_keys)
        return Recovered(_begun(partition, log_start, accept_loss), list(row_keys), [])
    manifest = decoded.pop(newest)
    if manifest.epoch > own_offset >= 0:
        return None  # its owner has read past our own marker, so we would never fold it
    if not accept_loss:
        _check_log_starts(number, manifest, log_start)
    present = set(row_keys)
    yield
    partition = yield from Partition.restoring(
        number, manifest, load, queue_id=queue_id, present=present, origin_keys=origin_keys
    )
    if accept_loss:
        _skip_deleted_markers(partition, log_start[1])
    return Recovered(partition, sorted(present.difference(partition.named_keys())), [newest, *decoded])


def give_up(partition: Partition, queue_start: int) -> None:
    """Go on at the first offset of the queue topic, though that is beyond what was read."""
    position = partition.position
    if queue_start > position:
        unfinished = queue_start - position - count(partition.ahead.within(position, queue_start))
        note_loss(partition, rows.Loss("queue", position, queue_start, unfinished, partition.last_timestamp_ms))
        partition.counters["deleted_unread"] += unfinished
        partition.ingest(position, queue_start, [])


def note_loss(partition: Partition, loss: rows.Loss) -> None:
    """Remember that these records were given up."""
    lost = partition.lost
    lost.append(loss)
    if len(lost) > LOSSES_MAX:
        first, second = [one for one in lost if one.log == lost[0].log][:2]
        lost.remove(second)
        unfinished = first.unfinished + second.unfinished
        lost[0] = rows.Loss(first.log, first.start, second.stop, unfinished, second.at_ms)


def _begun(partition: Partition, log_start: tuple[int, int], accept_loss: bool) -> Partition:
    """A partition without a manifest begins where its logs do."""
    queue_start, markers_start = log_start
    if accept_loss:
        # a topic of the user's may begin anywhere
        partition.start_at(0 if partition.queue_id is None else queue_start, 0)
        _skip_deleted_markers(partition, markers_start)
        return partition
    if markers_start or (queue_start and partition.queue_id is None):
        raise DeletedError(
            f"partition {partition.number}: the logs begin at {log_start}, but there is no manifest: records were "
            "deleted, so another owner has written one meanwhile, or they were deleted unread; "
            f"`python -m app repair --partition {partition.number}` names them"
        )
    partition.start_at(queue_start, markers_start)
    return partition


def _check_log_starts(number: int, manifest: rows.Manifest, log_start: tuple[int, int]) -> None:
    """Raises :exc:`DeletedError` if a log does not reach back to the position of the manifest."""
    for name, position, start in zip(
        ("queue", "markers"), (manifest.position, manifest.markers_position), log_start, strict=True
    ):
        if start > position:
            raise DeletedError(
                f"partition {number}: the {name} topic begins at {start}, beyond the position {position} of the newest "
                f"manifest (epoch {manifest.epoch}): records were deleted unread; "
                f"`python -m app repair --partition {number}` names them"
            )


def _skip_deleted_markers(partition: Partition, start: int) -> None:
    """Markers below ``start`` are gone: messages that they ended are delivered again."""
    position = partition.markers_position
    if start > position:
        unsure = len(partition.messages) + partition.segments.parked_total()
        note_loss(partition, rows.Loss("markers", position, start, unsure, partition.last_timestamp_ms))
        partition.skip_markers(start)
