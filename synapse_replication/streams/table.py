"""Declaration of a stream by its Postgres table, validated by the constructor.

::

    TableStream(
        name="orders", table="orders", id_column="stream_id",
        writer_column="instance_name", sequence="orders_stream_seq",
        columns={"order_id": str, "note": str | None},
        writers=["writer1", "writer2"],
    )

``storage/postgres_stream.py`` implements the stream, with typed rows and catch-up. See
docs/plugging-in.rst.
"""

from __future__ import annotations

import keyword
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Generic

import attrs

from synapse_replication.errors import StreamConfigurationError, excerpt
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.rows import AttrsRowCodec, RowT
from synapse_replication.streams.stream import StreamDescription

#: The names of column types in configuration files; a ``?`` after the name means that
#: the column may be null.
COLUMN_TYPES: Mapping[str, Any] = {
    "text": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "json": Any,
}

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}\Z")
_WORD = re.compile(r"\S+\Z")


def _to_columns(value: Any) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, Mapping):
        return tuple(
            (str(name), _to_type(name, type_)) for name, type_ in value.items()
        )
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise StreamConfigurationError(
            f"columns is {excerpt(repr(value))}; write a list of column names, or a "
            "mapping from column name to type"
        )
    return tuple(
        column if isinstance(column, tuple) else (str(column), Any) for column in value
    )


def _to_type(column: Any, type_: Any) -> Any:
    if not isinstance(type_, str):
        return type_
    name = type_.removesuffix("?")
    if name not in COLUMN_TYPES:
        raise StreamConfigurationError(
            f"column {excerpt(str(column))} has the unknown type {excerpt(type_)}; "
            f"write one of {', '.join(COLUMN_TYPES)}, followed by ? if the column may "
            "be null"
        )
    return COLUMN_TYPES[name] | None if name != type_ else COLUMN_TYPES[name]


def to_names(value: Any) -> tuple[str, ...]:
    """Return names as a tuple; a text is a single name."""
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen(kw_only=True)
class TableStream(Generic[RowT]):
    """A stream whose rows are the rows of one table.

    Identifiers are written as Postgres stores them: in lower case, without quotation
    marks.

    :ivar name: the name on the wire.
    :ivar table: the table, optionally qualified by its schema.
    :ivar id_column: the column with the row's id; the token is the id without its sign.
        The column needs an index, preferably on ``(writer_column, id_column)``.
    :ivar writer_column: the column with the name of the instance that wrote the row;
        ``None`` if there is none, which allows only one writer.
    :ivar columns: name and type of each column of a row, in the order of the wire: a
        mapping from names to types or to names of :data:`COLUMN_TYPES`, a list of
        names, or a list of pairs of name and type.
    :ivar sequence: the sequence that allocates the ids.
    :ivar writers: the instances that may write.
    :ivar positions_name: the stream's name in ``stream_positions``; by default, its
        name on the wire.
    :ivar negative: whether ids are negative and count down; tokens on the wire are
        positive.
    :ivar row_type: an attrs class with one field per column, in order; by default, it
        is created from the columns. Its last fields, from the first one after which
        every column may be null, have the default ``None``: they may be missing in rows
        of a writer that does not have these columns yet.
    :raises StreamConfigurationError: if the declaration is invalid.
    """

    name: str
    table: str
    id_column: str
    columns: tuple[tuple[str, Any], ...] = attrs.field(converter=_to_columns)
    sequence: str
    writers: tuple[str, ...] = attrs.field(converter=to_names)
    writer_column: str | None = None
    positions_name: str = attrs.field(
        default=attrs.Factory(lambda self: self.name, takes_self=True)
    )
    negative: bool = False
    # Not compared: each declaration creates its own class.
    row_type: type[RowT] = attrs.field(
        default=attrs.Factory(lambda self: self._make_row_type(), takes_self=True),
        eq=False,
    )
    description: StreamDescription[RowT] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._check_names()
        fields = len(attrs.fields(self.row_type))  # type: ignore[arg-type]
        if fields != len(self.columns):
            raise StreamConfigurationError(
                f"stream {self.name}: row type {self.row_type.__name__} has {fields} "
                f"fields for {len(self.columns)} columns; declare one field per "
                "column, in the same order"
            )
        codec = AttrsRowCodec(self.name, self.row_type)
        description = StreamDescription(
            self.name,
            codec,
            id_column=f"{self.table}.{self.id_column}",
            negative=self.negative,
        )
        object.__setattr__(self, "description", description)

    def _check_names(self) -> None:
        for what, word in (
            ("name", self.name),
            ("positions_name", self.positions_name),
            *(("writers", writer) for writer in self.writers),
        ):
            if not isinstance(word, str) or not _WORD.match(word):
                self._raise_invalid(what, word, "write one word without white space")
        identifiers = [
            ("table", part) for part in str(self.table).split(".", maxsplit=1)
        ]
        identifiers += [("sequence", part) for part in str(self.sequence).split(".", 1)]
        identifiers.append(("id_column", self.id_column))
        identifiers += [("columns", column) for column in self.column_names]
        if self.writer_column is not None:
            identifiers.append(("writer_column", self.writer_column))
        for what, identifier in identifiers:
            if not isinstance(identifier, str) or not _IDENTIFIER.match(identifier):
                self._raise_invalid(
                    what,
                    identifier,
                    "write a plain SQL identifier: lower-case letters, digits and _, "
                    "at most 63 characters",
                )
        for what, names, each in (
            ("columns", self.column_names, "column"),
            ("writers", self.writers, "instance"),
        ):
            if not names:
                self._raise_invalid(what, "", f"name at least one {each}")
            if len(set(names)) < len(names):
                self._raise_invalid(what, ", ".join(names), f"name each {each} once")
        if self.writer_column is None and len(self.writers) > 1:
            self._raise_invalid(
                "writers",
                ", ".join(self.writers),
                "name the writer_column that identifies their rows, or only one writer",
            )

    def _raise_invalid(self, what: str, value: object, hint: str) -> None:
        raise StreamConfigurationError(
            f"stream {excerpt(str(self.name))}: {what} is "
            f"'{excerpt(str(value))}'; {hint}"
        )

    def _make_row_type(self) -> type[Any]:
        for name in self.column_names:
            if not name.isidentifier() or keyword.iskeyword(name):
                self._raise_invalid(
                    "columns",
                    name,
                    "a Python field cannot have that name: pass a row_type with other "
                    "field names",
                )
        words = re.split(r"[^A-Za-z0-9]+", self.name)
        class_name = (
            "".join(word[:1].upper() + word[1:] for word in words) + "StreamRow"
        )
        namespace: dict[str, Any] = {
            "__annotations__": dict(self.columns),
            "__module__": __name__,
        }
        for name, type_ in reversed(self.columns):
            if type(None) not in typing.get_args(type_):
                break
            namespace[name] = None
        if not class_name.isidentifier():
            class_name = "_" + class_name
        return attrs.frozen(type(class_name, (), namespace))

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of a row's columns, in the order of the wire."""
        return tuple(name for name, _ in self.columns)

    @property
    def id_columns(self) -> tuple[IdColumn, ...]:
        """The columns that store the stream's ids."""
        return (IdColumn(self.table, self.id_column, self.writer_column),)
