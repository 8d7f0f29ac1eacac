"""The job that computes the contents of ``stream_positions`` from the tables.

A position means that all of its writer's rows up to that id have been committed. While
no writer runs, no transaction is in progress, so any id up to the stream's greatest id
would be a correct position. A writer with rows nevertheless gets the id of its own last
row, because the homeserver would have stored this id. Only a writer without rows, or a
writer of a stream whose tables do not record the writer, gets the greatest id of the
stream: a lower position would delay every reader that waits for all writers. A stored
position that is at or beyond the planned one is not changed.

The functions of the plan perform no I/O. The others use psycopg2 and block. Only
:func:`read_farthest` reads whole tables, with one query for each: the server divides a
large table among its parallel workers.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import connect, explained
from synapse_replication.storage import queries
from synapse_replication.storage.consistency import (
    ConsistencyReport,
    ProblemKind,
    StreamState,
)
from synapse_replication.storage.schema import DELTAS
from synapse_replication.streams.writer_positions import FIRST_POSITION

# -- the plan ----------------------------------------------------------------------

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

    :param found: the greatest token of each writer in each table, by table.
    :raises PipelineError: if a sequence is behind. The message names the sequence and
        both values.
    """
    states = {state.name: state for state in report.streams}
    behind = []
    for (name, table), rows in groupby(found, itemgetter(0, 1)):
        token = max(token for *_, token in rows)
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


def stored_ids(state: StreamState) -> dict[str, int]:
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
        stored = stored_ids(state)
        rows: dict[str | None, int] = {}
        for stream, _, writer, token in found:
            if stream == state.name:
                rows[writer] = max(token, rows.get(writer, 0))
        known = {*stored, *(writer for writer in rows if writer is not None)}
        writers = set(declared.get(state.name) or known)
        name, sign = state.stream.stream_name, state.stream.sign
        for writer in sorted(known | writers):
            old = new = stored.get(writer)
            treatment = PlannedChange.KEPT
            if writer not in writers:
                treatment = PlannedChange.UNDECLARED
            elif rows:
                token = rows.get(writer, max(rows.values()))
                if old is None:
                    new, treatment = sign * token, PlannedChange.NEW
                elif token > sign * old:
                    new, treatment = sign * token, PlannedChange.FORWARD
            elif old is None:
                continue
            changes.append(Change(state.name, name, writer, old, new, treatment))
    return changes


# -- the database ------------------------------------------------------------------


@attrs.frozen
class Bootstrap:
    """The state of the streams, and the plan for each position.

    :ivar without_writer: for each stream that has rows without a writer, in a table
        with a column for the writer, the greatest token of these rows.
    """

    states: Sequence[StreamState]
    changes: Sequence[Change]
    without_writer: Mapping[str, int]


def read_bootstrap(settings: PipelineSettings) -> Bootstrap:
    """Compute the positions of the writers of all streams.

    :raises PipelineError: if writers are active, a sequence is behind its tables or a
        stored position, ``stream_positions`` has two rows for a writer of a stream, or
        the database cannot be read or has no table of any stream. A writer that is
        running but idle is not detected.
    """
    with open_connection(settings.conninfo, readonly=True) as connection:
        # Each query has a new snapshot, so that active writers are detected.
        connection.autocommit = True
        with connection.cursor() as cursor:
            before = read_report(cursor, settings)
            if not before.streams:
                raise PipelineError(
                    "the database has no table of a homeserver's stream; is it the "
                    "homeserver's database?"
                )
            check_no_writers(cursor, before.streams, before.streams)
            found = list(read_farthest(cursor, before.streams))
            now = read_report(cursor, settings)
            check_no_writers(cursor, before.streams, now.streams)
    check_sequences(now, found)
    columns = {
        (s.name, c.table): c.writer_column for s in now.streams for c in s.stream.tables
    }
    without_writer: dict[str, int] = {}
    for stream, table, writer, token in found:
        if writer is None and columns[stream, table] is not None:
            without_writer[stream] = max(token, without_writer.get(stream, 0))
    changes = plan_positions(now.streams, found, settings.writers)
    return Bootstrap(now.streams, changes, without_writer)


