"""What streams there are to read: facts alone, that executors can be handed.

The standard streams that have tables, and those that a user's own table declares.
Typing, presence towards other servers and the like never reach a table: the wire is
recorded for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.tables import (
    Column,
    StreamTable,
    standard_tables,
    table_of_declaration,
)
from synapse_replication.storage.row_queries import RangeQuery, declared_query
from synapse_replication.storage.synapse_tables import STANDARD_QUERIES
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream

__all__ = [
    "CatalogQuery",
    "CatalogStream",
    "catalog_of",
    "declared_from_json",
    "declared_to_json",
    "select_streams",
]


@attrs.frozen
class CatalogQuery:
    """One of the queries for a stream's rows.

    :ivar distinct: its table has several rows for one row of the stream.
    """

    range: RangeQuery
    distinct: bool


@attrs.frozen(kw_only=True)
class CatalogStream:
    """A stream, as far as reading its tables goes.

    :ivar table: its name on the wire, and the columns of its rows.
    :ivar queries: within a token, rows of an earlier query come first.
    :ivar sequence: where its ids come from.
    :ivar positions_name: its name in ``stream_positions``; ``None`` if it is not in
        there.
    :ivar negative: ids are below zero in the tables; tokens are not.
    """

    table: StreamTable
    queries: tuple[CatalogQuery, ...]
    sequence: str
    positions_name: str | None
    negative: bool = False

    @property
    def name(self) -> str:
        """The name on the wire."""
        return self.table.name


def catalog_of(
    declared: Iterable[TableStream | CatalogStream] = (),
) -> dict[str, CatalogStream]:
    """Return all streams with tables, by their names on the wire.

    :param declared: those of the user's own tables.
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
    """Look up streams that were asked for by name.

    :raises PipelineError: if there is no such stream, or it has no tables.
    """
    for name in names:
        if name in catalog:
            continue
        if name in STANDARD_STREAMS:
            raise PipelineError(
                f"stream {name} is never in a table: record the wire (synapse-"
                "replication record) and read the recording"
            )
        raise PipelineError(
            f"streams: there is no stream {excerpt(name)}; known are "
            f"{', '.join(sorted(catalog))}; one of your own table must be declared "
            "in the configuration that the option config names"
        )
    return [catalog[name] for name in dict.fromkeys(names)]


def declared_to_json(declared: Iterable[TableStream]) -> str:
    """Write declared streams down, for a process without the configuration."""
    return json.dumps([attrs.asdict(_of_declaration(stream)) for stream in declared])


def declared_from_json(text: str) -> list[CatalogStream]:
    """Read what :func:`declared_to_json` wrote."""
    return [_from_dict(fields) for fields in json.loads(text)]


def _from_dict(fields: dict[str, Any]) -> CatalogStream:
    queries = tuple(
        CatalogQuery(
            RangeQuery(
                **{
                    **query["range"],
                    "columns": tuple(query["range"]["columns"]),
                    # A declared stream has none.
                    "details": (),
                }
            ),
            query["distinct"],
        )
        for query in fields.pop("queries")
    )
    table = fields.pop("table")
    return CatalogStream(
        table=StreamTable(
            table["name"],
            tuple(Column(**column) for column in table["columns"]),
            tuple((kind, tuple(names)) for kind, names in table["kinds"]),
        ),
        queries=queries,
        **fields,
    )
