"""The interfaces of hosts, connections and connection handlers, and their values.

A host is any object with the attributes of :class:`ReplicationHost`; inheritance is not
needed. ``app/host.py`` implements a stand-alone host, and ``dropin/`` implements a host
for Synapse. All methods are called in the reactor's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from synapse_replication.streams.stream import Stream
from synapse_replication.wire.commands import Command
from synapse_replication.wire.rdata import ReceivedItem


@attrs.frozen
class Identity:
    """The names of this process.

    :ivar server_name: the homeserver's name; also the name of the Redis channel.
    :ivar instance_name: the configured name of this instance, ``master`` for the main
        process. It identifies writers.
    :ivar instance_id: a random id, chosen at each start.
    """

    server_name: str
    instance_name: str
    instance_id: str


@attrs.frozen
class SyncingUser:
    """A user who is syncing with this process.

    :ivar device_id: ``None`` if it is unknown.
    :ivar last_sync_ms: when the user last synced, in ms since 1970.
    """

    user_id: str
    device_id: str | None
    last_sync_ms: int


class DelayedCall(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the call. Raises if it was already made or cancelled."""

    def active(self) -> bool:
        """Return whether the call is still pending."""


class Clock(Protocol):
    """The host's clock, from which handlers and links read the time."""

    def seconds(self) -> float:
        """Return the time in s, for measuring intervals.

        It may jump when the system clock is set, as a reactor's time does.
        """

    def time_msec(self) -> int:
        """Return wall-clock time in ms since 1970."""

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        """Call ``func(*args)`` after ``delay`` s."""

    def sleep(self, delay: float) -> Awaitable[None]:
        """Wait for ``delay`` s; a delay of 0 yields to other reactor events."""


class BackgroundRunner(Protocol):
    """Function that starts a background task.

    The host provides the environment of its own background tasks (a log context,
    metrics). A task runs synchronously until it first has to wait. The host logs the
    failure of a task.
    """

    def __call__(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Awaitable[Any]:
        """Start ``func`` and return an awaitable that never fails.

        The caller need not await it.
        """


class StreamDirectory(Protocol):
    """The streams that this process follows, and those that it writes."""

    def get_streams(self) -> Mapping[str, Stream]:
        """Return every stream that this process follows, by its name on the wire."""

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        """Return the streams that this process writes, in the order of sending."""


class RowSink(Protocol):
    """The part of a host that receives rows.

    Arguments are passed by position, so that a sink names its parameters as it likes.
    """

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any], /
    ) -> Awaitable[None] | None:
        """Handle the rows of one token, in order.

        Return an awaitable only if there is something to wait for; the stream's next
        token is delivered after it has fired. A sink that blocks, for instance to write
        to a disk, returns the Deferred of ``deferToThread()``: during a catch-up, many
        tokens are delivered in one turn of the reactor. By then, or when ``None`` is
        returned, ``Stream.current_token(instance_name)`` must be at or above ``token``.
        If the awaitable or this call fails, the failure is reported, and the writer's
        rows from this token on are fetched again.
        """

    def on_position(
        self, stream_name: str, instance_name: str, token: int, /
    ) -> Awaitable[None] | None:
        """Record that a writer has no further rows at or below ``token``.

        If the stream was reset, or if an earlier position proved false, ``token`` is
        lower than the writer's current token.
        """


@runtime_checkable
class PositionSink(Protocol):
    """Additional interface of a row sink that persists positions."""

    def saved_positions(self) -> Mapping[tuple[str, str], int]:
        """Return the saved token of each ``(stream, writer)``. Called at startup.

        Rows above it are fetched. A writer that is not in the result begins at the
        present, or at the beginning of the stream if ``fill_sink`` is set.
        """


@runtime_checkable
class EpochSink(Protocol):
    """Additional interface of a row sink that persists positions.

    When a writer restarts, the rows that it held in memory are lost and its tokens
    start from the beginning, so saved tokens of a stream held in memory become
    meaningless. A sink that saves these tokens therefore also saves the writer's
    *epoch* to which they belong. If the writer's current epoch differs from the saved
    epoch, or no epoch was saved, all rows are fetched from the writer again. Only the
    epochs of writers that speak the extension are known.
    """

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the epoch of each ``(stream, writer)``. Called at startup."""

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str, /
    ) -> Awaitable[None] | None:
        """Record that the following rows belong to this epoch and start after token 0.

        Save the epoch and the position 0 atomically. This method is called rarely, only
        for streams that are held in memory, and in order with the rows. If it fails,
        the failure is reported and the call is repeated later.
        """


@runtime_checkable
class LateRowSink(Protocol):
    """Additional interface of a row sink that accepts rows which are late.

    A writer without this package may commit a row and never announce it. If such a row
    is found below rows that were delivered, it is passed to this method. A sink without
    it never receives the row; the observer is notified in any case.

    A late row may be delivered twice, so handling it again must have no further effect:
    if it arrives after all, and no row with a greater token was delivered,
    ``on_position`` is called with a lower token, then ``on_rdata`` with this row. A row
    that was found shortly before the process stops may not be delivered.
    """

    def on_late_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any], /
    ) -> Awaitable[None] | None:
        """Handle rows whose token is below the writer's position."""


