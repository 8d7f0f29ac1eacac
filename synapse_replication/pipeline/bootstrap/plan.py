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
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.storage.consistency import (
    ConsistencyReport,
    ProblemKind,
    StreamState,
)
from synapse_replication.streams.writer_positions import FIRST_POSITION

#: A stream, a table, a writer (``None`` for rows without one), and the greatest token.
Found = tuple[str, str, str | None, int]


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


def check_sequences(report: ConsistencyReport, found: Iterable[Found]) -> None:
    """Verify that no sequence is behind its tables or a stored position.

    :param found: the greatest token of each writer in each table.
    :raises PipelineError: if a sequence is behind. The message names the sequence and
        both values.
    """
    states = {state.name: state for state in report.streams}
    behind = []
    greatest: dict[tuple[str, str], int] = {}
    for name, table, _, token in found:
        greatest[name, table] = max(token, greatest.get((name, table), 0))
    for (name, table), token in greatest.items():
        stream, last = states[name].stream, states[name].sequence_value or 0
        if token > last:
            behind.append(
                f"sequence {stream.sequence} of {name} is at {last}, but table {table} "
                f"has the id {stream.sign * token}: ids would be allocated twice"
            )
    behind += [
        f"{problem.stream_name}: {problem.text}"
        for problem in report.problems
        if problem.kind is ProblemKind.POSITION_AHEAD
    ]
    # The problems of the report do not include these.
    behind += [
        f"{state.name}: {writer.instance_name}, which is not a writer, is stored at "
        f"{writer.stored}, but sequence {state.stream.sequence} is at "
        f"{state.sequence_value}"
        for state in report.streams
        for writer in state.writers
        if not writer.declared
        and state.stream.sign * (writer.stored or 0)
        > max(state.sequence_value or 0, FIRST_POSITION)
    ]
    if behind:
        raise PipelineError(
            "; ".join(behind) + ". Stop all writers, and run 'synapse-replication "
            "positions repair' first"
        )


def stored_positions(state: StreamState) -> dict[str, int]:
    """Return the stored position of each writer, with the sign of the table."""
    return {w.instance_name: w.stored for w in state.writers if w.stored is not None}


def plan_positions(
    states: Iterable[StreamState],
    found: Collection[Found],
    declared: Mapping[str, Sequence[str]],
) -> list[Change]:
    """Return the planned position of each writer, in the order of the streams.

    A declared writer without a stored position is omitted if its stream has no rows.

    :param found: the greatest token of each writer in each table.
    :param declared: the declared writers of each stream; empty if they are unknown.
    """
    changes = []
    for state in states:
        stored = stored_positions(state)
        rows: dict[str | None, int] = {}
        for name, _, writer, token in found:
            if name == state.name:
                rows[writer] = max(token, rows.get(writer, 0))
        known = {*stored, *(writer for writer in rows if writer is not None)}
        writers = set(declared.get(state.name) or known)
        for writer in sorted(known | writers):
            change = _plan(state, writer, stored.get(writer), rows)
            if writer not in writers:
                change = attrs.evolve(
                    change, new=change.old, treatment=PlannedChange.UNDECLARED
                )
            if change.new is not None or writer not in writers:
                changes.append(change)
    return changes


def _plan(
    state: StreamState, writer: str, old: int | None, rows: Mapping[str | None, int]
) -> Change:
    """Return the planned position; without a new value if the stream has no rows.

    :param rows: the greatest token of each writer that has rows.
    """
    new, treatment = old, PlannedChange.KEPT
    if rows:
        sign = state.stream.sign
        token = sign * rows.get(writer, max(rows.values()))
        if old is None:
            new, treatment = token, PlannedChange.NEW
        elif token * sign > old * sign:
            new, treatment = token, PlannedChange.FORWARD
    name = state.stream.stream_name
    return Change(state.name, name, writer, old, new, treatment)
