"""Adapts a homeserver object ``hs`` to the interface :class:`ReplicationHost`.

Theory of operation: the parts of ``hs`` are requested through its public getters. Those
that handle commands are requested on first use, because a homeserver creates its parts
on demand, and some of them need the command handler in turn. Time comes from the host's
clock. Background work runs in the host's background processes, which have log contexts
and metrics, and end when the host shuts down. Rows are parsed by the host's ``Stream``
classes and delivered to its data handler.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from twisted.internet.error import AlreadyCancelled
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from synapse_replication.dropin.background import BackgroundProcessPool
from synapse_replication.dropin.homeserver import Homeserver, HomeserverClock
from synapse_replication.dropin.host_streams import HostStream, HostStreams
from synapse_replication.handlers.interfaces import DelayedCall, Identity, SyncingUser
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.wire import commands

_log = Logger()


class HostClock:
    """The host's clock, as a :class:`Clock`."""

    def __init__(self, clock: HomeserverClock, reactor: IReactorTime) -> None:
        self._clock, self._reactor = clock, reactor
        # Under a simulated reactor, this is the simulated time.
        self.seconds = reactor.seconds
        self.time_msec = clock.time_msec
        self._duration = _duration_type(clock)
        self._has_refused = False

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        """Call ``func(*args)`` after ``delay`` s."""
        try:
            call = self._clock.call_later(self._duration(delay), func, *args)
        except Exception as error:  # noqa: BLE001 -- the call is made nevertheless
            # If the host was shut down, its clock refuses calls, but its reactor still
            # runs. Connections are lost only now, and their hooks must be called.
            self._report_refusal(error)
            return self._reactor.callLater(delay, func, *args)
        return _HostDelayedCall(self._clock, call)

    def _report_refusal(self, error: Exception) -> None:
        """Log the first refusal, unless the host was shut down."""
        # Nothing but the text of the error shows that.
        if not self._has_refused and "shut" not in str(error).lower():
            self._has_refused = True
            _log.failure(
                "The homeserver's clock refuses calls; its reactor makes them instead. "
                "Its interface may have changed: report this version of the homeserver"
            )

    def sleep(self, delay: float) -> Awaitable[None]:
        """Wait ``delay`` s."""
        return self._clock.sleep(self._duration(delay))


def _duration_type(clock: HomeserverClock) -> Callable[[float], object]:
    """Return a function that converts seconds to the time type of the host's clock.

    Older clocks accept a number; newer clocks require a ``Duration``.
    """
    parameters = list(inspect.signature(clock.call_later).parameters.values())
    if "Duration" not in str(parameters[0].annotation):
        return float
    module = importlib.import_module("synapse.util.duration")
    return lambda delay: module.Duration(seconds=delay)


class _HostDelayedCall:
    """A call that is scheduled with the host's clock."""

    def __init__(self, clock: HomeserverClock, call: IDelayedCall) -> None:
        self._clock = clock
        self._call = call

    def cancel(self) -> None:
        # The host cancels all calls when it shuts down, before connections are lost.
        with contextlib.suppress(AlreadyCancelled):
            self._clock.cancel_call_later(self._call)

    def active(self) -> bool:
        return bool(self._call.active())


