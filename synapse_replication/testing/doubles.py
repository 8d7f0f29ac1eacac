"""Doubles of the seams, in memory, on one clock that only a test moves.

Nothing here does anything by itself: time passes when ``host.reactor.advance`` is
called, and a :class:`SourceStream` that is *held* answers when its ``answer`` is
called. So a test decides every order of events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock as TaskClock

from synapse_replication.clock import BackgroundProcesses, ReactorClock
from synapse_replication.errors import LineTooLongError
from synapse_replication.handlers.interfaces import Identity, SyncingUser
from synapse_replication.streams.rows import RowCodec
from synapse_replication.streams.stream import (
    JsonValue,
    Stream,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.testing.recording_observer import RecordingObserver
from synapse_replication.wire.commands.standard import Command
from synapse_replication.wire.rdata import read_lines

if TYPE_CHECKING:
    from synapse_replication.handlers.data import AdvancingStream
    from synapse_replication.handlers.interfaces import (
        ConnectionHandler,
        ReplicationConnection,
        ReplicationHost,
    )

__all__ = [
    "EPOCH_MS",
    "MemoryConnection",
    "MemoryHost",
    "MemoryNotifier",
    "RecordingCommands",
    "RecordingSink",
    "SourceStream",
    "StreamSet",
    "receive_lines",
]

#: The wall-clock time at which every test begins, ms.
EPOCH_MS = 1_700_000_000_000


class MemoryConnection:
    """A connection that records what it is given.

    It is a
    :class:`~synapse_replication.handlers.interfaces.ReplicationConnection`.

    :param max_line_length: longer lines are refused, bytes; ``None`` for no limit.
    :ivar sent: the lines, as text, in order.
    :ivar writes: how many lines each call to ``send_lines`` had.
    :ivar closed_with: the texts given to ``close_with_error``.
    :ivar is_behind: long pages are to wait.
    :ivar broken: if set, what every sending raises.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        relays: bool = False,
        max_line_length: int | None = None,
    ) -> None:
        self.name = name
        self.relays = relays
        self.max_line_length = max_line_length
        self.sent: list[str] = []
        self.writes: list[int] = []
        self.closed_with: list[str] = []
        self.is_behind = False
        self.broken: Exception | None = None

    def send_command(self, command: Command) -> None:
        """Keep one command, as its line."""
        self.send_lines(
            command.NAME, [f"{command.NAME} {command.to_line()}".rstrip().encode()]
        )

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Keep lines, or refuse them all."""
        if self.broken is not None:
            raise self.broken
        longest = max(map(len, lines), default=0)
        if self.max_line_length is not None and longest > self.max_line_length:
            raise LineTooLongError(command_name, longest, self.max_line_length)
        self.writes.append(len(lines))
        self.sent += [line.decode() for line in lines]

    def take(self) -> list[str]:
        """Return the lines that were sent since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def close_with_error(self, text: str) -> None:
        """Keep the text."""
        self.closed_with.append(text)


@attrs.frozen
class _Request:
    instance_name: str
    from_token: int
    upto_token: int
    answered: Deferred[StreamUpdateResult]


