"""Reading one page of a writer's rows, from one or several tables: :func:`query_page`.

Theory of operation: every query of a stream reads rows in order of their tokens, from
the lower bound on, and stops after a page of rows, but never within a token. A stream
with several tables has one query per table, and the page ends at the lowest token at
which a query stopped: rows beyond that token are omitted, even if another query has
read them. So a token is never split, and the page contains all rows up to its reported
end.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from synapse_replication.storage.database import Transaction
from synapse_replication.storage.row_queries import RowQuery
from synapse_replication.streams.stream import EncodedUpdates, StreamUpdateResult


def query_page(
    txn: Transaction,
    queries: Iterable[RowQuery],
    instance_name: str,
    from_token: int,
    upto_token: int,
    limit: int,
) -> StreamUpdateResult:
    """Read one page of a writer's rows. Call it in a database thread.

    :param txn: a cursor.
    :param limit: the most rows of each query, exceeded only so as not to split a token.
    """
    upto = upto_token
    found: list[tuple[int, Any]] = []
    seen: set[tuple[int, str | None]] = set()
    for query in queries:
        txn.execute(
            query.sql,
            {
                "instance_name": instance_name,
                "after": from_token,
                # Rows beyond the end of this page would be read again with the next.
                "up_to": upto,
                "limit": limit,
            },
        )
        rows = txn.fetchall()
        if len(rows) >= limit:
            upto = rows[-1][0]
        if query.distinct:
            rows = sorted(set(rows) - seen)
            seen.update(rows)
        found += rows
    # The sort is stable: within a token, rows of an earlier query stay first.
    found.sort(key=itemgetter(0))
    # New pairs would cost as much again as the test.
    updates = [row for row in found if row[0] <= upto and row[1] is not None]
    return StreamUpdateResult(EncodedUpdates(updates), upto, upto < upto_token)
