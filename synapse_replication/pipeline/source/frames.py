"""Rows of the database as data frames, for jobs and notebooks."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from synapse_replication.pipeline.scan import Scan
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, RowForm, with_texts
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.offsets import offsets_to_json
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.reading import read_parts

if TYPE_CHECKING:
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


def scan_rows(settings: PipelineSettings, *columns: str, **options: str) -> Scan:
    """Plan a read of rows in the database.

    :param columns: columns of ROWS_SCHEMA, and text columns such as ``room_id``, which
        are null for streams that lack them.
    :param options: options of the data source, for instance ``streams``.
    :return: ``stream`` and ``columns``.
    :raises PipelineError: if an option is invalid, or the database cannot be reached.
    """
    checked = SourceOptions.parse({**reader_options(settings), **options})
    plan = Planner(checked, continuous=False).batch()
    schema = with_texts(ROWS_SCHEMA, *columns)
    read = functools.partial(read_parts, plan.conninfo, schema=schema)
    ids = sum(part.size for part in plan.parts)
    return Scan(schema, plan.tasks, read, ids)


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
