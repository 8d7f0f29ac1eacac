"""The tokens of the committed rows of a stream, from an index of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import AccessPath, exists, find_access_paths
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.standard.registry import StandardStream

if TYPE_CHECKING:
    from synapse_replication.streams.table import TableStream


class RowIds(Struct, frozen=True):
    """The ids of a stream's rows in one table.

    :ivar negative: whether the ids are negative and count down.
    """

    column: IdColumn
    negative: bool = False


def row_ids_of(stream: StandardStream | TableStream) -> list[RowIds]:
    """Return the ids of a stream's rows in each of its tables, of all writers."""
    columns = stream.id_columns
    if isinstance(stream, StandardStream):
        columns = tuple(table.ids for table in stream.tables if table.columns)
    return [RowIds(column, stream.negative) for column in columns]


def committed_tokens(
    txn: Any,
    tables: Sequence[RowIds],
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
    for each in tables:
        txn.execute(
            queries.ids_between(
                each.column,
                each.negative,
                of_writer=each.column.writer_column is not None,
            ),
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


def writers_of(txn: Any, column: IdColumn) -> list[str]:
    """Return the names of the writers that have rows, by a few index searches."""
    if AccessPath.BY_WRITER not in find_access_paths(txn, column):
        return []
    txn.execute(queries.for_table("writers_of_table", column))
    return [name for (name,) in txn.fetchall()]


def existing_tables(txn: Any, tables: Sequence[RowIds]) -> list[RowIds]:
    """Return the ids whose tables exist."""
    return [
        each for each in tables if exists(txn, queries.identifier(each.column.table))
    ]
