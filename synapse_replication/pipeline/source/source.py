"""The Spark data source ``synapse_replication``: rows of streams from PostgreSQL.

::

    session.read.format("synapse_replication").option("dsn", "dbname=synapse").load()

docs/pipeline.rst describes the options and guarantees. The driver plans the ranges to
read and divides them into partitions. A task receives a partition as plain data, and
opens its own connection. Neither the driver nor the tasks use a Twisted reactor.

Spark persists the offsets of a streaming query in its checkpoint and passes them to the
reader, which persists nothing. Offsets never decrease, and never exceed what is
complete (:mod:`synapse_replication.pipeline.source.completeness`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from psycopg2.extensions import cursor
from pyspark.sql import DataFrame, SparkSession, datasource
from pyspark.sql.datasource import Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from synapse_replication.pipeline.schemas import RowForm
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.offsets import (
    StreamOffset,
    offsets_from_json,
    offsets_to_json,
)
from synapse_replication.pipeline.source.options import (
    LATEST,
    SourceOptions,
    reader_options,
)
from synapse_replication.pipeline.source.planning import Plan, Planner, cut_by_rows
from synapse_replication.pipeline.source.ranges import (
    EVERYTHING,
    Part,
    Selection,
    Wanted,
)
from synapse_replication.pipeline.source.reading import read_parts

_NEVER_NULL = {"stream", "instance_name", "stream_id", "row_index", "row"}


class RowsPartition(InputPartition):
    """The parts that one task reads.

    :ivar conninfo: libpq's parameters; they may contain a password.
    :ivar parts: the parts, which are read one after the other.
    """

    def __init__(self, conninfo: Mapping[str, Any], parts: Sequence[Part]) -> None:
        super().__init__(None)
        self.conninfo = conninfo
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return f"RowsPartition({[(p.stream.name, p.low, p.high) for p in self.parts]})"


def partitions_of(plan: Plan) -> list[RowsPartition]:
    """Return a partition for each task; if there are no tasks, one without parts.

    If the list were empty, Spark would add a partition that is not a RowsPartition.
    """
    return [RowsPartition(plan.conninfo, parts) for parts in plan.tasks or [()]]


class SynapseReplicationDataSource(datasource.DataSource):
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

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        """Return the reader for a batch query."""
        options = SourceOptions.parse(self.options)
        return (PushdownReader if options.filter_pushdown else RowsReader)(options)

    def streamReader(self, schema: StructType) -> datasource.DataSourceStreamReader:
        """Return the reader for a streaming query."""
        return RowsStreamReader(SourceOptions.parse(self.options))


class RowsReader(datasource.DataSourceReader):
    """Reads the rows between two offsets, which are fixed when the query is planned.

    By default, the second offset of a stream is the one up to which it is complete; of
    a stream without stored positions, it is the token of the last row.

    :param options: the validated options.
    :ivar wanted: the rows that the query needs.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self.wanted = EVERYTHING

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the ranges to read, and divide them into partitions."""
        planner = Planner(self._options, continuous=False)
        return partitions_of(planner.batch(self.wanted))

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
        """Accept the filters that the data source can apply; yield the others."""
        for condition in filters:
            matching = _matching(condition)
            if matching is None:
                yield condition
            else:
                self.wanted = self.wanted.only(matching)


def _matching(condition: Filter) -> Wanted | None:
    match condition:
        case datasource.IsNotNull(attribute=(column,)) if column in _NEVER_NULL:
            return EVERYTHING
        case datasource.EqualTo(attribute=("stream_id",), value=int(id_)):
            return Wanted(low=id_ - 1, high=id_)
        case datasource.GreaterThan(attribute=("stream_id",), value=int(id_)):
            return Wanted(low=id_)
        case datasource.GreaterThanOrEqual(attribute=("stream_id",), value=int(id_)):
            return Wanted(low=id_ - 1)
        case datasource.LessThan(attribute=("stream_id",), value=int(id_)):
            return Wanted(high=id_ - 1)
        case datasource.LessThanOrEqual(attribute=("stream_id",), value=int(id_)):
            return Wanted(high=id_)
        case (
            datasource.EqualTo(attribute=(column,), value=str(name))
            | datasource.EqualNullSafe(attribute=(column,), value=str(name))
        ):
            return _named(column, [name])
        case datasource.In(attribute=(column,), value=names):
            return _named(column, names)
    return None


def _named(column: str, values: Iterable[object]) -> Wanted | None:
    # A null in the list matches no value.
    names = frozenset(value for value in values if isinstance(value, str))
    if column == "stream":
        return Wanted(streams=names)
    return Wanted(writers=names) if column == "instance_name" else None


_Offsets = Mapping[str, StreamOffset]


class RowsStreamReader(datasource.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the rows after ``startingToken``, as far as they are complete.

    :param options: the validated options.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planner = Planner(options, continuous=True)
        self._selections: list[Selection] = []
        # Upper bounds of the read: endingToken, and, with the trigger availableNow, the
        # offset at the start of the run.
        self._ends: list[_Offsets] = []
        self._newest: dict[str, Any] | None = None
        self._checked = False

    # -- offsets -----------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return the initial offset of a query without a checkpoint."""
        with read_transaction(self._options.conninfo) as txn:
            offsets = self._planner.resolve(txn, self._select(txn), "startingToken")
            return offsets_to_json(offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        """Record the current end of the streams as the end of the query."""
        with read_transaction(self._options.conninfo) as txn:
            self._ends.append(self._planner.latest(txn, self._select(txn)))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return ``maxRowsPerTrigger`` as the limit of a batch; no limit if not set."""
        if self._options.max_rows is None:
            return ReadAllAvailable()
        return ReadMaxRows(self._options.max_rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end offset of the next batch.

        :raises PipelineError: if the database cannot be reached, ``start`` is ahead of
            it, or it is unknown which rows are complete.
        """
        begun = offsets_from_json(start)
        with read_transaction(self._options.conninfo) as txn:
            selections = self._select(txn)
            at = _starts(selections, begun)
            if not self._checked:
                for selection in selections:
                    offset = at[selection.stream.name]
                    self._planner.check_not_ahead(
                        txn, selection, offset, "the checkpoint"
                    )
                self._checked = True
            end = self._planner.latest(txn, selections, at)
            # Retain the offsets of streams that are in the checkpoint but no longer
            # read.
            self._newest = offsets_to_json({**begun, **end})
            for bound in self._ends:
                end = {
                    name: at[name].advance(end[name].retreat(bound[name]))
                    for name in end
                }
            if isinstance(limit, ReadMaxRows):
                end = cut_by_rows(txn, selections, at, end, limit.max_rows)
        return offsets_to_json({**begun, **end})

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the offset up to which rows are complete, for Spark's metrics.

        :return: ``None`` before the first call of :meth:`latestOffset`.
        """
        return self._newest

    # -- rows --------------------------------------------------------------------------

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Sequence[InputPartition]:
        """Divide a batch into tasks."""
        begun, ended = offsets_from_json(start), offsets_from_json(end)
        with read_transaction(self._options.conninfo) as txn:
            # A batch that Spark repeats may lack streams that were added after it was
            # planned.
            selections = [s for s in self._select(txn) if s.stream.name in ended]
            at = _starts(selections, begun)
            return partitions_of(self._planner.plan(txn, selections, at, ended))

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read the rows of one task."""
        assert isinstance(partition, RowsPartition)
        schema = self._options.form.schema
        return read_parts(partition.conninfo, partition.parts, schema)

    # -- the database ------------------------------------------------------------------

    def _select(self, txn: cursor) -> list[Selection]:
        if not self._selections:
            self._selections = self._planner.select(txn)
            if self._options.ending_token != LATEST:
                ends = self._planner.resolve(txn, self._selections, "endingToken")
                self._ends.append(ends)
        return self._selections


def _starts(
    selections: Sequence[Selection], offsets: _Offsets
) -> dict[str, StreamOffset]:
    names = [selection.stream.name for selection in selections]
    return {name: offsets.get(name, StreamOffset()) for name in names}


# -- for jobs and notebooks -----------------------------------------------------------


def read_rows(
    session: SparkSession,
    settings: PipelineSettings,
    form: RowForm = RowForm.JSON,
    **options: str,
) -> DataFrame:
    """Return a frame of the rows in the database; each query reads them again.

    If an option is invalid, Spark raises an exception of its own. If the database
    cannot be read, each query raises such an exception. The exception contains the
    message of the ``PipelineError`` that caused it.

    :param form: which columns to read. Reading fewer columns is faster.
    :param options: options of the data source, for instance ``streams``.
    """
    given = {**reader_options(settings), "rows": form.value, **options}
    return session.read.format("synapse_replication").options(**given).load()


def latest_token(settings: PipelineSettings, **options: str) -> str:
    """Return the token up to which no more rows can be committed, as JSON.

    If a read has this token as its ``endingToken``, a continuous read with this token
    as its ``startingToken`` returns the rows after that read.

    :param options: options of the data source, for instance ``streams``.
    :raises PipelineError: if an option is invalid, the database cannot be reached, or
        the token cannot be determined.
    """
    checked = SourceOptions.parse({**reader_options(settings), **options})
    planner = Planner(checked, continuous=True)
    with read_transaction(checked.conninfo) as txn:
        offsets = planner.latest(txn, planner.select(txn))
    return json.dumps(offsets_to_json(offsets))
