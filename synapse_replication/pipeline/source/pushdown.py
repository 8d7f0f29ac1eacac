"""Filter pushdown: the conditions of a query that reduce what the data source reads.

The functions are pure: they perform no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from synapse_replication.pipeline.source.planning import EVERYTHING, Wanted

_NEVER_NULL = {"stream", "instance_name", "stream_id", "row_index", "row"}


def push_filters(
    wanted: Wanted, filters: Iterable[Filter]
) -> tuple[Wanted, list[Filter]]:
    """Apply the conditions that the data source can evaluate.

    :return: the rows that are needed, and the conditions that Spark has to apply.
    """
    left: list[Filter] = []
    for condition in filters:
        matching = _matching(condition)
        if matching is None:
            left.append(condition)
        else:
            wanted = wanted.only(matching)
    return wanted, left


def _matching(condition: Filter) -> Wanted | None:
    match condition:
        case IsNotNull(attribute=(column,)) if column in _NEVER_NULL:
            return EVERYTHING
        case EqualTo(attribute=("stream_id",), value=int(id_)):
            return Wanted(low=id_ - 1, high=id_)
        case GreaterThan(attribute=("stream_id",), value=int(id_)):
            return Wanted(low=id_)
        case GreaterThanOrEqual(attribute=("stream_id",), value=int(id_)):
            return Wanted(low=id_ - 1)
        case LessThan(attribute=("stream_id",), value=int(id_)):
            return Wanted(high=id_ - 1)
        case LessThanOrEqual(attribute=("stream_id",), value=int(id_)):
            return Wanted(high=id_)
        case (
            EqualTo(attribute=(column,), value=str(name))
            | EqualNullSafe(attribute=(column,), value=str(name))
        ):
            return _named(column, [name])
        case In(attribute=(column,), value=names):
            return _named(column, names)
    return None


def _named(column: str, values: Iterable[object]) -> Wanted | None:
    # A null in the list matches no value.
    names = frozenset(value for value in values if isinstance(value, str))
    if column == "stream":
        return Wanted(streams=names)
    return Wanted(writers=names) if column == "instance_name" else None
