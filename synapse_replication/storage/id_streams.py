"""Streams as sets of ids in a database, and queries for these ids.

No query for a greatest id scans a large table. The exception is a table whose only
suitable index begins with the writer, in a stream that declares no writers.

The functions take a cursor and block. Ids are distances from zero, whatever the
stream's sign. This module uses neither the reactor nor the log.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from synapse_replication.storage import queries
from synapse_replication.storage.admission import Admission
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.standard.registry import StandardStream
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE

if TYPE_CHECKING:
    from synapse_replication.streams.table import TableStream

#: A table without a suitable index is scanned if it is at most this large, in bytes;
#: otherwise it is skipped.
MAX_SCANNED_BYTES = 32 * 2**20


@attrs.frozen(kw_only=True)
class IdStream:
    """The sequence, tables and writers of a stream.

    :ivar stream_name: its name in ``stream_positions``.
    :ivar sequence: the sequence that allocates its ids, optionally with its schema.
    :ivar tables: the columns that store its ids.
    :ivar writers: the declared writers; empty if every instance may write, in which
        case no positions are stored.
    :ivar negative: whether ids are negative in the tables and in the results of the id
        generators.
    :ivar plausible_distance: the most by which an id may exceed the sequence; a
        greater id is not accepted.
    """

    stream_name: str
    sequence: str
    tables: Sequence[IdColumn]
    writers: Sequence[str]
    negative: bool = False
    plausible_distance: int = PLAUSIBLE_DISTANCE

    @property
    def sign(self) -> int:
        """The factor between an id and its distance from zero."""
        return -1 if self.negative else 1

    def tells_apart(self, writers: Iterable[str]) -> bool:
        """Return whether the tables show which of these writers wrote each row."""
        return len(set(writers)) <= 1 or all(each.writer_column for each in self.tables)


def id_stream_of(
    stream: StandardStream | TableStream,
    writers: Iterable[str],
    plausible_distance: int = PLAUSIBLE_DISTANCE,
) -> IdStream:
    """Return the ids of a stream that is stored in the database.

    :param writers: its declared writers.
    """
    assert stream.sequence is not None, "the stream is not held in memory"
    return IdStream(
        stream_name=stream.positions_name or stream.name,
        sequence=stream.sequence,
        tables=stream.id_columns,
        writers=tuple(writers),
        negative=stream.negative,
        plausible_distance=plausible_distance,
    )


def row_stream_of(
    stream: StandardStream | TableStream, writers: Iterable[str]
) -> IdStream:
    """Return the ids of a stream's rows: only tables that have rows of it."""
    found = id_stream_of(stream, writers)
    if isinstance(stream, StandardStream):
        columns = tuple(table.ids for table in stream.tables if table.columns)
        return attrs.evolve(found, tables=columns)
    return found


class AccessPath(enum.Enum):
    """An access path to the ids of a table."""

    BY_ID = "an index that begins with the id"
    BY_WRITER = "an index that begins with writer and id"
    SCAN = "no index, but the table is small"
    NONE = "no index"


def find_access_paths(txn: Any, column: IdColumn) -> set[AccessPath]:
    """Return the access paths to a table's ids, from the system catalogue."""
    table = {"table": queries.identifier(column.table)}
    txn.execute(queries.SQL["indexes"], table)
    indexes = [list(columns) for columns, _ in txn.fetchall()]
    access_paths = set()
    if any(columns[:1] == [column.id_column] for columns in indexes):
        access_paths.add(AccessPath.BY_ID)
    if column.writer_column is not None and any(
        columns[:2] == [column.writer_column, column.id_column] for columns in indexes
    ):
        access_paths.add(AccessPath.BY_WRITER)
    if not access_paths:
        txn.execute(queries.SQL["table_size"], table)
        (size,) = txn.fetchone()
        access_paths.add(
            AccessPath.NONE if (size or 0) > MAX_SCANNED_BYTES else AccessPath.SCAN
        )
    return access_paths


def best_access_path(txn: Any, column: IdColumn) -> AccessPath:
    """Return the best access path to all writers' ids, from the system catalogue."""
    access_paths = find_access_paths(txn, column)
    return AccessPath.BY_ID if AccessPath.BY_ID in access_paths else access_paths.pop()


def check_tables(txn: Any, stream: IdStream) -> None:
    """Check that a stream's tables exist, and have the column of its ids.

    :raises psycopg2.errors.UndefinedTable: if a table does not exist.
    :raises psycopg2.errors.UndefinedColumn: if a column does not exist.
    """
    for column in stream.tables:
        txn.execute(queries.for_table("no_ids", column))


def with_existing_tables(
    txn: Any, streams: Mapping[str, IdStream]
) -> dict[str, IdStream]:
    """Return each stream with those of its tables that exist."""
    return {
        name: attrs.evolve(
            stream, tables=[c for c in stream.tables if exists(txn, c.table)]
        )
        for name, stream in streams.items()
    }


