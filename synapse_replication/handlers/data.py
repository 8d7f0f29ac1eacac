"""The end of the road: rows go to the host, then its streams move on.

Theory of operation: :class:`ReplicationDataHandler` stands between the command
handler and the host's own sink. The host gets the rows *first*, so that it can
drop what it has cached; only then the stream's position moves, and only then those
who wait for that position go on. So nobody who saw a position reads older data.

Waiters are kept by (stream, writer), in order of position; each wakes on its writer
alone. One that times out or is cancelled leaves nothing behind.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Awaitable, Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred

from synapse_replication.errors import WaitTimeoutError
from synapse_replication.handlers.interfaces import (
    Clock,
    DelayedCall,
    EpochSink,
    RowSink,
)
from synapse_replication.handlers.stream_tokens import StreamTokenWatch
from synapse_replication.streams.stream import Stream
from synapse_replication.streams.tokens import MultiWriterStreamToken

__all__ = ["AdvancingStream", "LargestToken", "ReplicationDataHandler"]


class AdvancingStream(Stream, Protocol):
    """A stream that is told where its writers stand."""

    def advance(self, instance_name: str, token: int) -> None:
        """Record that a writer's rows up to ``token`` were handled here."""
        ...


class LargestToken(Protocol):
    """Tells the largest token of a stream that any writer may have allocated."""

    def __call__(self, stream_name: str) -> Awaitable[int | None]:
        """Return the token; ``None`` if it cannot be told."""
        ...


@attrs.define(eq=False)
class _Waiter:
    position: int
    reached: Deferred[None]
    time_out: DelayedCall | None = None


_by_position: Callable[[_Waiter], int] = attrgetter("position")


class ReplicationDataHandler:
    """A row sink that delivers, then advances the streams, then wakes who waits.

    Used in the reactor's thread only.

    :param streams: by name.
    :param sink: the host's own; an
        :class:`~synapse_replication.handlers.interfaces.EpochSink`, perhaps.
    :param largest_token: what the positions that are waited for are capped to. A
        token that nobody allocated (of a database that was restored, say) would
        be waited for in vain.
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
        self._clock = clock
        self._largest_token = largest_token
        self._waiters: dict[tuple[str, str], list[_Waiter]] = {}
        self._tokens = StreamTokenWatch(streams, clock)

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Hand rows on, then advance. A late token moves nothing."""
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
        """Hand a position on, then take it, also if it is an earlier one."""
        waiting = self._sink.on_position(stream_name, instance_name, token)
        if waiting is not None:
            return self._advance_after(
                waiting, self._move, stream_name, instance_name, token
            )
        self._move(stream_name, instance_name, token)
        return None

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the epochs that the host saved, if it saves them."""
        return self._sink.saved_epochs() if isinstance(self._sink, EpochSink) else {}

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Awaitable[None] | None:
        """Have an epoch saved, if the host saves them."""
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
            self._move(stream_name, instance_name, token)

    def _move(self, stream_name: str, instance_name: str, token: int) -> None:
        self._streams[stream_name].advance(instance_name, token)
        if self._tokens.interests:
            self._tokens.moved()
        waiters = self._waiters and self._waiters.get((stream_name, instance_name))
        if not waiters:
            return
        reached = []
        while waiters and waiters[0].position <= token:
            reached.append(waiters.pop(0))
        if not waiters:
            del self._waiters[stream_name, instance_name]
        # The list is in order before anybody acts on it.
        for waiter in reached:
            if waiter.time_out is not None:
                waiter.time_out.cancel()
            waiter.reached.callback(None)

    async def wait_for_stream_position(
        self,
        instance_name: str,
        stream_name: str,
        position: int,
        timeout: float = 10.0,
    ) -> None:
        """Wait until a writer's rows up to ``position`` were handled here.

        :param timeout: s at most.
        :raises WaitTimeoutError: if they were not, in time.
        """
        stream = self._streams[stream_name]
        if position <= stream.current_token(instance_name):
            return
        if self._largest_token is not None:
            largest = await self._largest_token(stream_name)
            if largest is not None:
                position = min(position, largest)
            if position <= stream.current_token(instance_name):
                return
        key = stream_name, instance_name
        waiter = _Waiter(position, Deferred(lambda _: self._forget(key, waiter)))
        waiter.time_out = self._clock.call_later(timeout, self._give_up, key, waiter)
        insort(self._waiters.setdefault(key, []), waiter, key=_by_position)
        await waiter.reached

    # -- all writers of a stream together ---------------------------------------------

    async def wait_for_stream_token(
        self,
        stream_name: str,
        token: MultiWriterStreamToken,
        timeout: float = 10.0,
    ) -> None:
        """Wait until the rows that ``token`` covers were delivered here.

        :param timeout: s at most.
        :raises WaitTimeoutError: if they were not, in time.
        """
        if self._largest_token is not None:
            largest = await self._largest_token(stream_name)
            if largest is not None:
                token = token.bound_stream_token(largest)
        await self._tokens.wait(stream_name, token, timeout)

    def call_when_persisted(
        self, stream_name: str, callback: Callable[[int], object]
    ) -> Callable[[], None]:
        """Have ``callback`` called with the persisted-up-to token whenever it moved.

        The rows of *every* writer up to that token were delivered here. It is called in
        a turn of the reactor of its own, with the newest token.

        :return: ends that.
        :raises StreamConfigurationError: if the stream has no such token, as one that
            is held in memory.
        """
        return self._tokens.subscribe(stream_name, callback)

    def own_rows_written(self) -> None:
        """Record that this process wrote rows, which moves its own position."""
        if self._tokens.interests:
            self._tokens.moved()

    def _give_up(self, key: tuple[str, str], waiter: _Waiter) -> None:
        waiter.time_out = None
        self._forget(key, waiter)
        stream_name, instance_name = key
        current = self._streams[stream_name].current_token(instance_name)
        waiter.reached.errback(
            WaitTimeoutError(stream_name, instance_name, waiter.position, current)
        )

    def _forget(self, key: tuple[str, str], waiter: _Waiter) -> None:
        if waiter.time_out is not None:
            waiter.time_out.cancel()
        waiters = self._waiters[key]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[key]
