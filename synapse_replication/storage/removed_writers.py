"""Writers that were taken out of the configuration, and how far their rows reach.

Theory of operation: a writer inserts its row into ``stream_positions`` before it takes
its first id, and each start of a declared writer deletes the rows of the others. So a
writer without such a row does not write: whatever it committed is final, and nobody
announces it. Its greatest row in the tables is as far as readers have to fetch.

The sequence is read before the stored positions. A removed writer that comes back at
the same time stores its position first, and takes greater ids than those seen here.

One thing may still change: a transaction that was under way when its process was
killed. So the transactions that have written to the tables are waited for, and the
tables are read again.

Nothing is scanned: an index of writer and id leads to each writer's greatest row, and
with an index of the id alone the rows above the reader's positions are walked once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import psycopg2
from twisted.logger import Logger

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.storage import queries
from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.id_streams import (
    IdStream,
    Lookup,
    find_lookups,
    read_sequence,
)
from synapse_replication.storage.sequences import read_stored_positions
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from synapse_replication.streams.stream import RemovedWriter
from synapse_replication.streams.table import IdColumn

__all__ = [
    "HandledPositions",
    "RemovedWriterFinder",
    "WriterSurvey",
    "survey_writers",
]

_log = Logger()

#: Rows of an index that are walked by one statement.
WALKED_ROWS = 100_000

#: Ids that a new reader walks back, to know the names of writers that were removed. It
#: wants no rows of them, so an older name is of no use to it.
LOOK_BACK = 1_000_000

#: Between two looks at the transactions that are waited for, in s.
POLL_SECONDS = 0.1


class HandledPositions(Protocol):
    """How far a reader has got with each writer; tokens are above zero."""

    def get_handled(self) -> Mapping[str, int]:
        """Return the token of each writer that is known by name."""
        ...

    @property
    def unknown(self) -> int:
        """The token of every other writer."""
        ...


@attrs.frozen
class WriterSurvey:
    """What the database said of a stream's writers; ids are distances from zero.

    :ivar upto: the last id that was given out before anything else was read.
    :ivar stored: the positions in ``stream_positions``.
    :ivar greatest: the greatest row of each removed writer that has one above the
        position that it was looked for from.
    :ivar absent: the writers that are known by name, or have such a row, and have no
        stored position.
    :ivar open_transactions: those that have written to the tables.
    :ivar last_row: the greatest row that was seen, of any writer. An absent writer that
        comes back does not begin below it, so a reader that has all of its rows may
        stand there.
    """

    upto: int
    stored: Mapping[str, int]
    greatest: Mapping[str, int]
    absent: frozenset[str]
    open_transactions: frozenset[str]
    last_row: int


def survey_writers(
    txn: Any,
    stream: IdStream,
    instance_name: str,
    handled: Mapping[str, int],
    unknown: int,
    walk_from: int,
    walk_at_most: int | None = None,
) -> WriterSurvey:
    """Find the writers of a stream whose rows nobody announces.

    :param instance_name: the reader, whose own rows do not count.
    :param handled: where to look from, for each writer that is known.
    :param unknown: where to look from for others.
    :param walk_from: where to look from for others in a table in which only a walk
        finds them.
    :param walk_at_most: at most how many ids before the last one such a walk begins.

    To be run without a transaction: each statement must see what was committed
    before it.
    """
    upto = read_sequence(txn, stream.sequence)
    stored = read_stored_positions(txn, stream)
    # Before the rows: a row that is not seen then belongs to one of these.
    open_transactions = read_open_transactions(txn, stream)
    not_wanted = {instance_name}
    not_wanted.update(writer for writer in stored if writer in stream.writers)
    low = {
        writer: token for writer, token in handled.items() if writer not in not_wanted
    }
    if walk_at_most is not None:
        walk_from = max(walk_from, upto - walk_at_most)
    greatest: dict[str, int] = {}
    last_row = 0
    for column in stream.tables:
        if column.writer_column is None:
            # Each writer is given the rows of all of them.
            continue
        for writer, id_ in _greatest_rows(txn, stream, column, low, walk_from).items():
            # An id far beyond the sequence is none of this stream. A sequence that a
            # switch-over set back is a little behind its rows.
            row = id_ if id_ <= upto + PLAUSIBLE_DISTANCE else upto
            last_row = max(last_row, row)
            if writer not in not_wanted and row > handled.get(writer, unknown):
                greatest[writer] = max(row, greatest.get(writer, 0))
    absent = frozenset(low.keys() | greatest.keys()) - stored.keys()
    return WriterSurvey(upto, stored, greatest, absent, open_transactions, last_row)


def read_open_transactions(txn: Any, stream: IdStream) -> frozenset[str]:
    """Return the transactions that have written to the tables and have not ended."""
    tables = [queries.identifier(column.table) for column in stream.tables]
    txn.execute(queries.INSERTING_TRANSACTIONS, {"tables": tables})
    return frozenset(transaction for (transaction,) in txn.fetchall())


def _greatest_rows(
    txn: Any,
    stream: IdStream,
    column: IdColumn,
    low: Mapping[str, int],
    walk_from: int,
) -> dict[str, int]:
    """Return the greatest row of each writer, as far as it may be above ``low``."""
    lookups = find_lookups(txn, column)
    if Lookup.BY_WRITER in lookups:
        txn.execute(queries.writers_of_table(column))
        writers = {writer for (writer,) in txn.fetchall()} | low.keys()
        txn.execute(
            queries.greatest_ids_of_writers(column, stream.negative),
            {"writers": sorted(writers)},
        )
        return {writer: abs(id_) for writer, id_ in txn.fetchall() if id_ is not None}
    if Lookup.NONE in lookups:
        _log.warn(
            "table {table} is not searched for rows of removed writers: it is big and "
            "no index begins with {column}",
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
            queries.writers_beyond(column, stream.negative),
            {"low": stream.sign * low, "limit": WALKED_ROWS},
        )
        found = txn.fetchall()
        count = sum(rows for _, _, rows in found)
        for writer, id_, _ in found:
            low = max(low, abs(id_))
            if writer is not None:
                greatest[writer] = max(abs(id_), greatest.get(writer, 0))
    return greatest


class RemovedWriterFinder:
    """Finds the removed writers of one stream, for one reader.

    :param handled: how far the reader has got.
    :param is_new: the reader wants nothing that was written before it began.
    """

    def __init__(
        self,
        database: TransactionRunner,
        clock: Clock,
        stream: IdStream,
        instance_name: str,
        handled: HandledPositions,
        *,
        is_new: bool = False,
    ) -> None:
        self._database = database
        self._clock = clock
        self._stream = stream
        self._instance_name = instance_name
        self._handled = handled
        # What was walked once is not walked again: the greatest rows found so far,
        # and where to look from next.
        self._greatest: dict[str, int] = {}
        self._low: dict[str, int] = {}
        self._walk_from = handled.unknown
        self._walk_at_most = LOOK_BACK if is_new else None
        #: Writers that had a stored position at some time.
        self._were_stored: set[str] = set()

    async def find(self) -> dict[str, RemovedWriter]:
        """Return the removed writers that have rows above the reader's positions.

        Also those that were removed since the first call and have no such rows.

        :raises CatchUpError: if the database did not answer; a retry may help.
        """
        if not self._stream.writers:
            # Anybody may write, and no positions are stored.
            return {}
        try:
            survey = await self.survey()
        except psycopg2.Error as error:
            raise CatchUpError(
                f"the removed writers of {self._stream.stream_name} could not be "
                f"looked for: {str(error).strip()}"
            ) from error
        return self.select(survey)

    def select(self, survey: WriterSurvey) -> dict[str, RemovedWriter]:
        """Return the removed writers of the latest survey that are to be drained."""
        handled, unknown = self._handled.get_handled(), self._handled.unknown
        found = {}
        for writer, greatest in self._greatest.items():
            stored = survey.stored.get(writer)
            # It may be writing: what is above its stored position may not be final.
            upto = greatest if stored is None else min(greatest, stored)
            if upto > handled.get(writer, unknown):
                found[writer] = RemovedWriter(upto, is_deleted=stored is None)
        for writer in survey.absent & self._were_stored - found.keys():
            found[writer] = RemovedWriter(handled.get(writer, unknown), is_deleted=True)
        return found

    async def survey(self) -> WriterSurvey:
        """Survey the writers, once the transactions that are open have ended.

        :raises psycopg2.Error: if the database did not answer.
        """
        survey = await self._survey()
        if survey.absent and survey.open_transactions:
            await self._wait_for(survey.open_transactions)
            survey = await self._survey()
        for writer in survey.stored:
            if writer in self._stream.writers:
                # It announces its rows itself, perhaps again.
                self._greatest.pop(writer, None)
                self._low.pop(writer, None)
        self._were_stored.update(survey.stored)
        self._greatest.update(survey.greatest)
        # A writer without a stored position has no other rows up to there. Those that
        # have one are known by name from now on.
        self._low.update(dict.fromkeys(survey.absent, survey.upto))
        self._walk_from = survey.upto
        return survey

    async def _survey(self) -> WriterSurvey:
        handled = self._handled.get_handled()
        unknown = self._handled.unknown
        low = {
            writer: max(handled.get(writer, unknown), self._low.get(writer, 0))
            for writer in handled.keys() | self._low.keys() | self._were_stored
        }
        return await self._database.transact(
            "survey_writers",
            lambda txn: survey_writers(
                txn,
                self._stream,
                self._instance_name,
                low,
                unknown,
                self._walk_from,
                self._walk_at_most,
            ),
            # Each statement is to see what was committed before it.
            autocommit=True,
        )

    async def _wait_for(self, transactions: frozenset[str]) -> None:
        while transactions := transactions & await self._database.transact(
            "wait_for_open_transactions",
            lambda txn: read_open_transactions(txn, self._stream),
            autocommit=True,
        ):
            await self._clock.sleep(POLL_SECONDS)
