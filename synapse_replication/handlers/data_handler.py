"""Delivery of rows to the host, followed by advancing its streams' positions.

Theory of operation: :class:`ReplicationDataHandler` wraps the host's own sink. It
delivers rows to the host *first*, so that the host can invalidate its caches. Then it
advances the stream's position, and finally it wakes those that wait for positions. Code
that has seen a position therefore never reads data that is older than the position.

Users must not be notified of a row before every row with a lower id, of *every* writer,
has been delivered: a client that has received a token never requests the rows at or
below that token again. Code that notifies users of a row therefore waits until all
writers' rows up to that row have been delivered, not only those of the row's writer.

Each wait has a function that compares a position with that of a stream. The functions
are kept by stream and writer. When a position has advanced, those kept for it are
called in the next reactor turn, never during the delivery of rows. So waits for a stuck
writer cost nothing while other writers advance. A row of this process may advance any
position, so all are read, and the functions are called for those that have changed. A
wait that ends removes its function.

See docs/failure-modes.rst: failure-future-token, failure-wait-for-one-writer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

import attrs
from twisted.internet.defer import Deferred

from synapse_replication.errors import StreamConfigurationError, WaitTimeoutError
from synapse_replication.handlers.asyncio_tasks import run_in_task
from synapse_replication.handlers.interfaces import (
    Clock,
    EpochSink,
    LateRowSink,
    RowSink,
)
from synapse_replication.handlers.timer import Timer
from synapse_replication.streams.stream import CombinedStream, Stream, TokenStream
from synapse_replication.streams.tokens import MultiWriterStreamToken


class AdvancingStream(Stream, Protocol):
    """A stream whose positions are advanced by the data handler."""

    def advance(self, instance_name: str, token: int) -> None:
        """Record that a writer's rows up to ``token`` were delivered."""


#: A function that returns an upper bound of the allocated tokens of a stream, by its
#: name; ``None`` if it is not known.
LargestToken: TypeAlias = Callable[[str], Awaitable[int | None]]

#: The names of a stream and a writer; ``None`` for the combined token of all writers.
_Key: TypeAlias = "tuple[str, str | None]"
_Check: TypeAlias = Callable[[], None]


