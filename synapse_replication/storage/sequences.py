"""What the database knows about a stream's ids, read without scanning a table.

Everything here runs in a transaction's thread, with its cursor. Ids are
distances from zero, whatever the stream's sign.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Any

from twisted.logger import Logger

from synapse_replication.errors import SequenceBehindError
from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import (
    IdStream,
    Lookup,
    best_lookup,
    farthest_id,
    read_sequence,
)
from synapse_replication.streams.positions import (
    FIRST_POSITION,
    PLAUSIBLE_DISTANCE,
    WriterPositions,
)
from synapse_replication.streams.table import IdColumn

__all__ = [
    "IdStream",
    "Lookup",
    "best_lookup",
    "farthest_id",
    "fetch_ids",
    "limit_positions",
    "load_positions",
    "read_sequence",
    "read_stored_positions",
    "skip_ids",
]

_log = Logger()

#: Ids in a row that are not usable before a fetch gives up; also how far a
#: sequence may be behind stored positions to be brought forward at the start.
#: PostgreSQL logs sequences 32 ids ahead, so a standby is behind by no more.
MAX_SKIPPED_IDS = 1000

#: Rows beyond the smallest stored position that are looked at, at the start.
MAX_ROWS_AT_START = 10_000


def fetch_ids(
    txn: Any,
    sequence: str,
    count: int,
    usable: Callable[[list[int]], list[int]],
    known: int,
) -> list[int]:
    """Take new ids from a sequence, in ascending order.

    Those that are not usable are skipped and never used. If the sequence is
    behind what this process knows as finished, it is brought forward to that, unless
    the distance is too great to be believed.

    :param usable: picks those that may be used.
    :param known: the greatest id that this process knows as finished.
    :raises SequenceBehindError: if too many are not usable, or the sequence is far
        behind ``known``.
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
        if len(ids) == count:
            break
        if skipped > MAX_SKIPPED_IDS + count or known - given[-1] > PLAUSIBLE_DISTANCE:
            raise _sequence_behind_memory(sequence, given[-1], known)
        if known > given[-1]:
            _log.warn(
                "Sequence {sequence} went back to {given}, below {known}, while "
                "writers ran; it is brought forward again, and no id is used twice. "
                "Was it set by hand, or the database restored? Check it with: "
                "synapse-replication positions check -c FILE",
                sequence=sequence,
                given=given[-1],
                known=known,
            )
            skip_ids(txn, sequence, known - given[-1])
    return sorted(ids)


def skip_ids(txn: Any, sequence: str, count: int) -> int:
    """Take ids that nobody uses, so that those to come are greater.

    Unlike ``setval()``, this cannot move a sequence back under another writer.

    :return: the last of them.
    """
    txn.execute(
        queries.SKIP_IDS, {"sequence": queries.identifier(sequence), "count": count}
    )
    return int(txn.fetchone()[0])


def _sequence_behind_memory(
    sequence: str, last: int, known: int
) -> SequenceBehindError:
    is_far = known - last > PLAUSIBLE_DISTANCE
    return SequenceBehindError(
        sequence,
        "the memory of this process, of what it wrote or was told by other writers,",
        last,
        max(known, last),
        suspect=(
            "no table holds it. Find out whether the database was restored or an "
            "instance announced it that does not belong here, then start this "
            "process again"
        )
        if is_far
        else "",
    )


def read_stored_positions(txn: Any, stream: IdStream) -> dict[str, int]:
    """Return what ``stream_positions`` holds of a stream, also of removed writers.

    A position of the wrong sign is that of a stream nobody wrote.
    """
    txn.execute(queries.POSITIONS, {"stream_name": stream.stream_name})
    return {
        instance_name: max(stream.sign * stream_id, FIRST_POSITION)
        for instance_name, stream_id in txn.fetchall()
    }


def limit_positions(
    txn: Any,
    stream: IdStream,
    positions: Mapping[str, int],
    plausible_distance: int = PLAUSIBLE_DISTANCE,
) -> dict[str, int]:
    """Return a reader's positions, each at or below the greatest id there can be.

    That is the sequence's value, or the greatest row of any writer: after a switch to
    a standby the sequence may be a little behind the rows. So no row that is there is
    above a position that was set back, and none is delivered again. Where no index
    leads to the greatest row, only what is further than ``plausible_distance`` beyond
    the sequence is set back.
    """
    last = read_sequence(txn, stream.sequence)
    if max(positions.values(), default=0) <= last:
        return dict(positions)
    rows = [farthest_id(txn, stream, column) for column in stream.tables]
    # The sequence last: it is ahead of every row that was read before.
    last = read_sequence(txn, stream.sequence)
    limit = last + plausible_distance
    if rows and None not in rows:
        # One that is further away is no row of this stream.
        limit = max(
            [last, FIRST_POSITION, *(id_ for id_ in rows if id_ and id_ <= limit)]
        )
    return {
        writer: position
        if position <= limit
        else (last if position > last + plausible_distance else limit)
        for writer, position in positions.items()
    }


