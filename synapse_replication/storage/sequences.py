"""What the database knows about a stream's ids, read without scanning a table.

Everything here runs in a transaction's thread, with its cursor. Ids are
distances from zero, whatever the stream's sign.

Spec, section 7.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from typing import Any

import attrs
from twisted.logger import Logger

from synapse_replication.errors import SequenceBehindError
from synapse_replication.storage import queries
from synapse_replication.streams.positions import FIRST_POSITION, WriterPositions
from synapse_replication.streams.table import IdColumn

__all__ = [
    "IdStream",
    "Lookup",
    "best_lookup",
    "farthest_id",
    "fetch_ids",
    "load_positions",
    "read_sequence",
    "read_stored_positions",
]

_log = Logger()

#: Ids in a row that are not usable before a fetch gives up; also how far a
#: sequence may be behind stored positions to be brought forward at the start.
#: PostgreSQL logs sequences 32 ids ahead, so a standby is behind by no more.
MAX_SKIPPED_IDS = 1000

#: A table without a fitting index is read if it is no larger than this; else it is
#: passed over.
MAX_SCANNED_BYTES = 32 * 2**20

#: Rows beyond the smallest stored position that are looked at, at the start.
MAX_ROWS_AT_START = 10_000


def _to_tables(tables: Iterable[IdColumn]) -> tuple[IdColumn, ...]:
    return tuple(tables)


def _to_writers(writers: Iterable[str]) -> tuple[str, ...]:
    return tuple(writers)


@attrs.frozen(kw_only=True)
class IdStream:
    """A stream as its ids see it.

    :ivar stream_name: its name in ``stream_positions``.
    :ivar sequence: the sequence of its ids, with its schema if it needs one.
    :ivar tables: where its ids are kept.
    :ivar writers: the declared writers; none if anybody may write, and then no
        positions are kept.
    :ivar negative: ids are below zero in the tables, and outside.
    """

    stream_name: str
    sequence: str
    tables: tuple[IdColumn, ...] = attrs.field(converter=_to_tables)
    writers: tuple[str, ...] = attrs.field(converter=_to_writers)
    negative: bool = False

    @property
    def sign(self) -> int:
        """Give what to multiply with, from inside to outside and back."""
        return -1 if self.negative else 1


class Lookup(enum.Enum):
    """How the ids of a table can be looked up."""

    BY_ID = "an index that begins with the id"
    BY_WRITER = "an index that begins with writer and id"
    SCAN = "no index, but it is small"
    NONE = "no index"


def best_lookup(txn: Any, column: IdColumn) -> Lookup:
    """Look up, in the catalogue, which index a table has for its ids."""
    txn.execute(queries.INDEXES, {"table": queries.identifier(column.table)})
    indexes = [list(columns) for columns, _ in txn.fetchall()]
    if any(columns[:1] == [column.id_column] for columns in indexes):
        return Lookup.BY_ID
    if column.writer_column is not None and any(
        columns[:2] == [column.writer_column, column.id_column] for columns in indexes
    ):
        return Lookup.BY_WRITER
    txn.execute(queries.TABLE_SIZE, {"table": queries.identifier(column.table)})
    (size,) = txn.fetchone()
    return Lookup.NONE if (size or 0) > MAX_SCANNED_BYTES else Lookup.SCAN


def read_sequence(txn: Any, sequence: str) -> int:
    """Give the last id that a sequence has given out, one below its first if none."""
    txn.execute(queries.sequence_state(sequence))
    last_value, is_called = txn.fetchone()
    return int(last_value) if is_called else int(last_value) - 1


def fetch_ids(
    txn: Any,
    sequence: str,
    count: int,
    usable: Callable[[list[int]], list[int]],
    known: int,
) -> list[int]:
    """Take new ids from a sequence, in ascending order.

    Those that are not usable are passed over and never used (C34).

    :param usable: picks those that may be used.
    :param known: the greatest id that is known to be finished.
    :raises SequenceBehindError: too many were not.
    """
    ids: list[int] = []
    skipped = 0
    while len(ids) < count:
        wanted = count - len(ids)
        txn.execute(
            queries.NEXT_IDS,
            {"sequence": queries.identifier(sequence), "count": wanted},
        )
        given = [id_ for (id_,) in txn.fetchall()]
        ids += usable(given)
        skipped += wanted
        if len(ids) < count and skipped > MAX_SKIPPED_IDS + count:
            raise SequenceBehindError(
                sequence, "stream_positions", given[-1], max(known, given[-1])
            )
    return sorted(ids)


def read_stored_positions(txn: Any, stream: IdStream) -> dict[str, int]:
    """Give what ``stream_positions`` holds of a stream, also of removed writers.

    A position of the wrong sign is that of a stream nobody wrote.
    """
    txn.execute(queries.POSITIONS, {"stream_name": stream.stream_name})
    return {
        instance_name: max(stream.sign * stream_id, FIRST_POSITION)
        for instance_name, stream_id in txn.fetchall()
    }


def farthest_id(txn: Any, stream: IdStream, column: IdColumn) -> int:
    """Give the greatest id in a table; 0 if there is none, or no way to find it."""
    lookup = best_lookup(txn, column)
    if lookup is Lookup.NONE:
        _log.warn(
            "table {table} is not looked at: it is big and no index begins with "
            "{column}",
            table=column.table,
            column=column.id_column,
        )
        return 0
    if lookup is Lookup.BY_WRITER and stream.writers:
        txn.execute(
            queries.greatest_id_by_writer(column, stream.negative),
            {"writers": list(stream.writers)},
        )
    else:
        txn.execute(queries.greatest_id(column, stream.negative))
    (id_,) = txn.fetchone()
    return max(stream.sign * (id_ or 0), 0)


def _ids_beyond(txn: Any, stream: IdStream, column: IdColumn, low: int) -> list[int]:
    parameters: dict[str, object] = {
        "low": stream.sign * low,
        "limit": MAX_ROWS_AT_START,
    }
    if best_lookup(txn, column) is Lookup.BY_WRITER and stream.writers:
        parameters["writers"] = list(stream.writers)
        txn.execute(queries.ids_beyond_by_writer(column, stream.negative), parameters)
    else:
        txn.execute(queries.ids_beyond(column, stream.negative), parameters)
    return [stream.sign * id_ for (id_,) in txn.fetchall()]


def load_positions(
    txn: Any,
    stream: IdStream,
    instance_name: str,
    *,
    raise_to_tables: bool = False,
    positions_type: type[WriterPositions] = WriterPositions,
) -> WriterPositions:
    """Find out where a stream stands, at the start of a process.

    A declared writer also forgets removed ones, stores where it begins if it is
    new, and brings a sequence forward that is a little behind the stored
    positions, as after the loss of a primary server (C34). Whoever only reads
    changes nothing.

    The order matters: nobody may begin to write between the first thing that is
    read and the next, and make it mean something else. The greatest rows come
    first (without stored positions, all up to there counts as complete), the
    sequence last (it is ahead of every row read before).

    :param raise_to_tables: a sequence that is behind a table is brought forward.
    :param positions_type: what to make.
    :raises SequenceBehindError: the sequence is behind a table, or far behind the
        stored positions.
    """
    farthest = {column: farthest_id(txn, stream, column) for column in stream.tables}
    greatest = max(farthest.values(), default=0)
    kept = read_stored_positions(txn, stream) if stream.writers else {}
    stored = {w: p for w, p in kept.items() if w in stream.writers}
    beyond: list[int] = [greatest] if greatest else []
    if stored:
        low = min(stored.values())
        for column in stream.tables:
            if farthest[column] > low:
                beyond += _ids_beyond(txn, stream, column, low)
    is_writer = instance_name in stream.writers
    if raise_to_tables:
        _raise_sequence(txn, stream, greatest)
    last = _read_checked_sequence(txn, stream, farthest, stored, repair=is_writer)

    complete = FIRST_POSITION if stored else max(greatest, FIRST_POSITION)
    if not stream.writers or stream.writers == (instance_name,):
        # Nobody else writes, and we have not begun.
        complete = max(complete, last)
    positions = positions_type(instance_name, stream.writers, stored, beyond, complete)
    if is_writer:
        _settle_in(txn, stream, positions, kept)
    return positions


def _raise_sequence(txn: Any, stream: IdStream, greatest: int) -> None:
    last = read_sequence(txn, stream.sequence)
    if greatest > last:
        txn.execute(
            queries.raise_sequence(stream.sequence),
            {"sequence": queries.identifier(stream.sequence), "id": greatest},
        )
        _log.warn(
            "sequence {sequence} stood at {last}, behind rows up to {greatest}, and "
            "has been brought forward",
            sequence=stream.sequence,
            last=last,
            greatest=greatest,
        )


def _read_checked_sequence(
    txn: Any,
    stream: IdStream,
    farthest: dict[IdColumn, int],
    stored: dict[str, int],
    *,
    repair: bool,
) -> int:
    last = read_sequence(txn, stream.sequence)
    for column, id_ in farthest.items():
        if id_ > last:
            raise SequenceBehindError(stream.sequence, column.table, last, id_)
    behind = max(stored.values(), default=0) - last
    # A stream nobody wrote is stored as 1, its sequence may stand at 0.
    if behind > 0 and max(stored.values()) > FIRST_POSITION and repair:
        if behind > MAX_SKIPPED_IDS:
            raise SequenceBehindError(
                stream.sequence, "stream_positions", last, last + behind
            )
        # Taking ids, unlike setval(), cannot move it back under another writer.
        txn.execute(
            queries.NEXT_IDS,
            {"sequence": queries.identifier(stream.sequence), "count": behind},
        )
        txn.fetchall()
        _log.warn(
            "sequence {sequence} was {behind} behind stream_positions, and has been "
            "brought forward",
            sequence=stream.sequence,
            behind=behind,
        )
        last = read_sequence(txn, stream.sequence)
    return last


def _settle_in(
    txn: Any, stream: IdStream, positions: WriterPositions, kept: Collection[str]
) -> None:
    """Make ``stream_positions`` say who writes now."""
    if any(writer not in stream.writers for writer in kept):
        txn.execute(
            queries.DELETE_POSITIONS_OF_OTHERS,
            {"stream_name": stream.stream_name, "writers": list(stream.writers)},
        )
    if positions.instance_name not in kept:
        txn.execute(
            queries.INSERT_POSITION,
            {
                "stream_name": stream.stream_name,
                "instance_name": positions.instance_name,
                "stream_id": stream.sign * positions.announced,
            },
        )