class SourceStream:
    """A stream, its writers' positions, and the store that all processes share.

    :param instance_name: this process.
    :param page_rows: rows in a page; a token is never split.
    :ivar is_held: answers wait for :meth:`answer` or :meth:`fail`.
    :ivar is_guess: claim to have rows of ours whether or not we have.
    :ivar requests: (writer, from_token, upto_token) of all that were asked.
    :ivar local_token: what this process may announce; :meth:`persist` moves it.
    :ivar last_token: the last token that exists; ``None`` if any may.
    :ivar plausible_upto: tokens beyond it are not believed before the store was asked.
    """

    def __init__(
        self,
        name: str,
        row_type: type[Any],
        *,
        instance_name: str = "reader",
        page_rows: int = 100,
        idempotent: bool = False,
        resettable: bool = False,
        held_in_memory: bool = False,
        announce_own_moves_only: bool = False,
    ) -> None:
        self.description = StreamDescription(
            name,
            RowCodec(name, row_type),
            idempotent,
            resettable,
            held_in_memory,
            announce_own_moves_only,
        )
        self.instance_name = instance_name
        self.page_rows = page_rows
        self.is_held = False
        self.is_guess = True
        self.requests: list[tuple[str, int, int]] = []
        self.local_token = 0
        self.last_token: int | None = None
        self.plausible_upto = 100_000
        self._positions: dict[str, int] = {}
        self._rows: dict[str, list[tuple[int, JsonValue]]] = {}
        self._waiting: list[_Request] = []

    # -- a Stream ---------------------------------------------------------------------

    def current_token(self, instance_name: str) -> int:
        """Return the position of a writer."""
        return self._positions.get(instance_name, 0)

    def minimal_local_current_token(self) -> int:
        """Return the position up to which this process has written."""
        return self.local_token

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether this process wrote rows in ``(from_token, upto_token]``."""
        return self.is_guess or any(
            from_token < token <= upto_token
            for token, _ in self._rows.get(self.instance_name, ())
        )

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a token is at most ``plausible_upto``."""
        return token <= self.plausible_upto

    def advance(self, instance_name: str, token: int) -> None:
        """Take a position, also an earlier one."""
        self._positions[instance_name] = token

    def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> Deferred[StreamUpdateResult]:
        """Return the rows of a writer in ``(from_token, upto_token]``."""
        self.requests.append((instance_name, from_token, upto_token))
        request = _Request(instance_name, from_token, upto_token, Deferred())
        self._waiting.append(request)
        if not self.is_held:
            self.answer()
        return request.answered

    # -- for the test -----------------------------------------------------------------

    def persist(self, instance_name: str, token: int, *rows: JsonValue) -> None:
        """Commit rows of a writer under one token."""
        stored = self._rows.setdefault(instance_name, [])
        stored += [(token, row) for row in rows]
        stored.sort(key=lambda update: update[0])
        if instance_name == self.instance_name:
            self.local_token = max(self.local_token, token)

    def forget(self, instance_name: str) -> None:
        """Lose a writer's rows: its process starts again."""
        self._rows.pop(instance_name, None)

    @property
    def waiting(self) -> int:
        """How many requests are not answered."""
        return len(self._waiting)

    def answer(self) -> None:
        """Answer the oldest request with what the store holds now."""
        request = self._waiting.pop(0)
        page: list[tuple[int, JsonValue]] = []
        upto, last = request.upto_token, None
        if self.last_token is not None and self.last_token < upto:
            upto = last = self.last_token
        for token, row in self._rows.get(request.instance_name, ()):
            if not request.from_token < token <= upto:
                continue
            if len(page) >= self.page_rows and token != page[-1][0]:
                result = StreamUpdateResult(page, page[-1][0], True, last)
                break
            page.append((token, row))
        else:
            result = StreamUpdateResult(page, upto, False, last)
        request.answered.callback(result)

    def answer_with(self, result: StreamUpdateResult) -> None:
        """Answer the oldest request with anything."""
        self._waiting.pop(0).answered.callback(result)

    def fail(self, error: Exception) -> None:
        """Fail the oldest request."""
        self._waiting.pop(0).answered.errback(error)


class RecordingSink:
    """A row sink that keeps rows and moves the streams on.

    :ivar rows: (stream, writer, token, rows) in order of arrival.
    :ivar positions: (stream, writer, token) in order of arrival.
    :ivar epochs: those that were saved, by (stream, writer).
    :ivar begun: (stream, writer, epoch, where the stream stood), in order of arrival.
    :ivar failures: errors to raise, one for each call from now on; ``None`` for a
        call that works.
    :ivar is_held: calls wait for :meth:`release`.
    """

    def __init__(self, streams: Mapping[str, SourceStream]) -> None:
        self._streams = streams
        self.rows: list[tuple[str, str, int, list[Any]]] = []
        self.positions: list[tuple[str, str, int]] = []
        self.epochs: dict[tuple[str, str], str] = {}
        self.begun: list[tuple[str, str, str, int]] = []
        self.failures: list[Exception | None] = []
        self.is_held = False
        self._held: list[tuple[Deferred[None], Callable[[], None]]] = []

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Record or deliver rows of a stream."""

        def take() -> None:
            self.rows.append((stream_name, instance_name, token, rows))
            stream = self._streams[stream_name]
            if token > stream.current_token(instance_name):
                stream.advance(instance_name, token)

        return self._do(take)

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        """Record the position of a writer."""

        def take() -> None:
            self.positions.append((stream_name, instance_name, token))
            self._streams[stream_name].advance(instance_name, token)

        return self._do(take)

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the epochs by stream and writer."""
        return self.epochs

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Awaitable[None] | None:
        """Record that a stream of a writer began anew."""

        def take() -> None:
            token = self._streams[stream_name].current_token(instance_name)
            self.begun.append((stream_name, instance_name, epoch, token))
            self.epochs[stream_name, instance_name] = epoch

        return self._do(take)

    def tokens(self, instance_name: str, stream_name: str | None = None) -> list[int]:
        """Return the tokens of a writer's rows, in order of arrival."""
        return [
            token
            for stream, writer, token, _ in self.rows
            if writer == instance_name and stream_name in (None, stream)
        ]

    @property
    def holds(self) -> int:
        """How many calls wait for :meth:`release`."""
        return len(self._held)

    def release(self, error: Exception | None = None) -> None:
        """Let the oldest held call end, or fail."""
        done, take = self._held.pop(0)
        if error is not None:
            done.errback(error)
            return
        take()
        done.callback(None)

    def _do(self, take: Callable[[], None]) -> Deferred[None] | None:
        error = self.failures.pop(0) if self.failures else None
        if error is not None:
            raise error
        if self.is_held:
            done: Deferred[None] = Deferred()
            self._held.append((done, take))
            return done
        take()
        return None


