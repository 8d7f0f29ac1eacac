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
from pathlib import Path
from typing import Any

import attrs

from synapse_replication.data_files import read_table
from synapse_replication.errors import StorageError
from synapse_replication.storage import id_streams, queries
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.schema import DELTAS
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.writer_positions import FIRST_POSITION

#: The texts and the repairs of all problems, from ``consistency.csv``.
_CASES = {row["Case"]: row for row in read_table(Path(__file__).with_suffix(".csv"))}

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
    #: A position is ahead of its sequence.
    POSITION_AHEAD = "position_ahead"


@attrs.frozen
class Problem:
    """One inconsistency.

    :ivar stream_name: the stream; ``None`` if the problem concerns the whole table
        ``stream_positions``.
    :ivar text: what is wrong, with the names and values.
    :ivar hint: the SQL statements that repair it; empty if a person must decide.
    :ivar instance_name: the writer of the position concerned, if any.
    """

    kind: ProblemKind
    stream_name: str | None
    text: str
    hint: tuple[str, ...]
    instance_name: str | None = None


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
        problems.append(_make_problem("positions_missing", None, create=DELTAS[0]))
    elif not _is_unique(txn):
        problems.append(_make_problem("positions_not_unique", None))
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
            for statement in problem.hint:
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
                is_far = self._is_far(id_)
                case = "sequence_far_behind" if is_far else "sequence_behind"
                yield self._problem_of_table(case, columns[table], id_)
        for writer, position in stored:
            if writer not in self.stream.writers:
                yield self._problem_of_writer("unknown_writer", writer, position)
                continue
            if position * self.stream.sign < 0:
                yield self._problem_of_writer("wrong_sign", writer, position)
            # A stream without rows has the stored position 1, but no id was allocated.
            if abs(position) > max(self.last, FIRST_POSITION):
                is_far = self._is_far(abs(position))
                case = "position_far_ahead" if is_far else "position_ahead"
                yield self._problem_of_writer(case, writer, position)

    def _is_far(self, id_: int) -> bool:
        """Return whether an id is too far beyond the sequence to be one of it."""
        return id_ - self.last > self.stream.plausible_distance

    def _problem_of_table(self, case: str, column: IdColumn, id_: int) -> Problem:
        value = self.stream.sign * id_
        table = queries.identifier(column.table)
        name = queries.identifier(column.id_column)
        inspect = f"SELECT * FROM {table} WHERE {name} = {value};"
        return self._problem(case, value, table=column.table, inspect=inspect)

    def _problem_of_writer(self, case: str, writer: str, position: int) -> Problem:
        stream_name = queries.literal(self.stream.stream_name)
        row = (
            f"stream_name = {stream_name} AND instance_name = {queries.literal(writer)}"
        )
        return self._problem(case, position, writer=writer, row=row)

    def _problem(self, case: str, value: int, **more: str) -> Problem:
        stream, last = self.stream, self.last
        sequence = queries.identifier(stream.sequence)
        return _make_problem(
            case,
            self.name,
            value=value,
            negated=-value,
            sequence=stream.sequence,
            last=last,
            newest=stream.sign * max(last, FIRST_POSITION),
            writers=", ".join(stream.writers),
            direction="down" if stream.negative else "up",
            advance=f"SELECT setval({queries.literal(sequence)}, GREATEST(last_value, "
            f"{abs(value)}), true) FROM {sequence};",
            **more,
        )


def _make_problem(
    case: str, name: str | None, *, writer: str | None = None, **values: object
) -> Problem:
    row = _CASES[case]
    values["writer"] = writer
    hint = tuple(line.format(**values) for line in row["Repair"].splitlines())
    text = row["Text"].format(**values)
    return Problem(ProblemKind(row["Kind"]), name, text, hint, writer)
