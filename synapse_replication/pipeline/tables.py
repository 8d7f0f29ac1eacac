"""The typed columns of each stream, in its Delta table and its data frames.

They are derived from the stream registry and from declared streams. The fields of a
stream's row type become columns (see :class:`Column`); ``events``, which has three
kinds of rows, gets a column ``kind`` and the fields of all kinds. This module uses
neither Spark nor a database.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Final

import attrs
import pyarrow as pa

from synapse_replication.pipeline.schemas import (
    ARROW_TYPES,
    DAY,
    MEANINGS,
    ROW_KEYS_SCHEMA,
    ROWS_SCHEMA,
    read_columns,
)
from synapse_replication.storage.row_queries import STANDARD_QUERIES
from synapse_replication.streams.rows import RowCodec
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.standard.row_types import EventsRowCodec

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
    :ivar text: DuckDB's expression for a value as JSON text.
    """

    arrow: pa.DataType
    sql: str
    text: str


#: The types of columns by their names (see :class:`Column`).
TYPES: Final[Mapping[str, ColumnType]] = {
    row["Name"]: ColumnType(ARROW_TYPES[row["Type"]], row["PostgreSQL"], row["JSON"])
    for row in read_columns("types")
}

#: The columns that identify an object, in the streams whose tables have only the newest
#: or pending row of each object. The tables of all other streams have a row for each
#: change.
OBJECTS: Final[Mapping[str, list[str]]] = {
    row["Stream"]: row["Columns"].split(", ") for row in read_columns("objects")
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
