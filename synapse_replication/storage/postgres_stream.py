"""Streams whose rows are in Postgres: catch-up by writer and range, and writing.

Methods take and return tokens as they are on the wire: the negative ids of backfill are
positive tokens.

See docs/failure-modes.rst: failure-whole-tokens, failure-indexed-catch-up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias

import attrs
import psycopg2

from synapse_replication.errors import (
    CatchUpError,
    LocalProtocolError,
    StreamConfigurationError,
)
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.id_streams import read_sequence
from synapse_replication.storage.prepared import Prepared, run
from synapse_replication.storage.row_pages import query_page, read_rows_between
from synapse_replication.storage.row_queries import insert_sql, queries_of
from synapse_replication.storage.standby import Knowledge, knowledge_sql, read_role
from synapse_replication.storage.transactions import Transaction
from synapse_replication.streams.combined_position import CombinedPosition
from synapse_replication.streams.rows import RowT, encode_json
from synapse_replication.streams.standard.registry import StandardStream
from synapse_replication.streams.stream import (
    EncodedUpdates,
    RemovedWriter,
    RowsBetween,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.tokens import MultiWriterStreamToken
from synapse_replication.streams.writer_positions import PLAUSIBLE_DISTANCE

#: Default limit of the rows per page of a catch-up.
PAGE_ROWS = 2000

#: See :class:`~synapse_replication.streams.stream.DrainableStream`.
FindRemovedWriters: TypeAlias = Callable[[], Awaitable[Mapping[str, RemovedWriter]]]


class WriterIds(Protocol):
    """The part of an id generator that a stream uses. Ids have the stream's sign."""

    def get_next_txn(self, txn: Transaction) -> int:
        """Allocate an id that is finished when ``txn`` commits or rolls back."""

    def get_current_token_for_writer(self, instance_name: str) -> int:
        """Return a writer's position: the token up to which its ids are finished."""

    def get_announceable_token(self) -> int:
        """Return the position that this instance may announce."""

    def get_minimal_local_current_token(self) -> int:
        """Return this instance's greatest finished id that may be announced.

        This instance has no rows between that id and its announced position.
        """

    def advance(self, instance_name: str, new_id: int) -> None:
        """Record the position of another writer."""


