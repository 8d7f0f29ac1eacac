"""Reading one page of a stream's rows: of one writer, or between two tokens.

Theory of operation: a query reads rows in order of their tokens, from the lower bound
on, and stops after a page of rows or bytes, but never within a token. A token that is
larger than a page has a page of its own.

:func:`query_page` reads the rows of one writer, for a catch-up. A stream with several
tables has one query per table, and the page ends at the lowest token at which a query
stopped: rows beyond that token are omitted, even if another query has read them. So a
token is never split, and the page contains all rows up to its reported end.

:func:`read_rows_between` reads the rows of all writers between two tokens of a stream
with one table. The end of a page is a token with the position of each writer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from synapse_replication.storage.queries import identifier
from synapse_replication.storage.row_queries import RowQuery, page_sql
from synapse_replication.storage.standby import Knowledge, knowledge_sql
from synapse_replication.storage.transactions import Transaction
from synapse_replication.streams.rows import RowCodec, RowT
from synapse_replication.streams.stream import (
    EncodedUpdates,
    PositionedRow,
    RowsBetween,
    StreamUpdateResult,
)
from synapse_replication.streams.tokens import MultiWriterStreamToken, PersistedPosition


def query_page(
    txn: Transaction,
    queries: Iterable[RowQuery],
    instance_name: str,
    from_token: int,
    upto_token: int,
    limit: int,
    knowledge_query: str | None = None,
) -> tuple[StreamUpdateResult, Knowledge | None]:
    """Read one page of a writer's rows. Call it in a database thread.

    :param txn: a cursor.
    :param limit: the most rows of each query, exceeded only so as not to split a token.
        A page of a declared stream also ends after :data:`.PAGE_BYTES`.
    :param knowledge_query: the statement for what the snapshot knows about the writer
        (see :func:`.knowledge_sql`); ``None`` to omit it.
    :return: the page, and what its first snapshot knows about the writer.
    """
    upto = upto_token
    knowledge: Knowledge | None = None
    found: list[tuple[int, Any]] = []
    seen: set[tuple[int, str | None]] = set()
    for query in queries:
        parameters = {
            "instance_name": instance_name,
            "after": from_token,
            # Rows beyond the end of this page would be read again with the next.
            "up_to": upto,
            "limit": limit,
        }
        statements = query.sql, query.sql_of_large_rows
        asked = knowledge_query if knowledge is None else None
        rows, is_cut, known = _read_page(txn, query, statements, parameters, asked)
        knowledge = knowledge or known
        if is_cut or len(rows) >= limit:
            upto = rows[-1][0]
        if query.distinct:
            rows = sorted(set(rows) - seen)
            seen.update(rows)
        found += rows
    # The sort is stable: within a token, rows of an earlier query stay first.
    found.sort(key=itemgetter(0))
    # New pairs would cost as much again as the test.
    updates = [row for row in found if row[0] <= upto and row[1] is not None]
    page = StreamUpdateResult(EncodedUpdates(updates), upto, upto < upto_token)
    return page, knowledge


def _read_page(
    txn: Transaction,
    query: RowQuery,
    statements: Iterable[str],
    parameters: Any,
    knowledge_query: str | None,
) -> tuple[list[Any], bool, Knowledge | None]:
    """Return the records of a page, and whether it ends because of its size.

    Also return what the snapshot of the page knows, if ``knowledge_query`` selects it.

    :param statements: the one for small rows, and the one for large rows; see
        :func:`.page_sql`.
    """
    for statement in statements:
        knowledge = None
        if knowledge_query is not None:
            statement = f"{knowledge_query} UNION ALL ({statement})"
        txn.execute(statement, parameters)
        records = txn.fetchall()
        if knowledge_query is not None:
            # PostgreSQL may execute the parts in parallel.
            index = next(i for i, record in enumerate(records) if record[0] is None)
            knowledge = Knowledge.parse(records.pop(index)[-1])
        if not query.sizes or None not in map(itemgetter(-1), records):
            return records, False, knowledge
    end = bisect_left(records, True, key=lambda record: record[-1] is None)
    return records[:end], True, knowledge


def read_rows_between(
    txn: Transaction,
    query: RowQuery,
    codec: RowCodec[RowT],
    writer: str,
    low: MultiWriterStreamToken,
    high: MultiWriterStreamToken,
    limit: int,
    positions_name: str,
) -> tuple[RowsBetween[RowT], Knowledge]:
    """Read one page of rows; call it in a database thread.

    :param txn: the cursor of the transaction.
    :param writer: the only writer of a table without a writer column.
    :param low: exclusive lower bound.
    :param high: inclusive upper bound.
    :param limit: the maximum number of rows; a number below 1 counts as 1. The page
        may exceed the limit, because all rows of its last id are returned.
    :param positions_name: the stream's name in ``stream_positions``.
    :return: the page, and what its snapshot knows about the writers.
    """
    limit = max(limit, 1)
    ids, alias = query.ids, query.alias
    id_ = f"{alias}.{identifier(ids.id_column)}"
    token = f"(-{id_})" if query.negative else id_
    writer_column = "%s"
    names: tuple[str, ...] = (writer,)
    if ids.writer_column is not None:
        writer_column, names = f"{alias}.{identifier(ids.writer_column)}", ()
        condition, positions = sql_between(low, high, token, writer_column)
    else:
        positions = [each.get_stream_pos_for_instance(writer) for each in (low, high)]
        condition = f"{token} > %s AND {token} <= %s"
    # The index is on the column, not on its negation: add bounds on the column itself.
    index = f"{id_} < %s AND {id_} >= %s AND " if query.negative else ""
    index_bounds = (-low.stream, -high.get_max_stream_pos()) if query.negative else ()
    outputs, condition = f"{token}, {writer_column}", index + condition
    statements = (
        page_sql(query, outputs, condition, token, str(limit), large)
        for large in (False, True)
    )
    parameters = *names, *index_bounds, *positions
    asked = knowledge_sql(positions_name, columns="NULL::bigint, NULL")
    records, is_cut, knowledge = _read_page(txn, query, statements, parameters, asked)
    assert knowledge is not None
    rows = codec.decode([text for _, _, text in records]).rows
    positioned = [
        PositionedRow(PersistedPosition(name, position), row)
        for (position, name, _), row in zip(records, rows, strict=True)
    ]
    if len(records) < limit and not is_cut:
        return RowsBetween(positioned, high, False), knowledge
    upto = low.after_partial_read(high, records[-1][0])
    return RowsBetween(positioned, upto, upto != high), knowledge


def sql_between(
    low: MultiWriterStreamToken,
    high: MultiWriterStreamToken,
    id_column: str,
    writer_column: str,
) -> tuple[str, list[int | str]]:
    """Return the condition for exactly the rows after ``low`` and not after ``high``.

    The condition begins with constant bounds of the id, so that an index can be used.
    Column names are inserted verbatim: they must come from a declaration, never from a
    request. The ids must be positive.

    :return: the condition, with ``%s`` for each parameter, and the parameters.
    """
    parameters: list[int | str] = [low.stream, high.get_max_stream_pos()]
    conditions = [f"{id_column} > %s", f"{id_column} <= %s"]
    for token, operator in ((low, ">"), (high, "<=")):
        if not token.instance_map:
            continue
        cases = " ".join("WHEN %s THEN %s" for _ in token.instance_map)
        for writer, position in sorted(token.instance_map.items()):
            parameters += [writer, position]
        parameters.append(token.stream)
        conditions.append(
            f"{id_column} {operator} CASE {writer_column} {cases} ELSE %s END"
        )
    return " AND ".join(conditions), parameters
