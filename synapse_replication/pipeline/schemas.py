"""The Arrow schemas of rows, recordings and findings.

Frames of Spark have the same columns in the same order. docs/pipeline.rst describes
them for users of the archive.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

_TIME: Final = pa.timestamp("us", tz="UTC")

#: The partition of a table: the day of the time of a row or command, in UTC, or the day
#: of archiving if that time is unknown.
DAY: Final = "day"

#: A row of a stream, as the data source reads it.
ROWS_SCHEMA: Final = pa.schema(
    [
        # The name on the wire.
        pa.field("stream", pa.string(), nullable=False),
        # The writer; empty if it is unknown.
        pa.field("instance_name", pa.string(), nullable=False),
        # The token, as on the wire: positive even if the ids in the table are negative.
        pa.field("stream_id", pa.int64(), nullable=False),
        # The index among the rows of one token, from 0.
        pa.field("row_index", pa.int32(), nullable=False),
        # A JSON array, as on the wire.
        pa.field("row", pa.string(), nullable=False),
        # The time of writing, in UTC; null if the table does not record it.
        pa.field("written_ts", _TIME),
    ]
)

#: A row of a stream without its content.
ROW_KEYS_SCHEMA: Final = ROWS_SCHEMA.remove(ROWS_SCHEMA.get_field_index("row"))


def with_texts(schema: pa.Schema, *columns: str) -> pa.Schema:
    """Return ``stream`` and columns of a schema; other columns are texts."""
    return pa.schema(
        [
            schema.field(name) if name in schema.names else pa.field(name, pa.string())
            for name in ("stream", *columns)
        ]
    )


#: A line of a recording. Each valid line contains one command of the wire.
WIRE_SCHEMA: Final = pa.schema(
    [
        # The name of the file, with as many of its folders as make the name unique.
        pa.field("recording", pa.string(), nullable=False),
        # The number of the line in the file, from 1; lines are in order of arrival.
        pa.field("line_number", pa.int64(), nullable=False),
        # The time of arrival on a monotonic clock, in s; 0 if the line is not a record.
        # The origin of the clock is arbitrary, and may differ between recordings.
        pa.field("t", pa.float64(), nullable=False),
        # The time of arrival, in UTC; null if the recording has no date.
        pa.field("received_ts", _TIME),
        pa.field("channel", pa.string(), nullable=False),
        # The name of the command; null if the line cannot be parsed.
        pa.field("command", pa.string()),
        # This and the next four columns are null for commands other than RDATA and
        # POSITION.
        pa.field("stream", pa.string()),
        pa.field("instance_name", pa.string()),
        # The token of RDATA, null if it is "batch"; the new token of POSITION.
        pa.field("token", pa.int64()),
        # The previous token of POSITION.
        pa.field("prev_token", pa.int64()),
        # The row of RDATA, a JSON array.
        pa.field("row", pa.string()),
        # The complete command; for USER_IP, only its name; empty if the line is not a
        # record.
        pa.field("line", pa.string(), nullable=False),
    ]
)

_DAY_FIELD: Final = pa.field(DAY, pa.date32())

#: A row of the archive, with its content as JSON.
ARCHIVED_ROWS_SCHEMA: Final = ROWS_SCHEMA.append(_DAY_FIELD)

#: A command of the archive, as its table stores it.
ARCHIVED_WIRE_SCHEMA: Final = WIRE_SCHEMA.append(_DAY_FIELD)

#: A finding of an audit.
FINDINGS_SCHEMA: Final = pa.schema(
    [
        # A value of pipeline.audit.findings.Kind.
        pa.field("kind", pa.string(), nullable=False),
        # "error", "warning" or "info".
        pa.field("severity", pa.string(), nullable=False),
        pa.field("stream", pa.string()),
        pa.field("instance_name", pa.string()),
        # The first and the last affected token.
        pa.field("first_token", pa.int64()),
        pa.field("last_token", pa.int64()),
        # The number of affected rows, ids or lines.
        pa.field("count", pa.int64(), nullable=False),
        # One sentence for display.
        pa.field("message", pa.string(), nullable=False),
        # A JSON object with the evidence (files, lines, tables, values).
        pa.field("evidence", pa.string(), nullable=False),
    ]
)
