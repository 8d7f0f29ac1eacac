"""Filter pushdown: the conditions of a query that reduce what the data source reads.

The functions are pure: they perform no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import attrs
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

from synapse_replication.pipeline.source.offsets import Span

_NEVER_NULL = {"stream", "instance_name", "stream_id", "row_index", "row"}


@attrs.frozen
class Wanted:
    """The rows that a query can use.

    :ivar streams: the streams; ``None`` for all.
    :ivar writers: the writers; ``None`` for all.
    :ivar low: the lower bound of the tokens, exclusive.
    :ivar high: the upper bound of the tokens, inclusive; ``None`` for no bound.
    """

    streams: frozenset[str] | None = None
    writers: frozenset[str] | None = None
    low: int = -1
    high: int | None = None

    def only_streams(self, names: Iterable[str]) -> Wanted:
        """Return a copy restricted to these streams."""
        return attrs.evolve(self, streams=_intersect(self.streams, names))

    def only_writers(self, names: Iterable[str]) -> Wanted:
        """Return a copy restricted to rows of these writers."""
        return attrs.evolve(self, writers=_intersect(self.writers, names))

    def only_ids(self, low: int | None = None, high: int | None = None) -> Wanted:
        """Return a copy restricted to tokens in ``(low, high]``."""
        lows = [self.low] if low is None else [self.low, low]
        highs = [bound for bound in (self.high, high) if bound is not None]
        return attrs.evolve(self, low=max(lows), high=min(highs, default=None))

    def of_span(self, span: Span, sole_writer: str) -> Span | None:
        """Return the part of a span that is needed; ``None`` if that part is empty.

        :param sole_writer: the writer of rows whose table does not record the writer.
        """
        low = max(span.low, self.low)
        high = span.high if self.high is None else min(span.high, self.high)
        if low >= high:
            return None
        span = attrs.evolve(span, low=low, high=high)
        if self.writers is None:
            return span
        span = span.only(self.writers, nameless=sole_writer in self.writers)
        return span if span.writers or span.nameless else None


#: All rows: no condition.
EVERYTHING = Wanted()


def _intersect(old: Collection[str] | None, new: Iterable[str]) -> frozenset[str]:
    return frozenset(new) if old is None else frozenset(old).intersection(new)


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
