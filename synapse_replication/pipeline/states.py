"""The sequences, tables and stored positions of a deployment's streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.storage import queries
from synapse_replication.storage.consistency import ConsistencyReport, examine
from synapse_replication.storage.id_streams import exists, id_stream_of
from synapse_replication.streams.standard.registry import (
    STANDARD_STREAMS,
    StandardStream,
)
from synapse_replication.streams.table import TableStream

Stream = StandardStream | TableStream


def streams_of(settings: PipelineSettings) -> list[Stream]:
    """Return the standard streams, and those that the configuration declares."""
    return [*STANDARD_STREAMS.values(), *settings.declared]


def read_states(txn: Any, settings: PipelineSettings) -> ConsistencyReport:
    """Compare the sequences, tables and positions of all streams with ids.

    Without declared writers, every instance with a position is a writer.
    """
    stored: dict[str, list[str]] = {}
    if exists(txn, "stream_positions"):
        txn.execute(queries.ALL_POSITIONS)
        for stream, writer, _ in sorted(txn.fetchall()):
            stored.setdefault(stream, []).append(writer)
    id_streams = {}
    for each in streams_of(settings):
        if each.sequence is not None:
            known: Sequence[str] = ()
            if each.positions_name is not None:
                found = stored.get(each.positions_name, [])
                known = settings.writers.get(each.name) or found
            id_streams[each.name] = id_stream_of(each, known)
    return examine(txn, id_streams)
