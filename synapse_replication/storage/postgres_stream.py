"""Streams whose rows are in Postgres: catch-up by writer and range, and writing.

Theory of operation: every query of a stream walks an index upwards from the
lower bound and stops after a page of rows, but only where a token ends. Of a
stream with several tables each is read so, and the page ends where the query
that was cut first was cut: beyond that nothing is reported, even if another
query has read it. So a token is never split, and the end that is reported is
never beyond what was read.

Ids below zero (backfill) are tokens above zero here: what leaves this module is
as on the wire.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import attrs
import psycopg2

from synapse_replication.errors import (
    CatchUpError,
    LocalProtocolError,
    StreamConfigurationError,
)
from synapse_replication.storage.database import Transaction, TransactionRunner
from synapse_replication.storage.id_streams import read_sequence
from synapse_replication.storage.inserts import InsertStatement, declared_insert
from synapse_replication.storage.row_queries import RowQuery, declared_query
from synapse_replication.storage.rows_between import read_rows_between
from synapse_replication.storage.synapse_tables import STANDARD_QUERIES
from synapse_replication.streams.between import RowsBetween
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from synapse_replication.streams.rows import decode_json, encode_json
from synapse_replication.streams.standard.registry import StandardStream
from synapse_replication.streams.stream import (
    EncodedUpdates,
    RemovedWriter,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.tokens import MultiWriterStreamToken

__all__ = [
    "PAGE_ROWS",
    "FindRemovedWriters",
    "PostgresStream",
    "WriterIds",
    "read_page",
    "standard_stream",
    "table_stream",
]

#: Rows in a page of catch-up, unless told otherwise.
PAGE_ROWS = 2000


FindRemovedWriters: TypeAlias = Callable[[], Awaitable[Mapping[str, RemovedWriter]]]
"""See :meth:`~synapse_replication.streams.stream.DrainableStream`."""


class WriterIds(Protocol):
    """What a stream wants of its id generator. Ids are negative if its are."""

    def get_next(self) -> AbstractAsyncContextManager[int]:
        """Return an id; it is finished when the context is left."""
        ...

    def get_current_token_for_writer(self, instance_name: str) -> int:
        """Return up to where a writer has finished; of ours, what may be announced."""
        ...

    def get_announceable_token(self) -> int:
        """Return what may be announced as our position; not beyond the sequence."""
        ...

    def get_minimal_local_current_token(self) -> int:
        """Return the greatest finished id of ours that may be announced.

        Nothing of ours lies between it and what may be announced.
        """
        ...

    def advance(self, instance_name: str, new_id: int) -> None:
        """Record how far another writer has got."""
        ...


class PostgresStream:
    """A :class:`~synapse_replication.streams.stream.Stream` in the database.

    :param description: the facts about it.
    :param queries: how its rows are found.
    :param database: where.
    :param ids: its id generator, of this process.
    :param negative: its ids are below zero.
    :param insert: the statement of :meth:`write`; ``None`` if rows are written by
        other means.
    :param instance_name: this process.
    :param page_rows: rows in a page of catch-up.
    :param on_write: called after each :meth:`write`, for instance to wake the
        streamer.
    :param writers: the declared writers; none if anybody may write.
    :param find_removed_writers: finds writers whose rows nobody announces; ``None``
        if nobody is to look for them.
    :param sequence: of its ids; what writers announce is compared with it. ``None`` if
        there is none.
    """

    def __init__(
        self,
        description: StreamDescription,
        queries: Sequence[RowQuery],
        database: TransactionRunner,
        ids: WriterIds,
        *,
        instance_name: str,
        negative: bool = False,
        insert: InsertStatement | None = None,
        page_rows: int = PAGE_ROWS,
        on_write: Callable[[], object] | None = None,
        writers: Iterable[str] = (),
        find_removed_writers: FindRemovedWriters | None = None,
        sequence: str | None = None,
    ) -> None:
        if page_rows < 1:
            raise StreamConfigurationError(
                f"stream {description.name}: page_rows is {page_rows}; write 1 or more"
            )
        self._description = description
        self._queries = tuple(queries)
        self._database = database
        self._ids = ids
        self._instance_name = instance_name
        self._sign = -1 if negative else 1
        self._insert = insert
        self._page_rows = page_rows
        self._writers = tuple(writers)
        self._on_write = on_write
        self._find_removed_writers = find_removed_writers
        self._sequence = sequence
        # The last id that the sequence had given out when it was read last.
        self._allocated = 0

    @property
    def description(self) -> StreamDescription:
        """The facts about the stream."""
        return self._description

    def current_token(self, instance_name: str) -> int:
        """Return how far this process has got with a writer's rows."""
        return self._sign * self._ids.get_current_token_for_writer(instance_name)

    def minimal_local_current_token(self) -> int:
        """Return what this process, as a writer, may announce.

        It moves with the positions of others while we write nothing.
        """
        return self._sign * self._ids.get_announceable_token()

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether we may have written rows in the range."""
        newest = self._sign * self._ids.get_minimal_local_current_token()
        return from_token < min(upto_token, newest)

    def advance(self, instance_name: str, token: int) -> None:
        """Record that a writer's rows up to ``token`` were handled here."""
        self._ids.advance(instance_name, self._sign * token)

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Fetch a writer's rows in ``(from_token, upto_token]``, one page.

        A committed id never exceeds its sequence. So if the bound is beyond what the
        sequence is known to have given out, it is read in the same transaction, and a
        bound that is implausibly far beyond it is refuted. A bound that is near is not:
        after a switch to a standby a sequence may be a little behind what was
        announced, until a writer brings it forward.

        :raises CatchUpError: if the database did not answer, or has no such table.
        """
        if from_token >= upto_token:
            return StreamUpdateResult([], upto_token, False)
        sequence = self._sequence
        if upto_token <= self._allocated or instance_name == self._instance_name:
            sequence = None

        def read(txn: Transaction) -> tuple[StreamUpdateResult, int]:
            last = upto_token if sequence is None else read_sequence(txn, sequence)
            upto = upto_token if upto_token <= last + PLAUSIBLE_DISTANCE else last
            if upto <= from_token:
                return StreamUpdateResult([], upto, False), last
            page = read_page(
                txn, self._queries, instance_name, from_token, upto, self._page_rows
            )
            return page, last

        name = self._description.name
        try:
            page, last = await self._database.transact(f"catch_up_{name}", read)
            if sequence is not None:
                self._allocated = max(self._allocated, last)
            if upto_token <= last + PLAUSIBLE_DISTANCE:
                return page
            return attrs.evolve(page, last_token=last)
        except psycopg2.Error as error:
            raise CatchUpError(
                f"rows of {name} written by {instance_name} in ({from_token}, "
                f"{upto_token}] could not be read: {str(error).strip()}"
            ) from error

    async def find_removed_writers(self) -> Mapping[str, RemovedWriter]:
        """Find the removed writers that have rows above our positions.

        :raises CatchUpError: if the database did not answer; a retry may help.
        """
        if self._find_removed_writers is None:
            return {}
        return await self._find_removed_writers()

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a writer may be at a token, as far as is known here.

        If it may not, the sequence is to be asked, by way of a page of rows.
        """
        return self._sequence is None or (token <= self._allocated + PLAUSIBLE_DISTANCE)

    def current_stream_token(self) -> MultiWriterStreamToken:
        """Return up to where this process has the rows of each declared writer."""
        positions = {writer: self.current_token(writer) for writer in self._writers}
        return MultiWriterStreamToken(min(positions.values(), default=0), positions)

    async def get_rows_between(
        self,
        low: MultiWriterStreamToken | None,
        high: MultiWriterStreamToken | None,
        *,
        limit: int = PAGE_ROWS,
    ) -> RowsBetween:
        """Fetch rows of all writers after ``low`` and not after ``high``, one page.

        :param low: ``None`` for the rows from the beginning.
        :param high: ``None`` for the rows up to :meth:`current_stream_token`.
        :param limit: the most rows of a page; it is longer where rows of one id
            would be split.
        :raises StreamConfigurationError: if the stream is not declared by a table.
        :raises CatchUpError: if the database did not answer.
        """
        name = self._description.name
        if len(self._queries) != 1 or not self._writers or not self._queries[0].as_json:
            raise StreamConfigurationError(
                f"rows of {name} between two tokens cannot be read; that is for "
                "streams that are declared by their table"
            )
        (query,) = self._queries
        low = MultiWriterStreamToken(0) if low is None else low
        high = self.current_stream_token() if high is None else high

        def read(txn: Transaction) -> RowsBetween:
            return read_rows_between(
                txn,
                query.range,
                self._description.codec,
                self._writers[0],
                low,
                high,
                limit,
            )

        try:
            return await self._database.transact(f"rows_between_{name}", read)
        except psycopg2.Error as error:
            raise CatchUpError(
                f"rows of {name} between two tokens could not be read: "
                f"{str(error).strip()}"
            ) from error

    async def write(self, rows: Sequence[Any]) -> int:
        """Write rows, in one transaction and under one token.

        :param rows: of the stream's row type; at least one.
        :return: their token.
        :raises LocalProtocolError: if there are none, or one holds what JSON cannot
            say.
        :raises StreamConfigurationError: if the rows of this stream are written by
            other means.
        :raises psycopg2.Error: if the database refused them; nothing was written, and
            the token is not used again.
        """
        name, insert = self._description.name, self._insert
        if insert is None:
            raise StreamConfigurationError(
                f"stream {name} is read here but not written; write to the tables "
                "with ids of its id generator, or declare it as a TableStream"
            )
        if not rows:
            raise LocalProtocolError(f"no rows of {name} were given to write")
        codec = self._description.codec
        try:
            text = encode_json(
                [
                    dict(zip(insert.columns, codec.to_json(row), strict=True))
                    for row in rows
                ]
            ).decode()
        except ValueError as error:
            raise LocalProtocolError(
                f"a row of {name} cannot be written: {error}"
            ) from None

        def write(txn: Transaction) -> None:
            txn.execute(
                insert.sql,
                {"id": id_, "instance_name": self._instance_name, "rows": text},
            )

        async with self._ids.get_next() as id_:
            await self._database.transact(f"write_{name}", write)
        if self._on_write is not None:
            self._on_write()
        return self._sign * id_