class HostRows:
    """The host's data handler, as a :class:`RowSink`.

    The host has one token for all writers of a stream, up to which it shows rows to its
    users. The position of one writer may be the id of another writer's row that was not
    delivered yet. The host would regard that id as finished, advance its token past it
    as soon as all lower ids are finished, and never show the row to a user who synced
    before it was delivered. Such a position is therefore held until the row is
    delivered, and dropped if the announcing writer's position changes before that. The
    row is not fetched because of the position: a lower id of its writer may still be in
    flight, and the row of that id would then look old once it is committed.
    """

    def __init__(self, hs: Homeserver, streams: Mapping[str, HostStream]) -> None:
        self._data_handler = hs.get_replication_data_handler()
        self._streams = streams
        #: Held positions, by stream and by the writer that announced the position:
        #: the position, and the writer of the row with that id.
        self._held: defaultdict[str, dict[str, tuple[int, str]]] = defaultdict(dict)

    async def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Deliver the rows of one token."""
        await self._data_handler.on_rdata(stream_name, instance_name, token, rows)
        self._streams[stream_name].advance(instance_name, token, is_position=False)
        if self._held[stream_name]:
            await self._release(stream_name, instance_name)

    async def on_late_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Deliver rows whose token is below the writer's position.

        The host invalidates its caches and wakes waiting requests as for other rows;
        its position does not change.
        """
        await self._data_handler.on_rdata(stream_name, instance_name, token, rows)

    async def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that a writer has no further rows up to ``token``.

        If a stream held in memory was reset, its writer is queried first, although the
        queried range is empty: the host does so, too, to learn that the writer is
        running.
        """
        stream = self._streams[stream_name]
        current = stream.current_token(instance_name)
        if stream.description.held_in_memory and token < current:
            await stream.get_updates_since(instance_name, current, token)
        behind = stream.writers_behind(instance_name, token)
        owner = await self._writer_of(stream, behind, token)
        if owner is None and not stream.is_known_to_host(instance_name, token):
            await self._data_handler.on_position(stream_name, instance_name, token)
        stream.advance(instance_name, token, is_position=True)
        held = self._held[stream_name]
        held.pop(instance_name, None)
        if owner is not None:
            held[instance_name] = token, owner
        await self._release(stream_name, instance_name)

    async def _release(self, stream_name: str, instance_name: str) -> None:
        """Report the positions that were held for rows that are now delivered.

        :param instance_name: the writer of these rows.
        """
        stream = self._streams[stream_name]
        reached = stream.current_token(instance_name)
        held = self._held[stream_name]
        for writer, (token, owner) in list(held.items()):
            if owner == instance_name and token <= reached:
                del held[writer]
                if token == stream.current_token(writer):
                    # Otherwise, a later row of the writer has superseded the position.
                    await self._data_handler.on_position(stream_name, writer, token)

    async def _writer_of(
        self, stream: HostStream, writers: Iterable[str], token: int
    ) -> str | None:
        """Return which of ``writers`` wrote the row of a token.

        :return: ``None`` if none of them did.
        """
        for writer in writers:
            page = await stream.get_updates_since(writer, token - 1, token)
            if page.updates:
                return writer
        return None


class HostCommands:
    """Dispatches commands without rows to the parts of the host.

    The configuration of a process determines which parts it has. A command for a part
    that this process lacks is meant for another process, and is skipped.
    """

    def __init__(self, hs: Homeserver) -> None:
        self._hs = hs
        worker = hs.config.worker
        instance_name = hs.get_instance_name()
        self._is_main = instance_name == MAIN_INSTANCE
        self._runs_background_tasks = bool(worker.run_background_tasks)
        #: Whether USER_IP is needed here: to store it, or to send server notices.
        self.stores_user_ips = self._is_main or self._runs_background_tasks
        self._handlers: dict[type[commands.Command], Callable[[Any], object]] = {
            commands.UserIpCommand: self._on_user_ip,
            commands.RemoteServerUpCommand: self._on_remote_server_up,
            commands.LockReleasedCommand: self._on_lock_released,
        }
        if self._is_main:
            # Only older peers send these two.
            self._handlers[commands.RemovePusherCommand] = self._on_remove_pusher
            self._handlers[commands.InvalidateCacheCommand] = self._on_invalidate_cache
        if instance_name in worker.writers.presence:
            self._handlers[commands.UserSyncCommand] = self._on_user_sync
            self._handlers[commands.ClearUserSyncsCommand] = self._on_clear_user_sync
        if self._is_main and not worker.send_federation:
            self._handlers[commands.FederationAckCommand] = self._on_federation_ack
        if self._runs_background_tasks:
            self._handlers[commands.NewActiveTaskCommand] = self._on_new_active_task
            # Elsewhere, an attempt to cancel a task would interfere with the process
            # that runs it.
            self._handlers[commands.CancelTaskCommand] = self._on_cancel_task

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users who sync with this process."""
        now = self._hs.get_clock().time_msec()
        presence = self._hs.get_presence_handler()
        users = presence.get_currently_syncing_users_for_replication()
        for user_id, device_id in users:
            yield SyncingUser(user_id, device_id, now)

    def on_command(self, command: commands.Command) -> Awaitable[None] | None:
        """Dispatch a command to the part of the host that needs it."""
        handle = self._handlers.get(type(command))
        result = None if handle is None else handle(command)
        return result if inspect.isawaitable(result) else None

    def _on_user_sync(self, command: commands.UserSyncCommand) -> Awaitable[None]:
        return self._hs.get_presence_handler().update_external_syncs_row(
            command.instance_id,
            command.user_id,
            command.device_id,
            command.is_syncing,
            command.last_sync_ms,
        )

    def _on_clear_user_sync(
        self, command: commands.ClearUserSyncsCommand
    ) -> Awaitable[None]:
        presence = self._hs.get_presence_handler()
        return presence.update_external_syncs_clear(command.instance_id)

    def _on_federation_ack(self, command: commands.FederationAckCommand) -> None:
        self._hs.get_federation_sender().federation_ack(
            command.instance_name, command.token
        )

    async def _on_user_ip(self, command: commands.UserIpCommand) -> None:
        """Store the address of a user, if this process runs background tasks.

        The main process also sends the user's pending server notices.
        """
        if self._runs_background_tasks:
            await self._hs.get_datastores().main.insert_client_ip(
                command.user_id,
                command.access_token,
                command.ip,
                command.user_agent,
                command.device_id,
                command.last_seen,
            )
        if self._is_main:
            await self._hs.get_server_notices_sender().on_user_ip(command.user_id)

    def _on_remove_pusher(
        self, command: commands.RemovePusherCommand
    ) -> Awaitable[None]:
        return self._hs.get_pusherpool().remove_pusher(
            command.app_id, command.push_key, command.user_id
        )

    def _on_invalidate_cache(self, command: commands.InvalidateCacheCommand) -> object:
        """Invalidate an entry in all processes, or the whole cache in this one.

        A cache that this version of the host does not have is skipped.
        """
        store = self._hs.get_datastores().main
        cache = getattr(store, command.cache_func, None)
        if cache is None:
            return None
        if command.keys is None:
            return cache.invalidate_all()
        keys = tuple(command.keys)
        return store.invalidate_cache_and_stream(command.cache_func, keys)

    def _on_remote_server_up(self, command: commands.RemoteServerUpCommand) -> None:
        self._hs.get_notifier().notify_remote_server_up(command.data)

    def _on_lock_released(self, command: commands.LockReleasedCommand) -> None:
        self._hs.get_notifier().notify_lock_released(
            command.instance_name, command.lock_name, command.lock_key
        )

    def _on_new_active_task(self, command: commands.NewActiveTaskCommand) -> None:
        self._hs.get_task_scheduler().on_new_task(command.data)

    def _on_cancel_task(self, command: commands.CancelTaskCommand) -> object:
        # Older hosts lack this method.
        cancel = getattr(self._hs.get_task_scheduler(), "on_cancel_task", None)
        return None if cancel is None else cancel(command.data)


class SynapseHost:
    """A :class:`ReplicationHost` on a homeserver object ``hs``.

    :ivar hooks: delivers replication events to subscribed callbacks.
    :ivar processes: the pool of background processes for replication work.
    """

    def __init__(self, hs: Homeserver, hooks: ReplicationHooks) -> None:
        self.hooks = hooks
        self.identity = Identity(
            hs.hostname, hs.get_instance_name(), hs.get_instance_id()
        )
        self.clock = HostClock(hs.get_clock(), hs.get_reactor())
        self.streams = HostStreams(hs)
        self.rows = HostRows(hs, self.streams.get_streams())
        self.commands = HostCommands(hs)
        self.notifier = hs.get_notifier()
        self.stores_user_ips = self.commands.stores_user_ips
        self.processes = BackgroundProcessPool(hs.run_as_background_process)
        self.run_as_background_process = self.processes.start