def write_bootstrap(settings: PipelineSettings, found: Bootstrap) -> None:
    """Write the changes in one transaction.

    :raises PipelineError: if writers are active, a position would decrease, or the
        database cannot be written. In each case, nothing is written. A writer that is
        running but idle is not detected.
    """
    negative = {state.name: state.stream.negative for state in found.states}
    with (
        open_connection(settings.conninfo, readonly=False) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SET LOCAL lock_timeout = '10s'")
        cursor.execute(queries.SQL["lock_positions"])
        cursor.execute(DELTAS[0])
        cursor.execute("LOCK TABLE stream_positions IN SHARE ROW EXCLUSIVE MODE")
        check_no_writers(cursor, found.states, read_report(cursor, settings).streams)
        for change in found.changes:
            if not change.is_written:
                continue
            cursor.execute(
                queries.upsert_position(negative[change.stream], is_admitted=False),
                {
                    "stream_name": change.positions_name,
                    "instance_name": change.instance_name,
                    "stream_id": change.new,
                },
            )
            if cursor.rowcount != 1:
                raise PipelineError(
                    f"the position of {change.instance_name} in {change.stream} has "
                    "advanced since it was read; nothing was written"
                )


@contextlib.contextmanager
def open_connection(conninfo: Mapping[str, Any], *, readonly: bool) -> Iterator[Any]:
    """Open a connection, and close it at the end of the context.

    :raises PipelineError: if the connection fails, or the database rejects a statement.
    """
    with contextlib.closing(connect(conninfo)) as connection, explained(conninfo):
        connection.set_session(isolation_level="READ COMMITTED", readonly=readonly)
        yield connection


def read_report(cursor: Any, settings: PipelineSettings) -> ConsistencyReport:
    """Return the state of each stream that can have rows in ``stream_positions``.

    A stream is omitted if its sequence or all its tables are missing. A stream without
    rows in ``stream_positions`` is included.

    :raises PipelineError: if ``stream_positions`` has two rows for a writer of a
        stream.
    """
    report = settings.read_states(cursor)
    # A stream that all instances write has no positions.
    with_positions = {each.name for each in settings.streams if each.positions_name}
    states = [
        state
        for state in report.streams
        if state.name in with_positions and state.farthest
    ]
    for state in states:
        for writer, rows in Counter(w.instance_name for w in state.writers).items():
            if rows > 1:
                raise PipelineError(
                    f"stream_positions has two rows for {writer} of {state.name}; run "
                    "'synapse-replication positions repair' first"
                )
    return attrs.evolve(report, streams=states)


def check_no_writers(
    cursor: Any, before: Sequence[StreamState], now: Sequence[StreamState]
) -> None:
    """Check that no writer is active. A running but idle writer is not detected.

    :param before: the states as read at the beginning.
    :param now: the same states, read again.
    :raises PipelineError: if a writer is active. The message lists the evidence.
    """
    signs = []
    for old, new in zip(before, now, strict=True):
        if old.sequence_value != new.sequence_value:
            signs.append(
                f"sequence {new.stream.sequence} changed from {old.sequence_value} to "
                f"{new.sequence_value}"
            )
        elif stored_ids(old) != stored_ids(new):
            signs.append(f"positions of {new.name} changed")
    tables = {table for state in now for table in state.farthest}
    # A transaction that allocated an id but has not written its row yet holds a lock
    # on the sequence.
    sequences = {state.stream.sequence for state in now}
    names = map(queries.identifier, {*tables, *sequences, "stream_positions"})
    cursor.execute(queries.SQL["writing_transactions"], {"relations": list(names)})
    signs += [
        f"a transaction ({owner}) is writing to {table}"
        for table, owner in sorted(cursor.fetchall())
    ]
    if signs:
        raise PipelineError(
            f"writers are running: {'; '.join(signs[:5])}. Rows that they have not "
            "committed yet could be skipped; stop all writers, and try again"
        )


def read_farthest(cursor: Any, states: Iterable[StreamState]) -> Iterator[Found]:
    """Read the greatest token of each writer in each table."""
    for state in states:
        for column in state.stream.tables:
            if column.table in state.farthest:
                of_writers = column.writer_column is not None
                name = "farthest_ids_by_writer" if of_writers else "farthest_id"
                cursor.execute(queries.for_table(name, column, state.stream.negative))
                for writer, id_ in cursor.fetchall():
                    if id_ is not None:
                        yield state.name, column.table, writer, state.stream.sign * id_