@runtime_checkable
class DamageSink(Protocol):
    """Additional interface of a row sink that checks the rows which it has stored.

    :ivar damage: which rows are damaged, and what to do; empty if none are. The status
        page shows it as a problem. It is read once, when the process starts.
    """

    damage: str


@runtime_checkable
class ClosableSink(Protocol):
    """Additional interface of a row sink or command sink that holds resources."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources. Called once, after everything received was handled."""


class CommandSink(Protocol):
    """The part of a host that receives commands without rows."""

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users syncing with this process, to be sent on a new link."""

    def on_command(self, command: Command, /) -> Awaitable[None] | None:
        """Handle a command, or return ``None`` if the host does not need it.

        A :class:`UserSyncCommand` is a repeat if it has the same state as the last
        delivered command with the same instance, user and device, and a sync time less
        than 1 s later. Repeats are delivered at most once in 10 s. They may be
        delivered more often if there are more than 10,000 combinations of instance,
        user and device.

        :return: an awaitable only if there is something to wait for.
        """


class Notifier(Protocol):
    """Notifier of this process's writes."""

    def add_replication_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each write of this process.

        The callback is cheap, defers its work, and may be called arbitrarily often.
        """


class ReplicationHost(Protocol):
    """The attributes of a host that replication needs."""

    @property
    def identity(self) -> Identity:
        """The names of this process."""

    @property
    def clock(self) -> Clock:
        """The host's clock."""

    @property
    def streams(self) -> StreamDirectory:
        """The streams that this process follows, and those that it writes."""

    @property
    def rows(self) -> RowSink:
        """The sink for rows."""

    @property
    def commands(self) -> CommandSink:
        """The sink for commands without rows."""

    @property
    def notifier(self) -> Notifier:
        """The notifier of this process's writes."""

    @property
    def run_as_background_process(self) -> BackgroundRunner:
        """The function that starts background tasks."""

    @property
    def stores_user_ips(self) -> bool:
        """Whether this process needs USER_IP, for instance to store client IPs.

        If so, it subscribes to the Redis channel of this command.
        """


class ReplicationConnection(Protocol):
    """A link to one or more peers: a TCP connection, or Redis.

    :ivar name: label for logs and metrics, for instance ``redis`` or the peer's NAME.
        It must have few distinct values, so it must not contain random ids.
    :ivar relays: ``True`` at the server's end of a direct TCP connection. The client at
        the other end requests positions itself, and its broadcast commands
        (REMOTE_SERVER_UP, LOCK_RELEASED) are relayed, once, to the *other* connections
        of this kind. ``False`` at the client's end, and over Redis, which delivers
        commands to all instances.
    """

    name: str
    relays: bool

    def send_command(self, command: Command) -> None:
        """Send one command.

        :raises LineTooLongError: if the command's line is too long; nothing is sent
            then.
        :raises LocalProtocolError: if a field cannot be represented in a line.
        """

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Send encoded lines of one command, in order.

        :param lines: without their line ends.
        :raises LineTooLongError: if a line is too long; no line is sent then.
        :raises LocalProtocolError: if a line contains a newline; no line is sent then.
            A link over Redis does not check this.
        """

    def close_with_error(self, text: str) -> None:
        """Send ERROR to the peer, then close the connection. Safe at any time.

        The connection calls ``lost_connection`` later, never during this call. Over
        Redis, this method does nothing, because many peers share the link.
        """

    @property
    def is_behind(self) -> bool:
        """Whether Redis is slow to acknowledge lines, so that pages of rows must wait.

        When it becomes false, :meth:`ConnectionHandler.ready_again` is called. On a
        direct TCP connection it is always false, because a slow peer must not delay the
        others.
        """


@attrs.frozen(eq=False)
class Link:
    """A connection, from ``new_connection`` to ``lost_connection``.

    A connection that is established again is another link.
    """

    connection: ReplicationConnection


class ExtensionConnection(ReplicationConnection, Protocol):
    """A link on which extension messages can be sent.

    :ivar is_direct: whether the link is a direct TCP connection to one peer.
    :ivar has_own_channel: whether messages for this instance alone arrive on the link.
    """

    is_direct: bool
    has_own_channel: bool

    def send_extension(self, payloads: Sequence[bytes], to: str = "") -> None:
        """Send messages, in order with the rows and commands on the link.

        :param to: the only instance that receives them; empty for all. A direct link
            has only one peer.

        The messages are dropped if the link currently cannot send. Never raises.
        """


class ConnectionHandler(Protocol):
    """Receiver of a connection's events and items, such as the command handler."""

    def new_connection(self, connection: ReplicationConnection) -> None:
        """Record that the link is up.

        The client's end of a direct TCP connection calls this method when it has
        received SERVER, the server's end when it has received NAME. Over Redis, it is
        called when Redis has confirmed the subscription.
        """

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        """Handle rows and commands, in the order of ``items``."""

    def ready_again(self, connection: ReplicationConnection) -> None:
        """Resume sending: the link is no longer behind; see ``is_behind``."""

    def lost_connection(self, connection: ReplicationConnection) -> None:
        """Record that the link is down. Called once, after :meth:`new_connection`."""
