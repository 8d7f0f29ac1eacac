"""The Spark data source ``synapse_replication``: rows of streams from PostgreSQL.

::

    session.read.format("synapse_replication").option("dsn", "dbname=synapse").load()

docs/pipeline.rst describes the options and guarantees. The driver plans the ranges to
read and divides them into partitions. A task receives a partition as plain data, and
opens its own connection. Neither the driver nor the tasks use a Twisted reactor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.pushdown import EVERYTHING, push_filters
from synapse_replication.pipeline.source.reading import (
    RowsPartition,
    partitions_of,
    read_parts,
)
from synapse_replication.pipeline.source.streaming import RowsStreamReader


class SynapseReplicationDataSource(DataSource):
    """The rows of streams in PostgreSQL, for Spark."""

    @classmethod
    def name(cls) -> str:
        """Return the name to pass to ``format``."""
        return "synapse_replication"

    def schema(self) -> StructType:
        """Return the schema of the rows."""
        options = SourceOptions.parse(self.options)
        schema = options.form.schema
        if schema is None:
            assert options.streams is not None
            (stream,) = options.streams
            schema = options.catalog[stream].table.arrow_schema
        return from_arrow_schema(schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for a batch query."""
        options = SourceOptions.parse(self.options)
        return (PushdownReader if options.filter_pushdown else RowsReader)(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader for a streaming query."""
        return RowsStreamReader(SourceOptions.parse(self.options))


class RowsReader(DataSourceReader):
    """Reads the rows between two offsets, which are fixed when the query is planned.

    By default, the second offset of a stream is the one up to which it is complete; of
    a stream without stored positions, it is the token of the last row.

    :param options: the validated options.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._wanted = EVERYTHING

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the ranges to read, and divide them into partitions."""
        planner = Planner(self._options, continuous=False)
        return partitions_of(planner.batch(self._wanted))

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read the rows of one partition."""
        assert isinstance(partition, RowsPartition)
        schema = self._options.form.schema
        return read_parts(partition.conninfo, partition.parts, schema)


class PushdownReader(RowsReader):
    """Reads only the rows that match the pushed filters.

    Spark (4.2 and 4.3) applies the filters that a reader accepts to all later queries
    of the loaded frame. A query with other filters, or with none, then silently lacks
    rows. This reader is therefore used only if the option ``filterPushdown`` is set,
    and the frame must be used for a single query.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Accept the filters that :func:`push_filters` can apply; yield the others."""
        self._wanted, left = push_filters(self._wanted, filters)
        yield from left
