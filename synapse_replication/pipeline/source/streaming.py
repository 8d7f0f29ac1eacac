"""The data source's streaming reader: offsets for Spark's micro-batches.

Spark persists offsets in its checkpoint and passes them to the reader, which persists
nothing. Offsets never decrease, and never exceed what is complete
(:mod:`synapse_replication.pipeline.source.completeness`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from psycopg2.extensions import cursor
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from synapse_replication.pipeline.source.connections import (
    PLAN_TIMEOUT,
    pinned,
    reading,
)
from synapse_replication.pipeline.source.offsets import (
    StreamOffset,
    offsets_from_json,
    offsets_to_json,
)
from synapse_replication.pipeline.source.options import LATEST, SourceOptions
from synapse_replication.pipeline.source.partitions import cut_by_rows
from synapse_replication.pipeline.source.planning import Plan, Planner, Selection
from synapse_replication.pipeline.source.reading import (
    RowsPartition,
    partitions_of,
    read_parts,
)

_Offsets = Mapping[str, StreamOffset]


class RowsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
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
        with self._reading() as txn:
            selections = self._select(txn)
            return offsets_to_json(
                self._planner.resolve(txn, selections, "startingToken")
            )

    def prepareForTriggerAvailableNow(self) -> None:
        """Record the current end of the streams as the end of the query."""
        with self._reading() as txn:
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
        with self._reading() as txn:
            selections = self._select(txn)
            at = {
                s.stream.name: begun.get(s.stream.name, StreamOffset())
                for s in selections
            }
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
                streams = [(s.stream, s.present) for s in selections]
                end = cut_by_rows(txn, streams, at, end, limit.max_rows)
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
        with self._reading() as txn:
            # A batch that Spark repeats may lack streams that were added after it was
            # planned.
            selections = [s for s in self._select(txn) if s.stream.name in ended]
            at = {
                s.stream.name: begun.get(s.stream.name, StreamOffset())
                for s in selections
            }
            tasks = self._planner.cut(txn, selections, at, ended)
            plan = Plan(pinned(self._options.conninfo, txn.connection), tasks)
        return partitions_of(plan)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read the rows of one task."""
        assert isinstance(partition, RowsPartition)
        schema = self._options.form.schema
        return read_parts(partition.conninfo, partition.parts, schema)

    # -- the database ------------------------------------------------------------------

    def _reading(self) -> Any:
        return reading(self._options.conninfo, PLAN_TIMEOUT)

    def _select(self, txn: cursor) -> list[Selection]:
        if not self._selections:
            self._selections = self._planner.select(txn)
            if self._options.ending_token != LATEST:
                ends = self._planner.resolve(txn, self._selections, "endingToken")
                self._ends.append(ends)
        return self._selections
