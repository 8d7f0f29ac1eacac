"""Consistency checks of sequences, tables and stored positions, and their repair.

Theory of operation: :func:`examine` only reads, and returns a
:class:`ConsistencyReport`. It does not scan large tables, with one exception; see
:mod:`~synapse_replication.storage.id_streams`. Each :class:`Problem` has the SQL
statements that repair it, unless a person must decide how. The statements can be run by
hand; :func:`repair` runs them.

As a rule, a sequence is advanced rather than a position lowered. Sequences are advanced
last, because a rollback does not move a sequence back.

A value beyond the sequence by more than the stream's ``plausible_distance`` cannot be
an id of the stream, and advancing the sequence to that value would use up the ids in
between. A position that far beyond is set to the sequence's value, because no greater
id was ever allocated. A table row that far beyond is only reported, and a person must
decide.

A position ahead of all rows is normal: the ids above the last row were rolled back, or
their rows were deleted. A position ahead of the sequence is a problem: the next ids
would be below the position, so readers would regard their rows as already delivered.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from synapse_replication.errors import StorageError
from synapse_replication.storage import id_streams, queries
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.schema import DELTAS
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.writer_positions import FIRST_POSITION

#: Removes all but the greatest position of each writer, and creates the index that
#: prevents others.
_MAKE_UNIQUE: Final = (
    "DELETE FROM stream_positions AS one USING stream_positions AS other WHERE "
    "one.stream_name = other.stream_name AND one.instance_name = other.instance_name "
    "AND (abs(one.stream_id), one.ctid) < (abs(other.stream_id), other.ctid);",
    "DROP INDEX IF EXISTS stream_positions_idx;",
    "CREATE UNIQUE INDEX stream_positions_idx ON stream_positions (stream_name, "
    "instance_name);",
)

#: The most rounds of a repair. Repairing one problem may reveal another.
MAX_ROUNDS = 3


class ProblemKind(enum.Enum):
    """The kinds of inconsistency that :func:`examine` reports.

    The values are the kinds of the findings of the pipeline's audit.
    """

    TABLE_MISSING = "positions_missing"
    #: ``stream_positions`` may contain a writer twice.
    INDEX_MISSING = "positions_not_unique"
    WRONG_SIGN = "position_wrong_sign"
    #: A position belongs to an instance that is not a writer.
    UNKNOWN_WRITER = "unknown_writer"
    #: A sequence is behind a table.
    SEQUENCE_BEHIND = "sequence_behind"
    #: A sequence does not allocate ids in order.
    SEQUENCE_UNORDERED = "sequence_unordered"
    #: A position is ahead of its sequence.
    POSITION_AHEAD = "position_ahead"


@attrs.frozen
class Problem:
    """One inconsistency.

    :ivar stream_name: the stream; ``None`` if the problem concerns the whole table
        ``stream_positions``.
    :ivar text: what is wrong, with the names and values.
    :ivar statements: the SQL statements that repair it; empty if a person must decide.
    :ivar instance_name: the writer of the position concerned, if any.
    """

    kind: ProblemKind
    stream_name: str | None
    text: str
    statements: tuple[str, ...]
    instance_name: str | None = None


_TABLE_MISSING: Final = Problem(
    ProblemKind.TABLE_MISSING,
    None,
    "table stream_positions does not exist",
    (DELTAS[0],),
)
_INDEX_MISSING: Final = Problem(
    ProblemKind.INDEX_MISSING,
    None,
    "stream_positions has no unique index on stream_name and instance_name: it may "
    "contain a writer twice",
    _MAKE_UNIQUE,
)


@attrs.frozen
class WriterState:
    """State of one writer of a stream.

    :ivar declared: whether the configuration declares it as a writer.
    :ivar stored: its position in ``stream_positions``, with the stored sign; ``None``
        if there is none.
    :ivar lag: how many ids its position is behind the sequence; ``None`` if it has no
        stored position.
    """

    instance_name: str
    declared: bool
    stored: int | None
    lag: int | None


@attrs.frozen
class StreamState:
    """State of one stream.

    :ivar sequence_value: the last allocated id; ``None`` if the sequence does not
        exist, that is, this database does not have the stream.
    :ivar farthest: the greatest id in each existing table, as a distance from zero; 0
        if the table is empty, or large and without a suitable index.
    """

    name: str
    stream: IdStream
    sequence_value: int | None
    farthest: Mapping[str, int]
    writers: Sequence[WriterState]


@attrs.frozen
class ConsistencyReport:
    """Result of :func:`examine`."""

    streams: Sequence[StreamState]
    problems: Sequence[Problem]


def examine(txn: Any, streams: Mapping[str, IdStream]) -> ConsistencyReport:
    """Compare the sequences, tables and stored positions of streams.

    Call it in a database thread.

    :param txn: a cursor.
    :param streams: the streams by their names on the wire.
    """
    problems: list[Problem] = []
    states: list[StreamState] = []
    has_table = id_streams.exists(txn, "stream_positions")
    if not has_table:
        problems.append(_TABLE_MISSING)
    elif not _is_unique(txn):
        problems.append(_INDEX_MISSING)
    for name, stream in streams.items():
        if not id_streams.exists(txn, stream.sequence):
            states.append(StreamState(name, stream, None, {}, ()))
            continue
        # Read the sequence after the tables, so that it covers every row read.
        farthest = {
            column.table: id_streams.farthest_id(txn, stream, column) or 0
            for column in stream.tables
            if id_streams.exists(txn, column.table)
        }
        stored = _read_stored(txn, stream) if has_table and stream.writers else []
        last = id_streams.read_sequence(txn, stream.sequence)
        states.append(
            StreamState(name, stream, last, farthest, _writers(stream, stored, last))
        )
        if (
            found := id_streams.find_sequence_problem(txn, stream.sequence)
        ) is not None:
            text, statement = found
            kind = ProblemKind.SEQUENCE_UNORDERED
            problems.append(Problem(kind, name, text, (statement,)))
        problems += _Comparison(name, stream, last).problems(farthest, stored)
    return ConsistencyReport(states, problems)


def repair(
    txn: Any, streams: Mapping[str, IdStream]
) -> tuple[list[Problem], ConsistencyReport]:
    """Repair all inconsistencies in one transaction, which the caller must commit.

    Concurrent repairs are serialised by an advisory lock.

    :return: the repaired problems, and the report after the repair. A problem that
        needed several rounds occurs once for each of them.
    :raises StorageError: if inconsistencies remain, for instance because a person must
        decide; the caller must roll back.
    """
    txn.execute(queries.SQL["lock_positions"])
    repaired: list[Problem] = []
    for _ in range(MAX_ROUNDS):
        report = examine(txn, streams)
        if not report.problems:
            return repaired, report
        for problem in sorted(report.problems, key=_moves_a_sequence):
            for statement in problem.statements:
                txn.execute(statement)
        repaired += report.problems
    report = examine(txn, streams)
    if report.problems:
        raise StorageError(
            "inconsistencies remain after the repair; correct by hand what it cannot "
            "repair, stop all writers, and repeat it: "
            + "; ".join(problem.text for problem in report.problems)
        )
    return repaired, report


def _moves_a_sequence(problem: Problem) -> bool:
    return problem.kind in (ProblemKind.SEQUENCE_BEHIND, ProblemKind.POSITION_AHEAD)


def _is_unique(txn: Any) -> bool:
    txn.execute(queries.SQL["indexes"], {"table": "stream_positions"})
    return any(
        unique and set(columns) == {"stream_name", "instance_name"}
        for columns, unique in txn.fetchall()
    )


def _read_stored(txn: Any, stream: IdStream) -> list[tuple[str, int]]:
    txn.execute(queries.SQL["positions"], {"stream_name": stream.stream_name})
    return sorted(txn.fetchall())


def _writers(
    stream: IdStream, stored: Sequence[tuple[str, int]], last: int
) -> list[WriterState]:
    known = {writer for writer, _ in stored}
    states = [
        WriterState(
            writer, writer in stream.writers, position, max(last - abs(position), 0)
        )
        for writer, position in stored
    ]
    states += [
        WriterState(writer, True, None, None)
        for writer in stream.writers
        if writer not in known
    ]
    return states


@attrs.frozen
class _Comparison:
    """The comparison of one stream's sequence with its tables and stored positions."""

    name: str
    stream: IdStream
    last: int

    def problems(
        self, farthest: Mapping[str, int], stored: Sequence[tuple[str, int]]
    ) -> Iterator[Problem]:
        columns = {column.table: column for column in self.stream.tables}
        for table, id_ in farthest.items():
            if id_ > self.last:
                yield self._sequence_behind(columns[table], id_)
        for writer, position in stored:
            if writer not in self.stream.writers:
                yield self._unknown_writer(writer, position)
                continue
            if position * self.stream.sign < 0:
                yield self._wrong_sign(writer, position)
            # A stream without rows has the stored position 1, but no id was allocated.
            if abs(position) > max(self.last, FIRST_POSITION):
                yield self._position_ahead(writer, position)

    def _sequence_behind(self, column: IdColumn, id_: int) -> Problem:
        value = self.stream.sign * id_
        text = (
            f"sequence {self.stream.sequence} is at {self.last}, but table "
            f"{column.table} contains {value}: "
        )
        if not self._is_far(id_):
            text += "ids would be allocated twice"
            return self._problem(ProblemKind.SEQUENCE_BEHIND, text, self._advance(id_))
        table = queries.identifier(column.table)
        name = queries.identifier(column.id_column)
        text += (
            "that id is too far beyond the sequence to belong to this stream. The "
            f"sequence is not changed. Inspect the row: SELECT * FROM {table} WHERE "
            f"{name} = {value};"
        )
        return self._problem(ProblemKind.SEQUENCE_BEHIND, text, None)

    def _unknown_writer(self, writer: str, position: int) -> Problem:
        writers = ", ".join(self.stream.writers)
        return self._problem(
            ProblemKind.UNKNOWN_WRITER,
            f"{writer} is stored at {position}, but is not a writer (the writers are "
            f"{writers}): its position delays the stream's token",
            f"DELETE FROM stream_positions WHERE {self._row_of(writer)};",
            writer,
        )

    def _wrong_sign(self, writer: str, position: int) -> Problem:
        direction = "down" if self.stream.negative else "up"
        return self._problem(
            ProblemKind.WRONG_SIGN,
            f"{writer} is stored at {position}, but the stream's ids count {direction}",
            self._store(writer, position, -position),
            writer,
        )

    def _position_ahead(self, writer: str, position: int) -> Problem:
        sequence, last = self.stream.sequence, self.last
        text = (
            f"{writer} is stored at {position}, but sequence {sequence} is at {last}: "
        )
        if self._is_far(abs(position)):
            text += "an id that far beyond the sequence was never allocated"
            newest = self.stream.sign * max(last, FIRST_POSITION)
            statement = self._store(writer, position, newest)
        else:
            text += "the next ids would be below a position that counts as complete"
            statement = self._advance(abs(position))
        return self._problem(ProblemKind.POSITION_AHEAD, text, statement, writer)

    def _is_far(self, id_: int) -> bool:
        """Return whether an id is too far beyond the sequence to be one of it."""
        return id_ - self.last > self.stream.plausible_distance

    def _problem(
        self,
        kind: ProblemKind,
        text: str,
        statement: str | None,
        writer: str | None = None,
    ) -> Problem:
        statements = (statement,) if statement else ()
        return Problem(kind, self.name, text, statements, writer)

    # -- statements that repair a problem ---------------------------------------------

    def _row_of(self, writer: str) -> str:
        """Return the condition for a writer's row of ``stream_positions``."""
        stream_name = queries.literal(self.stream.stream_name)
        return (
            f"stream_name = {stream_name} AND instance_name = {queries.literal(writer)}"
        )

    def _store(self, writer: str, position: int, value: int) -> str:
        """Return the statement that replaces a writer's position with ``value``."""
        return (
            f"UPDATE stream_positions SET stream_id = {value} WHERE "
            f"{self._row_of(writer)} AND stream_id = {position};"
        )

    def _advance(self, id_: int) -> str:
        """Return the statement that advances the sequence to at least ``id_``."""
        sequence = queries.identifier(self.stream.sequence)
        return (
            f"SELECT setval({queries.literal(sequence)}, GREATEST(last_value, {id_}), "
            f"true) FROM {sequence};"
        )
