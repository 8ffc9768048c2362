"""How a checkpoint becomes durable, in steps that the owner's caller carries out: rows, manifest, fence, deletions.

    IDLE ◄───────────────────────────────────────────────────────────────────────┐
     │ step(): rows                 │ step(): there are none                      │
     ▼                              ▼                                             │
    WRITING_ROWS ──written()──► ROWS_WRITTEN                                      │ step(): what may be deleted
                                    │ step(): manifest                            │
                                    ▼                                             │
                                WRITING_MANIFEST ──written()──► FENCING ──► RETIRING
                                                                   the fence is folded

Rows and manifest are captured together when a cycle begins. Rows are deleted, and logs cut, only after a fence was
folded: a tick that was appended once the manifest was durable, with no foreign own marker before it. Until then another
worker may be reading an older manifest, which names these rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from marq.core import invariants, rows
from marq.core.checkpoints import Checkpoint
from marq.core.markers import Tick
from marq.core.partition import Partition
from marq.core.policies import Limits
from marq.errors import InternalError, RowError, StepTimeoutError


class CycleState(Enum):
    """The step that a checkpoint has reached. Error messages show the value."""

    IDLE = "idle"  # none is under way
    WRITING_ROWS = "rows"  # rows are on their way to the tables
    ROWS_WRITTEN = "manifest"  # the manifest may be written
    WRITING_MANIFEST = "manifest written"  # the manifest is on its way
    FENCING = "fence"  # the tick behind the manifest is on its way
    RETIRING = "retire"  # that tick is folded: what the manifest does not name may be deleted


class WriteRows(NamedTuple):
    """Write these rows, then call :meth:`Owner.written`."""

    rows: list[tuple[str, bytes]]


class WriteManifest(NamedTuple):
    """Write the manifest, then call :meth:`Owner.written`."""

    key: str
    value: bytes


class Retire(NamedTuple):
    """The checkpoint is behind its fence: delete these rows and manifests, and the logs may go up to the positions."""

    rows: list[str]
    manifests: list[str]
    position: int
    markers_position: int


Step = WriteRows | WriteManifest | Retire


class CheckpointCycle:
    """The checkpoints of one owner, one after the other. Times are its monotonic clock.

    Args:
        nonce: of the owner; fences are named after it.
        orphans: rows in the tables that no manifest names: the first checkpoint deletes them.
        old_manifests: keys of manifests of former owners: deleted, too.
    """

    def __init__(
        self,
        partition: Partition,
        nonce: str,
        limits: Limits,
        orphans: Iterable[str] = (),
        old_manifests: Iterable[str] = (),
    ) -> None:
        self.state = CycleState.IDLE
        self._partition = partition
        self._nonce = nonce
        self._limits = limits
        self._epoch = -1
        self._orphans = list(orphans)
        self._old_manifests = list(old_manifests)
        self._checkpoint: Checkpoint | None = None
        self._since_ms = 0  # when it got into this state
        self._next_ms = 0  # when the next checkpoint begins
        self._hurried = False
        self._fence = ""
        self._fences = 0

    def serve(self, epoch: int, now_ms: int) -> None:
        """Begin to make checkpoints: the owner serves from now on."""
        self._epoch = epoch
        self._next_ms = now_ms + self._limits.checkpoint_ms

    def hurry(self) -> None:
        """Memory is short: the next checkpoint comes at once, unless it is put off, and writes all payloads."""
        if not self._hurried:
            # only the first time: one that waits for its turn is asked to hurry again and again
            self._hurried, self._next_ms = True, 0

    @property
    def is_urgent(self) -> bool:
        """True from :meth:`hurry` until the checkpoint begins."""
        return self._hurried

    def put_off(self, until_ms: int) -> None:
        """The next checkpoint does not begin before this time."""
        self._next_ms = max(self._next_ms, until_ms)

    def is_due(self, now_ms: int) -> bool:
        """True if :meth:`step` would begin a checkpoint now."""
        return self.state is CycleState.IDLE and now_ms >= self._next_ms

    @property
    def under_way(self) -> bool:
        """True while a checkpoint is not complete."""
        return self.state is not CycleState.IDLE

    @property
    def has_to_write(self) -> bool:
        """True if a checkpoint is worth a tick, without which it is not made."""
        partition = self._partition
        return partition.changed() or (self._hurried and partition.persisted < partition.position)

    def wants_event(self, now_ms: int) -> bool:
        """True if a step waits for the arrival of a marker: append a tick if no other marker comes."""
        if self.state is CycleState.IDLE:
            return self.is_due(now_ms) and self.has_to_write
        return self.state in (CycleState.ROWS_WRITTEN, CycleState.RETIRING)

    def event_ms(self, now_ms: int) -> int | None:
        """The time from which on :meth:`wants_event` is true, if nothing happens until then; None: never."""
        if self.state is not CycleState.IDLE:
            return now_ms if self.state in (CycleState.ROWS_WRITTEN, CycleState.RETIRING) else None
        if not self.has_to_write:
            return None
        return self._next_ms

    # ------------------------------------------------------------------ what happens

    def step(self, now_ms: int) -> Step | None:
        """Returns what to do next, or None.

        Raises:
            StepTimeoutError: a step was not acknowledged in time.
            InternalError: the state breaks a rule, and must not be written down.
        """
        if self.is_due(now_ms):
            self._begin(now_ms)
            if self.state is CycleState.WRITING_ROWS:
                return WriteRows(self._captured().rows)
        if self.state is CycleState.ROWS_WRITTEN:
            self._enter(CycleState.WRITING_MANIFEST, now_ms)
            return WriteManifest(self._manifest_key(), self._captured().manifest)
        if self.state is CycleState.RETIRING:
            return self._retire(now_ms)
        late_ms = now_ms - self._since_ms
        if self.state is not CycleState.IDLE and late_ms > self._limits.step_timeout_ms:
            raise StepTimeoutError(
                f"partition {self._partition.number}: checkpoint step {self.state.value!r} was not acknowledged within "
                f"{self._limits.step_timeout_ms} ms"
            )
        return None

    def written(self, now_ms: int) -> Tick | None:
        """All that the last step wrote is durable. Returns the fence to append if that was the manifest."""
        if self.state is CycleState.WRITING_ROWS:
            self._enter(CycleState.ROWS_WRITTEN, now_ms)
        elif self.state is CycleState.WRITING_MANIFEST:
            self._enter(CycleState.FENCING, now_ms)
            self._fences += 1
            self._fence = f"{self._nonce}/{self._fences}"
            return Tick(self._fence)
        return None

    def folded(self, tick: Tick) -> None:
        """A tick was folded by an owner that serves."""
        if self.is_awaited(tick):
            self.state = CycleState.RETIRING

    def is_awaited(self, tick: Tick) -> bool:
        """True if ``tick`` is the fence that the cycle waits for: if it was lost, append it again."""
        return self.state is CycleState.FENCING and tick.fence == self._fence

    def stood_still(self, now_ms: int) -> None:
        """Kafka or this process stood still: the time-out of the step begins anew."""
        self._since_ms = now_ms

    # ------------------------------------------------------------------ how

    def _begin(self, now_ms: int) -> None:
        limits = self._limits
        self._next_ms = now_ms + limits.checkpoint_ms
        hurried, self._hurried = self._hurried, False
        invariants.check(self._partition, invariants.SOME)
        window = 0 if hurried else limits.window_offsets
        try:
            checkpoint = self._partition.checkpoint(self._epoch, now_ms, window, limits.persist_after_ms)
        except RowError:
            return  # a segment that was to be merged can't be read; the owner serves no more
        if checkpoint is None:
            return
        self._checkpoint = checkpoint
        if checkpoint.partial:
            self._next_ms, self._hurried = now_ms, hurried
        self._enter(CycleState.WRITING_ROWS if checkpoint.rows else CycleState.ROWS_WRITTEN, now_ms)

    def _retire(self, now_ms: int) -> Retire:
        checkpoint, own = self._captured(), self._manifest_key()
        self._enter(CycleState.IDLE, now_ms)
        retire = Retire(
            checkpoint.obsolete + self._orphans,
            [key for key in self._old_manifests if key != own],
            checkpoint.position,
            checkpoint.markers_position,
        )
        self._checkpoint, self._orphans, self._old_manifests = None, [], []
        return retire

    def _captured(self) -> Checkpoint:
        if self._checkpoint is None:
            raise InternalError(f"partition {self._partition.number}: {self.state} without a checkpoint")
        return self._checkpoint

    def _manifest_key(self) -> str:
        return rows.manifest_key(self._partition.number, self._epoch)

    def _enter(self, state: CycleState, now_ms: int) -> None:
        self.state = state
        self._since_ms = now_ms
