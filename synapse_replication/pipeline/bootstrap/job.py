"""The job that computes positions from the rows in the tables.

The functions use psycopg2 and block. Only :func:`read_farthest` reads whole tables,
with one query for each: the server divides a large table among its parallel workers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.bootstrap.plan import (
    Change,
    Found,
    check_sequences,
    plan_positions,
    stored_positions,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import connect, explained
from synapse_replication.pipeline.states import read_states, streams_of
from synapse_replication.storage import queries
from synapse_replication.storage.consistency import ConsistencyReport, StreamState
from synapse_replication.storage.schema.deltas import DELTAS
from synapse_replication.streams.id_column import IdColumn

_LOCK_TABLE = "LOCK TABLE stream_positions IN SHARE ROW EXCLUSIVE MODE"


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
    with connected(settings.conninfo, readonly=True) as connection:
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
    with (
        connected(settings.conninfo, readonly=False) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        write_positions(cursor, settings, found.states, found.changes)


@contextlib.contextmanager
def connected(conninfo: Mapping[str, Any], *, readonly: bool) -> Iterator[Any]:
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
    report = read_states(cursor, settings)
    # A stream that all instances write has no positions.
    with_positions = {each.name for each in streams_of(settings) if each.positions_name}
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
        elif stored_positions(old) != stored_positions(new):
            signs.append(f"positions of {new.name} changed")
    tables = {table for state in now for table in state.farthest}
    # A transaction that allocated an id but has not written its row yet holds a lock
    # on the sequence.
    sequences = {state.stream.sequence for state in now}
    names = map(queries.identifier, {*tables, *sequences, "stream_positions"})
    cursor.execute(queries.WRITING_TRANSACTIONS, {"relations": list(names)})
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
                cursor.execute(_farthest_sql(column, negative=state.stream.negative))
                for writer, token in cursor.fetchall():
                    if token is not None:
                        yield state.name, column.table, writer, token


def write_positions(
    cursor: Any,
    settings: PipelineSettings,
    before: Sequence[StreamState],
    changes: Sequence[Change],
) -> None:
    """Write positions, if none has changed since the states were read.

    The caller commits the transaction.

    :raises PipelineError: if a writer is running, or a position would decrease.
    """
    cursor.execute("SET LOCAL lock_timeout = '10s'")
    cursor.execute(queries.LOCK_POSITIONS)
    cursor.execute(DELTAS[0])
    cursor.execute(_LOCK_TABLE)
    check_no_writers(cursor, before, read_report(cursor, settings).streams)
    negative = {state.name: state.stream.negative for state in before}
    for change in changes:
        if not change.is_written:
            continue
        cursor.execute(
            queries.upsert_position(negative[change.stream]),
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


def _farthest_sql(column: IdColumn, *, negative: bool) -> str:
    id_, table = map(queries.identifier, (column.id_column, column.table))
    greatest = f"-min({id_})" if negative else f"max({id_})"
    source = f"FROM {table} WHERE {id_} {'<' if negative else '>'} 0"
    if column.writer_column is None:
        # If the id is indexed, the server looks up its greatest value.
        return f"SELECT NULL, {greatest} {source}"
    writer = queries.identifier(column.writer_column)
    return f"SELECT {writer}, {greatest} {source} GROUP BY 1"
