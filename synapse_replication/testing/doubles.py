"""In-memory doubles of the interfaces, on one clock that the test advances.

Nothing here happens by itself: time passes only when the test calls
``host.reactor.advance``. A :class:`SourceStream` or :class:`RecordingSink` that is
*held* responds only when the test calls one of its methods (``answer``, ``release``,
...). The test therefore determines the order of all events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock as TaskClock
from typing_extensions import override

from synapse_replication.errors import LineTooLongError
from synapse_replication.handlers.data_handler import AdvancingStream
from synapse_replication.handlers.events import Event, OperationFailed
from synapse_replication.handlers.host_parts import (
    BackgroundProcesses,
    ReactorClock,
    StreamTable,
    WriteNotifier,
)
from synapse_replication.handlers.interfaces import (
    ConnectionHandler,
    Identity,
    SyncingUser,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.streams.rows import AttrsRowCodec
from synapse_replication.streams.stream import (
    JsonValue,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.wire.commands import Command
from synapse_replication.wire.rdata import read_lines

#: The wall-clock time of a new :class:`MemoryHost`, in ms since 1970.
EPOCH_MS = 1_700_000_000_000


@attrs.define(eq=False, repr=False, slots=False)
class MemoryConnection:
    """A connection that records sent lines.

    It implements
    :class:`~synapse_replication.handlers.interfaces.ReplicationConnection`.

    :param max_line_length: the length in bytes above which lines are rejected;
        ``None`` for no limit.
    :ivar sent: the lines since the last :meth:`take`, as text, in order.
    :ivar writes: the number of lines of each successful call of ``send_lines``.
    :ivar closed_with: the arguments of the calls of ``close_with_error``.
    :ivar is_behind: whether the connection claims to be behind, so that pages of rows
        must wait. Set by the test.
    :ivar broken: if set, the exception that every send raises.
    """

    name: str = "memory"
    relays: bool = attrs.field(default=False, kw_only=True)
    max_line_length: int | None = attrs.field(default=None, kw_only=True)
    sent: list[str] = attrs.field(factory=list, init=False)
    writes: list[int] = attrs.field(factory=list, init=False)
    closed_with: list[str] = attrs.field(factory=list, init=False)
    is_behind: bool = attrs.field(default=False, init=False)
    broken: Exception | None = attrs.field(default=None, init=False)

    def send_command(self, command: Command) -> None:
        """Record the line of a command."""
        self.send_lines(
            command.NAME, [f"{command.NAME} {command.to_line()}".rstrip().encode()]
        )

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Record lines, or reject all of them.

        :raises LineTooLongError: if a line is too long.
        """
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
        """Record the text."""
        self.closed_with.append(text)


@attrs.frozen
class _PageRequest:
    instance_name: str
    from_token: int
    upto_token: int
    answered: Deferred[StreamUpdateResult]


class SourceStream:
    """A stream, and the committed rows of all its writers, in memory.

    :param instance_name: the name of this process.
    :param page_rows: the number of rows after which a page ends. A page may contain
        more, because the rows of one token are never split.
    :ivar is_held: whether answers wait for :meth:`answer`, :meth:`answer_with` or
        :meth:`fail`.
    :ivar is_guess: whether :meth:`has_local_updates` always returns true.
    :ivar requests: (writer, from_token, upto_token) of each request.
    :ivar local_token: the position that this process may announce; :meth:`persist`
        advances it for rows of this process.
    :ivar last_token: the last token that exists; ``None`` if there is no limit.
    :ivar plausible_upto: the greatest token that :meth:`is_plausible` accepts.
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
            AttrsRowCodec(name, row_type),
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
        self._waiting: list[_PageRequest] = []

    # -- a Stream ---------------------------------------------------------------------

    def current_token(self, instance_name: str) -> int:
        """Return the position up to which a writer's rows were delivered."""
        return self._positions.get(instance_name, 0)

    def minimal_local_current_token(self) -> int:
        """Return the position up to which this process has written."""
        return self.local_token

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        """Return whether this process wrote rows in ``(from_token, upto_token]``.

        If ``is_guess`` is set, return true, even if there are no such rows.
        """
        return self.is_guess or any(
            from_token < token <= upto_token
            for token, _ in self._rows.get(self.instance_name, ())
        )

    def is_plausible(self, instance_name: str, token: int) -> bool:
        """Return whether a token is at most ``plausible_upto``."""
        return token <= self.plausible_upto

    def advance(self, instance_name: str, token: int) -> None:
        """Set a writer's position, which may be lower than before."""
        self._positions[instance_name] = token

    def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> Deferred[StreamUpdateResult]:
        """Request a page of a writer's rows in ``(from_token, upto_token]``."""
        self.requests.append((instance_name, from_token, upto_token))
        request = _PageRequest(instance_name, from_token, upto_token, Deferred())
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
        """Remove a writer's rows, as its restart does for a stream held in memory."""
        self._rows.pop(instance_name, None)

    @property
    def waiting(self) -> int:
        """The number of unanswered requests."""
        return len(self._waiting)

    def answer(self) -> None:
        """Answer the oldest request with one page of the rows that exist now."""
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
        """Answer the oldest request with ``result``."""
        self._waiting.pop(0).answered.callback(result)

    def fail(self, error: Exception) -> None:
        """Fail the oldest request."""
        self._waiting.pop(0).answered.errback(error)


