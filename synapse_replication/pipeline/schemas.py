"""The tables of the pipeline, column by column.

Every data frame that one part hands to another has one of these schemas, in this
order. docs/pipeline.rst shows them to readers of the archive.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

__all__ = [
    "ARCHIVED_ROWS_SCHEMA",
    "ARCHIVED_WIRE_SCHEMA",
    "FINDINGS_SCHEMA",
    "ROWS_SCHEMA",
    "WIRE_SCHEMA",
]

#: A row of a stream, as the data source reads it.
ROWS_SCHEMA: Final = StructType(
    [
        # The name on the wire.
        StructField("stream", StringType(), nullable=False),
        # The writer.
        StructField("instance_name", StringType(), nullable=False),
        # The token as on the wire: positive also where ids are negative.
        StructField("stream_id", LongType(), nullable=False),
        # The place among the rows of one token, from 0.
        StructField("row_index", IntegerType(), nullable=False),
        # A JSON array, as on the wire.
        StructField("row", StringType(), nullable=False),
        # When it was written, UTC; null where the table does not tell.
        StructField("written_ts", TimestampType(), nullable=True),
    ]
)

#: A command of a recording of the wire.
WIRE_SCHEMA: Final = StructType(
    [
        # The file, without its folder.
        StructField("recording", StringType(), nullable=False),
        # The line in it, from 1: the order of arrival.
        StructField("line_number", LongType(), nullable=False),
        # When it arrived: s from any beginning, monotonic within the recording.
        StructField("t", DoubleType(), nullable=False),
        # The same, UTC; null if the recording does not tell.
        StructField("received_ts", TimestampType(), nullable=True),
        StructField("channel", StringType(), nullable=False),
        # The name of the command; null if the line does not parse.
        StructField("command", StringType(), nullable=True),
        # Of RDATA and POSITION, else null.
        StructField("stream", StringType(), nullable=True),
        StructField("instance_name", StringType(), nullable=True),
        # Of RDATA: null for "batch". Of POSITION: the new token.
        StructField("token", LongType(), nullable=True),
        # Of POSITION.
        StructField("prev_token", LongType(), nullable=True),
        # Of RDATA: a JSON array.
        StructField("row", StringType(), nullable=True),
        # The whole line; of USER_IP the name alone.
        StructField("line", StringType(), nullable=False),
    ]
)

#: A row of the archive, its content as JSON. ``day`` is the partition.
ARCHIVED_ROWS_SCHEMA: Final = StructType(
    [*ROWS_SCHEMA.fields, StructField("day", DateType(), nullable=True)]
)

#: A command of the archive. ``day`` is the partition: of received_ts, or else of
#: when it was archived; UTC.
ARCHIVED_WIRE_SCHEMA: Final = StructType(
    [*WIRE_SCHEMA.fields, StructField("day", DateType(), nullable=True)]
)

#: What audit found.
FINDINGS_SCHEMA: Final = StructType(
    [
        # One of transforms.findings.Kind.
        StructField("kind", StringType(), nullable=False),
        # "error", "warning" or "info".
        StructField("severity", StringType(), nullable=False),
        StructField("stream", StringType(), nullable=True),
        StructField("instance_name", StringType(), nullable=True),
        # The tokens concerned, both inclusive.
        StructField("first_token", LongType(), nullable=True),
        StructField("last_token", LongType(), nullable=True),
        # Rows or ids concerned.
        StructField("count", LongType(), nullable=False),
        # One sentence for people.
        StructField("message", StringType(), nullable=False),
        # A JSON object: where it was seen (files, lines, tables, values).
        StructField("evidence", StringType(), nullable=False),
    ]
)
