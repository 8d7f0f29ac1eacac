"""Plans the contents of ``stream_positions`` from the contents of the tables.

A position means that all of its writer's rows up to that id have been committed. While
no writer runs, no transaction is in progress, so any id up to the stream's greatest id
would be a correct position. A writer with rows nevertheless gets the id of its own last
row, because the homeserver would have stored this id. Only a writer without rows, or a
writer of a stream whose tables do not record the writer, gets the greatest id of the
stream: a lower position would delay every reader that waits for all writers. A stored
position that is at or beyond the planned one is not changed. The functions perform no
I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.streams.table import IdColumn

#: A stream, a table, a writer (``None`` for rows without one), and the greatest token.
Found = tuple[str, str, str | None, int]


@attrs.frozen(kw_only=True)
class StreamHistory:
    """The state of one stream in the database.

    The ids in ``stored`` have the sign of the table. All other ids are tokens, which
    are positive.

    :ivar name: the name on the wire.
    :ivar positions_name: the name in ``stream_positions``.
    :ivar sequence: the sequence that allocates the ids.
    :ivar tables: the id columns of the existing tables.
    :ivar negative: whether ids are negative in tables and in ``stream_positions``.
    :ivar writers: the declared writers; ``None`` if they are unknown.
    :ivar sequence_value: the last allocated id.
    :ivar stored: the stored position of each writer.
    :ivar farthest: the greatest token of each table that has rows.
    :ivar found: the greatest token of each writer that has rows.
    """

    name: str
    positions_name: str
    sequence: str
    tables: tuple[IdColumn, ...]
    negative: bool
    writers: tuple[str, ...] | None
    sequence_value: int
    stored: Mapping[str, int]
    farthest: Mapping[str, int]
    found: Mapping[str, int] = attrs.Factory(dict)

    @property
    def sign(self) -> int:
        """The factor that converts between a token and its stored value."""
        return -1 if self.negative else 1

    def with_found(self, found: Iterable[Found]) -> StreamHistory:
        """Return a copy with the tokens that were found in tables of this stream."""
        farthest: dict[str, int] = {}
        by_writer: dict[str, int] = {}
        for stream, table, writer, token in found:
            if stream == self.name:
                farthest[table] = max(token, farthest.get(table, 0))
                if writer is not None:
                    by_writer[writer] = max(token, by_writer.get(writer, 0))
        return attrs.evolve(self, farthest=farthest, found=by_writer)


class PlannedChange(enum.Enum):
    """How the plan treats a position."""

    NEW = "new"
    FORWARD = "forward"
    KEPT = "unchanged"
    UNDECLARED = "not a writer any more: unchanged"


@attrs.frozen
class Change:
    """The planned position of one writer.

    :ivar stream: the name of the stream on the wire.
    :ivar old: the stored value; ``None`` if there is none.
    :ivar new: the value to store; equal to ``old`` if the position is unchanged.
    """

    stream: str
    positions_name: str
    instance_name: str
    old: int | None
    new: int | None
    treatment: PlannedChange

    @property
    def is_written(self) -> bool:
        """Whether the position has to be written."""
        return self.treatment in (PlannedChange.NEW, PlannedChange.FORWARD)


def check_histories(histories: Iterable[StreamHistory]) -> None:
    """Verify that no sequence is behind its tables or a stored position.

    :raises PipelineError: if a sequence is behind. The message names the sequence and
        both values.
    """
    behind = []
    for history in histories:
        last = history.sequence_value
        behind += [
            f"sequence {history.sequence} of {history.name} is at {last}, but table "
            f"{table} has the id {history.sign * token}"
            for table, token in history.farthest.items()
            if token > last
        ]
        # A stream without rows has the position 1, although no id was allocated.
        behind += [
            f"sequence {history.sequence} of {history.name} is at {last}, but the "
            f"stored position of {writer} is {stored}"
            for writer, stored in history.stored.items()
            if history.sign * stored > max(last, 1)
        ]
    if behind:
        raise PipelineError(
            "; ".join(behind) + ": ids would be allocated twice. Stop all writers, and "
            "run 'synapse-replication positions repair' first"
        )


def plan_positions(histories: Iterable[StreamHistory]) -> list[Change]:
    """Return the planned position of each writer, in the order of the streams.

    A declared writer without a stored position is omitted if its stream has no rows.
    """
    return [change for history in histories for change in _plan(history)]


def _plan(history: StreamHistory) -> Sequence[Change]:
    greatest = max(history.farthest.values(), default=0)
    if history.writers is None:
        declared = {*history.found, *history.stored}
    else:
        declared = set(history.writers)
    changes = []
    for writer in sorted({*declared, *history.found, *history.stored}):
        old = history.stored.get(writer)
        new, treatment = old, PlannedChange.KEPT
        if writer not in declared:
            treatment = PlannedChange.UNDECLARED
        elif greatest:
            token = history.sign * history.found.get(writer, greatest)
            if old is None:
                new, treatment = token, PlannedChange.NEW
            elif token * history.sign > old * history.sign:
                new, treatment = token, PlannedChange.FORWARD
        elif old is None:
            # A stream without rows: its writers store their positions themselves.
            continue
        changes.append(
            Change(history.name, history.positions_name, writer, old, new, treatment)
        )
    return changes
