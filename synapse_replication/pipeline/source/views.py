"""Rows with columns of their own, one view for each kind of row.

The JSON array of a row becomes columns named and typed as the fields of the row's
type in :mod:`synapse_replication.streams`. What has no fixed form (the content of a
receipt) stays JSON text. ``events`` has three kinds of rows, and a view for each.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.streams.standard import rows
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream

__all__ = ["View", "create_views", "field_types", "typed_view", "views_of"]

#: Columns that each view has besides the fields.
_KEPT = ("stream_id", "instance_name", "row_index", "written_ts")

_SQL_TYPES: Mapping[Any, str] = MappingProxyType(
    {str: "string", int: "bigint", float: "double", bool: "boolean"}
)


@attrs.frozen
class View:
    """Rows of one kind.

    :ivar name: of the view: the stream's, or with the kind of row behind it.
    :ivar stream: the name on the wire.
    :ivar row_type: an attrs class; its fields are the places of the array.
    :ivar kind: of ``events``: the first place of the row, whose second holds the
        fields.
    """

    name: str
    stream: str
    row_type: Any
    kind: str | None = None


_KINDS_OF_EVENTS = {
    "ev": ("events_ev", rows.EventsStreamEventRow),
    "state": ("events_state", rows.EventsStreamCurrentStateRow),
    "state-all": ("events_state_all", rows.EventsStreamAllStateRow),
}


def views_of(declared: Iterable[TableStream] = ()) -> dict[str, View]:
    """Give all views by their names.

    :param declared: streams of the user's own tables.
    """
    views = [
        View(name, "events", row_type, kind)
        for kind, (name, row_type) in _KINDS_OF_EVENTS.items()
    ]
    views += [
        View(name, name, stream.description.codec.row_type)
        for name, stream in STANDARD_STREAMS.items()
        if name != "events"
    ]
    views += [View(stream.name, stream.name, stream.row_type) for stream in declared]
    return {view.name: view for view in views}


def field_types(row_type: Any) -> dict[str, str]:
    """Give name and type, in SQL, of each field of a row's type, in order."""
    hints = typing.get_type_hints(row_type)
    return {
        field.name: _sql_type(hints.get(field.name, field.type))
        for field in attrs.fields(row_type)
    }


def _sql_type(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    if typing.get_origin(hint) is list:
        return "array<string>"
    # Whatever else it is, JSON text says it.
    return _SQL_TYPES.get(hint, "string")


def typed_view(frame: DataFrame, view: View) -> DataFrame:
    """Give the rows of one kind with a column for each field.

    :param frame: with the columns of the rows' or the archive's schema. Streaming
        frames do, too.
    """
    places = sf.from_json("row", "array<string>")
    wanted = sf.col("stream") == view.stream
    if view.kind is not None:
        wanted &= places[0] == view.kind
        places = sf.from_json(places[1], "array<string>")
    return (
        frame.where(wanted)
        .select(*_KEPT, places.alias("places"))
        .select(
            *_KEPT,
            *(
                _field(place, type_).alias(f"row_{name}" if name in _KEPT else name)
                for place, (name, type_) in enumerate(
                    field_types(view.row_type).items()
                )
            ),
        )
    )


def _field(place: int, type_: str) -> Column:
    # Rows of older writers are shorter: what is not there is null.
    value = sf.get("places", sf.lit(place))
    if type_ == "array<string>":
        return sf.from_json(value, type_)
    return value.cast(type_)


def create_views(
    frame: DataFrame, names: Iterable[str] | None = None, *, prefix: str = ""
) -> list[str]:
    """Make temporary views for SQL, and give their names.

    :param frame: with the columns of the rows' schema.
    :param names: which; all of the standard streams if not given.
    :param prefix: put before each name.
    :raises PipelineError: there is no view of a name.
    """
    views = views_of()
    created = []
    for name in views if names is None else names:
        if name not in views:
            raise PipelineError(
                f"there is no view {excerpt(name)}; known are {', '.join(views)}"
            )
        typed_view(frame, views[name]).createOrReplaceTempView(prefix + name)
        created.append(prefix + name)
    return created
