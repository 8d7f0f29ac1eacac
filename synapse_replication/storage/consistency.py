"""Compare sequences, tables and stored positions; say what disagrees; repair it.

Theory of operation: :func:`examine` reads, scans nothing big, and gives a
:class:`Report`. Each :class:`Problem` carries the statements that repair it, so that
a person can run them; :func:`repair` runs just these. A position is not moved
back, as a rule: a sequence is brought forward instead. What a sequence does is not
undone by a rollback, so sequences come last.

A value that is more than
:data:`~synapse_replication.streams.positions.PLAUSIBLE_DISTANCE` beyond the sequence is
no id of the stream: to move the sequence there would use its ids up. Such a position
is set to where the sequence is (no id beyond was ever given out); such a row of a table
is shown, and a person decides about it.

A position that is ahead of the rows alone is no problem: ids without rows are
normal (rolled back, or the rows were deleted since). One ahead of the sequence is:
no row can be there, and the next ids would lie below it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from synapse_replication.errors import StorageError
from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import (
    IdStream,
    farthest_id,
    read_sequence,
)
from synapse_replication.storage.schema.deltas import DELTAS
from synapse_replication.streams.positions import FIRST_POSITION, PLAUSIBLE_DISTANCE
from synapse_replication.streams.table import IdColumn

__all__ = [
    "Problem",
    "ProblemKind",
    "Report",
    "StreamState",
    "WriterState",
    "examine",
    "repair",
]

#: Mending one thing may bring another to light; not more often than this.
MAX_ROUNDS = 3


class ProblemKind(enum.Enum):
    """What disagrees."""

    TABLE_MISSING = "there is no table stream_positions"
    INDEX_MISSING = "stream_positions may hold a writer twice"
    WRONG_SIGN = "a position has the wrong sign"
    UNKNOWN_WRITER = "a position of an instance that is no writer"
    SEQUENCE_BEHIND = "a sequence is behind a table"
    POSITION_AHEAD = "a position is ahead of any row that there can be"


@attrs.frozen
class Problem:
    """One disagreement.

    :ivar stream_name: the stream, ``None`` if it is about the table itself.
    :ivar text: what is wrong, with the names and values.
    :ivar hint: the statements that repair it; none if a person must decide.
    :ivar instance_name: the writer whose position it is about, if it is.
    """

    kind: ProblemKind
    stream_name: str | None
    text: str
    hint: tuple[str, ...]
    instance_name: str | None = None


@attrs.frozen
class WriterState:
    """Where one writer of a stream is.

    :ivar declared: it is a writer according to the configuration.
    :ivar stored: its position in ``stream_positions``, or ``None``; as stored.
    :ivar lag: how many ids it is behind what the sequence has given out.
    """

    instance_name: str
    declared: bool
    stored: int | None
    lag: int | None


@attrs.frozen
class StreamState:
    """Where one stream is.

    :ivar sequence_value: the last id given out, ``None`` if there is no such
        sequence: then the stream is not in this database.
    :ivar farthest: the greatest id of each table (distance from zero).
    """

    name: str
    stream: IdStream
    sequence_value: int | None
    farthest: Mapping[str, int]
    writers: Sequence[WriterState]


@attrs.frozen
class Report:
    """What :func:`examine` found."""

    streams: Sequence[StreamState]
    problems: Sequence[Problem]


def examine(txn: Any, streams: Iterable[tuple[str, IdStream]]) -> Report:
    """Read where streams stand, and compare.

    :param streams: each with its name on the wire.
    """
    problems: list[Problem] = []
    states: list[StreamState] = []
    has_table = _exists(txn, "stream_positions")
    if not has_table:
        problems.append(
            Problem(
                ProblemKind.TABLE_MISSING,
                None,
                "there is no table stream_positions",
                DELTAS[:1],
            )
        )
    elif not _is_unique(txn):
        problems.append(_index_problem())
    for name, stream in streams:
        if not _exists(txn, queries.identifier(stream.sequence)):
            states.append(StreamState(name, stream, None, {}, ()))
            continue
        # The tables first: what is in them then, the sequence has given out.
        farthest = {
            column.table: farthest_id(txn, stream, column) or 0
            for column in stream.tables
            if _exists(txn, queries.identifier(column.table))
        }
        stored = _read_stored(txn, stream) if has_table and stream.writers else []
        last = read_sequence(txn, stream.sequence)
        states.append(
            StreamState(name, stream, last, farthest, _writers(stream, stored, last))
        )
        problems += _compare(name, stream, last, farthest, stored)
    return Report(states, problems)


def repair(
    txn: Any, streams: Sequence[tuple[str, IdStream]]
) -> tuple[list[Problem], Report]:
    """Repair all that disagrees, in one transaction, which the caller commits.

    Others that repair at the same time wait.

    :return: what was repaired, and how it is now.
    :raises StorageError: if something still disagrees; roll back.
    """
    txn.execute(queries.LOCK_POSITIONS)
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
            "still wrong after the repair, is it being written to? "
            + "; ".join(problem.text for problem in report.problems)
        )
    return repaired, report


def _moves_a_sequence(problem: Problem) -> bool:
    return problem.kind in (ProblemKind.SEQUENCE_BEHIND, ProblemKind.POSITION_AHEAD)


def _exists(txn: Any, name: str) -> bool:
    txn.execute("SELECT to_regclass(%s) IS NOT NULL", (name,))
    return bool(txn.fetchone()[0])


def _is_unique(txn: Any) -> bool:
    txn.execute(queries.INDEXES, {"table": "stream_positions"})
    return any(
        unique and set(columns) == {"stream_name", "instance_name"}
        for columns, unique in txn.fetchall()
    )


def _index_problem() -> Problem:
    return Problem(
        ProblemKind.INDEX_MISSING,
        None,
        "stream_positions has no unique index of stream_name and instance_name: a "
        "writer may be in there twice",
        (
            "DELETE FROM stream_positions AS one USING stream_positions AS other "
            "WHERE one.stream_name = other.stream_name "
            "AND one.instance_name = other.instance_name AND "
            "(abs(one.stream_id), one.ctid) < (abs(other.stream_id), other.ctid);",
            "DROP INDEX IF EXISTS stream_positions_idx;",
            "CREATE UNIQUE INDEX stream_positions_idx "
            "ON stream_positions (stream_name, instance_name);",
        ),
    )


def _read_stored(txn: Any, stream: IdStream) -> list[tuple[str, int]]:
    txn.execute(queries.POSITIONS, {"stream_name": stream.stream_name})
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


def _compare(
    name: str,
    stream: IdStream,
    last: int,
    farthest: Mapping[str, int],
    stored: Sequence[tuple[str, int]],
) -> list[Problem]:
    columns = {column.table: column for column in stream.tables}
    problems = [
        _sequence_problem(name, stream, columns[table], last, id_)
        for table, id_ in farthest.items()
        if id_ > last
    ]
    for writer, position in stored:
        if writer not in stream.writers:
            problems.append(
                Problem(
                    ProblemKind.UNKNOWN_WRITER,
                    name,
                    f"{writer} is stored at {position}, but is no writer (those are "
                    f"{', '.join(stream.writers)}): where it stands holds up others",
                    (f"DELETE FROM stream_positions WHERE {_row(stream, writer)};",),
                    writer,
                )
            )
            continue
        if position * stream.sign < 0:
            kind = "down" if stream.negative else "up"
            problems.append(
                Problem(
                    ProblemKind.WRONG_SIGN,
                    name,
                    f"{writer} is stored at {position}, but the stream counts {kind}",
                    (
                        "UPDATE stream_positions SET stream_id = "
                        f"{-position} WHERE {_row(stream, writer)} "
                        f"AND stream_id = {position};",
                    ),
                    writer,
                )
            )
        # Where nobody has written, 1 is stored and nothing was given out.
        if abs(position) > max(last, FIRST_POSITION):
            problems.append(_position_problem(name, stream, writer, last, position))
    return problems


def _sequence_problem(
    name: str, stream: IdStream, column: IdColumn, last: int, id_: int
) -> Problem:
    text = (
        f"sequence {stream.sequence} stands at {last}, but table {column.table} holds "
        f"{stream.sign * id_}: "
    )
    if id_ - last > PLAUSIBLE_DISTANCE:
        table = queries.identifier(column.table)
        text += (
            "too far beyond to be an id of this stream, so the sequence is not moved. "
            f"Look at the row: SELECT * FROM {table} WHERE "
            f"{queries.identifier(column.id_column)} = {stream.sign * id_};"
        )
        return Problem(ProblemKind.SEQUENCE_BEHIND, name, text, ())
    text += "ids would be given out twice"
    hint = (_forward(stream.sequence, id_),)
    return Problem(ProblemKind.SEQUENCE_BEHIND, name, text, hint)


def _position_problem(
    name: str, stream: IdStream, writer: str, last: int, position: int
) -> Problem:
    text = (
        f"{writer} is stored at {position}, but sequence {stream.sequence} stands at "
        f"{last}: "
    )
    if abs(position) - last > PLAUSIBLE_DISTANCE:
        text += "no such id was ever given out"
        hint = (
            f"UPDATE stream_positions SET stream_id = "
            f"{stream.sign * max(last, FIRST_POSITION)} "
            f"WHERE {_row(stream, writer)} AND stream_id = {position};"
        )
    else:
        text += "the next rows would lie below what counts as complete"
        hint = _forward(stream.sequence, abs(position))
    return Problem(ProblemKind.POSITION_AHEAD, name, text, (hint,), writer)


def _forward(sequence: str, value: int) -> str:
    name = queries.identifier(sequence)
    return (
        f"SELECT setval({queries.literal(name)}, GREATEST(last_value, {value}), true) "
        f"FROM {name};"
    )


def _row(stream: IdStream, writer: str) -> str:
    return (
        f"stream_name = {queries.literal(stream.stream_name)} "
        f"AND instance_name = {queries.literal(writer)}"
    )
