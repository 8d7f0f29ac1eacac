"""What is read, in the shape of the archive."""

from __future__ import annotations

import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from synapse_replication.pipeline.archive.layout import ARCHIVED_WIRE_SCHEMA
from synapse_replication.pipeline.schemas import (
    ARCHIVE_SCHEMA,
    ROWS_SCHEMA,
    WIRE_SCHEMA,
)

__all__ = ["archive_rows", "archive_wire"]


def archive_rows(frame: DataFrame, archived: datetime.datetime) -> DataFrame:
    """Give rows their day: when they were written, or else archived; UTC.

    :param frame: of ROWS_SCHEMA.
    :param archived: with its time zone.
    :return: of ARCHIVE_SCHEMA.
    """
    return (
        frame.select(*ROWS_SCHEMA.names)
        .withColumn("archived_ts", sf.lit(archived))
        .withColumn("day", sf.to_date(sf.coalesce("written_ts", "archived_ts")))
        .select(*ARCHIVE_SCHEMA.names)
    )


def archive_wire(frame: DataFrame, archived: datetime.datetime) -> DataFrame:
    """Give commands their day: when they were received, or else archived; UTC.

    :param frame: of WIRE_SCHEMA.
    :param archived: with its time zone.
    :return: of ARCHIVED_WIRE_SCHEMA.
    """
    return (
        frame.select(*WIRE_SCHEMA.names)
        .withColumn("day", sf.to_date(sf.coalesce("received_ts", sf.lit(archived))))
        .select(*ARCHIVED_WIRE_SCHEMA.names)
    )