class RecordingSink:
    """A row sink that records rows and advances the streams.

    :ivar rows: (stream, writer, token, rows) in order of arrival.
    :ivar positions: (stream, writer, token) in order of arrival.
    :ivar epochs: the saved epochs, by (stream, writer).
    :ivar begun: (stream, writer, epoch, position) of each successful call of
        :meth:`on_epoch`; the position is that of the writer in the stream when the call
        completed.
    :ivar failures: the exceptions that the next calls of ``on_rdata``, ``on_position``
        and ``on_epoch`` raise, in order; ``None`` for a call without an exception.
    :ivar is_held: whether calls wait for :meth:`release`.
    """

    def __init__(self, streams: Mapping[str, AdvancingStream]) -> None:
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
        """Record rows, and advance the writer's position unless it would decrease."""

        def apply() -> None:
            self.rows.append((stream_name, instance_name, token, rows))
            stream = self._streams[stream_name]
            if token > stream.current_token(instance_name):
                stream.advance(instance_name, token)

        return self._do(apply)

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        """Record a writer's position, and set it in the stream, even if it is lower."""

        def apply() -> None:
            self.positions.append((stream_name, instance_name, token))
            self._streams[stream_name].advance(instance_name, token)

        return self._do(apply)

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the epochs by stream and writer."""
        return self.epochs

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Awaitable[None] | None:
        """Record a new epoch of a writer's stream."""

        def apply() -> None:
            token = self._streams[stream_name].current_token(instance_name)
            self.begun.append((stream_name, instance_name, epoch, token))
            self.epochs[stream_name, instance_name] = epoch

        return self._do(apply)

    def tokens(self, instance_name: str, stream_name: str | None = None) -> list[int]:
        """Return the tokens of a writer's rows, in order of arrival."""
        return [
            token
            for stream, writer, token, _ in self.rows
            if writer == instance_name and stream_name in (None, stream)
        ]

    @property
    def holds(self) -> int:
        """The number of calls that wait for :meth:`release`."""
        return len(self._held)

    def release(self, error: Exception | None = None) -> None:
        """Complete the oldest held call, or fail it with ``error``."""
        done, apply = self._held.pop(0)
        if error is not None:
            done.errback(error)
            return
        apply()
        done.callback(None)

    def _do(self, apply: Callable[[], None]) -> Deferred[None] | None:
        error = self.failures.pop(0) if self.failures else None
        if error is not None:
            raise error
        if self.is_held:
            done: Deferred[None] = Deferred()
            self._held.append((done, apply))
            return done
        apply()
        return None


class RecordingCommands:
    """A command sink that only records the commands that it receives.

    :ivar received: the commands, in order.
    :ivar answer: the return value of :meth:`on_command`.
    :ivar error: the exception that :meth:`on_command` raises, if set.
    :ivar syncing: the users who sync with this process.
    """

    def __init__(self) -> None:
        self.received: list[Command] = []
        self.answer: Awaitable[None] | None = None
        self.error: Exception | None = None
        self.syncing: list[SyncingUser] = []

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users to report on a new link."""
        return self.syncing

    def on_command(self, command: Command) -> Awaitable[None] | None:
        """Record a command."""
        self.received.append(command)
        if self.error is not None:
            raise self.error
        return self.answer


class EventRecorder(ReplicationObserver):
    """An observer that records events.

    :ivar events: the events, in order; see :mod:`synapse_replication.handlers.events`.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def failures(self) -> list[tuple[str, BaseException]]:
        """The description and the error of each reported failure."""
        return [
            (event.what, event.error)
            for event in self.events
            if isinstance(event, OperationFailed)
        ]

    @override
    def observe(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)


class MemoryHost:
    """A host without I/O, whose time is that of :attr:`reactor`.

    It implements :class:`~synapse_replication.handlers.interfaces.ReplicationHost`.

    :param written: the names of the streams that this process writes.
    :param observer: receives the events, including the failures of background tasks; an
        :class:`EventRecorder` by default.
    :ivar reactor: the clock that the test advances.
    """

    def __init__(
        self,
        *streams: SourceStream,
        written: Sequence[str] = (),
        instance_name: str = "reader",
        stores_user_ips: bool = False,
        observer: ReplicationObserver | None = None,
    ) -> None:
        self.reactor = TaskClock()
        self.observer = observer or EventRecorder()
        self.identity = Identity("hs.example", instance_name, f"{instance_name}-id")
        self.clock = ReactorClock(
            self.reactor, lambda: EPOCH_MS / 1000 + self.reactor.seconds()
        )
        self.streams = StreamTable()
        for stream in streams:
            is_written_here = stream.description.name in written
            self.streams.add(stream, is_written_here=is_written_here)
        self.rows = RecordingSink(self.streams.get_streams())
        self.commands = RecordingCommands()
        self.notifier = WriteNotifier()
        self.run_as_background_process = BackgroundProcesses(self.observer)
        self.stores_user_ips = stores_user_ips


def receive_lines(
    handler: ConnectionHandler, connection: MemoryConnection, *lines: str
) -> None:
    """Parse lines as one chunk, as links do, and pass the items to a handler."""
    handler.received(connection, read_lines([line.encode() for line in lines]))
