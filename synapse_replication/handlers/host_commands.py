"""Commands for the host: all except those about rows, positions and the connection.

Theory of operation: a command is delivered to the host's
:class:`~synapse_replication.handlers.interfaces.CommandSink`. The following are not
delivered: repeats of USER_SYNC; copies of REMOTE_SERVER_UP and LOCK_RELEASED that
arrive on another link; USER_SYNC, CLEAR_USER_SYNC and LOCK_RELEASED that this process
sent itself; and USER_IP if the host does not store client IPs. REMOTE_SERVER_UP and
LOCK_RELEASED are also relayed to other peers over direct TCP.

A background process is started only if the host returns an awaitable for a command.

See docs/failure-modes.rst: failure-echoed-command, failure-no-flapping.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs

from synapse_replication.handlers.events import BackgroundTask, Discarded, DiscardReason
from synapse_replication.handlers.interfaces import (
    ReplicationConnection,
    ReplicationHost,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.redaction import without_secrets
from synapse_replication.handlers.sending.command_sender import CommandSender
from synapse_replication.recent import GroupedRecentDict, RecentDict
from synapse_replication.streams.stream import AcknowledgedStream
from synapse_replication.wire import commands

#: The time for which the same command on another link is a copy, in s.
COPY_WINDOW: Final = 2.0
#: The largest number of commands whose origin is stored.
MAX_ORIGINS: Final = 1000

#: The time after which the same state of a user is delivered again, in s.
REFRESH_AFTER: Final = 10.0
#: A sync time that is later by less than this, in ms, counts as unchanged.
RESOLUTION_MS: Final = 1000
#: The largest number of (instance, user, device) triples that are stored.
MAX_SYNCS: Final = 10_000


class CopyFilter:
    """Filter that stores the origin of each command that is relayed.

    Over direct TCP, a broadcast command (REMOTE_SERVER_UP, LOCK_RELEASED) reaches an
    instance over several links: two instances may be connected in both directions, and
    instances relay commands. A process that speaks the extension relays it to all
    peers, with the names of the instances to which it was sent; it is never sent to one
    of them again, so it cannot circulate. A plain line does not carry these names; it
    is relayed only from one client of this process to the others.

    A command has no id, so a copy is identified by its link: a link transmits each
    event only once. The link on which a command was last received as a new event is its
    *origin*. If the same command arrives on another link within :data:`COPY_WINDOW` of
    that event, it is a copy. Otherwise it is a new event, for instance the release of a
    lock that was acquired again.

    Bounds: at most :data:`MAX_ORIGINS` commands are stored. To make room, the command
    that has not been a new event for the longest time is evicted; at worst, a copy of
    it is then delivered.
    """

    def __init__(self) -> None:
        self._origins: RecentDict[
            commands.Command, tuple[ReplicationConnection, float]
        ] = RecentDict(MAX_ORIGINS)

    def check_and_record(
        self, command: commands.Command, connection: ReplicationConnection, now: float
    ) -> bool:
        """Return whether a command is a copy; if not, store the link as its origin.

        :param now: the time of the host's clock, in s.
        """
        origin = self._origins.get(command)
        if (
            origin is not None
            and origin[0] is not connection
            and now - origin[1] < COPY_WINDOW
        ):
            return True
        self._origins[command] = (connection, now)
        return False

    def forget(self, connection: ReplicationConnection) -> None:
        """Remove the commands whose origin is a lost link.

        If such a command arrives on another link, it is then a new event.
        """
        for command in [
            command
            for command, (origin, _) in self._origins.items()
            if origin is connection
        ]:
            del self._origins[command]


@attrs.define
class _LastSync:
    is_syncing: bool
    last_sync_ms: int
    delivered_at: float


class UserSyncDeduplicator:
    """The last USER_SYNC for each user, by instance and device, to suppress repeats.

    In a presence storm, or when an instance reconnects and reports all its syncing
    users, the same USER_SYNC arrives many times, and each time the host may compute and
    publish a user's presence. The last delivered command for each (instance, user,
    device) is stored. The next command is a repeat if its state is the same, it arrives
    within :data:`REFRESH_AFTER` after that delivery, and its sync time is earlier, or
    less than :data:`RESOLUTION_MS` later.

    Suppression is safe: a start after an end, or an end after a start, is never a
    repeat, so the host always knows which users sync. For a user who continues to sync,
    repeats are suppressed for at most 10 s, and a host times users out only much later.
    The stored commands of an instance are removed when its CLEAR_USER_SYNC arrives, and
    a command is removed if the host failed to handle it.

    Bounds: at most :data:`MAX_SYNCS` commands are stored. The one that was delivered
    the longest time ago is evicted first; its next repeat is delivered.
    """

    def __init__(self) -> None:
        self._last_syncs: GroupedRecentDict[_LastSync] = GroupedRecentDict(MAX_SYNCS)

    def is_repeat(self, command: commands.UserSyncCommand, now: float) -> bool:
        """Return whether a command is a repeat; if not, store it.

        :param now: the time of the host's clock, in s.
        """
        key = command.instance_id, command.user_id, command.device_id
        last = self._last_syncs.get(key)
        if (
            last is not None
            and last.is_syncing is command.is_syncing
            and command.last_sync_ms - last.last_sync_ms < RESOLUTION_MS
            and now - last.delivered_at < REFRESH_AFTER
        ):
            return True
        self._last_syncs[key] = _LastSync(command.is_syncing, command.last_sync_ms, now)
        return False

    def forget(self, command: commands.UserSyncCommand) -> None:
        """Remove a command, because the host failed to handle it."""
        key = command.instance_id, command.user_id, command.device_id
        if key in self._last_syncs:
            del self._last_syncs[key]

    def forget_process(self, instance_id: str) -> None:
        """Remove all commands of an instance: no user syncs with it any more."""
        self._last_syncs.remove_group(instance_id)


def _always(command: commands.Command) -> bool:
    return True


@attrs.define(eq=False, repr=False, slots=False)
class HostCommandDispatcher:
    """Delivers received commands to the host, and relays some of them.

    Use it in the reactor's thread only.
    """

    _host: ReplicationHost
    _observer: ReplicationObserver
    _sender: CommandSender

    def __attrs_post_init__(self) -> None:
        self._syncs = UserSyncDeduplicator()
        self._relayed = CopyFilter()
        self._delivered = CopyFilter()
        #: The commands for the host: whether a command must be delivered.
        self._filters: dict[type[commands.Command], Callable[[Any], bool]] = {
            commands.UserSyncCommand: self._is_news,
            commands.ClearUserSyncsCommand: self._clears_another,
            commands.FederationAckCommand: self._acknowledge,
            commands.UserIpCommand: _always,
            commands.RemoteServerUpCommand: _always,
            commands.LockReleasedCommand: self._is_lock_of_another,
            commands.NewActiveTaskCommand: _always,
            commands.CancelTaskCommand: _always,
            commands.RemovePusherCommand: _always,
            commands.InvalidateCacheCommand: _always,
        }

    def dispatch(
        self,
        connection: ReplicationConnection,
        command: commands.Command,
        reached: frozenset[str] | None = None,
    ) -> None:
        """Deliver a command to the host, if the host needs it.

        :param reached: the instances to which the command was already sent; ``None`` if
            it arrived as a plain line.
        """
        if command.NAME in commands.RELAYED:
            self._relay(connection, command, reached)
        is_wanted = self._filters.get(type(command))
        if is_wanted is None:
            return
        try:
            if (
                isinstance(command, commands.UserIpCommand)
                and not self._host.stores_user_ips
            ):
                self._discard_user_ip(connection, command)
                return
            if not is_wanted(command) or self._is_copy(connection, command):
                return
            waiting = self._host.commands.on_command(command)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._report_failure(f"handling {command.NAME}", command, error)
            return
        if waiting is not None:
            description = f"replication_{command.NAME}"
            self._host.run_as_background_process(
                description, lambda: self._wait(description, command, waiting)
            )

    async def _wait(
        self, description: str, command: commands.Command, waiting: Awaitable[None]
    ) -> None:
        with self._observer.span(BackgroundTask(description)):
            try:
                await waiting
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self._report_failure(description, command, error)

    def _report_failure(
        self, what: str, command: commands.Command, error: Exception
    ) -> None:
        if isinstance(command, commands.UserSyncCommand):
            self._syncs.forget(command)
        self._observer.failure(what, without_secrets(error, command))

    def forget_copies(self, connection: ReplicationConnection) -> None:
        """Forget the commands that arrived on a lost connection."""
        self._relayed.forget(connection)
        self._delivered.forget(connection)

    def _is_news(self, command: commands.UserSyncCommand) -> bool:
        if command.instance_id == self._host.identity.instance_id:
            return False
        if self._syncs.is_repeat(command, self._host.clock.seconds()):
            self._discard(command, DiscardReason.REPEATED)
            return False
        return True

    def _clears_another(self, command: commands.ClearUserSyncsCommand) -> bool:
        if command.instance_id == self._host.identity.instance_id:
            return False
        self._syncs.forget_process(command.instance_id)
        return True

    def _acknowledge(self, command: commands.FederationAckCommand) -> bool:
        stream: object = self._host.streams.get_streams().get("federation")
        if isinstance(stream, AcknowledgedStream):
            stream.acknowledge(command.instance_name, command.token)
        return True

    def _relay(
        self,
        connection: ReplicationConnection,
        command: commands.Command,
        reached: frozenset[str] | None,
    ) -> None:
        """Relay a command to other peers, unless it is a copy.

        A plain line that arrived on a link that this process opened is not relayed: in
        a mesh, it would circulate for ever.
        """
        if len(self._sender.links) < 2 or (reached is None and not connection.relays):
            return
        now = self._host.clock.seconds()
        if not self._relayed.check_and_record(command, connection, now):
            self._sender.relay(command, connection, reached or frozenset())

    def _is_lock_of_another(self, command: commands.LockReleasedCommand) -> bool:
        return command.instance_name != self._host.identity.instance_name

    def _is_copy(
        self, connection: ReplicationConnection, command: commands.Command
    ) -> bool:
        if command.NAME not in commands.RELAYED or len(self._sender.links) < 2:
            # No copy can arrive on another link.
            return False
        now = self._host.clock.seconds()
        is_copy = self._delivered.check_and_record(command, connection, now)
        if is_copy:
            self._discard(command, DiscardReason.REPEATED)
        return is_copy

    def _discard_user_ip(
        self, connection: ReplicationConnection, command: commands.UserIpCommand
    ) -> None:
        """Discard a client IP that this process does not store.

        It is not relayed: without the names of those that have it, it could circulate.
        A peer that connected here has no other link to the process that stores it.
        """
        lost_by = connection.name if connection.relays else ""
        reason = DiscardReason.NOT_RESPONSIBLE
        self._observer.observe(Discarded(command.NAME, "", reason, 1, lost_by))

    def _discard(self, command: commands.Command, reason: DiscardReason) -> None:
        self._observer.observe(Discarded(command.NAME, "", reason, 1))