def read_page(
    txn: Transaction,
    queries: Iterable[RowQuery],
    instance_name: str,
    from_token: int,
    upto_token: int,
    limit: int,
) -> StreamUpdateResult:
    """Read one page of a writer's rows; for a database thread.

    :param limit: rows of each query. A page is longer where a token would be
        split otherwise.
    """
    upto = upto_token
    found: list[tuple[int, Any]] = []
    seen: set[tuple[Any, ...]] = set()
    queries = tuple(queries)
    # Then the rows stay the text that they are.
    all_json = all(query.as_json for query in queries)
    for query in queries:
        txn.execute(
            query.sql,
            {
                "instance_name": instance_name,
                "after": from_token,
                # What is beyond the end of the page would be read again.
                "up_to": upto,
                "limit": limit,
            },
        )
        records = txn.fetchall()
        if len(records) >= limit:
            upto = records[-1][0]
        if query.distinct:
            records = sorted(set(records) - seen)
            seen.update(records)
        if not query.as_json:
            found += [(record[0], list(record[1:])) for record in records]
        elif all_json:
            found += records
        else:
            found += [
                (token, None if text is None else decode_json(text))
                for token, text in records
            ]
    # Of one token, those of an earlier query stay first.
    found.sort(key=itemgetter(0))
    updates = [
        update for update in found if update[0] <= upto and update[1] is not None
    ]
    return StreamUpdateResult(
        EncodedUpdates(updates) if all_json else updates, upto, upto < upto_token
    )