def _known_farthest_id(txn: Any, stream: IdStream, column: IdColumn) -> int:
    id_ = farthest_id(txn, stream, column)
    if id_ is not None:
        return id_
    _log.warn(
        "table {table} is not looked at: it is big and no index begins with {column}",
        table=column.table,
        column=column.id_column,
    )
    return 0


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
    positions, as after the loss of a primary server. Whoever only reads
    changes nothing.

    The order matters: nobody may begin to write between the first thing that is
    read and the next, and make it mean something else. The greatest rows come
    first (without stored positions, all up to there counts as complete), the
    sequence last (it is ahead of every row read before).

    :param raise_to_tables: a sequence that is behind a table is brought forward.
    :param positions_type: what to make.
    :raises SequenceBehindError: if the sequence is behind a table, or far behind the
        stored positions.
    """
    farthest = {
        column: _known_farthest_id(txn, stream, column) for column in stream.tables
    }
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
    stored = _without_implausible(stream, stored, last)

    complete = FIRST_POSITION if stored else max(greatest, FIRST_POSITION)
    if not stream.writers or stream.writers == (instance_name,):
        # Nobody else writes, and we have not begun.
        complete = max(complete, last)
    positions = positions_type(
        instance_name, stream.writers, stored, beyond, complete, last
    )
    if is_writer:
        _settle_in(txn, stream, positions, kept)
    return positions


def _raise_sequence(txn: Any, stream: IdStream, greatest: int) -> None:
    last = read_sequence(txn, stream.sequence)
    if last > FIRST_POSITION and greatest - last > PLAUSIBLE_DISTANCE:
        # One bad row must not use the ids up; what follows reports it.
        return
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


def _without_implausible(
    stream: IdStream, stored: dict[str, int], last: int
) -> dict[str, int]:
    """Return stored positions, those far beyond the sequence put back to it."""
    for writer, position in stored.items():
        if position - last > PLAUSIBLE_DISTANCE:
            _log.warn(
                "{error}; {writer} is taken to stand at {last}",
                error=_sequence_behind_positions(stream, last, position),
                writer=writer,
                last=last,
            )
    return {
        writer: last if position - last > PLAUSIBLE_DISTANCE else position
        for writer, position in stored.items()
    }


def _read_checked_sequence(
    txn: Any,
    stream: IdStream,
    farthest: dict[IdColumn, int],
    stored: dict[str, int],
    *,
    repair: bool,
) -> int:
    last = read_sequence(txn, stream.sequence)
    greatest = max(stored.values(), default=0)
    if farthest and max(farthest.values()) > last:
        column, id_ = max(farthest.items(), key=itemgetter(1))
        if id_ < greatest <= last + PLAUSIBLE_DISTANCE:
            # Else an id would be given out that counts as finished.
            raise _sequence_behind_positions(stream, last, greatest)
        raise _sequence_behind_table(stream, column, last, id_)
    behind = greatest - last
    # A stream nobody wrote is stored as 1, its sequence may stand at 0.
    if behind > 0 and greatest > FIRST_POSITION and repair:
        if behind > MAX_SKIPPED_IDS:
            raise _sequence_behind_positions(stream, last, greatest)
        skip_ids(txn, stream.sequence, behind)
        _log.warn(
            "sequence {sequence} was {behind} behind stream_positions, and has been "
            "brought forward",
            sequence=stream.sequence,
            behind=behind,
        )
        last = read_sequence(txn, stream.sequence)
    return last


def _sequence_behind_table(
    stream: IdStream, column: IdColumn, last: int, id_: int
) -> SequenceBehindError:
    table, name = queries.identifier(column.table), queries.identifier(column.id_column)
    return SequenceBehindError(
        stream.sequence,
        f"table {column.table}",
        last,
        id_,
        suspect=(
            f"look at the row, SELECT * FROM {table} WHERE {name} = "
            f"{stream.sign * id_}; and remove it if it does not belong there"
        )
        if id_ - last > PLAUSIBLE_DISTANCE
        else "",
    )


def _sequence_behind_positions(
    stream: IdStream, last: int, position: int
) -> SequenceBehindError:
    return SequenceBehindError(
        stream.sequence,
        "table stream_positions",
        last,
        position,
        suspect=(
            "look at the row, SELECT * FROM stream_positions WHERE stream_name = "
            f"'{stream.stream_name}' AND stream_id = {stream.sign * position}; "
            "and have 'synapse-replication positions repair' correct it"
        )
        if position - last > PLAUSIBLE_DISTANCE
        else "",
    )


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
