"""The streams that can be read from tables, as plain data for executors.

These are the standard streams that have tables, and the streams that the configuration
declares. Streams that are held in memory, for instance ``typing``, have no tables:
their rows can only be recorded from the wire.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.tables import (
    Column,
    DatabaseTable,
    standard_tables,
    table_of_declaration,
)
from synapse_replication.storage.row_queries import RangeQuery, declared_query
from synapse_replication.storage.synapse_tables import STANDARD_QUERIES
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream


@attrs.frozen
class CatalogQuery:
    """One of the queries for a stream's rows.

    :ivar distinct: whether the table may have several rows for one row of the stream.
    """

    range: RangeQuery
    distinct: bool


@attrs.frozen(kw_only=True)
class CatalogStream:
    """A stream, with the queries for its rows.

    :ivar table: the name of the stream on the wire, and the columns of its rows.
    :ivar queries: the queries. If rows of several queries have the same token, those of
        an earlier query come first.
    :ivar sequence: the sequence that allocates the stream's ids.
    :ivar positions_name: the stream's name in ``stream_positions``; ``None`` if its
        positions are not stored.
    :ivar negative: whether the tables store ids as negative numbers; tokens are
        positive.
    """

    table: DatabaseTable
    queries: tuple[CatalogQuery, ...]
    sequence: str
    positions_name: str | None
    negative: bool = False

    @property
    def name(self) -> str:
        """The name of the stream on the wire."""
        return self.table.name


def catalog_of(
    declared: Iterable[TableStream | CatalogStream] = (),
) -> dict[str, CatalogStream]:
    """Return all streams with tables, by their names on the wire.

    :param declared: the streams that the configuration declares.
    """
    tables = standard_tables()
    streams = {
        name: CatalogStream(
            table=tables[name],
            queries=tuple(CatalogQuery(q.range, q.distinct) for q in queries),
            sequence=STANDARD_STREAMS[name].sequence or "",
            positions_name=STANDARD_STREAMS[name].positions_name,
            negative=STANDARD_STREAMS[name].negative,
        )
        for name, queries in STANDARD_QUERIES.items()
    }
    for stream in declared:
        if isinstance(stream, TableStream):
            stream = _of_declaration(stream)
        streams[stream.name] = stream
    return streams


def _of_declaration(declaration: TableStream) -> CatalogStream:
    return CatalogStream(
        table=table_of_declaration(declaration),
        queries=(CatalogQuery(declared_query(declaration).range, False),),
        sequence=declaration.sequence,
        positions_name=declaration.positions_name,
        negative=declaration.negative,
    )


def select_streams(
    catalog: Mapping[str, CatalogStream], names: Sequence[str]
) -> list[CatalogStream]:
    """Look up streams by name.

    :raises PipelineError: if a stream is unknown or has no tables.
    """
    for name in names:
        if name in catalog:
            continue
        if name in STANDARD_STREAMS:
            raise PipelineError(
                f"stream {name} is held in memory and has no table; record it with "
                "'synapse-replication record', and read the recording"
            )
        raise PipelineError(
            f"stream {excerpt(name)} is unknown; the streams with tables are "
            f"{', '.join(sorted(catalog))}; declare a stream of your own in the "
            "configuration, and set the option 'config' to its path"
        )
    return [catalog[name] for name in dict.fromkeys(names)]


def declared_to_json(declared: Iterable[TableStream]) -> str:
    """Encode declared streams for a process that does not read the configuration."""
    streams = [attrs.asdict(_of_declaration(stream)) for stream in declared]
    return json.dumps(streams, default=msgspec.to_builtins)


def declared_from_json(text: str) -> list[CatalogStream]:
    """Decode the result of :func:`declared_to_json`."""
    return [_from_dict(fields) for fields in json.loads(text)]


def _from_dict(fields: dict[str, Any]) -> CatalogStream:
    queries = tuple(
        CatalogQuery(
            RangeQuery(
                **{
                    **query["range"],
                    "columns": tuple(query["range"]["columns"]),
                    # A declared stream has no details.
                    "details": (),
                }
            ),
            query["distinct"],
        )
        for query in fields.pop("queries")
    )
    table = fields.pop("table")
    return CatalogStream(
        table=DatabaseTable(
            table["name"],
            tuple(Column(**column) for column in table["columns"]),
            tuple((kind, tuple(names)) for kind, names in table["kinds"]),
        ),
        queries=queries,
        **fields,
    )
