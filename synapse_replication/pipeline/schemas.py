"""The columns of rows, recordings and findings, and the rows that are built from them.

The Arrow schemas are read from tables, most of which are in the manual, too. Frames of
Spark have the same columns in the same order.

The typed columns of each stream, in its Delta table and its data frames, are derived
from the stream registry and from declared streams. The fields of a stream's row type
become columns (see :class:`Column`); ``events``, which has three kinds of rows, gets a
column ``kind`` and the fields of all kinds. :func:`json_rows` converts these columns to
rows as on the wire: JSON arrays as text. This module uses neither Spark nor a database
of a deployment.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.data_files import read_table
from synapse_replication.storage.row_queries import STANDARD_QUERIES
from synapse_replication.streams.rows import RowCodec
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.standard.row_types import EventsRowCodec

#: The partition of a table: the day of the time of a row or command, in UTC, or the day
#: of archiving if that time is unknown.
DAY: Final = "day"

_FOLDER: Final = Path(__file__).with_name("columns")

#: The Arrow types of the types in the tables of columns.
_ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
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


def _read_columns(name: str) -> list[dict[str, str]]:
    """Return the rows of a table."""
    return read_table(_FOLDER / f"{name}.csv")


def read_schema(name: str) -> pa.Schema:
    """Return the schema that a table describes."""
    return pa.schema(
        [
            pa.field(each["Column"], _ARROW_TYPES[each["Type"]], each["Null"] == "yes")
            for each in _read_columns(name)
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
    {each["Column"]: each["Meaning"] for each in _read_columns("archive")}
)

# -- the tables of streams ---------------------------------------------------------

#: The columns of every stream's table that precede the columns of the rows' fields.
KEY_COLUMNS: Final = pa.schema(
    ROWS_SCHEMA.field(name)
    for name in ("stream_id", "row_index", "instance_name", "written_ts")
)

#: The column with the kind of a row; only ``events`` has it.
KIND: Final = "kind"

#: The property in Arrow and Delta that marks a text column as JSON, and a column with a
#: time that is a number on the wire.
TYPE_METADATA: Final = "synapse_replication.type"

_RESERVED: Final = frozenset({*KEY_COLUMNS.names, DAY, KIND, "stream", "row"})

#: The type of a column (see :class:`Column`) for the type of a row's field.
_TYPES_OF_FIELDS: Final[Mapping[Any, str]] = {
    str: "string",
    int: "bigint",
    float: "double",
    bool: "boolean",
}


@attrs.frozen
class ColumnType:
    """The type of a column.

    :ivar arrow: the type in Arrow.
    :ivar sql: the type to which PostgreSQL casts the values.
    :ivar texts: converts values to JSON texts; null stays null.
    """

    arrow: pa.DataType
    sql: str
    texts: Callable[[pa.Array], pa.Array]


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(pa.string())


def _encoded(values: pa.Array) -> pa.Array:
    return pa.array(
        (
            None if value is None else msgspec.json.encode(value).decode()
            for value in values.to_pylist()
        ),
        pa.string(),
    )


def _quoted(values: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(values, r'["\\\x00-\x1f]')).as_py():
        return _encoded(values)
    return pc.binary_join_element_wise('"', values, '"', "")


def _doubles(values: pa.Array) -> pa.Array:
    # JSON has no infinity and no NaN.
    return pa.array(
        (
            None if value is None else repr(value) if isfinite(value) else f'"{value}"'
            for value in values.to_pylist()
        ),
        pa.string(),
    )


def _milliseconds(values: pa.Array) -> pa.Array:
    return _plain(pc.divide(values.cast(pa.int64()), 1000))


#: The types of columns by their names (see :class:`Column`).
TYPES: Final[Mapping[str, ColumnType]] = {
    "string": ColumnType(pa.string(), "text", _quoted),
    "bigint": ColumnType(pa.int64(), "bigint", _plain),
    "double": ColumnType(pa.float64(), "double precision", _doubles),
    "boolean": ColumnType(pa.bool_(), "boolean", _plain),
    # PostgreSQL returns µs since 1970, as for the time of writing.
    "time": ColumnType(_ARROW_TYPES["timestamp"], "bigint", _milliseconds),
    "strings": ColumnType(_ARROW_TYPES["array<string>"], "text[]", _encoded),
    "json": ColumnType(pa.string(), "text", _plain),
}

#: The columns that identify an object, in the streams whose tables have only the newest
#: or pending row of each object. The tables of all other streams have a row for each
#: change.
OBJECTS: Final[Mapping[str, list[str]]] = {
    row["Stream"]: row["Columns"].split(", ") for row in _read_columns("objects")
}


class RowForm(enum.Enum):
    """How a frame represents the content of rows, in addition to the key columns."""

    #: One column with the row as JSON, as on the wire.
    JSON = "json"
    #: A column for each field. The frame can have the rows of only one stream.
    TYPED = "typed"
    #: No content.
    NONE = "none"

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of rows; ``None`` if each stream has its own."""
        schemas = {RowForm.JSON: ROWS_SCHEMA, RowForm.NONE: ROW_KEYS_SCHEMA}
        return schemas.get(self)


