"""Determines, from the database, up to which token a stream is complete.

Theory of operation: a row is written by a transaction, which may commit after
transactions with higher ids. A reader whose offset is already beyond the row's id would
skip the row. The offset of a continuous read therefore never exceeds the token up to
which no more rows can be committed:

* A writer's rows are complete up to its position in ``stream_positions``: a writer
  stores a position only when all of its ids up to that position are finished.
* A position beyond both the stream's sequence and its greatest row is wrong: it is
  read as the greater of the two, so that nothing is skipped once it is corrected.
* Rows without a known writer (account data, rows older than the writer column) are
  complete up to the smallest of these positions.
* A declared writer without a position has not finished any id. A continuous reader
  waits for that writer, also with rows without a known writer.
* All instances write ``caches``, which has no positions. Its sequence is used instead:
  a transaction that has allocated an id holds a lock on the sequence until the
  transaction ends, and ``pg_locks`` shows these locks. The driver reads the last
  allocated id first, then the transactions that hold the lock. Once these have ended,
  the rows up to that id are complete, because all other transactions allocate greater
  ids. (This requires that the transaction which allocates an id also writes the row, as
  in Synapse.)

On a standby, the positions match the rows, even if the standby lags behind the primary.
The locks on the primary's sequences are not visible on a standby, so a continuous read
of ``caches`` fails there. docs/pipeline.rst, "Offsets", describes the guarantees.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from psycopg2.extensions import cursor

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.source.catalog import CatalogStream
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.ranges import AvailableQuery, Selection
from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import exists, read_sequence, read_writers
from synapse_replication.storage.row_queries import RowQuery
from synapse_replication.streams.tokens import MAX_TOKEN

#: How long to wait for transactions that write ``caches``, in s.
LOCK_PATIENCE = 5.0
_LOCK_INTERVAL = 0.02


def find_available_queries(
    txn: cursor, streams: Iterable[CatalogStream]
) -> dict[str, tuple[AvailableQuery, ...]]:
    """Look up each stream's tables, columns and indexes in the system catalogue."""
    streams = list(streams)
    queried = [query for stream in streams for query in stream.queries]
    tables = {query.ids.table for query in queried}
    tables |= {detail.table for query in queried for detail in query.details}
    names = {queries.identifier(table): table for table in tables}
    txn.execute(queries.SQL["tables"], (list(names),))
    found = {names[n]: (columns, indexes) for n, columns, indexes in txn.fetchall()}
    return {
        stream.name: tuple(
            _available(query, found)
            for query in stream.queries
            if query.ids.table in found
        )
        for stream in streams
    }


def _available(query: RowQuery, tables: Mapping[str, Any]) -> AvailableQuery:
    """Return a query with what the database has for it.

    :param tables: the columns and the indexes of each table.
    """
    ids = query.ids
    columns, indexes = tables[ids.table]
    by_id = any(index["columns"][:1] == [ids.id_column] for index in indexes)
    by_writer = not by_id and ids.writer_column is not None
    by_writer &= any(
        index["columns"][:2] == [ids.writer_column, ids.id_column] for index in indexes
    )
    return AvailableQuery(
        query,
        has_written=query.written_ms_column in columns,
        by_id=by_id,
        by_writer=by_writer,
        nullable=by_writer and columns[ids.writer_column],
        joinable=all(
            {"is_unique": True, "columns": ["event_id"]}
            in tables.get(detail.table, ({}, ()))[1]
            for detail in query.details
        ),
    )


def stored_tokens(txn: cursor, stream: CatalogStream) -> dict[str, int]:
    """Return the stream's positions in ``stream_positions``, as tokens of 0 or more."""
    if stream.positions_name is None or not exists(txn, "stream_positions"):
        return {}
    txn.execute(queries.SQL["positions"], {"stream_name": stream.positions_name})
    # The stored position of a stream without rows may have the opposite sign.
    return {
        writer: _to_token(id_, negative=stream.negative)
        for writer, id_ in txn.fetchall()
    }


def _to_token(id_: int, *, negative: bool) -> int:
    """Return the token of an id: 0 or more, and of 64 bits."""
    return min(max(-id_ if negative else id_, 0), MAX_TOKEN)


def last_allocated_id(txn: cursor, stream: CatalogStream) -> int | None:
    """Return the last id that the sequence allocated.

    :return: the first id minus one if the sequence has allocated none; ``None`` if the
        sequence does not exist.
    """
    if not exists(txn, stream.sequence):
        return None
    return read_sequence(txn, stream.sequence)