def standard_stream(
    stream: StandardStream,
    database: TransactionRunner,
    ids: WriterIds,
    *,
    instance_name: str,
    page_rows: int = PAGE_ROWS,
    find_removed_writers: FindRemovedWriters | None = None,
) -> PostgresStream:
    """Make one of Synapse's streams, to be read from Synapse's tables.

    :raises StreamConfigurationError: if it is held in memory.
    """
    queries = STANDARD_QUERIES.get(stream.name)
    if queries is None:
        raise StreamConfigurationError(
            f"stream {stream.name} has no tables; make a MemoryStream of it"
        )
    return PostgresStream(
        stream.description,
        queries,
        database,
        ids,
        instance_name=instance_name,
        negative=stream.negative,
        page_rows=page_rows,
        find_removed_writers=find_removed_writers,
        sequence=stream.sequence,
    )


def table_stream(
    declaration: TableStream,
    database: TransactionRunner,
    ids: WriterIds,
    *,
    instance_name: str,
    page_rows: int = PAGE_ROWS,
    on_write: Callable[[], object] | None = None,
    writers: Iterable[str] | None = None,
    find_removed_writers: FindRemovedWriters | None = None,
) -> PostgresStream:
    """Make a stream of its declaration, to be read and written.

    :param writers: if others than those that it declares.
    """
    return PostgresStream(
        declaration.description,
        [declared_query(declaration)],
        database,
        ids,
        instance_name=instance_name,
        negative=declaration.negative,
        insert=declared_insert(declaration),
        page_rows=page_rows,
        writers=declaration.writers if writers is None else writers,
        find_removed_writers=find_removed_writers,
        on_write=on_write,
        sequence=declaration.sequence,
    )
