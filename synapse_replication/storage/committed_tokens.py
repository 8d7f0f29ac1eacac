"""What a database shows of writers: stored positions, newest and committed tokens.

The functions take a cursor and block. What a missing token means is decided by the
callers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import psycopg2

from synapse_replication.storage import id_streams, queries
from synapse_replication.storage.id_streams import AccessPath, IdStream
from synapse_replication.storage.open_transactions import read_open_transactions
from synapse_replication.storage.standby import read_role

#: ``(stream, writer)``; streams have their names on the wire.
Key: TypeAlias = tuple[str, str]

#: ``(stream, writer) -> token``.
Tokens: TypeAlias = dict[Key, int]

#: The most tokens of a writer that one read returns, for each table.
MAX_READ: Final = 10_000


@attrs.frozen
class TokenReading:
    """The result of one read.

    :ivar stored: the stored positions of all writers.
    :ivar newest: the greatest tokens of each writer of streams without stored
        positions; not of those to which an open transaction has written, or on a
        standby, which does not show open transactions.
    :ivar committed: the committed tokens of the requested ranges, in order, and the
        token up to which they are complete.
    :ivar is_standby: whether the database is a standby.
    """

    stored: Tokens
    newest: Tokens
    committed: Mapping[Key, tuple[list[int], int]]
    is_standby: bool


@attrs.define(eq=False, repr=False)
class TokenReader:
    """Reads the tokens of some streams, in a database thread, one read at a time.

    A hot standby may show any earlier state, and different ones if several are listed.
    So, of a writer's rows, a standby is asked only for those up to the writer's stored
    position in the same session.

    :param streams: the ids of each stream's rows, by its name on the wire. One that
        declares no writers has no stored positions.
    :param instances: the instances whose newest tokens are read, in streams without
        stored positions; ``None`` for all that have rows, if an index finds them.
    :ivar streams: the streams; after a read, with the tables that exist.
    """

    streams: Mapping[str, IdStream]
    _instances: Sequence[str] | None = None
    _has_found_tables: bool = attrs.field(default=False, init=False)

    def read(self, txn: Any, ranges: Mapping[Key, tuple[int, int]]) -> TokenReading:
        """Return the tokens.

        :param ranges: for each writer, the exclusive lower and the inclusive upper
            bound of the tokens to read.
        """
        streams = self.streams
        if not self._has_found_tables:
            # A stream may lack some of its tables.
            streams = id_streams.with_existing_tables(txn, streams)
        stored = id_streams.read_tokens(txn, streams)
        newest: Tokens = {}
        is_standby = read_role(txn).is_standby
        for name, stream in streams.items():
            if not stream.writers and not is_standby:
                found = self._newest_tokens(txn, name, stream)
                # A transaction that has inserted a lower id may be committed later.
                if not read_open_transactions(txn, stream):
                    newest |= found
        if is_standby:
            ranges = {
                key: (after, min(upto, stored[key]))
                for key, (after, upto) in ranges.items()
                if stored.get(key, 0) > after
            }
        committed = {
            (name, writer): id_streams.committed_tokens(
                txn, streams[name], writer, after, upto, MAX_READ
            )
            for (name, writer), (after, upto) in ranges.items()
        }
        # Not before: after a failure, the tables are looked up again.
        self.streams, self._has_found_tables = streams, True
        return TokenReading(stored, newest, committed, is_standby)

    def _newest_tokens(self, txn: Any, name: str, stream: IdStream) -> Tokens:
        found: Tokens = {}
        for column in stream.tables:
            writers = self._instances
            if writers is None:
                access_paths = id_streams.find_access_paths(txn, column)
                if AccessPath.BY_WRITER not in access_paths:
                    continue
                writers = id_streams.read_writers(txn, column)
            newest = id_streams.greatest_ids(txn, stream, column, writers)
            found |= {(name, writer): id_ for writer, id_ in newest.items()}
        return found


def read_timeline(txn: Any) -> str | None:
    """Return a text that changes if the database goes back to an earlier state.

    Needs autocommit, so that an error affects only this statement.

    :return: ``None`` if the database lacks the functions, as some services do.
    """
    try:
        txn.execute(queries.SQL["timeline"])
    except psycopg2.Error:
        return None
    ((timeline,),) = txn.fetchall()
    return str(timeline)
