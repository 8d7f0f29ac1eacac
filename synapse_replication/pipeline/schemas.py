"""The schemas of the pipeline's data frames.

These are the schemas of rows, recordings and findings; a frame's columns have the order
of its schema. docs/pipeline.rst describes them for users of the archive.
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

#: A row of a stream, as the data source reads it.
ROWS_SCHEMA: Final = StructType(
    [
        # The name on the wire.
        StructField("stream", StringType(), nullable=False),
        # The writer; empty if it is unknown.
        StructField("instance_name", StringType(), nullable=False),
        # The token, as on the wire: positive even if the ids in the table are negative.
        StructField("stream_id", LongType(), nullable=False),
        # The index among the rows of one token, from 0.
        StructField("row_index", IntegerType(), nullable=False),
        # A JSON array, as on the wire.
        StructField("row", StringType(), nullable=False),
        # The time of writing, in UTC; null if the table does not record it.
        StructField("written_ts", TimestampType(), nullable=True),
    ]
)

#: A line of a recording. Each valid line contains one command of the wire.
WIRE_SCHEMA: Final = StructType(
    [
        # The name of the file, with as many of its folders as make the name unique.
        StructField("recording", StringType(), nullable=False),
        # The number of the line in the file, from 1; lines are in order of arrival.
        StructField("line_number", LongType(), nullable=False),
        # The time of arrival on a monotonic clock, in s; 0 if the line is not a record.
        # The origin of the clock is arbitrary, and may differ between recordings.
        StructField("t", DoubleType(), nullable=False),
        # The time of arrival, in UTC; null if the recording has no date.
        StructField("received_ts", TimestampType(), nullable=True),
        StructField("channel", StringType(), nullable=False),
        # The name of the command; null if the line cannot be parsed.
        StructField("command", StringType(), nullable=True),
        # This and the next four columns are null for commands other than RDATA and
        # POSITION.
        StructField("stream", StringType(), nullable=True),
        StructField("instance_name", StringType(), nullable=True),
        # The token of RDATA, null if it is "batch"; the new token of POSITION.
        StructField("token", LongType(), nullable=True),
        # The previous token of POSITION.
        StructField("prev_token", LongType(), nullable=True),
        # The row of RDATA, a JSON array.
        StructField("row", StringType(), nullable=True),
        # The complete command; for USER_IP, only its name; empty if the line is not a
        # record.
        StructField("line", StringType(), nullable=False),
    ]
)

#: A row of the archive, with its content as JSON. ``day`` is the partition.
ARCHIVED_ROWS_SCHEMA: Final = StructType(
    [*ROWS_SCHEMA.fields, StructField("day", DateType(), nullable=True)]
)

#: A command of the archive. ``day`` is the partition: the day of ``received_ts`` in
#: UTC, or the day of archiving if ``received_ts`` is null.
ARCHIVED_WIRE_SCHEMA: Final = StructType(
    [*WIRE_SCHEMA.fields, StructField("day", DateType(), nullable=True)]
)

#: A finding of an audit.
FINDINGS_SCHEMA: Final = StructType(
    [
        # A value of pipeline.audit.findings.Kind.
        StructField("kind", StringType(), nullable=False),
        # "error", "warning" or "info".
        StructField("severity", StringType(), nullable=False),
        StructField("stream", StringType(), nullable=True),
        StructField("instance_name", StringType(), nullable=True),
        # The first and the last affected token.
        StructField("first_token", LongType(), nullable=True),
        StructField("last_token", LongType(), nullable=True),
        # The number of affected rows, ids or lines.
        StructField("count", LongType(), nullable=False),
        # One sentence for display.
        StructField("message", StringType(), nullable=False),
        # A JSON object with the evidence (files, lines, tables, values).
        StructField("evidence", StringType(), nullable=False),
    ]
)
