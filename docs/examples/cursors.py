"""Cursors: a custom stream, held in the memory of its writer."""

from typing import Any

import attrs

from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.rows import AttrsRowCodec
from synapse_replication.streams.stream import StreamDescription


@attrs.frozen
class CursorRow:
    document: str
    offset: int


CURSORS = StreamDescription(
    name="cursors",
    codec=AttrsRowCodec("cursors", CursorRow),
    held_in_memory=True,
    resettable=True,  # tokens start at 0 again when the writer restarts
)


def add_stream(host: Any, config: dict[str, Any]) -> None:
    own_name = host.identity.instance_name
    stream = MemoryStream(
        CURSORS,
        instance_name=own_name,
        fetch=host.fetch_from_writer("cursors"),
        key=lambda row: row.document,  # a row replaces older rows with the same key
        on_write=host.notifier.notify,
    )
    writer = config["writer"]
    host.streams.add(stream, is_written_here=own_name == writer, writers=[writer])
