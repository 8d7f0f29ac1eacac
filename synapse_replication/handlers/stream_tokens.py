"""Waiters for a stream's combined token, and callbacks for its persisted-up-to token.

Theory of operation: users must not be notified of a row before every row with a lower
id, of *every* writer, has been delivered: a client that has received a token never
requests the rows at or below that token again. Code that notifies users of a row
therefore waits until all writers' rows up to that row have been delivered, not only
those of the row's writer.

While any stream has waiters or callbacks, each advance of a writer's position, in any
stream, schedules a check of all streams with waiters or callbacks. The check runs in
the next reactor turn, never during the delivery of rows. Waiters that have ended and
callbacks that were unsubscribed are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred

from synapse_replication.errors import (
    StreamConfigurationError,
    WaitTimeoutError,
)
from synapse_replication.handlers.interfaces import Clock, DelayedCall
from synapse_replication.streams.between import TokenStream
from synapse_replication.streams.stream import Stream
from synapse_replication.streams.tokens import MultiWriterStreamToken

_StreamT = TypeVar("_StreamT", bound=Stream)


def find_stream(streams: Mapping[str, _StreamT], name: str) -> _StreamT:
    """Return the stream with a name.

    :raises StreamConfigurationError: if there is none.
    """
    try:
        return streams[name]
    except KeyError:
        raise StreamConfigurationError(
            f"this process has no stream {name}; it has {', '.join(sorted(streams))}"
        ) from None


@attrs.define(eq=False)
class _TokenWaiter:
    token: MultiWriterStreamToken
    reached: Deferred[None]
    time_out: DelayedCall | None = None


@attrs.define(eq=False)
class _Interest:
    """The waiters and callbacks of one stream."""

    stream: TokenStream
    persisted_upto: int
    waiters: list[_TokenWaiter] = attrs.Factory(list)
    callbacks: list[Callable[[int], object]] = attrs.Factory(list)

    def is_empty(self) -> bool:
        return not (self.waiters or self.callbacks)


class StreamTokenWatch:
    """The waiters and callbacks of all streams of one process.

    Use it in the reactor's thread only.

    :param streams: the streams by name.
    """

    def __init__(self, streams: Mapping[str, Any], clock: Clock) -> None:
        self._streams = streams
        self._clock = clock
        #: By stream; only streams with waiters or callbacks have an entry.
        self.interests: dict[str, _Interest] = {}
        self._check_call: DelayedCall | None = None

    def schedule_check(self) -> None:
        """Schedule a check of the tokens. Call it only if there are interests."""
        if self._check_call is None:
            self._check_call = self._clock.call_later(0, self._check)

    async def wait(
        self, stream_name: str, token: MultiWriterStreamToken, timeout: float
    ) -> None:
        """Wait until all rows at or below ``token`` have been delivered.

        :param timeout: the timeout in s.
        :raises WaitTimeoutError: if the rows have not been delivered in time.
        :raises StreamConfigurationError: if the stream has no combined token.
        """
        interest = self._interest(stream_name)
        if token.is_before_or_eq(interest.stream.current_stream_token()):
            return
        self.interests[stream_name] = interest
        waiter = _TokenWaiter(token, Deferred(lambda _: self._remove(waiter)))
        waiter.time_out = self._clock.call_later(
            timeout, self._time_out, stream_name, waiter
        )
        interest.waiters.append(waiter)
        await waiter.reached

    def subscribe(
        self, stream_name: str, callback: Callable[[int], object]
    ) -> Callable[[], None]:
        """Call ``callback`` with the persisted-up-to token whenever it has advanced.

        :return: a function that unsubscribes.
        :raises StreamConfigurationError: if the stream has no persisted-up-to token.
        """
        interest = self._interest(stream_name)
        if self._streams[stream_name].description.held_in_memory:
            raise StreamConfigurationError(
                f"{stream_name} has no persisted-up-to token: it is held in memory by "
                "its writers, whose tokens are independent of one another"
            )
        self.interests[stream_name] = interest
        # Wrap the function in a new object, so that it can be subscribed twice.
        entry = lambda token: callback(token)  # noqa: E731
        interest.callbacks.append(entry)

        def unsubscribe() -> None:
            if entry in interest.callbacks:
                interest.callbacks.remove(entry)
                self._drop_empty()

        return unsubscribe

    # -- internals --------------------------------------------------------------------

    def _interest(self, stream_name: str) -> _Interest:
        interest = self.interests.get(stream_name)
        if interest is None:
            stream = find_stream(self._streams, stream_name)
            if not isinstance(stream, TokenStream):
                raise StreamConfigurationError(
                    f"{stream_name} has no combined token of all its writers; "
                    "implement current_stream_token and get_rows_between in its class"
                )
            interest = _Interest(stream, stream.current_stream_token().stream)
        return interest

    def _check(self) -> None:
        self._check_call = None
        for interest in list(self.interests.values()):
            current = interest.stream.current_stream_token()
            for waiter in list(interest.waiters):
                # The callback of an earlier waiter may have cancelled this one.
                if not waiter.reached.called and waiter.token.is_before_or_eq(current):
                    self._remove(waiter)
                    waiter.reached.callback(None)
            if current.stream > interest.persisted_upto:
                interest.persisted_upto = current.stream
                for callback in list(interest.callbacks):
                    # Each callback is a delayed call of its own, so the reactor logs a
                    # failure of one callback and still runs the others.
                    self._clock.call_later(0, callback, current.stream)

    def _time_out(self, stream_name: str, waiter: _TokenWaiter) -> None:
        waiter.time_out = None
        self._remove(waiter)
        stream: TokenStream = self._streams[stream_name]
        current = stream.current_stream_token()
        behind = {
            writer: position
            for writer, position in waiter.token.instance_map.items()
            if position > current.get_stream_pos_for_instance(writer)
        }
        if waiter.token.stream > current.stream or not behind:
            error = WaitTimeoutError(
                stream_name, "the slowest writer", waiter.token.stream, current.stream
            )
        else:
            writer, position = next(iter(behind.items()))
            reached = current.get_stream_pos_for_instance(writer)
            error = WaitTimeoutError(stream_name, writer, position, reached)
        waiter.reached.errback(error)

    def _remove(self, waiter: _TokenWaiter) -> None:
        if waiter.time_out is not None:
            waiter.time_out.cancel()
            waiter.time_out = None
        for interest in self.interests.values():
            if waiter in interest.waiters:
                interest.waiters.remove(waiter)
        self._drop_empty()

    def _drop_empty(self) -> None:
        for name in [n for n, each in self.interests.items() if each.is_empty()]:
            del self.interests[name]
