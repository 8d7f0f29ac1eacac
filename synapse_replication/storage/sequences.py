"""Allocation of a stream's ids, and its initial positions, without long table scans.

The functions run in a database thread, with a transaction's cursor. Ids are distances
from zero, whatever the stream's sign.

See docs/failure-modes.rst: failure-switched-over-database, failure-repaired-at-start,
failure-unused-sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Any

from twisted.logger import Logger

from synapse_replication.errors import SequenceBehindError, StreamConfigurationError
from synapse_replication.storage import queries
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.id_streams import (
    AccessPath,
    IdStream,
    best_access_path,
    farthest_id,
    find_sequence_problem,
    read_sequence,
)
from synapse_replication.storage.prepared import Prepared, run
from synapse_replication.storage.standby import read_role
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.writer_positions import FIRST_POSITION, WriterPositions

_log = Logger()

#: A fetch with unusable ids fails when it has allocated more than this many ids beyond
#: the requested number (those that :func:`skip_ids` allocates do not count). At the
#: start, a sequence behind the stored positions is advanced by at most this many ids.
#: The bound suffices for a failover to a standby whose replication lagged slightly.
MAX_SKIPPED_IDS = 1000

#: The most rows beyond the smallest stored position that are read from each table (or
#: for each writer) at the start.
MAX_ROWS_AT_START = 10_000

#: The greatest value of an id's column.
MAX_ID = 2**63 - 1

_COUNTED = {"sequence": "text", "count": "integer"}
_ADMITTED = {**_COUNTED, "writer": "text", "term": "bigint"}
_ALLOCATIONS = {
    name: Prepared(queries.SQL[name], types)
    for name, types in (
        ("next_ids", _COUNTED),
        ("txn_ids", _COUNTED),
        ("admitted_ids", _ADMITTED),
        ("admitted_txn_ids", _ADMITTED),
        ("next_id", {"sequence": "text"}),
        ("id_and_term", {"sequence": "text", "writer": "text"}),
        ("txn_id_and_term", {"sequence": "text", "writer": "text"}),
    )
}


def fetch_ids(
    txn: Any,
    stream: IdStream,
    count: int,
    usable: Callable[[list[int]], list[int]],
    known: int,
    admission: Admission | None = None,
    *,
    in_use: bool = False,
) -> list[int]:
    """Allocate ids from a stream's sequence, in ascending order.

    Unusable ids are skipped and never used. If the sequence is behind ``known``, the
    sequence is advanced to ``known``, unless the distance is implausibly great.

    :param txn: a cursor.
    :param usable: returns those of the allocated ids that may be used.
    :param known: the greatest id that is known to be finished.
    :param admission: the name of this process; ``None`` if it has acquired none.
    :param in_use: whether the ids are used in this transaction. If its cursor has the
        attribute ``xid``, the number of the transaction is stored there, and the name
        is checked again when it commits. Otherwise, as for a homeserver's cursor, no
        other process can acquire the name before the end of the transaction.
    :raises psycopg2.Error: if another process has the name; see ``Admission.explain``.
    :raises SequenceBehindError: if too many ids are unusable, or the sequence is far
        behind ``known``.
    """
    ids: list[int] = []
    skipped = 0
    sequence = queries.identifier(stream.sequence)
    while len(ids) < count:
        wanted = count - len(ids)
        allocated = _allocate(txn, sequence, wanted, admission, in_use=in_use)
        ids += usable(allocated)
        skipped += wanted
        if len(ids) == count:
            break
        last = allocated[-1]
        is_far = known - last > stream.plausible_distance
        if skipped > MAX_SKIPPED_IDS + count or is_far:
            raise _sequence_behind(
                stream,
                "the memory of this process (ids it wrote, or other writers announced)",
                last,
                max(known, last),
                "find out whether the database was restored, or an instance of "
                f"another deployment announced {known}, then restart this process",
            )
        if known > last:
            _log.warn(
                "Sequence {sequence} went back to {last}, below {known}, while "
                "writers were running; it is advanced again, and no id is used twice. "
                "Was the sequence set by hand, or the database restored? Check with: "
                "synapse-replication positions check -c FILE",
                sequence=stream.sequence,
                last=last,
                known=known,
            )
            skip_ids(txn, stream.sequence, known - last)
    return sorted(ids)


def _allocate(
    txn: Any, sequence: str, count: int, admission: Admission | None, *, in_use: bool
) -> list[int]:
    parameters: dict[str, Any] = {"sequence": sequence, "count": count}
    has_xid = in_use and hasattr(txn, "xid")
    name = "txn_ids" if in_use else "next_ids"
    if admission is not None:
        parameters |= admission.parameters
        if count == 1 and (has_xid or not in_use):
            return [_allocate_one(txn, parameters, admission, in_use=in_use)]
        name = "admitted_txn_ids" if in_use else "admitted_ids"
    run(txn, parameters, _ALLOCATIONS[name])
    rows = txn.fetchall()
    if has_xid:
        txn.xid = rows[0][1]
    return [row[0] for row in rows]


def _allocate_one(
    txn: Any, parameters: Mapping[str, Any], admission: Admission, *, in_use: bool
) -> int:
    """Allocate an id and compare the term, at a lower cost than the function."""
    term = "txn_id_and_term" if in_use else "id_and_term"
    run(txn, parameters, _ALLOCATIONS["next_id"], _ALLOCATIONS[term])
    rows = txn.fetchall()
    if not rows or rows[0][-1] != admission.term:
        # This raises the error, unless the snapshot was too old to tell.
        admission.confirm(txn)
    if in_use:
        txn.xid = rows[0][1]
    id_: int = rows[0][0]
    return id_


def skip_ids(txn: Any, sequence: str, count: int) -> int:
    """Allocate ``count`` ids without using them, so that later ids are greater.

    Unlike ``setval()``, it cannot move the sequence back if another writer advances it
    at the same time.

    :return: the last of these ids.
    """
    txn.execute(
        queries.SQL["skip_ids"],
        {"sequence": queries.identifier(sequence), "count": count},
    )
    return int(txn.fetchone()[0])


def read_stored_positions(txn: Any, stream: IdStream) -> dict[str, int]:
    """Return a stream's positions in ``stream_positions``, removed writers included.

    The initial position of a stream without rows may be stored with the wrong sign;
    any position with the wrong sign is returned as ``FIRST_POSITION``.
    """
    txn.execute(queries.SQL["positions"], {"stream_name": stream.stream_name})
    return {
        instance_name: max(stream.sign * stream_id, FIRST_POSITION)
        for instance_name, stream_id in txn.fetchall()
    }


def limit_positions(
    txn: Any, stream: IdStream, positions: Mapping[str, int]
) -> dict[str, int]:
    """Return a reader's positions, each limited to the greatest id that can exist.

    The limit is the sequence's value or the greatest row, whichever is greater: after a
    failover to a standby, the sequence may be slightly behind the rows. So no existing
    row is above a position that is lowered to the limit, and none is delivered twice.
    A position implausibly far beyond the sequence says nothing about the delivered
    rows, so it is lowered to the sequence's value. If a large table has no index for
    the greatest row, only positions implausibly far beyond the sequence are lowered.

    A standby may not have replayed the greatest ids yet, so no position is lowered.

    :param txn: a cursor.
    :param positions: the reader's saved positions, by writer.
    """
    last = read_sequence(txn, stream.sequence)
    if max(positions.values(), default=0) <= last or read_role(txn).is_standby:
        return dict(positions)
    rows = [farthest_id(txn, stream, column) for column in stream.tables]
    # Read the sequence again, after the rows, so that it covers every row read.
    last = read_sequence(txn, stream.sequence)
    limit = last + stream.plausible_distance
    if rows and None not in rows:
        # An id beyond the limit is not an id of this stream.
        limit = max(
            [last, FIRST_POSITION, *(id_ for id_ in rows if id_ and id_ <= limit)]
        )
    return {
        writer: position
        if position <= limit
        else (last if position > last + stream.plausible_distance else limit)
        for writer, position in positions.items()
    }


def _known_farthest_id(txn: Any, stream: IdStream, column: IdColumn) -> int:
    id_ = farthest_id(txn, stream, column)
    if id_ is not None:
        return id_
    _log.warn(
        "table {table} is not compared with its sequence: it is large and no index "
        "begins with {column}; create one",
        table=column.table,
        column=column.id_column,
    )
    return 0


def _ids_beyond(txn: Any, stream: IdStream, column: IdColumn, low: int) -> list[int]:
    access_path = best_access_path(txn, column)
    of_writer = access_path is AccessPath.BY_WRITER and bool(stream.writers)
    query = queries.ids_between(column, stream.negative, of_writer=of_writer)
    bounds = {"after": low, "up_to": MAX_ID, "limit": MAX_ROWS_AT_START}
    ids: list[int] = []
    for writer in stream.writers if of_writer else [None]:
        txn.execute(query, {**bounds, "instance_name": writer})
        ids += [id_ for (id_,) in txn.fetchall()]
    return ids


def _committed_ids(
    txn: Any, stream: IdStream, farthest: dict[IdColumn, int], stored: dict[str, int]
) -> list[int]:
    """Return ids of rows: the greatest, and those beyond the smallest position.

    :param stored: the stored position of each declared writer.
    """
    greatest = max(farthest.values(), default=0)
    ids = [greatest] if greatest else []
    if stored:
        low = min(stored.values())
        for column in stream.tables:
            if farthest[column] > low:
                ids += _ids_beyond(txn, stream, column, low)
    return ids


def load_positions(
    txn: Any,
    stream: IdStream,
    instance_name: str,
    *,
    raise_to_tables: bool = False,
    positions_type: type[WriterPositions] = WriterPositions,
) -> WriterPositions:
    """Return the positions of a stream at the start of a process.

    A declared writer also deletes the positions of removed writers, stores its own
    initial position if it is new, and advances a sequence that is slightly behind the
    stored positions, as after the loss of a primary server. A reader changes nothing,
    unless ``raise_to_tables`` is true.

    The order of the reads matters, because other writers may start writing in between.
    The greatest rows are read first, since without stored positions all ids up to them
    count as complete. The sequence is read last, so that it covers every row read
    before.

    :param txn: a cursor.
    :param raise_to_tables: whether to advance a sequence that is behind a table,
        instead of raising :exc:`SequenceBehindError`. A sequence that is implausibly
        far behind is advanced only if it has not been used.
    :param positions_type: the class to instantiate.
    :raises SequenceBehindError: if the sequence is behind a table and is not advanced,
        or, at the start of a declared writer, if it is more than
        :data:`MAX_SKIPPED_IDS` behind a stored position.
    :raises StreamConfigurationError: at the start of a declared writer, if the sequence
        does not allocate ids in order, for instance because of ``CACHE``.
    """
    is_writer = instance_name in stream.writers
    if is_writer and (found := find_sequence_problem(txn, stream.sequence)):
        problem, statement = found
        raise StreamConfigurationError(
            f"{instance_name} cannot write stream {stream.stream_name}: {problem}. "
            f"Stop its writers, run {statement} and start them again"
        )
    farthest = {
        column: _known_farthest_id(txn, stream, column) for column in stream.tables
    }
    greatest = max(farthest.values(), default=0)
    all_stored = read_stored_positions(txn, stream) if stream.writers else {}
    stored = {w: p for w, p in all_stored.items() if w in stream.writers}
    committed = _committed_ids(txn, stream, farthest, stored)
    if raise_to_tables:
        _advance_sequence(txn, stream, greatest)
    last = _read_checked_sequence(txn, stream, farthest, stored, repair=is_writer)
    stored = _without_implausible(stream, stored, last)
    complete = FIRST_POSITION if stored else max(greatest, FIRST_POSITION)
    if not stream.writers or stream.writers == (instance_name,):
        # No other writer is declared, and this instance has not begun to write: all ids
        # allocated so far count as finished.
        complete = max(complete, last)
    positions = positions_type(
        instance_name,
        stream.writers,
        stored,
        committed,
        complete,
        last,
        stream.plausible_distance,
    )
    if is_writer:
        _store_writers(txn, stream, positions, all_stored)
    return positions


def _advance_sequence(txn: Any, stream: IdStream, greatest: int) -> None:
    last = read_sequence(txn, stream.sequence)
    if last > FIRST_POSITION and greatest - last > stream.plausible_distance:
        # A single corrupt row must not use up the ids. The caller raises an error next.
        return
    if greatest > last:
        name = queries.identifier(stream.sequence)
        txn.execute(
            queries.SQL["advance_sequence"].format(sequence=name),
            {"sequence": name, "id": greatest},
        )
        _log.warn(
            "sequence {sequence} was at {last}, but a table has rows up to "
            "{greatest}; the sequence was advanced to {greatest}",
            sequence=stream.sequence,
            last=last,
            greatest=greatest,
        )


def _without_implausible(
    stream: IdStream, stored: dict[str, int], last: int
) -> dict[str, int]:
    """Return the stored positions; replace those far beyond the sequence with ``last``.

    :param last: the sequence's value.
    """
    plausible = dict(stored)
    for writer, position in stored.items():
        if position - last > stream.plausible_distance:
            plausible[writer] = last
            _log.warn(
                "{error}; {last} is used as the position of {writer}",
                error=_sequence_behind_positions(stream, last, position),
                writer=writer,
                last=last,
            )
    return plausible


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
        if id_ < greatest <= last + stream.plausible_distance:
            # Do not suggest advancing the sequence to the table's greatest row only:
            # ids up to the stored position count as finished and would be allocated
            # again.
            raise _sequence_behind_positions(stream, last, greatest)
        table = queries.identifier(column.table)
        name = queries.identifier(column.id_column)
        raise _sequence_behind(
            stream,
            f"table {column.table}",
            last,
            id_,
            f"inspect the row (SELECT * FROM {table} WHERE {name} = "
            f"{stream.sign * id_};) and delete it if it is not a row of the stream",
        )
    behind = greatest - last
    # A stream without rows has the stored position 1, and its sequence may be at 0.
    if behind > 0 and greatest > FIRST_POSITION and repair:
        if behind > MAX_SKIPPED_IDS:
            raise _sequence_behind_positions(stream, last, greatest)
        skip_ids(txn, stream.sequence, behind)
        _log.warn(
            "sequence {sequence} was {behind} ids behind stream_positions; it was "
            "advanced by {behind}",
            sequence=stream.sequence,
            behind=behind,
        )
        last = read_sequence(txn, stream.sequence)
    return last


def _sequence_behind_positions(
    stream: IdStream, last: int, position: int
) -> SequenceBehindError:
    return _sequence_behind(
        stream,
        "table stream_positions",
        last,
        position,
        "inspect the row (SELECT * FROM stream_positions WHERE stream_name = "
        f"'{stream.stream_name}' AND stream_id = {stream.sign * position};) "
        "and run 'synapse-replication positions repair' to correct it",
    )


def _sequence_behind(
    stream: IdStream, source: str, last: int, id_: int, suspect: str
) -> SequenceBehindError:
    """Return the error that a sequence is behind an id.

    :param source: where the id was found.
    :param suspect: what to do if the id is implausibly far beyond the sequence.
    """
    is_far = id_ - last > stream.plausible_distance
    return SequenceBehindError(
        stream.sequence, source, last, id_, suspect=suspect if is_far else ""
    )


def _store_writers(
    txn: Any, stream: IdStream, positions: WriterPositions, stored: Collection[str]
) -> None:
    """Update the writers in ``stream_positions``.

    Delete undeclared writers, and add this instance if it is missing.

    :param stored: the writers that have a stored position.
    """
    if any(writer not in stream.writers for writer in stored):
        txn.execute(
            queries.SQL["delete_positions_of_others"],
            {"stream_name": stream.stream_name, "writers": list(stream.writers)},
        )
    if positions.instance_name not in stored:
        txn.execute(
            queries.SQL["insert_position"],
            {
                "stream_name": stream.stream_name,
                "instance_name": positions.instance_name,
                "stream_id": stream.sign * positions.announced,
            },
        )
