"""Rows of the database as data frames, for jobs and notebooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from synapse_replication.pipeline.local import local_batches
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.database import PLAN_TIMEOUT, reading
from synapse_replication.pipeline.source.offsets import offsets_to_json
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.reading import read_parts
from synapse_replication.pipeline.tables import RowForm

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


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


def map_rows(
    session: SparkSession,
    settings: PipelineSettings,
    work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
    form: RowForm = RowForm.NONE,
    **options: str,
) -> DataFrame:
    """Apply a function to the rows in the database, in the tasks that read them.

    Only the results of the function are passed to Spark, not the rows. If there are few
    rows, they are read in this process, before the function returns.

    :param work: called in each task with the batches of the data source.
    :param schema: the columns of the batches that ``work`` yields.
    :param form: which columns to read.
    :param options: options of the data source, for instance ``streams``.
    :raises PipelineError: if an option is invalid, or the database cannot be reached.
    """
    given = {**reader_options(settings), "rows": form.value, **options}
    checked = SourceOptions.parse(given)
    plan = Planner(checked, continuous=False).batch()
    if len(plan.tasks) <= 1:
        rows = (
            batch
            for parts in plan.tasks
            for batch in read_parts(plan.conninfo, parts, form)
        )
        return local_batches(session, schema, work(rows))

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column("id").to_pylist():
                yield from work(read_parts(plan.conninfo, plan.tasks[number], form))

    count = len(plan.tasks)
    # Create a partition for each number, so that no shuffle is needed.
    numbers = session.range(0, count, numPartitions=max(count, 1))
    return numbers.mapInArrow(read, schema)


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
    with reading(checked.conninfo, PLAN_TIMEOUT) as txn:
        offsets = planner.latest(txn, planner.select(txn))
    return json.dumps(offsets_to_json(offsets))
