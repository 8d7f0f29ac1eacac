"""The streams of a Synapse deployment: the properties common to all processes.

They are read from ``streams.csv``, and their tables from ``tables.csv``. Synapse's
tables of account data have an ``instance_name``, but Synapse does not fill it in.

The writers of each stream are configured in ``stream_writers``, under the keys given
here; ``master`` writes every stream that is not configured, except ``caches``, which
every instance may write.
"""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from synapse_replication.data_files import read_table
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.rows import AttrsRowCodec, CheckedRowCodec
from synapse_replication.streams.stream import StreamDescription

_FOLDER = Path(__file__).parent

#: The instance name of the main process.
MAIN_INSTANCE = "master"


@attrs.frozen
class RowTable:
    """A table with ids of a stream.

    :ivar ids: the column of the ids, and that of the writers.
    :ivar columns: expressions for the columns of the rows on the wire; none if its rows
        are not on the wire. ``column[]`` is an array of texts, or JSON.
    :ivar kind: the kind of its rows, if the stream has several; a row on the wire is
        then ``[kind, [columns]]``.
    :ivar written_ms: the column with the time of writing, ms since 1970.
    :ivar distinct: whether it may have several rows for one row of the stream.
    """

    ids: IdColumn
    columns: tuple[str, ...]
    kind: str | None
    written_ms: str | None
    distinct: bool


@attrs.frozen(kw_only=True)
class StandardStream:
    """One of the streams that every Synapse deployment has.

    :ivar name: the name on the wire.
    :ivar codec: the name of its row type or its codec in
        :mod:`synapse_replication.streams.standard.row_types`.
    :ivar idempotent: see :class:`StreamDescription`, as for the next three.
    :ivar writers_key: the key of ``stream_writers`` that names its writers; ``None`` if
        they cannot be configured.
    :ivar any_instance_writes: whether every instance may write it without being
        declared, so that it has no positions in ``stream_positions``.
    :ivar from_older_peers_only: whether only older versions of Synapse write it; it is
        then replicated only if the configuration names it.
    :ivar sequence: the sequence of its ids; ``None`` if it is held in memory.
    :ivar tables: the tables that store its ids. Within a token, the rows of an earlier
        table come first.
    :ivar positions_name: its name in ``stream_positions``; ``None`` if it has no
        positions there.
    :ivar negative: whether ids are stored as negative numbers; tokens on the wire are
        positive.
    :ivar key: for a stream held in memory, returns the key that a row describes, if
        rows replace older rows of the same key.
    """

    name: str
    codec: str
    idempotent: bool = False
    resettable: bool = False
    held_in_memory: bool = False
    announce_own_moves_only: bool = False
    writers_key: str | None = None
    any_instance_writes: bool = False
    from_older_peers_only: bool = False
    sequence: str | None = None
    tables: tuple[RowTable, ...] = ()
    positions_name: str | None = None
    negative: bool = False
    key: Callable[[Any], Hashable] | None = None

    @property
    def id_columns(self) -> tuple[IdColumn, ...]:
        """The columns that store its ids."""
        return tuple(table.ids for table in self.tables)

    @property
    def description(self) -> StreamDescription:
        """Its name, row type and properties."""
        return _describe(self)


@functools.cache
def _describe(stream: StandardStream) -> StreamDescription:
    # Most processes decode the rows of few standard streams, or of none.
    row_types = importlib.import_module(
        "synapse_replication.streams.standard.row_types"
    )
    kind = getattr(row_types, stream.codec)
    is_codec = issubclass(kind, CheckedRowCodec)
    ids = stream.id_columns
    return StreamDescription(
        stream.name,
        kind(stream.name) if is_codec else AttrsRowCodec(stream.name, kind),
        idempotent=stream.idempotent,
        resettable=stream.resettable,
        held_in_memory=stream.held_in_memory,
        announce_own_moves_only=stream.announce_own_moves_only,
        id_column=f"{ids[0].table}.{ids[0].id_column}" if ids else "",
        negative=stream.negative,
    )


def _read_tables() -> dict[str, list[RowTable]]:
    tables: dict[str, list[RowTable]] = defaultdict(list)
    for row in read_table(_FOLDER / "tables.csv"):
        tables[row["Stream"]].append(
            RowTable(
                IdColumn(row["Table"], row["Id"], row["Writer"] or None),
                tuple(row["Columns"].split(", ")) if row["Columns"] else (),
                row["Kind"] or None,
                row["Written"] or None,
                row["Distinct"] == "yes",
            )
        )
    return tables


def _read_streams() -> Iterator[StandardStream]:
    tables = _read_tables()
    for row in read_table(_FOLDER / "streams.csv"):
        yield StandardStream(
            name=row["Stream"],
            codec=row["Rows"],
            writers_key=row["Writers"] or None,
            sequence=row["Sequence"] or None,
            tables=tuple(tables[row["Stream"]]),
            positions_name=row["Stored as"] or None,
            key=attrgetter(*row["Key"].split()) if row["Key"] else None,
            **dict.fromkeys(row["Properties"].split(), True),
        )


#: The standard streams by their names on the wire.
STANDARD_STREAMS: Mapping[str, StandardStream] = MappingProxyType(
    {stream.name: stream for stream in _read_streams()}
)

#: The names of the streams that are replicated unless the configuration lists others.
DEFAULT_STREAMS: tuple[str, ...] = tuple(
    name
    for name, stream in STANDARD_STREAMS.items()
    if not stream.from_older_peers_only
)
