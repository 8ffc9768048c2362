"""Takes the state of a partition from its tables, and goes on without records that were deleted unread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple

from marq.core import rows
from marq.core.partition import Partition
from marq.core.ranges import RangeSet, count
from marq.core.restoring import newest_read_ms
from marq.core.world import World
from marq.errors import DeletedError, RewrittenError

#: Losses that a manifest has one by one. When there are more, the two oldest of a log become one.
LOSSES_MAX = 1_000

#: Milliseconds for which a loss is reported as a present problem; it stays in the manifest.
RECENT_MS = 86_400_000


class Edges(NamedTuple):
    """What the logs of a partition have now, told after its tables were read. The queue topic's offset comes first."""

    start: tuple[int, int]  # first offsets
    end: tuple[int, int] | None = None  # offsets behind the last ones; None: not known
    newer: int | None = None  # record of the queue topic below what was read, and newer than all that was read
    world: World | None = None  # None: not known


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
    edges: Edges,
    *,
    own_offset: int = -1,
    queue_id: str | None = None,
    origin_keys: tuple[bytes, ...] = (),
    accept_loss: bool = False,
) -> Generator[None, None, Recovered | None]:
    """The state of partition ``number``, in slices of a few rows; None if the newest manifest is of a later epoch.

    For the arguments see :meth:`~marq.core.owner.Owner.restore`.
    """
    ours = dict(_of_world(manifests.items(), edges.world))
    newest = max(ours, key=lambda key: ours[key].epoch, default=None)
    if newest is None:
        _check_world(number, manifests.values(), edges.world)
        partition = Partition(number, queue_id=queue_id, load=load, origin_keys=origin_keys)
        partition.world = edges.world
        return Recovered(_begun(partition, edges.start, accept_loss), list(row_keys), [])
    manifest = ours[newest]
    _check_log_ends(number, manifest, edges)
    if manifest.epoch > own_offset >= 0:
        return None  # its owner has read past our own marker, so we would never fold it
    if not accept_loss:
        _check_markers_start(number, manifest, edges.start[1])
    present = set(row_keys)
    yield
    partition = yield from Partition.restoring(
        number, manifest, load, queue_id=queue_id, present=present, origin_keys=origin_keys
    )
    partition.world = edges.world or manifest.world
    if accept_loss:
        _skip_deleted_markers(partition, edges.start[1])
    return Recovered(partition, sorted(present.difference(partition.named_keys())), list(manifests))


class LastRead(NamedTuple):
    """What the newest manifest has read of the queue topic: up to which offset, and the greatest timestamp there."""

    position: int
    newest_ms: int
    unreadable: tuple[int, ...] = ()  # ranges below the position: not read

    def is_newer(self, offset: int, timestamp_ms: int) -> bool:
        """True if a record lies where others were read, and is newer than all of them."""
        return offset < self.position and timestamp_ms > self.newest_ms and offset not in RangeSet([*self.unreadable])


def newest(manifests: Iterable[bytes], world: World | None) -> rows.Manifest | None:
    """The manifest that counts: the one with the highest epoch among those of this world. None: there is none."""
    ours = (manifest for _, manifest in _of_world((("", value) for value in manifests), world))
    return max(ours, key=lambda one: one.epoch, default=None)


def last_read(manifest: rows.Manifest, queue_id: str | None = None) -> LastRead:
    """What the owner that wrote a manifest had read of the queue topic."""
    return LastRead(manifest.position, newest_read_ms(manifest, queue_id), tuple(manifest.unreadable))


class Deleted(NamedTuple):
    """The queue topic begins at ``start``, and something below was not read: it is beyond the position, or unreadable.

    Messages below are lost if they are not done once the markers below ``markers_end`` are folded.
    """

    start: int
    markers_end: int

    def losses_of(self, partition: Partition) -> list[rows.Loss]:
        """The messages that were deleted unread and are not done: a loss for each range that was unreadable."""
        position, start, purged = partition.position, self.start, 0
        if partition.queue_id is not None:  # one queue has all of the topic: a purge ends what was not read, too
            purged = min(start, partition.purges.get(partition.queue_id, 0))
        ranges = [(max(a, purged), min(b, start)) for a, b in partition.unreadable_ranges()]
        losses = [rows.Loss("queue", a, b, b - a, partition.last_timestamp_ms) for a, b in ranges if a < b]
        position = max(position, purged)
        unfinished = start - position - count(partition.ahead.within(position, start))
        if unfinished > 0:
            losses.append(rows.Loss("queue", position, start, unfinished, partition.last_timestamp_ms))
        return losses


