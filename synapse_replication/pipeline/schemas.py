"""The Arrow schemas of rows, recordings and findings, and the meaning of columns.

They are read from tables, most of which are in the manual, too. Frames of Spark have
the same columns in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from synapse_replication.data_files import read_table

#: The partition of a table: the day of the time of a row or command, in UTC, or the day
#: of archiving if that time is unknown.
DAY: Final = "day"

_FOLDER: Final = Path(__file__).with_name("columns")

#: The Arrow types of the types in these tables.
ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "tinyint": pa.int8(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.string()),
}


def read_columns(name: str) -> list[dict[str, str]]:
    """Return the rows of a table."""
    return read_table(_FOLDER / f"{name}.csv")


def read_schema(name: str) -> pa.Schema:
    """Return the schema that a table describes."""
    return pa.schema(
        [
            pa.field(each["Column"], ARROW_TYPES[each["Type"]], each["Null"] == "yes")
            for each in read_columns(name)
        ]
    )


#: A row of a stream, as the data source reads it.
ROWS_SCHEMA: Final = read_schema("rows")

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
WIRE_SCHEMA: Final = read_schema("wire")

_DAY_FIELD: Final = pa.field(DAY, pa.date32())

#: A row of the archive, with its content as JSON.
ARCHIVED_ROWS_SCHEMA: Final = ROWS_SCHEMA.append(_DAY_FIELD)

#: A command of the archive, as its table stores it.
ARCHIVED_WIRE_SCHEMA: Final = WIRE_SCHEMA.append(_DAY_FIELD)

#: A finding of an audit.
FINDINGS_SCHEMA: Final = read_schema("findings")

#: The meaning of each column of the archive's tables of streams, by name.
MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {each["Column"]: each["Meaning"] for each in read_columns("archive")}
)
