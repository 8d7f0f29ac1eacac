"""The tokens of the committed rows of a stream, from an index of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import Lookup, exists, find_lookups
from synapse_replication.storage.row_queries import (
    RangeQuery,
    declared_query,
    id_expressions,
)
from synapse_replication.storage.synapse_tables import STANDARD_QUERIES
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.standard.registry import StandardStream

if TYPE_CHECKING:
    from synapse_replication.streams.table import TableStream


def ranges_of(stream: StandardStream | TableStream) -> list[RangeQuery]:
    """Return the queries for the rows of a stream in the database, of all writers."""
    if isinstance(stream, StandardStream):
        return [query.range for query in STANDARD_QUERIES[stream.name]]
    return [declared_query(stream).range]


def committed_tokens(
    txn: Any,
    ranges: Sequence[RangeQuery],
    instance_name: str,
    from_token: int,
    upto_token: int,
    limit: int,
) -> tuple[list[int], int]:
    """Return one writer's committed tokens in ``(from_token, upto_token]``.

    A table without names of writers yields the tokens of all writers.

    :param limit: the most tokens to read from each table.
    :return: the tokens, in order, and the token up to which they are complete.
    """
    found: set[int] = set()
    upto = upto_token
    for each in ranges:
        txn.execute(
            committed_query(each),
            {
                "instance_name": instance_name,
                "after": from_token,
                "up_to": upto,
                "limit": limit,
            },
        )
        tokens = [id_ for (id_,) in txn.fetchall()]
        if len(tokens) == limit:
            # Rows of the last token may be missing, and so may all later ones.
            upto = tokens[-1] - 1
        found.update(tokens)
    return sorted(each for each in found if each <= upto), upto


def committed_query(each: RangeQuery) -> str:
    """Return a query for a writer's committed tokens in a range, in order."""
    token, order, bounds = id_expressions(
        queries.identifier(each.id_column), each.negative
    )
    writer = "TRUE"
    if each.writer_column is not None:
        writer = f"{queries.identifier(each.writer_column)} = %(instance_name)s"
    return (
        f"SELECT {token} FROM {queries.identifier(each.table)} "
        f"WHERE {writer} AND {bounds} ORDER BY {order} LIMIT %(limit)s"
    )


def newest_tokens(txn: Any, each: RangeQuery, writers: Sequence[str]) -> dict[str, int]:
    """Return the newest token of each writer in a stream without stored positions.

    Lower ids of a writer may still be in flight.
    """
    column = IdColumn(each.table, each.id_column, each.writer_column)
    txn.execute(
        queries.greatest_ids_of_writers(column, each.negative),
        {"writers": list(writers)},
    )
    return {writer: abs(id_) for writer, id_ in txn.fetchall() if id_ is not None}


def writers_of(txn: Any, each: RangeQuery) -> list[str]:
    """Return the names of the writers that have rows, by a few index searches."""
    column = IdColumn(each.table, each.id_column, each.writer_column)
    if Lookup.BY_WRITER not in find_lookups(txn, column):
        return []
    txn.execute(queries.writers_of_table(column))
    return [name for (name,) in txn.fetchall()]


def existing_ranges(txn: Any, ranges: Sequence[RangeQuery]) -> list[RangeQuery]:
    """Return the queries whose tables exist."""
    return [each for each in ranges if exists(txn, queries.identifier(each.table))]
