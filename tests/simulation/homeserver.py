"""Doubles of a homeserver's streams and data handler, for the drop-in.

In a homeserver, every process has an id generator for each stream in the database. The
token that the generator returns for a writer is at least the id up to which all writers
have persisted their rows, even if this process has not received these rows. The
POSITION of one writer can therefore advance another writer's token past a row that this
process missed. The id generators, and the drop-in's classes between these doubles and
the command handler, are real.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

from synapse_replication.dropin.host_streams import HostStream
from synapse_replication.dropin.synapse_host import HostRows
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.storage.id_generators import MultiWriterIdGenerator
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.stream import JsonValue


class HomeserverStream:
    """One of a homeserver's stream objects.

    :param stream: the source of the rows.
    :param instance_name: the name of this process.
    :param ids: the generator of the stream's ids; ``None`` for a stream in memory.
    :ivar NAME: the name on the wire.
    :ivar stream: the source of the rows.
    :ivar ids: the generator of the stream's ids; ``None`` for a stream in memory.
    """

    def __init__(
        self,
        stream: PostgresStream | MemoryStream,
        instance_name: str,
        ids: MultiWriterIdGenerator | None,
    ) -> None:
        self.NAME = stream.description.name
        self.stream = stream
        self._instance_name = instance_name
        self.ids = ids

    def current_token(self, instance_name: str) -> int:
        """Return a writer's token; see the module's docstring."""
        if self.ids is None:
            return self.stream.current_token(instance_name)
        return self.ids.get_current_token_for_writer(instance_name)

    def minimal_local_current_token(self) -> int:
        """Return the position that this process may announce for its own rows."""
        if self.ids is None:
            return self.stream.current_token(self._instance_name)
        return self.ids.get_minimal_local_current_token()

    def parse_row(self, value: Any) -> Any:
        """Return the typed row for a JSON value."""
        return self.stream.description.codec.from_json(value)

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> tuple[Sequence[tuple[int, JsonValue]], int, bool]:
        """Return a page of rows, its last token, and whether more pages follow."""
        page = await self.stream.get_updates_since(
            instance_name, from_token, upto_token
        )
        return page.updates, page.upto_token, page.limited


class _Sink(Protocol):
    """The sink of the simulation, which records deliveries."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None: ...

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None: ...


class _DataHandler:
    """The double of a homeserver's data handler.

    As a homeserver updates its caches before it advances its ids, this class awaits the
    sink before it advances the stream.
    """

    def __init__(
        self,
        sink: _Sink,
        streams: Mapping[str, HostStream],
        shows: Callable[[str, int], object],
    ) -> None:
        self._sink = sink
        self._streams = streams
        self._shows = shows

    async def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        waiting = self._sink.on_rdata(stream_name, instance_name, token, rows)
        if waiting is not None:
            await waiting
        self._advance(stream_name, instance_name, token)

    async def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        waiting = self._sink.on_position(stream_name, instance_name, token)
        if waiting is not None:
            await waiting
        self._advance(stream_name, instance_name, token)

    def _advance(self, stream_name: str, instance_name: str, token: int) -> None:
        original = cast(HomeserverStream, self._streams[stream_name].original)
        original.stream.advance(instance_name, token)
        if original.ids is not None:
            self._shows(stream_name, original.ids.get_persisted_upto_position())


def make_rows(
    sink: _Sink,
    streams: Mapping[str, HostStream],
    shows: Callable[[str, int], object],
    clock: Clock,
) -> HostRows:
    """Return the drop-in's row sink for a simulated homeserver.

    :param sink: receives rows and positions before the homeserver's ids advance.
    :param streams: the streams by name.
    :param shows: called after each delivered batch or position of a stream in the
        database, with the name of the stream and the token up to which this process
        treats the stream as complete. A user who syncs up to the token never receives a
        row that was missing below it.
    :param clock: the clock of the process.
    """
    handler = _DataHandler(sink, streams, shows)
    homeserver = SimpleNamespace(get_replication_data_handler=lambda: handler)
    return HostRows(homeserver, streams)
