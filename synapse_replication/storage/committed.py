"""The tokens of the committed rows of a stream, from an index of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synapse_replication.storage import queries
from synapse_replication.storage.row_queries import RangeQuery, id_expressions


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
        token, order, bounds = id_expressions(
            queries.identifier(each.id_column), each.negative
        )
        writer = each.writer_column
        of_writer = (
            "TRUE"
            if writer is None
            else f"{queries.identifier(writer)} = %(instance_name)s"
        )
        txn.execute(
            f"SELECT {token} FROM {queries.identifier(each.table)} "
            f"WHERE {of_writer} AND {bounds} ORDER BY {order} LIMIT %(limit)s",
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


def existing_ranges(txn: Any, ranges: Sequence[RangeQuery]) -> list[RangeQuery]:
    """Return the queries whose tables exist."""
    found = []
    for each in ranges:
        txn.execute(
            "SELECT to_regclass(%(table)s) IS NOT NULL",
            {"table": queries.identifier(each.table)},
        )
        if txn.fetchone()[0]:
            found.append(each)
    return found
