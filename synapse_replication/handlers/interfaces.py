"""The seams: what a host homeserver must offer, and what a connection offers.

A host is anything that has the attributes of :class:`ReplicationHost`; nothing
is inherited. ``app/host.py`` implements it for people who have no homeserver,
``dropin/`` for Synapse. Everything here is called in the reactor's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from synapse_replication.streams.stream import Stream
from synapse_replication.wire.commands.standard import Command
from synapse_replication.wire.rdata import ReceivedItem

__all__ = [
    "BackgroundRunner",
    "Clock",
    "CommandSink",
    "ConnectionHandler",
    "DelayedCall",
    "EpochSink",
    "Identity",
    "Notifier",
    "ReplicationConnection",
    "ReplicationHost",
    "RowSink",
    "StreamDirectory",
    "SyncingUser",
]


@attrs.frozen
class Identity:
    """Who this process is.

    :ivar server_name: the homeserver's name; also the name of the Redis channel.
    :ivar instance_name: this process's name among the homeserver's, ``master``
        for the main one. Writers are known by it.
    :ivar instance_id: random, made anew at each start.
    """

    server_name: str
    instance_name: str
    instance_id: str


class DelayedCall(Protocol):
    """A call that was asked for and may be taken back."""

    def cancel(self) -> None:
        """Take it back. An error once it was made."""
        ...

    def active(self) -> bool:
        """Return whether it is still to be made."""
        ...


class Clock(Protocol):
    """Time, as the host has it. No code of ours asks anything else for the time."""

    def seconds(self) -> float:
        """Monotonic time in s."""
        ...

    def time_msec(self) -> int:
        """Wall-clock time in ms since the epoch."""
        ...

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        """Call ``func(*args)`` after ``delay`` s."""
        ...

    def sleep(self, delay: float) -> Awaitable[None]:
        """Wait ``delay`` s; 0 lets the reactor do what else is ready."""
        ...


class BackgroundRunner(Protocol):
    """Starts work that nobody waits for.

    The host gives it what its own background work has (a log context, metrics).
    It runs synchronously up to the first thing that it waits for. Its failures
    are logged by the host; ours end none.
    """

    def __call__(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Awaitable[Any]:
        """Start ``func``; what is returned may be waited for, and never fails."""
        ...


class StreamDirectory(Protocol):
    """Which streams there are, and which of them this process writes."""

    def get_streams(self) -> Mapping[str, Stream]:
        """Return every stream that this process follows, by its name on the wire."""
        ...

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        """Return those that this process writes, in the order of sending."""
        ...


class RowSink(Protocol):
    """Where received rows go."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        """Take the rows of one token, in order.

        Returns an awaitable only if there is something to wait for; the next
        token of the stream is delivered when it is done. When it is done,
        ``Stream.current_token(instance_name)`` is at or above ``token``. If it
        fails, the failure is reported, and the writer's rows are fetched again.
        """
        ...

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        """Record that a writer has nothing more up to ``token``.

        The token may be lower than the current one for a stream that was reset.
        """
        ...


@runtime_checkable
class EpochSink(Protocol):
    """What a row sink offers besides, if it saves positions over a restart.

    What a writer held in memory is gone when it starts again, and its tokens begin
    anew: what was saved of it then says nothing. So a sink that saves the tokens of
    such a stream saves which start of the writer, its *epoch*, they are of. If the
    epoch is another one after a restart, or was not saved, all is fetched from the
    writer again. Only a writer that speaks the extension tells its epoch.
    """

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the epoch of each ``(stream, writer)``. Asked for at the start."""
        ...

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Awaitable[None] | None:
        """Record that what comes next is of this epoch, and begins after token 0.

        To be saved in one step: the epoch, and 0 as the token that was reached.
        Told of streams held in memory alone, seldom, and in order with the rows. If
        it fails, the failure is reported, and it is told again later.
        """
        ...


@attrs.frozen
class SyncingUser:
    """A user who is syncing with this process.

    :ivar device_id: ``None`` if not known.
    :ivar last_sync_ms: when the user was last seen here, ms since the epoch.
    """

    user_id: str
    device_id: str | None
    last_sync_ms: int