def exists(txn: Any, name: str) -> bool:
    """Return whether a table or sequence exists.

    :param name: its name, which may be qualified by a schema.
    """
    txn.execute(queries.SQL["table_exists"], {"table": queries.identifier(name)})
    return bool(txn.fetchone()[0])


def read_sequence(txn: Any, sequence: str, admission: Admission | None = None) -> int:
    """Return the last id that a sequence allocated.

    If it has allocated none, return its first id minus one.

    :param admission: the name of this process, which is checked after the read;
        ``None`` to check none.
    :raises psycopg2.Error: if another process has the name; see ``Admission.explain``.
    """
    if admission is None:
        txn.execute(queries.sequence_state(sequence))
    else:
        txn.execute(queries.admitted_sequence_state(sequence), admission.parameters)
    last_value, is_called = txn.fetchone()
    return int(last_value) if is_called else int(last_value) - 1


def find_sequence_problem(txn: Any, sequence: str) -> tuple[str, str] | None:
    """Return why a sequence is unfit for ids, and the statement that corrects it.

    :return: ``None`` if the sequence allocates ids in ascending order, whatever session
        asks for them.
    """
    name = queries.identifier(sequence)
    txn.execute(queries.SQL["sequence_options"], {"sequence": name})
    ((cache, increment, cycles),) = txn.fetchall() or [(1, 1, False)]
    if cache > 1:
        what = (
            f"has CACHE {cache}: each session allocates {cache} ids at once, so that "
            "later ids can be below earlier ones, which readers would discard as old"
        )
        option = "CACHE 1"
    elif increment < 1:
        what, option = f"has INCREMENT {increment}: ids must ascend", "INCREMENT 1"
    elif cycles:
        what, option = "has CYCLE: it would allocate ids again", "NO CYCLE"
    else:
        return None
    return f"sequence {sequence} {what}", f"ALTER SEQUENCE {name} {option};"


def farthest_id(txn: Any, stream: IdStream, column: IdColumn) -> int | None:
    """Return the greatest id in a table.

    The rows of writers that are not declared any more count, too: what they announced
    as finished stays finished.

    :return: 0 if the table is empty; ``None`` if it is large and has no suitable index.
    """
    access_path = best_access_path(txn, column)
    if access_path is AccessPath.NONE:
        return None
    if access_path is AccessPath.BY_WRITER and stream.writers:
        of_each = greatest_ids(txn, stream, column, read_writers(txn, column))
        return max(of_each.values(), default=0)
    txn.execute(queries.for_table("greatest_id", column, stream.negative))
    (id_,) = txn.fetchone()
    return max(stream.sign * (id_ or 0), 0)


def greatest_ids(
    txn: Any, stream: IdStream, column: IdColumn, writers: Iterable[str]
) -> dict[str, int]:
    """Return the greatest id of each writer that has rows, as a distance from zero.

    Lower ids of a writer may still be in flight. Needs an index on writer and id.
    """
    txn.execute(
        queries.for_table("greatest_ids_of_writers", column, stream.negative),
        {"writers": list(writers)},
    )
    sign = stream.sign
    return {
        writer: sign * id_ for writer, id_ in txn.fetchall() if sign * (id_ or 0) > 0
    }


def read_writers(txn: Any, column: IdColumn) -> list[str]:
    """Return the writers that have rows. Needs an index on writer and id."""
    txn.execute(queries.for_table("writers_of_table", column))
    return [writer for (writer,) in txn.fetchall()]


def committed_tokens(
    txn: Any,
    stream: IdStream,
    instance_name: str,
    from_token: int,
    upto_token: int,
    limit: int,
) -> tuple[list[int], int]:
    """Return one writer's committed tokens in ``(from_token, upto_token]``.

    A table without names of writers yields the tokens of all writers.

    :param limit: the most tokens to read from each table.
    :return: the tokens, in order, and the token up to which they are complete.
    """
    found: set[int] = set()
    upto = upto_token
    for column in stream.tables:
        of_writer = column.writer_column is not None
        txn.execute(
            queries.ids_between(column, stream.negative, of_writer=of_writer),
            {
                "instance_name": instance_name,
                "after": from_token,
                "up_to": upto,
                "limit": limit,
            },
        )
        tokens = [id_ for (id_,) in txn.fetchall()]
        if len(tokens) == limit:
            # Rows of the last token may be missing, and so may all later ones.
            upto = tokens[-1] - 1
        found.update(tokens)
    return sorted(each for each in found if each <= upto), upto


def read_tokens(
    txn: Any, streams: Mapping[str, IdStream]
) -> dict[tuple[str, str], int]:
    """Return the stored positions of all writers of streams, as tokens.

    :param streams: the streams, by their names on the wire. One that declares no
        writers has no stored positions.
    :return: the tokens by stream and writer.
    """
    names = {of.stream_name: name for name, of in streams.items() if of.writers}
    txn.execute(queries.SQL["all_positions"])
    return {
        # The ids of a stream that counts down are negative, its tokens are not.
        (names[stream_name], instance_name): abs(id_)
        for stream_name, instance_name, id_ in txn.fetchall()
        if stream_name in names
    }
