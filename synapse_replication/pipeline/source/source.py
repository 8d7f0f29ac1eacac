"""The data source ``synapse_replication``: rows of streams, from PostgreSQL.

::

    session.read.format("synapse_replication").option("dsn", "dbname=synapse").load()

Options and guarantees are in docs/pipeline.rst. The driver decides what is to be
read and how it is cut; tasks are handed plain facts, and each opens its own
connection. Nothing here knows a reactor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.pushdown import EVERYTHING, push_filters
from synapse_replication.pipeline.source.reading import (
    RowsPartition,
    partitions_of,
    read_parts,
)
from synapse_replication.pipeline.source.streaming import RowsStreamReader
from synapse_replication.pipeline.tables import RowForm

if TYPE_CHECKING:
    import pyarrow

__all__ = ["PushdownReader", "RowsReader", "SynapseReplicationDataSource"]


class SynapseReplicationDataSource(DataSource):
    """Rows of streams, from Postgres."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "synapse_replication"

    def schema(self) -> StructType | str:
        """Return the columns."""
        options = SourceOptions.parse(self.options)
        if options.form is RowForm.TYPED:
            assert options.streams is not None
            (stream,) = options.streams
            # As text: here, in a worker, there is no session that could parse it.
            return options.catalog[stream].table.spark_ddl
        if options.form is RowForm.NONE:
            return StructType([field for field in ROWS_SCHEMA if field.name != "row"])
        return ROWS_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of one moment."""
        options = SourceOptions.parse(self.options)
        return (PushdownReader if options.filter_pushdown else RowsReader)(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Make the reader that goes on."""
        return RowsStreamReader(SourceOptions.parse(self.options))


class RowsReader(DataSourceReader):
    """Reads what is there now.

    :param options: checked.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._wanted = EVERYTHING

    def partitions(self) -> Sequence[InputPartition]:
        """Decide what is read, and cut it into tasks."""
        planner = Planner(self._options, continuous=False)
        return partitions_of(planner.batch(self._wanted))

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read the rows of one task."""
        assert isinstance(partition, RowsPartition)
        options = self._options
        return read_parts(options.conninfo, partition.parts, options.form)


class PushdownReader(RowsReader):
    """Reads less where conditions allow it: for a frame that serves one query.

    Spark (4.2 and 4.3) keeps what a reader took over for all queries of the frame that
    was loaded, also for those that have other conditions, or none: they lose rows
    without a word. So nobody gets this reader who did not ask for it.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Take over conditions on stream, writer and token."""
        self._wanted, left = push_filters(self._wanted, filters)
        yield from left
