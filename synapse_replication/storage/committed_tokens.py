"""What a database shows of writers: stored positions, newest and committed tokens.

The functions take a cursor and block. What a missing token means is decided by the
callers.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

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
MAX_TOKENS = 10_000
_MAX_TOKENS_ONCE = 10 * MAX_TOKENS


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
                txn, streams[name], writer, after, upto, MAX_TOKENS
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


def find_gone(
    txn: Any, streams: Mapping[str, IdStream], samples: Sequence[Tokens]
) -> dict[Key, tuple[int, int]]:
    """Return the ranges in which each writer's rows do not exist any more.

    The positions of all writers of a stream follow its last committed id. If there is
    none for a while below a position that this process had, that id is gone.

    :param samples: this process's positions at some times.
    """
    gone = {}
    for name, stream in streams.items():
        of_stream = [
            {key: token for key, token in sample.items() if key[0] == name}
            for sample in samples
        ]
        tops = [max(sample.values(), default=0) for sample in of_stream]
        floor = max(0, min(tops, default=0) - MAX_TOKENS)
        committed = {floor}
        for _, writer in of_stream[-1] if of_stream else ():
            committed.update(
                id_streams.committed_tokens(
                    txn, stream, writer, floor, max(tops), _MAX_TOKENS_ONCE
                )[0]
            )
        ids = sorted(committed)
        widest = 0
        for sample, top in zip(of_stream, tops, strict=True):
            newest = ids[bisect(ids, top) - 1]
            if top - newest > widest:
                widest = top - newest
                for key, position in sample.items():
                    gone[key] = newest, position
    return {key: (low, high) for key, (low, high) in gone.items() if low < high}