class PostgresStream(Generic[RowT]):
    """A :class:`~synapse_replication.streams.stream.Stream` in the database.

    :param declared: the declaration of the stream. Only rows of a
        :class:`~synapse_replication.streams.table.TableStream` and of ``caches`` can be
        written; rows of Synapse's other streams are written by other means.
    :param database: runs the queries.
    :param ids: this instance's id generator of the stream.
    :param instance_name: this instance.
    :param page_rows: the most rows that each query returns for a page of a catch-up,
        exceeded only so as not to split the rows of one token.
    :param on_write: called after each :meth:`write`, for instance to wake the
        streamer.
    :param writers: the configured writers; ``None`` for those that a ``TableStream``
        declares.
    :param find_removed_writers: returns the writers that no longer announce their
        rows; ``None`` to omit the search.
    :param plausible_distance: the most by which a position may exceed the sequence.
    :ivar writers: the configured or declared writers; empty if there are none.
    :raises StreamConfigurationError: if ``page_rows`` is below 1, or the stream is held
        in memory.
    """

    def __init__(
        self,
        declared: StandardStream | TableStream[RowT],
        database: TransactionRunner,
        ids: WriterIds,
        *,
        instance_name: str,
        page_rows: int = PAGE_ROWS,
        on_write: Callable[[], object] | None = None,
        writers: Iterable[str] | None = None,
        find_removed_writers: FindRemovedWriters | None = None,
        plausible_distance: int = PLAUSIBLE_DISTANCE,
    ) -> None:
        if page_rows < 1:
            raise StreamConfigurationError(
                f"stream {declared.name}: page_rows is {page_rows}; write 1 or more"
            )
        self.description: StreamDescription[RowT] = declared.description
        self._queries = queries_of(declared)
        if not self._queries:
            raise StreamConfigurationError(
                f"stream {declared.name} has no tables; use a MemoryStream for it"
            )
        self._insert: Prepared | None = None
        self._columns: Sequence[str] = ()
        self.writers: Sequence[str] = tuple(writers or ())
        if isinstance(declared, TableStream):
            self._columns = declared.column_names
            if writers is None:
                self.writers = tuple(declared.writers)
        elif declared.any_instance_writes:
            # Its rows on the wire have all columns of its table.
            self._columns = self._queries[0].columns
        if self._columns:
            ids_of_rows = self._queries[0].ids
            types = {"id": "bigint", "rows": "text"}
            if ids_of_rows.writer_column is not None:
                types["instance_name"] = "text"
            self._insert = Prepared(insert_sql(ids_of_rows, self._columns), types)
        self._combined = CombinedPosition()
        self._positions_name = declared.positions_name or declared.name
        self._knowledge_sql = knowledge_sql(
            self._positions_name if self.writers else None, of_writer=True
        )
        self._database = database
        self._ids = ids
        self._instance_name = instance_name
        self._sign = -1 if declared.negative else 1
        self._page_rows = page_rows
        self._on_write = on_write
        self._find_removed_writers = find_removed_writers
        self._sequence = declared.sequence
        self._plausible_distance = plausible_distance
        # The value of the sequence when it was last read; 0 before the first read.
        self._allocated = 0

    def current_token(self, instance_name: str) -> int:
        """Return this process's position in a writer's rows."""
        return self._sign * self._ids.get_current_token_for_writer(instance_name)

    def minimal_local_current_token(self) -> int:
        """Return the position that this instance, as a writer, may announce.

        It advances with the positions of other writers while this instance writes
        nothing.
        """
        if self._combined.is_large:
            # A process that only writes settles its own ids here.
            self.current_stream_token()
        return self._sign * self._ids.get_announceable_token()

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether this instance may have written rows in the range."""
        newest = self._sign * self._ids.get_minimal_local_current_token()
        return from_token < min(upto_token, newest)

    def advance(self, instance_name: str, token: int) -> None:
        """Record that a writer's rows up to ``token`` were delivered here."""
        if token < self.current_token(instance_name):
            self._combined.rewound(token)
        self._ids.advance(instance_name, self._sign * token)

    def row_delivered(self, token: int) -> None:
        """Record that the rows of a token were delivered here."""
        if self.writers:
            self._combined.delivered(token)
            if self._combined.is_large:
                self.current_stream_token()

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Fetch one page of a writer's rows in ``(from_token, upto_token]``.

        A committed id normally does not exceed its sequence. So if another writer's
        ``upto_token`` exceeds the known value of the sequence, the sequence is read
        first. If ``upto_token`` is implausibly far beyond the sequence, the page ends
        at the sequence's value at the latest, and the result's ``last_token`` is that
        value. A smaller distance is accepted: after a failover to a standby, a sequence
        may be slightly behind announced positions until a writer advances it.

        If the database is a standby, the page ends at the writer's stored position in
        the same snapshot: the standby may not have replayed rows above it.

        :raises DatabaseBehindError: if that position is not above ``from_token``.
        :raises CatchUpError: if a query fails, for instance because the database does
            not answer or lacks the table.
        """
        if from_token >= upto_token:
            return StreamUpdateResult([], upto_token, False)
        sequence, distance = self._sequence, self._plausible_distance
        is_own = instance_name == self._instance_name
        if upto_token <= self._allocated or is_own:
            sequence = None

        def read(txn: Transaction) -> tuple[StreamUpdateResult, int, bool]:
            last = upto_token if sequence is None else read_sequence(txn, sequence)
            # A standby may have replayed too little of the sequence, too.
            is_far = upto_token > last + distance and not read_role(txn).is_standby
            upto = last if is_far else upto_token
            if upto <= from_token:
                return StreamUpdateResult([], upto, False), last, is_far
            page, knowledge = query_page(
                txn,
                self._queries,
                instance_name,
                from_token,
                upto,
                self._page_rows,
                None if is_own else self._knowledge_sql,
            )
            if knowledge is not None and knowledge.is_standby:
                page = self._limit_to(knowledge, instance_name, from_token, page)
            return page, last, is_far

        name = self.description.name
        try:
            # No statement needs the snapshot of another: later ones only see more.
            page, last, is_far = await self._database.transact(
                f"catch_up_{name}", read, autocommit=True
            )
            if sequence is not None:
                self._allocated = max(self._allocated, last)
            return attrs.evolve(page, last_token=last) if is_far else page
        except psycopg2.Error as error:
            raise CatchUpError(
                f"rows of {name} written by {instance_name} in ({from_token}, "
                f"{upto_token}] could not be read: {str(error).strip()}"
            ) from error

    def _limit_to(
        self,
        knowledge: Knowledge,
        instance_name: str,
        from_token: int,
        page: StreamUpdateResult,
    ) -> StreamUpdateResult:
        """Return the part of a page that the snapshot of a standby is sure of."""
        stored = knowledge.stored.get(instance_name)
        if stored is None:
            if self.writers and instance_name not in self.writers:
                # A removed writer: its rows are final.
                return page
            stored = from_token
        if stored >= page.upto_token:
            return page
        if stored <= from_token:
            raise knowledge.error(self.description.name, instance_name, page.upto_token)
        updates = page.updates
        assert isinstance(updates, EncodedUpdates)
        known = [update for update in updates.encoded if update[0] <= stored]
        return StreamUpdateResult(EncodedUpdates(known), stored, True)

    async def find_removed_writers(self) -> Mapping[str, RemovedWriter]:
        """Return the removed writers that have rows above this process's positions.

        The result includes writers that were removed since the first call, even if
        they have no such rows.

        :raises CatchUpError: if a query fails; a retry may succeed.
        """
        if self._find_removed_writers is None:
            return {}
        return await self._find_removed_writers()

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a token is near enough to the known value of the sequence.

        If it is not, :meth:`get_updates_since` for that token reads the sequence again.
        """
        return self._sequence is None or (
            token <= self._allocated + self._plausible_distance
        )

    def current_stream_token(self) -> MultiWriterStreamToken:
        """Return this process's position in the rows of every configured writer.

        Its minimum advances over ids that are known to be settled while a writer is
        down; see :mod:`~synapse_replication.streams.combined_position`.

        :raises StreamConfigurationError: if no writers are configured.
        """
        if not self.writers:
            raise StreamConfigurationError(
                f"{self.description.name} has no combined token: its writers are not "
                "configured; list them in stream_writers, or in the declaration"
            )
        positions = {writer: self.current_token(writer) for writer in self.writers}
        upto = self._combined.upto(
            min(positions.values()), positions.get(self._instance_name, 0)
        )
        return MultiWriterStreamToken(upto, positions)

    def get_first_unfinished(self) -> tuple[int, str] | None:
        """Return the first id that is not settled, and the writer that holds it back.

        :return: ``None`` if no writer is beyond the minimum of
            :meth:`current_stream_token`, and in streams without configured writers.
        """
        if len(self.writers) < 2:
            return None
        token = self.current_stream_token()
        if not token.instance_map:
            return None
        return self._sign * (token.stream + 1), min(
            self.writers, key=self.current_token
        )

    async def get_rows_between(
        self,
        low: MultiWriterStreamToken | None,
        high: MultiWriterStreamToken | None,
        *,
        limit: int = PAGE_ROWS,
    ) -> RowsBetween[RowT]:
        """Fetch one page of all writers' rows after ``low`` and not after ``high``.

        :param low: ``None`` for the rows from the beginning.
        :param high: ``None`` for the rows up to :meth:`current_stream_token`.
        :param limit: the most rows of a page, exceeded only so as not to split the
            rows of one id.
        :raises StreamConfigurationError: if the stream is not declared by a table.
        :raises CatchUpError: if the query fails.
        :raises DatabaseBehindError: if the database is a standby that may lack rows of
            this page.
        """
        name = self.description.name
        if not (self._columns and self.writers):
            raise StreamConfigurationError(
                f"rows of {name} between two tokens cannot be read; only streams that "
                "are declared by their table support it"
            )
        (query,) = self._queries
        codec, writer = self.description.codec, self.writers[0]
        low = MultiWriterStreamToken(0) if low is None else low
        high = self.current_stream_token() if high is None else high
        try:
            found, knowledge = await self._database.transact(
                f"rows_between_{name}",
                lambda txn: read_rows_between(
                    txn, query, codec, writer, low, high, limit, self._positions_name
                ),
            )
        except psycopg2.Error as error:
            raise CatchUpError(
                f"rows of {name} between two tokens could not be read: "
                f"{str(error).strip()}"
            ) from error
        for each in self.writers if knowledge.is_standby else ():
            upto = found.upto.get_stream_pos_for_instance(each)
            is_own = each == self._instance_name
            if not is_own and knowledge.stored.get(each, 0) < upto:
                raise knowledge.error(name, each, upto)
        return found

    async def write(self, rows: Sequence[RowT]) -> int:
        """Write rows, in one transaction and under one token.

        :param rows: of the stream's row type; at least one.
        :return: their token.
        :raises LocalProtocolError: if ``rows`` is empty, or peers would not accept a
            row, for instance because a value does not have its declared type.
        :raises StreamConfigurationError: if the rows of this stream are written by
            other means, or this instance is not a writer of the stream.
        :raises SequenceBehindError: if the sequence is far behind the ids that this
            process knows; nothing was written.
        :raises NameLostError: if another process has acquired the name of this one;
            nothing was written.
        :raises StreamClosedError: if the process stops; nothing was written.
        :raises CommitUnknownError: if the connection was lost during the commit, and
            it is not known yet whether the rows were written. If they were, they are
            announced.
        :raises psycopg2.Error: if the database rejected the rows; nothing was written.
            The token is not used again.
        """
        text = self._encode_new(rows)
        token = await self._database.transact(
            f"write_{self.description.name}", lambda txn: self._insert_rows(txn, text)
        )
        if self._on_write is not None:
            self._on_write()
        return token

    def write_txn(self, txn: Transaction, rows: Sequence[RowT]) -> int:
        """Write rows under one token, in a transaction of the application.

        The rows are announced after the commit. After a rollback, or if the transaction
        is repeated, the token is not used. Call it in the thread that runs the
        transaction, as often as needed.

        :param txn: the transaction: the argument of the function that was passed to
            ``database.transact``, without ``autocommit``. A cursor of another pool
            needs ``call_after`` and ``call_on_exception``.
        :param rows: of the stream's row type; at least one.
        :return: their token.
        :raises LocalProtocolError: as :meth:`write` does; nothing was written, and the
            transaction can continue. Likewise ``StreamConfigurationError``.
        :raises SequenceBehindError: if the sequence is far behind the ids that this
            process knows.
        :raises psycopg2.Error: if the database rejected the rows.
        """
        return self._insert_rows(txn, self._encode_new(rows))

    def _encode_new(self, rows: Sequence[RowT]) -> str:
        name = self.description.name
        if self._insert is None:
            raise StreamConfigurationError(
                f"stream {name} is read here but not written; write to the tables "
                "with ids of its id generator, or declare it as a TableStream"
            )
        if not rows:
            raise LocalProtocolError(
                f"rows of {name} cannot be written: there are none"
            )
        codec = self.description.codec
        for row in rows:
            codec.encode_new(row)
        values = [
            dict(zip(self._columns, codec.to_json(row), strict=True)) for row in rows
        ]
        text = encode_json(values).decode()
        if "\\u0000" in text:
            _check_for_nul(name, values)
        return text

    def _insert_rows(self, txn: Transaction, text: str) -> int:
        """Insert encoded rows under a new token, and return the token."""
        assert self._insert is not None
        id_ = self._ids.get_next_txn(txn)
        token = self._sign * id_
        if self.writers:
            self._combined.allocated(token)
        values = {"id": id_, "instance_name": self._instance_name, "rows": text}
        run(txn, values, self._insert)
        return token


def _check_for_nul(stream_name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that no value has the character NUL, which PostgreSQL cannot store.

    :raises LocalProtocolError: if one has; it names the column.
    """

    def has_nul(value: Any) -> bool:
        if isinstance(value, str):
            return "\0" in value
        if isinstance(value, Mapping):
            return any(map(has_nul, (*value.keys(), *value.values())))
        return isinstance(value, list | tuple) and any(map(has_nul, value))

    for row in rows:
        for column, value in row.items():
            if has_nul(value):
                raise LocalProtocolError(
                    f"a row of {stream_name} cannot be written: column {column} has "
                    "the character NUL (\\x00), which PostgreSQL cannot store"
                )
