"""The data source ``synapse_replication``: rows of streams, from PostgreSQL.

::

    session.read.format("synapse_replication").option("dsn", "dbname=synapse").load()

Options and guarantees are in docs/pipeline.rst. The driver decides what is to be
read and how it is cut; tasks are handed plain facts, and each opens its own
connection. Nothing here knows a reactor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from synapse_replication.pipeline.database import READ_TIMEOUT, reading
from synapse_replication.pipeline.partitions import Part
from synapse_replication.pipeline.planning import Planner
from synapse_replication.pipeline.ranges import range_sql
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.source_options import SourceOptions

if TYPE_CHECKING:
    import pyarrow

__all__ = ["RowsPartition", "SynapseReplicationDataSource", "read_part"]


class SynapseReplicationDataSource(DataSource):
    """Rows of streams, from Postgres."""

    @classmethod
    def name(cls) -> str:
        """Give the name for ``format``."""
        return "synapse_replication"

    def schema(self) -> StructType:
        """Give the columns."""
        return ROWS_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of one moment."""
        return RowsReader(SourceOptions.parse(self.options))


class RowsPartition(InputPartition):
    """What one task reads.

    :ivar parts: one after the other.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(None)
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return f"RowsPartition({[(p.stream.name, p.span) for p in self.parts]})"


class RowsReader(DataSourceReader):
    """Reads what is there now.

    :param options: checked.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Decide what is read, and cut it into tasks."""
        planner = Planner(self._options, continuous=False)
        return [RowsPartition(parts) for parts in planner.batch()]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read the rows of one task."""
        assert isinstance(partition, RowsPartition)
        for part in partition.parts:
            yield from read_part(self._options.conninfo, part)


def read_part(conninfo: Mapping[str, Any], part: Part) -> Iterator[pyarrow.RecordBatch]:
    """Read a part, in blocks.

    :raises PipelineError: the database cannot be reached or refuses.
    """
    from synapse_replication.pipeline.copying import copy_batches

    # Where no index leads to the rows, a scan is better than a detour.
    unindexed = part.present.tables - part.present.by_id - part.present.by_writer
    sql = range_sql(part.stream, part.span, part.present, part.sole_writer)
    with reading(conninfo, READ_TIMEOUT, walk_indexes=not unindexed) as txn:
        yield from copy_batches(txn, sql, part.stream.name)
