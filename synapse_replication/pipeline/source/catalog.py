"""The streams that can be read from tables, as plain data for executors.

These are the standard streams that have tables, and the streams that the configuration
declares. Streams that are held in memory, for instance ``typing``, have no tables:
their rows can only be recorded from the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.schemas import DatabaseTable, table_of_codec
from synapse_replication.storage import row_queries
from synapse_replication.streams.standard import registry
from synapse_replication.streams.table import TableStream


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
    queries: tuple[row_queries.RowQuery, ...]
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
    standard = registry.STANDARD_STREAMS
    streams = {name: stream_of(standard[name]) for name in row_queries.STANDARD_QUERIES}
    for stream in declared:
        found = stream_of(stream) if isinstance(stream, TableStream) else stream
        streams[found.name] = found
    return streams


def stream_of(stream: registry.StandardStream | TableStream) -> CatalogStream:
    """Return a stream that has tables, with its queries."""
    return CatalogStream(
        table=table_of_codec(stream.name, stream.description.codec),
        queries=row_queries.queries_of(stream),
        sequence=stream.sequence or "",
        positions_name=stream.positions_name,
        negative=stream.negative,
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
        if name in registry.STANDARD_STREAMS:
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
