"""A walker that goes on where the last one stopped, from the rows of state that it left:

    walker      its positions (`ResumeState`)
    manifest    of the core's checkpoint; the core's rows that it names are there under their own keys
    …           rows of the job itself

A job replaces all of them in one commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from marq.core import rows
from marq.core.partition import Partition
from marq.errors import PipelineError, RowError
from pipeline.walker import Plan, Walker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


class ResumeState(msgspec.Struct):
    """State of a walker, apart from the core's and the job's."""

    v: int
    position: int
    markers_position: int
    first: int | None
    markers_start: int
    whole_ms: int | None


State = TypeVar("State", bound=ResumeState)


class _Version(msgspec.Struct):
    """The part of a `ResumeState` that every version has."""

    v: int


def read_resume_state(value: bytes, state_type: type[State], newest: int, path: str) -> State:
    """Decode the state that a job left in the table at `path`.

    Raises:
        PipelineError: it is of a later version than `newest`, or damaged.
    """
    again = f"or delete {path} and the job's other tables to begin anew"
    try:
        found = msgspec.msgpack.decode(value, type=_Version).v
        if found > newest:
            raise PipelineError(
                f"{path} has a state of version {found}, and this marq reads up to {newest}; upgrade marq, {again}"
            )
        return msgspec.msgpack.decode(value, type=state_type)
    except msgspec.MsgspecError as error:
        raise PipelineError(f"{path} has a damaged state: {error}; restore the table, {again}") from None


def states_left(
    table: DataFrame, state_type: type[State], newest: int, path: str, *columns: str
) -> Iterator[tuple[Row, State]]:
    """The state that a job left of each partition, with `columns` of its row, from the table at `path`.

    Raises:
        PipelineError: one is of a later version than `newest`, or damaged.
    """
    for row in table.where("key = 'walker'").select("partition", "value", *columns).collect():
        yield row, read_resume_state(bytes(row.value), state_type, newest, path)


def check_manifests(table: DataFrame, path: str) -> None:
    """Check that the state of the core, in the table at `path`, can be read, before tasks need it.

    Raises:
        PipelineError: it is of a later version, or damaged.
    """
    for row in table.where("key = 'manifest'").select("partition", "value").collect():
        try:
            rows.decode_manifest(bytes(row.value))
        except RowError as error:
            raise PipelineError(f"{path}, partition {row.partition}: {error}") from None


class ResumingWalker(Walker):
    """Starts from the rows of `state` that it gets, or from the beginning of the logs if there are none."""

    #: A job may use a subclass with more fields.
    state_type: type[ResumeState] = ResumeState
    #: Version of the job's rows.
    version = 1

    def __init__(self, number: int, told: Plan) -> None:
        super().__init__(number)
        self.told = told
        self._rows: dict[str, bytes] = {}

    # -- what a job overrides

    def goes_on(self, resume_state: ResumeState) -> bool:
        """Whether the logs still have everything after `resume_state`. If not, the walker begins anew."""
        return True

    def restore(self, resume_state: Any, stored: dict[str, bytes]) -> None:
        """Restore the job's own state: remove its rows from `stored` and read them."""

    def resume_state(self) -> ResumeState:
        """The positions of the walker."""
        partition = self.partition
        return ResumeState(
            self.version,
            partition.position,
            partition.markers_position,
            self.first,
            self._markers_start,
            self._whole_ms,
        )

    # -- from run to run

    def row(self, key: str, value: bytes | None) -> None:
        if value is not None:
            self._rows[key] = value

    def begin(self) -> None:
        told, stored = self.told, self._rows
        resume_state = (
            msgspec.msgpack.decode(stored.pop("walker"), type=self.state_type) if "walker" in stored else None
        )
        if resume_state is None or not self.goes_on(resume_state):
            stored.clear()
            self.start_at(told.queue_start, told.markers_start, told.queue_id)
            return
        manifest = rows.decode_manifest(stored.pop("manifest"))
        self.restore(resume_state, stored)
        self.partition = Partition.restore(self.number, manifest, stored.__getitem__, queue_id=told.queue_id)
        self.first, self._markers_start, self._whole_ms = (
            resume_state.first,
            resume_state.markers_start,
            resume_state.whole_ms,
        )

    def state(self, epoch: int) -> Iterator[tuple[str, bytes]]:
        """The rows of walker and core. `epoch` must differ from those of earlier rows."""
        checkpoint = self.partition.checkpoint(epoch, 0, 0, 0, whole=True)
        assert checkpoint is not None  # the first one after a restore or a beginning
        self._rows.update(checkpoint.rows)
        yield "walker", msgspec.msgpack.encode(self.resume_state())
        yield "manifest", checkpoint.manifest
        for key in self.partition.named_keys():
            yield key, self._rows[key]


# ------------------------------------------------------------------ what it returns


def state_batch(schema: pa.Schema, number: int, state: Iterable[tuple[str, bytes]]) -> pa.RecordBatch:
    """Rows of state, in the columns `partition`, `state_key` and `state_value` of a schema."""
    keys, values = zip(*state, strict=True)
    columns = {"partition": [number] * len(keys), "state_key": keys, "state_value": values}
    return filled(schema, columns, len(keys))


def filled(schema: pa.Schema, columns: Mapping[str, Any], count: int) -> pa.RecordBatch:
    """A batch of `count` rows with these columns (arrays or lists); other columns of the schema are null."""
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(count, field.type))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