def pass_deleted(partition: Partition, deleted: Deleted, losses: list[rows.Loss]) -> None:
    """Go on at the first offset of the queue topic."""
    for loss in losses:
        note_loss(partition, loss)
        partition.counters["deleted_unread"] += loss.unfinished
    partition.read_again(0, deleted.start, [])
    partition.ingest(partition.position, deleted.start, [])


def note_loss(partition: Partition, loss: rows.Loss) -> None:
    """Remember that these records were given up."""
    lost = partition.lost
    lost.append(loss)
    if len(lost) > LOSSES_MAX:
        first, second = [one for one in lost if one.log == lost[0].log][:2]
        lost.remove(second)
        unfinished = first.unfinished + second.unfinished
        lost[0] = rows.Loss(first.log, first.start, second.stop, unfinished, second.at_ms)


def _of_world(manifests: Iterable[tuple[str, bytes]], world: World | None) -> Iterator[tuple[str, rows.Manifest]]:
    """Manifests that are not known to be of another world."""
    for key, value in manifests:
        manifest = rows.decode_manifest(value)
        if manifest.world is None or world is None or not manifest.world.difference(world):
            yield key, manifest


def _check_world(number: int, manifests: Iterable[bytes], world: World | None) -> None:
    """Raises :exc:`RewrittenError` if there are manifests, but none of this world."""
    foreign = newest(manifests, None)
    if foreign is not None and foreign.world is not None and world is not None:
        raise RewrittenError(
            f"partition {number}: its state was made from other logs ({foreign.world.difference(world)}): a topic was "
            "made anew, or the changelogs were copied from another Kafka (docs/operations.md)"
        )


def recent_losses(partition: Partition) -> list[rows.Loss]:
    """What was given up in the last day of the partition's log."""
    return [loss for loss in partition.lost if loss.at_ms > partition.last_timestamp_ms - RECENT_MS]


def _begun(partition: Partition, log_start: tuple[int, int], accept_loss: bool) -> Partition:
    """A partition without a manifest is read from its beginning. A topic of the user's may begin anywhere."""
    queue_start, markers_start = log_start
    if markers_start and not accept_loss:
        raise DeletedError(
            f"partition {partition.number}: the logs begin at {log_start}, but there is no manifest: records were "
            "deleted, so another owner has written one meanwhile, or they were deleted unread; "
            f"`python -m app repair --partition {partition.number}` names them"
        )
    partition.start_at(0 if partition.queue_id is None else queue_start, 0)
    _skip_deleted_markers(partition, markers_start)
    return partition


def deleted_unread(number: int, log: str, start: int, position: int, messages: str = "records") -> DeletedError:
    """The error that a log begins at ``start``, though it was read to ``position`` only."""
    return DeletedError(
        f"partition {number}: the {log} topic begins at {start}, beyond the position {position} up to which it was "
        f"read: {messages} were deleted unread; `python -m app repair --partition {number}` names them"
    )


def _check_markers_start(number: int, manifest: rows.Manifest, start: int) -> None:
    """Raises :exc:`DeletedError` if the markers log does not reach back to the position of the manifest."""
    if start > manifest.markers_position:
        raise deleted_unread(number, "markers", start, manifest.markers_position)


def _check_log_ends(number: int, manifest: rows.Manifest, edges: Edges) -> None:
    """Raises :exc:`RewrittenError` if a log does not have what was read, or has given out its offsets once more.

    Whoever served such a partition would pass over what was written there since.
    """
    said = f"of the newest manifest (epoch {manifest.epoch})"
    why = "the topic was made anew or restored, or has lost its end (docs/operations.md)"
    positions = (manifest.position, manifest.markers_position)
    for name, position, end in zip(("queue", "markers"), positions, edges.end or positions, strict=True):
        if end < position:
            raise RewrittenError(
                f"partition {number}: the {name} topic ends at {end}, before the position {position} {said}: {why}"
            )
    if edges.newer is not None and edges.newer < manifest.position:
        raise RewrittenError(
            f"partition {number}: record {edges.newer} of the queue topic is newer than all that were read there up to "
            f"the position {manifest.position} {said}: {why}"
        )


def _skip_deleted_markers(partition: Partition, start: int) -> None:
    """Markers below ``start`` are gone."""
    position = partition.markers_position
    if start > position:
        lose_markers(partition, position, start)


def lose_markers(partition: Partition, start: int, stop: int) -> None:
    """Go on without the markers in ``[start, stop)``: messages that they ended are delivered again."""
    unsure = len(partition.messages) + partition.segments.parked_total()
    note_loss(partition, rows.Loss("markers", start, stop, unsure, partition.last_timestamp_ms))
    partition.skip_markers(stop)
