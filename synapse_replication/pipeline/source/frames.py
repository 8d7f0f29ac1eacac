"""Rows of the database as data frames, for jobs and notebooks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.database import PLAN_TIMEOUT, reading
from synapse_replication.pipeline.source.offsets import offsets_to_json
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.tables import RowForm

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["latest_token", "read_rows"]


def read_rows(
    session: SparkSession,
    settings: PipelineSettings,
    form: RowForm = RowForm.JSON,
    **options: str,
) -> DataFrame:
    """Read the rows that are currently in the database.

    :param form: which columns to read; the fewest are the fastest.
    :param options: options of the data source, for instance ``streams``.
    :raises PipelineError: if an option is wrong, or the database cannot be reached.
    """
    given = {**reader_options(settings), "rows": form.value, **options}
    return session.read.format("synapse_replication").options(**given).load()


def latest_token(settings: PipelineSettings, **options: str) -> str:
    """Return the token up to which no more rows can be committed, as JSON.

    After a read with this ``endingToken``, a continuous read can resume with the same
    ``startingToken``.

    :param options: options of the data source, for instance ``streams``.
    :raises PipelineError: if an option is wrong, or the database cannot be reached.
    """
    checked = SourceOptions.parse({**reader_options(settings), **options})
    planner = Planner(checked, continuous=True)
    with reading(checked.conninfo, PLAN_TIMEOUT) as txn:
        offsets = planner.latest(txn, planner.select(txn))
    return json.dumps(offsets_to_json(offsets))