@attrs.define(eq=False, repr=False, slots=False)
class ReplicationDataHandler:
    """A row sink that delivers rows, then advances streams, then wakes waiters.

    Use it in the reactor's thread only.

    :param streams: the streams by name.
    :param sink: the host's own sink, which may be an
        :class:`~synapse_replication.handlers.interfaces.EpochSink`.
    :param largest_token: returns the upper bound of positions to wait for. Waiting for
        a token that was never allocated, for instance after the database was restored
        from a backup, would never succeed. ``None`` for no upper bound.
    """

    _streams: Mapping[str, AdvancingStream]
    _sink: RowSink
    _clock: Clock
    _largest_token: LargestToken | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if isinstance(self._sink, LateRowSink):
            self.on_late_rdata = partial(_deliver_late, self._sink)
        #: By stream, the function to call for each row, if it is a combined one.
        self._row_delivered: dict[str, Callable[[int], None] | None] = {}
        #: The functions that compare positions, in the order in which they were added;
        #: see the module's docstring.
        self._checks: dict[_Key, dict[_Check, None]] = {}
        #: The positions that the functions compared last; none if one was added since
        #: then, at another position.
        self._compared: dict[_Key, object] = {}
        #: Which positions may have advanced since the functions were called.
        self._advanced: dict[_Key, None] = {}
        self._timer = Timer(self._clock)

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
        waiting = self._sink.on_epoch(stream_name, instance_name, epoch)
        return None if waiting is None else run_in_task(waiting)

    async def _advance_after(
        self,
        waiting: Awaitable[None],
        advance: Callable[[str, str, int], None],
        stream_name: str,
        instance_name: str,
        token: int,
    ) -> None:
        await run_in_task(waiting)
        advance(stream_name, instance_name, token)

    def _advance(self, stream_name: str, instance_name: str, token: int) -> None:
        try:
            row_delivered = self._row_delivered[stream_name]
        except KeyError:
            row_delivered = self._find_row_delivered(stream_name)
        if row_delivered is not None:
            row_delivered(token)
        if token > self._streams[stream_name].current_token(instance_name):
            self._set_position(stream_name, instance_name, token)

    def _find_row_delivered(self, stream_name: str) -> Callable[[int], None] | None:
        # A check for a protocol is too slow for each row.
        stream: object = self._streams[stream_name]
        found = stream.row_delivered if isinstance(stream, CombinedStream) else None
        self._row_delivered[stream_name] = found
        return found

    def _set_position(self, stream_name: str, instance_name: str, token: int) -> None:
        self._streams[stream_name].advance(instance_name, token)
        if self._checks:
            self._check_soon((stream_name, instance_name), (stream_name, None))

    # -- waiting -----------------------------------------------------------------------

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
        stream = self._stream(stream_name)
        if position <= stream.current_token(instance_name):
            return
        largest = await self._find_largest(stream_name)
        upto = position if largest is None else min(position, largest)
        await self._wait_until(
            (stream_name, instance_name),
            lambda: upto <= stream.current_token(instance_name),
            timeout,
            lambda: WaitTimeoutError(
                stream_name, instance_name, upto, stream.current_token(instance_name)
            ),
        )

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
        stream = self._token_stream(stream_name)
        largest = await self._find_largest(stream_name)
        upto = token if largest is None else token.bound_stream_token(largest)
        await self._wait_until(
            (stream_name, None),
            lambda: upto.is_before_or_eq(stream.current_stream_token()),
            timeout,
            lambda: _late_writer_error(stream_name, upto, stream),
        )

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
        stream = self._token_stream(stream_name)
        if self._streams[stream_name].description.held_in_memory:
            raise StreamConfigurationError(
                f"{stream_name} has no persisted-up-to token: it is held in memory by "
                "its writers, whose tokens are independent of one another"
            )
        reported = stream.current_stream_token().stream

        def check() -> None:
            nonlocal reported
            token = stream.current_stream_token().stream
            if token > reported:
                reported = token
                # It is a delayed call of its own, so the reactor logs a failure of one
                # callback and still runs the others.
                self._clock.call_later(0, callback, token)

        key = stream_name, None
        self._add(key, check)
        return lambda: self._remove(key, check)

    def own_rows_written(self) -> None:
        """Wake those that wait for rows that this process has written."""
        if self._checks:
            self._check_soon(*self._checks)

    async def _wait_until(
        self,
        key: _Key,
        is_reached: Callable[[], bool],
        timeout: float,
        explain: Callable[[], WaitTimeoutError],
    ) -> None:
        """Wait until a function of the positions is true.

        :param explain: returns the error after the timeout.
        """
        if is_reached():
            return
        reached: Deferred[None] = Deferred()

        def check() -> None:
            if is_reached():
                reached.callback(None)

        self._add(key, check)
        time_out = Timer(self._clock)
        time_out.start(timeout, lambda: reached.errback(explain()))
        try:
            await reached
        finally:
            self._remove(key, check)
            time_out.stop()

    def _add(self, key: _Key, check: _Check) -> None:
        self._checks.setdefault(key, {})[check] = None
        if self._compared.get(key) != self._position(key):
            self._compared.pop(key, None)

    def _remove(self, key: _Key, check: _Check) -> None:
        checks = self._checks.get(key, {})
        checks.pop(check, None)
        if not checks:
            self._checks.pop(key, None)
            self._compared.pop(key, None)

    def _position(self, key: _Key) -> object:
        stream_name, writer = key
        if writer is None:
            return self._token_stream(stream_name).current_stream_token()
        return self._stream(stream_name).current_token(writer)

    def _check_soon(self, *keys: _Key) -> None:
        self._advanced.update(dict.fromkeys(keys))
        if not self._timer.is_running:
            self._timer.start(0, self._check)

    def _check(self) -> None:
        advanced, self._advanced = self._advanced, {}
        try:
            for key in list(advanced):
                del advanced[key]
                self._check_key(key)
        finally:
            # A stream raised: the reactor logs it, and the rest is checked next.
            if advanced:
                self._check_soon(*advanced)

    def _check_key(self, key: _Key) -> None:
        position = self._position(key) if key in self._checks else None
        if position == self._compared.get(key):
            return
        self._compared[key] = position
        for check in list(self._checks[key]):
            # One that was called earlier may have ended this wait.
            if check in self._checks.get(key, ()):
                check()

    async def _find_largest(self, stream_name: str) -> int | None:
        if self._largest_token is None:
            return None
        return await self._largest_token(stream_name)

    def _stream(self, name: str) -> AdvancingStream:
        try:
            return self._streams[name]
        except KeyError:
            known = ", ".join(sorted(self._streams))
            raise StreamConfigurationError(
                f"this process has no stream {name}; it has {known}"
            ) from None

    def _token_stream(self, name: str) -> TokenStream:
        stream: object = self._stream(name)
        if not isinstance(stream, TokenStream):
            raise StreamConfigurationError(
                f"{name} has no combined token of all its writers; "
                "implement current_stream_token and get_rows_between in its class"
            )
        return stream


def _deliver_late(
    sink: LateRowSink, stream_name: str, instance_name: str, token: int, rows: list[Any]
) -> Awaitable[None] | None:
    waiting = sink.on_late_rdata(stream_name, instance_name, token, rows)
    return None if waiting is None else run_in_task(waiting)


def _late_writer_error(
    stream_name: str, wanted: MultiWriterStreamToken, stream: TokenStream
) -> WaitTimeoutError:
    """Return an error that names a writer whose rows were not delivered in time."""
    current = stream.current_stream_token()
    if wanted.stream <= current.stream:
        for writer, position in wanted.instance_map.items():
            reached = current.get_stream_pos_for_instance(writer)
            if position > reached:
                return WaitTimeoutError(stream_name, writer, position, reached)
    writers = stream.writers if isinstance(stream, CombinedStream) else ()
    at = current.get_stream_pos_for_instance
    slowest = [each for each in writers if at(each) <= current.stream]
    name = " and ".join(slowest) or "the slowest writer"
    return WaitTimeoutError(stream_name, name, wanted.stream, current.stream)