class CommandSink(Protocol):
    """What a host does with the commands that carry no rows.

    Each returns an awaitable only if there is something to wait for. A method
    that the host has no use for returns ``None``.
    """

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users to announce on a new connection (workers only)."""
        ...

    def on_user_sync(
        self,
        instance_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int,
    ) -> Awaitable[None] | None:
        """Record that a user began, goes on or ceased to sync with a process.

        What says nothing new is told once in 10 s at most.
        """
        ...

    def on_clear_user_sync(self, instance_id: str) -> Awaitable[None] | None:
        """Forget all users that sync with a process."""
        ...

    def on_federation_ack(
        self, instance_name: str | None, token: int
    ) -> Awaitable[None] | None:
        """Record up to which id the federation sender has sent."""
        ...

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
        ...

    def on_remote_server_up(self, server: str) -> Awaitable[None] | None:
        """Retry a remote server, which is reachable again."""
        ...

    def on_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> Awaitable[None] | None:
        """Wake up whoever waits for a lock."""
        ...

    def on_new_active_task(self, task_id: str) -> Awaitable[None] | None:
        """Launch a scheduled task."""
        ...

    def on_cancel_task(self, task_id: str) -> Awaitable[None] | None:
        """Cancel a scheduled task."""
        ...

    def on_remove_pusher(
        self, app_id: str, push_key: str, user_id: str
    ) -> Awaitable[None] | None:
        """Delete a pusher of a user."""
        ...

    def on_invalidate_cache(
        self, cache_func: str, keys: list[Any] | None
    ) -> Awaitable[None] | None:
        """Invalidate an entry of a cache; all of its entries without keys."""
        ...


class Notifier(Protocol):
    """Tells us that something was written."""

    def add_replication_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after each write of this process.

        It is cheap, does its work later, and may be called at any rate.
        """
        ...


class ReplicationHost(Protocol):
    """All that a homeserver offers to replication. Plain attributes will do."""

    @property
    def identity(self) -> Identity:
        """Who this process is."""
        ...

    @property
    def clock(self) -> Clock:
        """What time it is."""
        ...

    @property
    def streams(self) -> StreamDirectory:
        """Which streams there are, and which of them this process writes."""
        ...

    @property
    def rows(self) -> RowSink:
        """Where received rows go."""
        ...

    @property
    def commands(self) -> CommandSink:
        """Where the commands that carry no rows go."""
        ...

    @property
    def notifier(self) -> Notifier:
        """What tells us that something was written."""
        ...

    @property
    def run_as_background_process(self) -> BackgroundRunner:
        """What starts work that nobody waits for."""
        ...

    @property
    def stores_user_ips(self) -> bool:
        """Whether this process stores client IPs.

        If so, it subscribes to USER_IP, which has a Redis channel of its own.
        """
        ...


class ReplicationConnection(Protocol):
    """A link to one or more peers: a TCP connection, or Redis.

    :ivar name: for logs and metrics, for instance ``redis`` or the peer's NAME.
        Bounded: no random ids.
    :ivar relays: a peer connected to us over direct TCP. It asks for our
        positions when it wants them, and what it tells everybody
        (REMOTE_SERVER_UP, LOCK_RELEASED) is relayed, once, to our *other*
        connections of this kind.
        ``False`` where we connected, and over Redis, which tells everybody.
    """

    name: str
    relays: bool

    def send_command(self, command: Command) -> None:
        """Send one command.

        :raises LineTooLongError: if its line is too long for the peer; nothing was
            sent.
        """
        ...

    def send_lines(self, command_name: str, lines: Sequence[bytes]) -> None:
        """Send lines that are encoded already, all of one command, in order.

        :param lines: without their ends.
        :raises LineTooLongError: if one is too long; none was sent.
        """
        ...

    def close_with_error(self, text: str) -> None:
        """Tell the peer that it did wrong, then close. Safe at any time.

        On Redis, where the peers behind it are many, nothing is sent or closed.
        ``lost_connection`` follows later, never from inside this call.
        """
        ...

    @property
    def is_behind(self) -> bool:
        """Much of what was sent has not been taken: long pages of rows had better wait.

        Never because of a single peer, which must not hold up the others. When it is
        over, the handler's :meth:`ConnectionHandler.ready_again` is called.
        """
        ...


class ConnectionHandler(Protocol):
    """What a connection tells of itself; the command handler is one."""

    def new_connection(self, connection: ReplicationConnection) -> None:
        """Record that the link is up (SERVER seen, or the subscription confirmed)."""
        ...

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        """Rows and commands arrived, in this order."""
        ...

    def ready_again(self, connection: ReplicationConnection) -> None:
        """Record that the link is not behind any more; see ``is_behind``."""
        ...

    def lost_connection(self, connection: ReplicationConnection) -> None:
        """Record that the link is gone; only after :meth:`new_connection`, and once."""
        ...