@attrs.define
class CompletenessReader:
    """Determines up to which offset streams are complete.

    :ivar declared: the configured writers of each stream.
    :ivar continuous: whether a continuous read resumes from the result. If so, the
        result never exceeds what is complete. Otherwise, the result for a stream
        without positions is the token of its last row, and a declared writer without a
        position is ignored.
    """

    declared: Mapping[str, Sequence[str]]
    continuous: bool

    def survey(
        self, txn: cursor, selection: Selection, start: StreamOffset
    ) -> StreamOffset:
        """Return the offset up to which a stream is complete, but at least ``start``.

        :raises PipelineError: if the offset cannot be determined.
        """
        stream = selection.stream
        if stream.positions_name is None and self.continuous:
            return start.advance(StreamOffset(self._bound_by_locks(txn, stream)))
        stored = stored_tokens(txn, stream)
        if not stored:
            return start.advance(self._without_positions(txn, selection))
        limit = self._limit(txn, selection, max(stored.values()))
        stored = {writer: min(token, limit) for writer, token in stored.items()}
        declared = self.declared.get(stream.name, ()) if self.continuous else ()
        # A writer without a position remains where it is.
        positions = {writer: start.position(writer) for writer in declared} | stored
        return start.advance(StreamOffset(min(positions.values()), positions))

    @staticmethod
    def _limit(txn: cursor, selection: Selection, stored: int) -> int:
        """Return the token that a stored position cannot exceed, if it is right.

        A position beyond the stream's ids is wrong. If it was read before it is
        corrected, the rows up to it would be skipped for ever.

        :param stored: the greatest stored position, read before.
        """
        last = last_allocated_id(txn, selection.stream)
        if last is None or stored <= last:
            return stored
        # After a failover, a sequence may be behind rows.
        return max(last, _greatest_token(txn, selection))

    def _without_positions(self, txn: cursor, selection: Selection) -> StreamOffset:
        stream = selection.stream
        greatest = _greatest_token(txn, selection)
        if greatest and self.continuous:
            raise PipelineError(
                f"stream {stream.name} has rows up to {greatest}, but nothing in "
                "stream_positions shows which of them are complete; fill that table "
                "with synapse-replication pipeline bootstrap"
            )
        return StreamOffset(greatest)

    def _bound_by_locks(self, txn: cursor, stream: CatalogStream) -> int:
        txn.execute("SELECT pg_is_in_recovery()")
        if txn.fetchall() == [(True,)]:
            raise PipelineError(
                f"stream {stream.name} cannot be read from a standby, because only the "
                "primary knows which of its rows are complete; read it from the "
                "primary, or omit it from the option streams"
            )
        last = last_allocated_id(txn, stream)
        if last is None:
            return 0
        open_transactions = self._holders(txn, stream)
        deadline = time.monotonic() + LOCK_PATIENCE
        while open_transactions:
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"stream {stream.name}: a transaction that may write rows has been "
                    f"open for {LOCK_PATIENCE:.0f} s, so it is unknown which rows are "
                    "complete; end the transaction (pg_locks and pg_stat_activity show "
                    f"which one has locked sequence {stream.sequence}), or omit the "
                    "stream from the option streams"
                )
            time.sleep(_LOCK_INTERVAL)
            open_transactions &= self._holders(txn, stream)
        return last

    @staticmethod
    def _holders(txn: cursor, stream: CatalogStream) -> set[str]:
        sequences = {"tables": [queries.identifier(stream.sequence)]}
        txn.execute(queries.SQL["inserting_transactions"], sequences)
        return {transaction for (transaction,) in txn.fetchall()}


def _greatest_token(txn: cursor, selection: Selection) -> int:
    greatest = 0
    for rows in (query.rows for query in selection.queries):
        txn.execute(queries.for_table("greatest_id", rows.ids, rows.negative))
        ((id_,),) = txn.fetchall()
        greatest = max(greatest, _to_token(id_ or 0, negative=rows.negative))
    return greatest


def find_writers(txn: cursor, selection: Selection) -> set[str]:
    """Return the writers in the tables that have only an index on writer and id."""
    writers: set[str] = set()
    for query in selection.queries:
        if query.by_writer:
            writers.update(read_writers(txn, query.rows.ids))
    return writers
