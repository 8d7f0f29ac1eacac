"""What a task does: it reads its parts, in blocks, by a connection of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from synapse_replication.pipeline.source.copy import copy_batches
from synapse_replication.pipeline.source.database import READ_TIMEOUT, reading
from synapse_replication.pipeline.source.partitions import Part
from synapse_replication.pipeline.source.ranges import range_sql

if TYPE_CHECKING:
    import pyarrow

__all__ = ["RowsPartition", "partitions_of", "read_parts"]


class RowsPartition(InputPartition):
    """What one task reads.

    :ivar parts: one after the other.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(None)
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return f"RowsPartition({[(p.stream.name, p.span) for p in self.parts]})"


def partitions_of(tasks: Sequence[Sequence[Part]]) -> list[RowsPartition]:
    """Give what Spark hands to tasks: of nothing to read, one that reads nothing.

    Spark makes a partition of its own of an empty list.
    """
    return [RowsPartition(parts) for parts in tasks or [()]]


def read_parts(
    conninfo: Mapping[str, Any], parts: Sequence[Part]
) -> Iterator[pyarrow.RecordBatch]:
    """Read parts, in blocks.

    :raises PipelineError: the database cannot be reached or refuses.
    """
    for part in parts:
        sql = range_sql(part.stream, part.span, part.present, part.sole_writer)
        walk = part.walks_indexes
        with reading(conninfo, READ_TIMEOUT, walk_indexes=walk) as txn:
            yield from copy_batches(txn, sql, part.stream.name)
