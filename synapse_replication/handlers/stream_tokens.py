"""Waiting for the combined token of a stream, and being called when it moves.

Theory of operation: users must not be notified of a row before every row with a lower
id, of *every* writer, is here: a client that is given a token at or above such a row
never asks for it again. So whoever notifies users waits for the maximum of what it
wants to announce to be persisted for all writers, and not for the writer of one row.

A move of a stream that somebody waits for schedules one look at its token, in the next
turn of the reactor: never from inside the delivery of rows. Waiters and callbacks that
end leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from synapse_replication.errors import StreamConfigurationError, WaitTimeoutError
from synapse_replication.handlers.interfaces import Clock, DelayedCall
from synapse_replication.streams.between import TokenStream
from synapse_replication.streams.tokens import MultiWriterStreamToken

__all__ = ["StreamTokenWatch"]


@attrs.define(eq=False)
class _TokenWaiter:
    token: MultiWriterStreamToken
    reached: Deferred[None]
    time_out: DelayedCall | None = None


@attrs.define(eq=False)
class _Interest:
    """Those who care about the token of one stream."""

    stream: TokenStream
    persisted_upto: int
    waiters: list[_TokenWaiter] = attrs.Factory(list)
    callbacks: list[Callable[[int], object]] = attrs.Factory(list)

    def is_over(self) -> bool:
        return not (self.waiters or self.callbacks)


class StreamTokenWatch:
    """Waiters and callbacks of the streams of one process.

    Used in the reactor's thread only.

    :param streams: by name.
    """

    def __init__(self, streams: Mapping[str, Any], clock: Clock) -> None:
        self._streams = streams
        self._clock = clock
        #: By stream; a stream that nobody waits for is not in there.
        self.interests: dict[str, _Interest] = {}
        self._look_call: DelayedCall | None = None

    def moved(self) -> None:
        """Look at the tokens soon; to be called only if there are interests."""
        if self._look_call is None:
            self._look_call = self._clock.call_later(0, self._look)

    async def wait(
        self, stream_name: str, token: MultiWriterStreamToken, timeout: float
    ) -> None:
        """Wait until the rows that ``token`` covers were delivered here.

        :param timeout: s at most.
        :raises WaitTimeoutError: if they were not, in time.
        :raises StreamConfigurationError: if the stream has no combined token.
        """
        interest = self._interest(stream_name)
        if token.is_before_or_eq(interest.stream.current_stream_token()):
            return
        self.interests[stream_name] = interest
        waiter = _TokenWaiter(token, Deferred(lambda _: self._forget(waiter)))
        waiter.time_out = self._clock.call_later(
            timeout, self._give_up, stream_name, waiter
        )
        interest.waiters.append(waiter)
        await waiter.reached

    def subscribe(
        self, stream_name: str, callback: Callable[[int], object]
    ) -> Callable[[], None]:
        """Have ``callback`` called with the persisted-up-to token when it has moved.

        :return: ends that.
        :raises StreamConfigurationError: if the stream has no such token.
        """
        interest = self._interest(stream_name)
        if self._streams[stream_name].description.held_in_memory:
            raise StreamConfigurationError(
                f"{stream_name} is held in the memory of its writers, who count by "
                "themselves: there is no id up to which all of them are persisted"
            )
        self.interests[stream_name] = interest
        # So that one that was subscribed twice is two.
        entry = lambda token: callback(token)  # noqa: E731
        interest.callbacks.append(entry)

        def unsubscribe() -> None:
            if entry in interest.callbacks:
                interest.callbacks.remove(entry)
                self._drop_if_over()

        return unsubscribe

    # -- inside -----------------------------------------------------------------------

    def _interest(self, stream_name: str) -> _Interest:
        interest = self.interests.get(stream_name)
        if interest is None:
            stream = self._streams[stream_name]
            if not isinstance(stream, TokenStream):
                raise StreamConfigurationError(
                    f"{stream_name} has no token for all its writers together; give "
                    "its class current_stream_token and get_rows_between"
                )
            interest = _Interest(stream, stream.current_stream_token().stream)
        return interest

    def _look(self) -> None:
        self._look_call = None
        for interest in list(self.interests.values()):
            current = interest.stream.current_stream_token()
            for waiter in list(interest.waiters):
                if waiter.token.is_before_or_eq(current):
                    self._forget(waiter)
                    waiter.reached.callback(None)
            if current.stream > interest.persisted_upto:
                interest.persisted_upto = current.stream
                for callback in list(interest.callbacks):
                    # A turn for each: one that fails is logged and stops no other.
                    self._clock.call_later(0, callback, current.stream)

    def _give_up(self, stream_name: str, waiter: _TokenWaiter) -> None:
        waiter.time_out = None
        self._forget(waiter)
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

    def _forget(self, waiter: _TokenWaiter) -> None:
        if waiter.time_out is not None:
            waiter.time_out.cancel()
            waiter.time_out = None
        for interest in self.interests.values():
            if waiter in interest.waiters:
                interest.waiters.remove(waiter)
        self._drop_if_over()

    def _drop_if_over(self) -> None:
        for name in [n for n, each in self.interests.items() if each.is_over()]:
            del self.interests[name]