class RecordingCommands:
    """A command sink that keeps the calls.

    :ivar calls: (method, arguments...) in order.
    :ivar answer: what every call returns.
    :ivar error: what every call raises, if set.
    :ivar syncing: the users who sync with this process.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Awaitable[None] | None = None
        self.error: Exception | None = None
        self.syncing: list[SyncingUser] = []

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users to announce on a new connection."""
        return self.syncing

    def on_user_sync(
        self,
        instance_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int,
    ) -> Awaitable[None] | None:
        """Record that a user began, continued or ceased to sync."""
        return self._call(
            "on_user_sync", instance_id, user_id, device_id, is_syncing, last_sync_ms
        )

    def on_clear_user_sync(self, instance_id: str) -> Awaitable[None] | None:
        """Forget all users that sync with a process."""
        return self._call("on_clear_user_sync", instance_id)

    def on_federation_ack(
        self, instance_name: str | None, token: int
    ) -> Awaitable[None] | None:
        """Record up to which id the federation sender has sent."""
        return self._call("on_federation_ack", instance_name, token)

    def on_user_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        last_seen_ms: int,
    ) -> Awaitable[None] | None:
        """Record from where a user was last seen, in ms since the epoch."""
        return self._call(
            "on_user_ip", user_id, access_token, ip, user_agent, device_id, last_seen_ms
        )

    def on_remote_server_up(self, server: str) -> Awaitable[None] | None:
        """Retry a remote server, which is reachable again."""
        return self._call("on_remote_server_up", server)

    def on_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> Awaitable[None] | None:
        """Wake up whoever waits for a lock."""
        return self._call("on_lock_released", instance_name, lock_name, lock_key)

    def on_new_active_task(self, task_id: str) -> Awaitable[None] | None:
        """Launch a scheduled task."""
        return self._call("on_new_active_task", task_id)

    def on_cancel_task(self, task_id: str) -> Awaitable[None] | None:
        """Cancel a scheduled task."""
        return self._call("on_cancel_task", task_id)

    def on_remove_pusher(
        self, app_id: str, push_key: str, user_id: str
    ) -> Awaitable[None] | None:
        """Delete a pusher of a user."""
        return self._call("on_remove_pusher", app_id, push_key, user_id)

    def on_invalidate_cache(
        self, cache_func: str, keys: list[Any] | None
    ) -> Awaitable[None] | None:
        """Invalidate an entry of a cache; all of its entries without keys."""
        return self._call("on_invalidate_cache", cache_func, keys)

    def _call(self, *call: Any) -> Awaitable[None] | None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return self.answer


class MemoryNotifier:
    """A notifier that the test rings."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add_replication_callback(self, callback: Callable[[], None]) -> None:
        """Call a function after each write."""
        self._callbacks.append(callback)

    def notify(self) -> None:
        """Say that something was written."""
        for callback in self._callbacks:
            callback()


@attrs.frozen
class StreamSet:
    """A stream directory: all streams, and the names of those that we write."""

    streams: Mapping[str, SourceStream]
    written: Sequence[str] = ()

    def get_streams(self) -> Mapping[str, Stream]:
        """Return all streams by name."""
        return self.streams

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        """Return the streams that this process writes."""
        return [self.streams[name] for name in self.written]


class MemoryHost:
    """A host whose time is :attr:`reactor`.

    It is a :class:`~synapse_replication.handlers.interfaces.ReplicationHost`.

    :param written: the names of the streams that this process writes.
    :ivar observer: hears of the failures of background processes too.
    """

    def __init__(
        self,
        *streams: SourceStream,
        written: Sequence[str] = (),
        instance_name: str = "reader",
        stores_user_ips: bool = False,
    ) -> None:
        self.reactor = TaskClock()
        self.observer = RecordingObserver()
        self.identity = Identity("hs.example", instance_name, f"{instance_name}-id")
        self.clock = ReactorClock(
            self.reactor, lambda: EPOCH_MS / 1000 + self.reactor.seconds()
        )
        by_name = {stream.description.name: stream for stream in streams}
        self.streams = StreamSet(by_name, written)
        self.rows = RecordingSink(by_name)
        self.commands = RecordingCommands()
        self.notifier = MemoryNotifier()
        self.run_as_background_process = BackgroundProcesses(self.observer)
        self.stores_user_ips = stores_user_ips


def receive_lines(
    handler: ConnectionHandler, connection: MemoryConnection, *lines: str
) -> None:
    """Deliver lines to a handler at once, through the parser of the real links."""
    handler.received(connection, read_lines([line.encode() for line in lines]))


if TYPE_CHECKING:
    _host: type[ReplicationHost] = MemoryHost
    _connection: type[ReplicationConnection] = MemoryConnection
    _stream: type[AdvancingStream] = SourceStream
