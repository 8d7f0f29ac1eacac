"""Make the streams of a process: declared and standard, in tables and in memory.

Where a process starts, for a writer other than itself:

1. at what the sink saved (its optional ``saved_positions()``);
2. else where ``stream_positions`` says that the writer is: a sink that is new gets
   what is written from now on. Such positions are told to the sink, so that it
   resumes from there even if it is killed before the first row;
3. a declared writer that never wrote is where the slowest writer of the stream is.

Spec, sections 5, 7 and 9; cases C27, C40.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from operator import attrgetter
from typing import Any

import attrs

from synapse_replication.app.config import ProcessConfig
from synapse_replication.app.handled import HandledIds
from synapse_replication.app.host import StandaloneHost
from synapse_replication.handlers.data import AdvancingStream
from synapse_replication.handlers.interfaces import RowSink
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.retry import with_retries
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import MultiWriterIdGenerator
from synapse_replication.storage.tables import (
    WriterIds,
    standard_stream,
    table_stream,
)
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.positions import FIRST_POSITION
from synapse_replication.streams.registry import STANDARD_STREAMS, StandardStream
from synapse_replication.streams.stream import UpdateFunction
from synapse_replication.streams.table import IdColumn, TableStream

__all__ = ["StreamSetup"]

#: What a row replaces older rows of, for streams in memory where it does.
_KEYS: Mapping[str, Callable[[Any], Hashable]] = {"typing": attrgetter("room_id")}

#: ``(stream, writer) -> token``.
Positions = Mapping[tuple[str, str], int]


@attrs.frozen
class _Kept:
    """What is the same for a declared and a standard stream in the database."""

    name: str
    positions_name: str | None
    sequence: str
    id_columns: tuple[IdColumn, ...]
    negative: bool


class StreamSetup:
    """Fills a host's table of streams, once.

    :param database: ``None`` if the configuration needs none.
    :param client: asks writers for what they hold in memory.
    """

    def __init__(
        self,
        config: ProcessConfig,
        host: StandaloneHost,
        database: Database | None,
        client: HttpCatchUpClient,
    ) -> None:
        self._config = config
        self._host = host
        self._database = database
        self._client = client
        self._stored: Positions = {}
        self._saved: Positions = {}

    async def run(self, sink: RowSink) -> None:
        """Make the streams and tell the sink where they begin.

        :raises SequenceBehindError: ids would be given out twice.
        :raises StreamConfigurationError: a stream is declared twice.
        """
        saved_positions = getattr(sink, "saved_positions", None)
        if saved_positions is not None:
            self._saved = saved_positions()
        if self._database is not None:
            self._stored = await read_stream_positions(self._database)
        for declared in self._config.streams:
            stream = await self._make(declared)
            self._host.streams.add(
                stream, is_written_here=self._writes(stream.description.name)
            )
            if saved_positions is not None:
                await self._tell_beginning(stream, sink)

    def _writes(self, name: str) -> bool:
        return self._config.instance_name in self._config.writers[name]

    def _others(self, name: str) -> list[str]:
        me = self._config.instance_name
        writers = dict.fromkeys(self._config.writers[name])
        return [writer for writer in writers if writer != me]

    async def _tell_beginning(self, stream: AdvancingStream, sink: RowSink) -> None:
        name = stream.description.name
        for writer in self._others(name):
            if (name, writer) not in self._saved:
                waiting = sink.on_position(name, writer, stream.current_token(writer))
                if waiting is not None:
                    await waiting

    async def _make(self, declared: str | TableStream) -> AdvancingStream:
        instance_name = self._config.instance_name
        if isinstance(declared, TableStream):
            kept = _Kept(
                declared.name,
                declared.positions_name,
                declared.sequence,
                declared.id_columns,
                declared.negative,
            )
            return table_stream(
                declared,
                self._get_database(),
                await self._ids(kept),
                instance_name=instance_name,
                on_write=self._host.notifier.notify,
            )
        standard = STANDARD_STREAMS[declared]
        if standard.description.held_in_memory:
            return self._make_in_memory(standard)
        assert standard.sequence is not None
        kept = _Kept(
            standard.name,
            standard.positions_name,
            standard.sequence,
            standard.id_columns,
            standard.negative,
        )
        return standard_stream(
            standard,
            self._get_database(),
            await self._ids(kept),
            instance_name=instance_name,
        )

    def _get_database(self) -> Database:
        assert self._database is not None, "the configuration was checked"
        return self._database

    def _make_in_memory(self, standard: StandardStream) -> MemoryStream:
        stream = MemoryStream(
            standard.description,
            instance_name=self._config.instance_name,
            fetch=self._fetch(standard.name),
            key=_KEYS.get(standard.name),
            on_write=self._host.notifier.notify,
        )
        for (name, writer), token in self._saved.items():
            if name == standard.name and writer != self._config.instance_name:
                stream.advance(writer, token)
        return stream

    def _fetch(self, name: str) -> UpdateFunction:
        return with_retries(
            self._client.for_stream(name), self._host.clock, random.random
        )

    async def _ids(self, kept: _Kept) -> HandledIds:
        own: WriterIds | None = None
        if self._writes(kept.name):
            own = await self._generator(kept)
        stored = {
            writer: abs(token)
            for (name, writer), token in self._stored.items()
            if name == kept.positions_name
        }
        saved = {
            writer: token
            for (name, writer), token in self._saved.items()
            if name == kept.name
        }
        known = saved or stored
        if known:
            unknown = min(known.values())
        elif kept.positions_name is None:
            unknown = await read_sequence(self._get_database(), kept.sequence)
        else:
            unknown = FIRST_POSITION
        return HandledIds(
            kept.name,
            self._config.instance_name,
            known,
            unknown,
            own,
            negative=kept.negative,
        )

    async def _generator(self, kept: _Kept) -> WriterIds:
        raise NotImplementedError
