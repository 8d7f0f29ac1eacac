"""Delivery of rows to the host, followed by advancing its streams' positions.

Theory of operation: :class:`ReplicationDataHandler` wraps the host's own sink. It
delivers rows to the host *first*, so that the host can invalidate its caches. Then it
advances the stream's position, and finally it wakes the waiters for that position. Code
that has seen a position therefore never reads data that is older than the position.

Waiters are stored by (stream, writer), in order of position. A waiter that times out or
is cancelled is removed.

See docs/failure-modes.rst: failure-future-token, failure-wait-for-one-writer.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Awaitable, Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred

from synapse_replication.errors import WaitTimeoutError
from synapse_replication.handlers.interfaces import Clock, DelayedCall, RowSink
from synapse_replication.handlers.row_sinks import EpochSink, LateRowSink
from synapse_replication.handlers.stream_tokens import StreamTokenWatch, find_stream
from synapse_replication.streams.stream import Stream
from synapse_replication.streams.tokens import MultiWriterStreamToken


class AdvancingStream(Stream, Protocol):
    """A stream whose positions are advanced by the data handler."""

    def advance(self, instance_name: str, token: int) -> None:
        """Record that a writer's rows up to ``token`` were delivered."""
        ...


class LargestToken(Protocol):
    """Function that returns an upper bound of the allocated tokens of a stream."""

    def __call__(self, stream_name: str) -> Awaitable[int | None]:
        """Return the token; ``None`` if it is not known."""
        ...


@attrs.define(eq=False)
class _Waiter:
    position: int
    reached: Deferred[None]
    time_out: DelayedCall | None = None

    def stop_timer(self) -> None:
        if self.time_out is not None:
            self.time_out.cancel()
            self.time_out = None


_by_position: Callable[[_Waiter], int] = attrgetter("position")


