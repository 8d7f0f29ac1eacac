"""A process of this package for the benchmarks: real classes, rows from memory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from twisted.internet.task import LoopingCall

from scripts.tools.bench.side import Counting
from scripts.tools.bench.traffic import (
    SERVER_NAME,
    STREAM,
    WRITER,
    timed_row,
)
from synapse_replication.app.host import StandaloneHost
from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.stream import StreamUpdateResult
from tests.support.hooks import silent_hooks

_PAGE = 500


class CountingSink:
    """A row sink that counts rows."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Count rows of a stream."""
        self._counting.count(rows)
        return None

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        """Record that a writer announced its position."""
        self._counting.position()
        return None


class Source:
    """A stream with its rows in memory, which a reader cannot fetch."""

    def __init__(self, stream_name: str = STREAM) -> None:
        self.description = STANDARD_STREAMS[stream_name].description
        self.rows: list[Any] = []
        self._positions: dict[str, int] = {}

    def current_token(self, instance_name: str) -> int:
        """Return the position of a writer."""
        return self._positions.get(instance_name, 0)

    def minimal_local_current_token(self) -> int:
        """Return the position up to which this process has written."""
        return len(self.rows)

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether this process wrote rows in ``(from_token, upto_token]``."""
        return True

    def advance(self, instance_name: str, token: int) -> None:
        """Advance the position of a writer."""
        self._positions[instance_name] = token

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        """Return a page of the written rows in ``(from_token, upto_token]``.

        :raises CatchUpError: if this is a reader, which has no rows.
        """
        if not self.rows:
            raise CatchUpError("a row was missed, which invalidates the measurement")
        end = min(upto_token, from_token + _PAGE)
        updates = [(n + 1, self.rows[n]) for n in range(from_token, end)]
        return StreamUpdateResult(updates, end, end < upto_token)


class Process:
    """A reader or writer.

    :ivar source: the stream that a writer writes.
    """

    source: Source

    def __init__(
        self,
        reactor: Any,
        instance_name: str,
        sink: Any,
        *,
        options: HandlerOptions | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        self._reactor = reactor
        self.observer = PrometheusObserver(
            ReplicationMetrics(CollectorRegistry()), SERVER_NAME
        )
        self.clock = ReactorClock(reactor)
        host = StandaloneHost(
            Identity(SERVER_NAME, instance_name, instance_name),
            self.clock,
            self.observer,
            silent_hooks(self.clock),
            HttpCatchUpClient(None, {}, None, reactor).for_stream,
        )
        sources = sources or [Source(name) for name in STANDARD_STREAMS]
        for source in sources:
            is_written = source.description.name == STREAM and instance_name == WRITER
            host.streams.add(source, is_written_here=is_written)
            if is_written:
                self.source = source
        host.set_sink(sink, None)
        self.handler = ReplicationCommandHandler(host, self.observer, options=options)
        self._streamer = ReplicationStreamer(host, self.handler.sender, self.observer)
        self._link: RedisReplicationLink | None = None

    def connect_redis(self, port: int) -> None:
        """Begin to connect to Redis."""
        self._link = RedisReplicationLink(
            self._reactor,
            RedisOptions(host="127.0.0.1", port=port),
            SERVER_NAME,
            self.handler,
            self.observer,
            lambda lost: self.handler.sender.announce_positions(),
            self.handler.start_replication(),
        )
        self._link.start()

    async def connected(self) -> None:
        """Wait until this process is connected."""
        while not self.handler.sender.connected():
            await self.clock.sleep(0.01)

    def start_streamer(self) -> None:
        """Do nothing: the constructor has created the streamer."""

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` s."""
        await self.clock.sleep(seconds)

    async def stop(self) -> None:
        """Close the connections."""
        if self._link is not None:
            await self._link.stop()

    def write(self, rows: list[Any]) -> None:
        """Write rows, and notify the streamer once."""
        self.source.rows += rows
        self._streamer.on_notifier_poke()

    def write_at_rate(self, rows: int, rate: int) -> None:
        """Write rows that contain the times of their writes, ``rate`` per second."""
        started = time.monotonic()

        def write_due() -> None:
            due = min(rows, int((time.monotonic() - started) * rate))
            while len(self.source.rows) < due:
                self.write([timed_row(time.monotonic_ns())])
            if due == rows:
                calls.stop()

        calls = LoopingCall(write_due)
        calls.clock = self._reactor
        calls.start(1 / rate)