@attrs.frozen
class Column:
    """A column of a stream's rows.

    :ivar name: the name of the row's field, with the prefix ``row_`` if that name is
        reserved for a column of some table or frame.
    :ivar type: ``string``, ``bigint``, ``double``, ``boolean``, ``time`` (on the wire,
        in ms since 1970), ``strings`` (a list of strings), or ``json`` (text that
        contains any JSON value).
    """

    name: str
    type: str

    @property
    def arrow(self) -> pa.Field:
        """The Arrow field; nullable, because rows of older versions may lack it."""
        marked = self.type in ("json", "time")
        metadata = {TYPE_METADATA: self.type} if marked else None
        return pa.field(self.name, TYPES[self.type].arrow, metadata=metadata)


@attrs.frozen
class DatabaseTable:
    """The table of a stream: its columns, and their order in rows on the wire.

    :ivar name: the name of the stream on the wire.
    :ivar columns: its columns in order, without :data:`KEY_COLUMNS`.
    :ivar kinds: pairs of the kind of a row (the value of the column ``kind``) and the
        names of the columns in that row's JSON array. A stream with rows of one kind
        has a single pair, with the kind ``None``.
    """

    name: str
    columns: tuple[Column, ...]
    kinds: tuple[tuple[str | None, tuple[str, ...]], ...]

    @property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema: :data:`KEY_COLUMNS`, then the columns of the rows."""
        return pa.schema([*KEY_COLUMNS, *(column.arrow for column in self.columns)])

    @property
    def archive_schema(self) -> pa.Schema:
        """The Arrow schema of the archive's table: :attr:`arrow_schema` and ``day``.

        The fields have descriptions, where Delta Lake expects them.
        """
        schema = self.arrow_schema.append(pa.field(DAY, pa.date32()))
        return pa.schema(map(_described, schema))


def _described(field: pa.Field) -> pa.Field:
    text = MEANINGS.get(field.name)
    if text is None:
        return field
    return field.with_metadata({**(field.metadata or {}), "comment": text})


def _columns_of(row_type: Any) -> list[Column]:
    hints = typing.get_type_hints(row_type)
    return [
        Column(
            f"row_{field.name}" if field.name in _RESERVED else field.name,
            _type_of(field.name, hints.get(field.name, field.type)),
        )
        for field in attrs.fields(row_type)
    ]


def _type_of(name: str, hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    if typing.get_origin(hint) is list:
        return "strings"
    if name.endswith("_ts") and hint is int:
        return "time"
    # A value of any other type has no fixed structure, so it is stored as JSON.
    return _TYPES_OF_FIELDS.get(hint, "json")


def table_of_codec(name: str, codec: RowCodec[Any]) -> DatabaseTable:
    """Return the table of a stream, derived from the codec of its rows."""
    row_types: dict[str | None, Any] = {}
    merged: dict[str, Column] = {}
    if isinstance(codec, EventsRowCodec):
        row_types.update(codec.row_types)
        merged[KIND] = Column(KIND, "string")
    else:
        row_types[None] = codec.row_type
    kinds = []
    for kind, row_type in row_types.items():
        of_kind = {column.name: column for column in _columns_of(row_type)}
        merged |= of_kind
        kinds.append((kind, tuple(of_kind)))
    return DatabaseTable(name, tuple(merged.values()), tuple(kinds))


def standard_tables() -> dict[str, DatabaseTable]:
    """Return the table of each standard stream, including those held in memory."""
    return {
        name: table_of_codec(name, stream.description.codec)
        for name, stream in STANDARD_STREAMS.items()
    }


def describe_table(stream: str) -> str:
    """Return the description of a stream's table: its sources and what they retain."""
    if stream not in STANDARD_QUERIES:
        return f"Rows of the stream {stream}, which the configuration declares."
    tables = ", ".join(query.ids.table for query in STANDARD_QUERIES[stream])
    retained = (
        "only the newest or pending row of each object: older rows are here only if "
        "they were archived before they were replaced"
        if stream in OBJECTS
        else "one row for each change"
    )
    return f"Rows of the stream {stream}, from {tables}, which have {retained}."


# -- rows as on the wire -----------------------------------------------------------


def json_rows(table: DatabaseTable, batch: pa.RecordBatch) -> pa.Array:
    """Return each row of a batch as a JSON array.

    :param batch: rows with at least the columns ``table.columns``.
    """
    texts = {
        column.name: pc.fill_null(
            TYPES[column.type].texts(batch.column(column.name)), "null"
        )
        for column in table.columns
    }
    rows = pa.nulls(batch.num_rows, pa.string())
    for kind, names in table.kinds:
        fields = [texts[name] for name in names] or [
            pa.repeat(pa.scalar(""), batch.num_rows)
        ]
        begin, end = ("[", "]") if kind is None else (f"[{json.dumps(kind)},[", "]]")
        of_kind = _joined(begin, _joined(*fields, separator=","), end)
        if kind is None:
            return of_kind
        is_kind = pc.fill_null(pc.equal(batch.column(KIND), kind), False)
        rows = pc.if_else(is_kind, of_kind, rows)
    return rows


def _joined(*parts: pa.Array | str, separator: str = "") -> pa.Array:
    return pc.binary_join_element_wise(*parts, separator)