class ReplicationDataHandler:
    """A row sink that delivers rows, then advances streams, then wakes waiters.

    Use it in the reactor's thread only.

    :param streams: the streams by name.
    :param sink: the host's own sink, which may be an
        :class:`~synapse_replication.handlers.row_sinks.EpochSink`.
    :param largest_token: returns the upper bound of positions to wait for. Waiting for
        a token that was never allocated, for instance after the database was restored
        from a backup, would never succeed. ``None`` for no upper bound.
    """

    def __init__(
        self,
        streams: Mapping[str, AdvancingStream],
        sink: RowSink,
        clock: Clock,
        *,
        largest_token: LargestToken | None = None,
    ) -> None:
        self._streams = streams
        self._sink = sink
        if isinstance(sink, LateRowSink):
            self.on_late_rdata = sink.on_late_rdata
        self._clock = clock
        self._largest_token = largest_token
        self._waiters: dict[tuple[str, str], list[_Waiter]] = {}
        self._tokens = StreamTokenWatch(streams, clock)

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Deliver rows, then advance the stream's position if it is below ``token``."""
        waiting = self._sink.on_rdata(stream_name, instance_name, token, rows)
        if waiting is not None:
            return self._advance_after(
                waiting, self._advance, stream_name, instance_name, token
            )
        self._advance(stream_name, instance_name, token)
        return None

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        """Deliver a position, then set the stream's position, even to a lower token."""
        waiting = self._sink.on_position(stream_name, instance_name, token)
        if waiting is not None:
            return self._advance_after(
                waiting, self._set_position, stream_name, instance_name, token
            )
        self._set_position(stream_name, instance_name, token)
        return None

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the epochs that the host has saved; none if its sink saves none."""
        return self._sink.saved_epochs() if isinstance(self._sink, EpochSink) else {}

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Awaitable[None] | None:
        """Save an epoch, if the host's sink saves epochs."""
        if not isinstance(self._sink, EpochSink):
            return None
        return self._sink.on_epoch(stream_name, instance_name, epoch)

    async def _advance_after(
        self,
        waiting: Awaitable[None],
        advance: Callable[[str, str, int], None],
        stream_name: str,
        instance_name: str,
        token: int,
    ) -> None:
        await waiting
        advance(stream_name, instance_name, token)

    def _advance(self, stream_name: str, instance_name: str, token: int) -> None:
        if token > self._streams[stream_name].current_token(instance_name):
            self._set_position(stream_name, instance_name, token)

    def _set_position(self, stream_name: str, instance_name: str, token: int) -> None:
        self._streams[stream_name].advance(instance_name, token)
        if self._tokens.interests:
            self._tokens.schedule_check()
        if self._waiters:
            self._wake(stream_name, instance_name, token)

    def _wake(self, stream_name: str, instance_name: str, token: int) -> None:
        """Wake those that wait for a writer's position up to ``token``."""
        waiters = self._waiters.get((stream_name, instance_name))
        if not waiters:
            return
        reached = []
        while waiters and waiters[0].position <= token:
            reached.append(waiters.pop(0))
        if not waiters:
            del self._waiters[stream_name, instance_name]
        # Update everything first: the callbacks may add waiters, or cancel others.
        for waiter in reached:
            waiter.stop_timer()
        for waiter in reached:
            if not waiter.reached.called:
                waiter.reached.callback(None)

    async def wait_for_stream_position(
        self,
        instance_name: str,
        stream_name: str,
        position: int,
        timeout: float = 10.0,
    ) -> None:
        """Wait until a writer's rows up to ``position`` have been delivered.

        If the writer is this process, wait until its transactions up to ``position``
        have ended. If ``largest_token`` returns a lower token, wait only for the rows
        up to it.

        :param timeout: the timeout in s.
        :raises WaitTimeoutError: if the rows have not been delivered in time.
        :raises StreamConfigurationError: if this process has no such stream.
        """
        stream = find_stream(self._streams, stream_name)
        if position <= stream.current_token(instance_name):
            return
        if self._largest_token is not None:
            largest = await self._largest_token(stream_name)
            if largest is not None:
                position = min(position, largest)
            if position <= stream.current_token(instance_name):
                return
        key = stream_name, instance_name
        waiter = _Waiter(position, Deferred(lambda _: self._remove(key, waiter)))
        waiter.time_out = self._clock.call_later(timeout, self._time_out, key, waiter)
        insort(self._waiters.setdefault(key, []), waiter, key=_by_position)
        await waiter.reached

    # -- tokens of all writers of a stream ---------------------------------------------

    async def wait_for_stream_token(
        self,
        stream_name: str,
        token: MultiWriterStreamToken,
        timeout: float = 10.0,
    ) -> None:
        """Wait until all rows at or below ``token`` have been delivered.

        If ``largest_token`` returns a token, do not wait for rows above it.

        :param timeout: the timeout in s.
        :raises WaitTimeoutError: if the rows have not been delivered in time.
        :raises StreamConfigurationError: if the stream has no combined token.
        """
        if self._largest_token is not None:
            largest = await self._largest_token(stream_name)
            if largest is not None:
                token = token.bound_stream_token(largest)
        await self._tokens.wait(stream_name, token, timeout)

    def call_when_persisted(
        self, stream_name: str, callback: Callable[[int], object]
    ) -> Callable[[], None]:
        """Call ``callback`` with the persisted-up-to token whenever it has advanced.

        The rows of *every* other writer up to the token have then been delivered, and
        this process's own rows up to the token have been written. Each callback is
        scheduled as a separate delayed call, so that one that fails does not affect the
        others.

        :return: a function that unsubscribes.
        :raises StreamConfigurationError: if the stream has no such token, for instance
            because it is held in memory.
        """
        return self._tokens.subscribe(stream_name, callback)

    def own_rows_written(self) -> None:
        """Wake those that wait for rows that this process has written."""
        if self._tokens.interests:
            self._tokens.schedule_check()
        for stream_name, instance_name in list(self._waiters):
            token = self._streams[stream_name].current_token(instance_name)
            self._wake(stream_name, instance_name, token)

    def _time_out(self, key: tuple[str, str], waiter: _Waiter) -> None:
        waiter.time_out = None
        self._remove(key, waiter)
        stream_name, instance_name = key
        current = self._streams[stream_name].current_token(instance_name)
        waiter.reached.errback(
            WaitTimeoutError(stream_name, instance_name, waiter.position, current)
        )

    def _remove(self, key: tuple[str, str], waiter: _Waiter) -> None:
        waiter.stop_timer()
        waiters = self._waiters.get(key, [])
        # A waiter whose position has just been reached is not in the list.
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[key]
