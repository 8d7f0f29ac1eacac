"""Search for writers that were removed from the configuration and still have rows.

Theory of operation: a writer inserts its position into ``stream_positions`` before it
allocates its first id, and each declared writer deletes, when it starts, the positions
of undeclared writers. So a writer without a stored position does not write: its
committed rows are final, and no instance announces them. Readers must fetch its rows
from the tables, up to the greatest one.

The sequence is read before the stored positions. If a removed writer is declared again
and stores its position too late to be seen, it allocates its ids even later: they are
greater than the value of the sequence that was read.

Only a transaction that was open when its process was killed can still add rows.
Therefore, if a writer without a stored position is found, the search waits for the end
of the open transactions that have written to the tables, and then reads the tables
again. If one of them does not end in time, the search fails, and is to be repeated.

No large table is scanned. An index on writer and id yields each writer's greatest row;
with only an index on the id, the rows above the reader's positions are walked; a large
table without such an index is not searched.

See docs/failure-modes.rst: failure-wrong-writers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import psycopg2
from twisted.logger import Logger

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.timer import Backoff
from synapse_replication.storage import id_streams, queries
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.open_transactions import (
    MAX_WAIT,
    POLL_SECONDS,
    find_session,
    read_open_transactions,
)
from synapse_replication.storage.sequences import read_stored_positions
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.stream import RemovedWriter

_log = Logger()

#: The delays between queries for open transactions.
_POLLING = Backoff(POLL_SECONDS, maximum=1.0)

#: The most rows that one statement walks.
WALKED_ROWS = 100_000

#: The most ids below the sequence's value that a new reader walks to find the names of
#: removed writers. The reader does not need their rows, so writers with only older rows
#: do not matter.
REMOVED_WRITERS_LOOK_BACK = 1_000_000


@attrs.frozen
class WriterSurvey:
    """The state of a stream's writers in the database; ids are distances from zero.

    :ivar upto: the value of the sequence, which was read before everything else.
    :ivar stored: the positions in ``stream_positions``, by writer.
    :ivar greatest: the greatest id, in the tables, of each writer that is undeclared or
        has no stored position, if it is above the reader's position.
    :ivar absent: the writers without a stored position, among those that the reader
        knows and those in ``greatest``.
    :ivar open_transactions: the open transactions that have written to the tables.
    :ivar last_row: the greatest id that was found in the tables, of any writer; 0 if
        there is none. An implausible id counts as ``upto``. If an absent writer
        returns, its new ids are greater, so ``last_row`` is a valid position for a
        reader that has all rows of that writer, or needs none.
    """

    upto: int
    stored: Mapping[str, int]
    greatest: Mapping[str, int]
    absent: frozenset[str]
    open_transactions: frozenset[str]
    last_row: int


def _greatest_rows(
    txn: Any,
    stream: IdStream,
    column: IdColumn,
    low: Mapping[str, int],
    walk_from: int,
) -> dict[str, int]:
    """Return the greatest id of each writer that may have rows above ``low``."""
    access_paths = id_streams.find_access_paths(txn, column)
    if id_streams.AccessPath.BY_WRITER in access_paths:
        writers = {*id_streams.read_writers(txn, column), *low}
        return id_streams.greatest_ids(txn, stream, column, writers)
    if id_streams.AccessPath.NONE in access_paths:
        _log.warn(
            "table {table} is not searched for rows of removed writers: it is large "
            "and no index begins with {column}; create such an index",
            table=column.table,
            column=column.id_column,
        )
        return {}
    return _walk(txn, stream, column, min([walk_from, *low.values()]))


def _walk(txn: Any, stream: IdStream, column: IdColumn, low: int) -> dict[str, int]:
    greatest: dict[str, int] = {}
    count = WALKED_ROWS
    while count == WALKED_ROWS:
        txn.execute(
            queries.for_table("writers_beyond", column, stream.negative),
            {"low": stream.sign * low, "limit": WALKED_ROWS},
        )
        found = txn.fetchall()
        count = sum(rows for _, _, rows in found)
        for writer, id_, _ in found:
            low = max(low, abs(id_))
            if writer is not None:
                greatest[writer] = max(abs(id_), greatest.get(writer, 0))
    return greatest


@attrs.define(eq=False, repr=False)
class RemovedWriterFinder:
    """Finds the removed writers of one stream, for one reader.

    :param database: runs the queries.
    :param delivered: returns the reader's delivered position for each writer whose name
        is known, as a token.
    :param unknown: the reader's token for every other writer.
    :param is_new: whether the reader is new, and needs no rows from before its start.
    """

    _database: TransactionRunner
    _clock: Clock
    _stream: IdStream
    _instance_name: str
    _delivered: Callable[[], Mapping[str, int]]
    _unknown: int
    _is_new: bool = attrs.field(default=False, kw_only=True)
    # Each writer's greatest row found so far, and the ids from which the next search
    # starts, so that it does not walk all rows again. A table without an index on the
    # writer is walked from _walk_from, or from a lower position of a writer that is
    # searched for.
    _greatest: dict[str, int] = attrs.field(factory=dict, init=False)
    _low: dict[str, int] = attrs.field(factory=dict, init=False)
    _walk_from: int = attrs.field(init=False)
    #: Writers that a survey has found with a stored position.
    _were_stored: set[str] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self._walk_from = self._unknown

    async def find(self) -> dict[str, RemovedWriter]:
        """Return the removed writers that have rows above the reader's positions.

        The result includes writers that were removed since the first survey, even if
        they have no rows above the reader's position.

        :raises CatchUpError: if a query fails, or a transaction does not end in time; a
            retry may succeed.
        """
        if not self._stream.writers:
            # Every instance may write, and no positions are stored.
            return {}
        try:
            survey = await self.survey()
        except psycopg2.Error as error:
            raise CatchUpError(
                f"the search for removed writers of {self._stream.stream_name} "
                f"failed: {str(error).strip()}"
            ) from error
        return self.select(survey)

    def select(self, survey: WriterSurvey) -> dict[str, RemovedWriter]:
        """Return the removed writers that must be drained, given the latest survey."""
        delivered, unknown = self._delivered(), self._unknown
        found = {}
        for writer, greatest in self._greatest.items():
            stored = survey.stored.get(writer)
            # A writer with a stored position may still be writing above that position.
            upto = greatest if stored is None else min(greatest, stored)
            if upto > delivered.get(writer, unknown):
                found[writer] = RemovedWriter(upto, is_deleted=stored is None)
        for writer in survey.absent & self._were_stored - found.keys():
            found[writer] = RemovedWriter(
                delivered.get(writer, unknown), is_deleted=True
            )
        return found

    async def survey(self) -> WriterSurvey:
        """Survey the writers; if open transactions may add rows, wait and repeat.

        :raises psycopg2.Error: if a query fails.
        :raises CatchUpError: if a transaction has not ended after :data:`.MAX_WAIT` s.
        """
        survey = await self._survey()
        if survey.absent and survey.open_transactions:
            await self._wait_for(survey.open_transactions)
            survey = await self._survey()
        for writer in survey.stored.keys() & set(self._stream.writers):
            # A declared writer announces its rows itself.
            self._greatest.pop(writer, None)
            self._low.pop(writer, None)
        self._were_stored.update(survey.stored)
        self._greatest.update(survey.greatest)
        # A writer without a stored position cannot add rows up to survey.upto.
        self._low.update(dict.fromkeys(survey.absent, survey.upto))
        self._walk_from = survey.upto
        return survey

    async def _survey(self) -> WriterSurvey:
        delivered = self._delivered()
        positions = {
            writer: max(delivered.get(writer, self._unknown), self._low.get(writer, 0))
            for writer in delivered.keys() | self._low.keys() | self._were_stored
        }
        return await self._database.transact(
            "survey_writers",
            lambda txn: self._read(txn, positions),
            # Each statement must see everything committed before it.
            autocommit=True,
        )

    def _read(self, txn: Any, positions: Mapping[str, int]) -> WriterSurvey:
        """Read the state of the stream's writers, in a database thread.

        :param positions: the reader's position for each known writer.
        """
        stream = self._stream
        upto = id_streams.read_sequence(txn, stream.sequence)
        stored = read_stored_positions(txn, stream)
        # Read these before the rows: if a row of an absent writer is committed too late
        # to be found below, it belongs to one of these transactions.
        open_transactions = read_open_transactions(txn, stream)
        not_wanted = {self._instance_name} | (stored.keys() & set(stream.writers))
        low = {
            writer: token
            for writer, token in positions.items()
            if writer not in not_wanted
        }
        walk_from = self._walk_from
        if self._is_new:
            walk_from = max(walk_from, upto - REMOVED_WRITERS_LOOK_BACK)
        greatest: dict[str, int] = {}
        last_row = 0
        for column in stream.tables:
            if column.writer_column is None:
                # Without a writer column, every writer's catch-up returns all rows.
                continue
            rows = _greatest_rows(txn, stream, column, low, walk_from)
            for writer, id_ in rows.items():
                # An id far beyond the sequence is not an id of this stream. After a
                # failover, a sequence may be slightly behind its rows.
                row = id_ if id_ <= upto + stream.plausible_distance else upto
                last_row = max(last_row, row)
                position = positions.get(writer, self._unknown)
                if writer not in not_wanted and row > position:
                    greatest[writer] = max(row, greatest.get(writer, 0))
        absent = frozenset(low.keys() | greatest.keys()) - stored.keys()
        return WriterSurvey(upto, stored, greatest, absent, open_transactions, last_row)

    async def _wait_for(self, transactions: frozenset[str]) -> None:
        due = self._clock.seconds() + MAX_WAIT
        attempt = 0
        while transactions := transactions & await self._database.transact(
            "wait_for_open_transactions",
            lambda txn: read_open_transactions(txn, self._stream),
            autocommit=True,
        ):
            if self._clock.seconds() >= due:
                raise await self._still_open(transactions)
            attempt += 1
            await self._clock.sleep(_POLLING.delay(attempt))

    async def _still_open(self, transactions: frozenset[str]) -> CatchUpError:
        """Return an error that names the session of a transaction."""
        session = await self._database.transact(
            "find_open_session",
            lambda txn: find_session(txn, self._stream, 0, transactions),
            autocommit=True,
        )
        what = "no session has it: see pg_prepared_xacts"
        if session is not None and session.writes_stream:
            what = f"{session.describe()}. {session.hint()}"
        return CatchUpError(
            f"a transaction that may add rows of a removed writer to "
            f"{self._stream.stream_name} has not ended within {MAX_WAIT:.0f} s: {what}"
        )
