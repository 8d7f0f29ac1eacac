"""Filter pushdown: the conditions of a query that reduce what the data source reads.

The functions are pure: they perform no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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

from synapse_replication.pipeline.source.planning import Wanted

_NEVER_NULL = {"stream", "instance_name", "stream_id", "row_index", "row"}


def push_filters(
    wanted: Wanted, filters: Iterable[Filter]
) -> tuple[Wanted, list[Filter]]:
    """Apply the conditions that the data source can evaluate.

    :return: the rows that are needed, and the conditions that Spark has to apply.
    """
    left: list[Filter] = []
    for condition in filters:
        narrowed = _narrow(wanted, condition)
        if narrowed is None:
            left.append(condition)
        else:
            wanted = narrowed
    return wanted, left


def _narrow(wanted: Wanted, condition: Filter) -> Wanted | None:
    match condition:
        case IsNotNull(attribute=(column,)) if column in _NEVER_NULL:
            return wanted
        case (
            EqualTo(attribute=("stream",), value=str(name))
            | EqualNullSafe(attribute=("stream",), value=str(name))
        ):
            return wanted.only_streams([name])
        case In(attribute=("stream",), value=names):
            return wanted.only_streams(_texts(names))
        case (
            EqualTo(attribute=("instance_name",), value=str(name))
            | EqualNullSafe(attribute=("instance_name",), value=str(name))
        ):
            return wanted.only_writers([name])
        case In(attribute=("instance_name",), value=names):
            return wanted.only_writers(_texts(names))
        case EqualTo(attribute=("stream_id",), value=int(id_)):
            return wanted.only_ids(id_ - 1, id_)
        case GreaterThan(attribute=("stream_id",), value=int(id_)):
            return wanted.only_ids(low=id_)
        case GreaterThanOrEqual(attribute=("stream_id",), value=int(id_)):
            return wanted.only_ids(low=id_ - 1)
        case LessThan(attribute=("stream_id",), value=int(id_)):
            return wanted.only_ids(high=id_ - 1)
        case LessThanOrEqual(attribute=("stream_id",), value=int(id_)):
            return wanted.only_ids(high=id_)
    return None


def _texts(values: Iterable[object]) -> Iterator[str]:
    # A null in the list matches no value.
    return (value for value in values if isinstance(value, str))
