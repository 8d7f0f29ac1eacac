"""Adapts a homeserver object ``hs`` to the interface :class:`ReplicationHost`.

Theory of operation: the parts of ``hs`` are requested through its public getters. Those
that handle commands are requested on first use, because a homeserver creates its parts
on demand, and some of them need the command handler in turn. Time comes from the host's
clock. Background work runs in the host's background processes, which have log contexts
and metrics, and end when the host shuts down. Rows are parsed by the host's ``Stream``
classes and delivered to its data handler.

The host is untyped here, because its packages might not be installed.
"""

from __future__ import annotations

import importlib
import inspect
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any

from synapse_replication.dropin.background import BackgroundProcessPool
from synapse_replication.dropin.streams import HostStream, HostStreams
from synapse_replication.errors import RowDecodeError
from synapse_replication.handlers.interfaces import (
    Clock,
    DelayedCall,
    Identity,
    SyncingUser,
)
from synapse_replication.handlers.receiving.silent_moves import SilentMoves
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.streams.standard.registry import MAIN_INSTANCE

__all__ = ["HostClock", "HostCommands", "HostRows", "SynapseHost"]


class HostClock:
    """The host's clock, as a :class:`Clock`."""

    def __init__(self, clock: Any, reactor: Any) -> None:
        self._clock = clock
        # Under a simulated reactor, this is the simulated time.
        self.seconds: Callable[[], float] = reactor.seconds
        self.time_msec: Callable[[], int] = clock.time_msec
        self._duration = _duration_type(clock)

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        """Call ``func(*args)`` after ``delay`` s."""
        return _HostDelayedCall(
            self._clock, self._clock.call_later(self._duration(delay), func, *args)
        )

    def sleep(self, delay: float) -> Awaitable[None]:
        """Wait ``delay`` s."""
        sleeping: Awaitable[None] = self._clock.sleep(self._duration(delay))
        return sleeping


def _duration_type(clock: Any) -> Callable[[float], Any]:
    """Return a function that converts seconds to the time type of the host's clock.

    Older clocks accept a number; newer clocks require a ``Duration``.
    """
    parameters = list(inspect.signature(clock.call_later).parameters.values())
    if "Duration" not in str(parameters[0].annotation):
        return float
    duration: type[timedelta] = importlib.import_module(
        "synapse.util.duration"
    ).Duration
    return lambda delay: duration(seconds=delay)


class _HostDelayedCall:
    """A call that is scheduled with the host's clock."""

    def __init__(self, clock: Any, call: Any) -> None:
        self._clock = clock
        self._call = call

    def cancel(self) -> None:
        self._clock.cancel_call_later(self._call)

    def active(self) -> bool:
        return bool(self._call.active())


class HostRows:
    """The host's data handler, as a :class:`RowSink`.

    The host tracks the token up to which it shows rows to its users. The position of
    one writer can advance that token past a row of another writer that this process has
    not received. A user who syncs before the row is delivered would never be shown the
    row. Therefore rows of other writers at or below a position are fetched and
    delivered before the position.

    A position may also be the id of another writer's row that cannot be delivered yet,
    because a lower id is in flight. The host would regard the row's id as finished, and
    advance its token past the row as soon as the lower id is finished, too. Such a
    position is held until the row is delivered, and dropped if the announcing writer's
    position changes before that.

    :param clock: measures how long ago a position advanced without rows. For a limited
        time, such a position is suspected of being false, that is, of hiding rows.
    """

    def __init__(self, hs: Any, streams: HostStreams, clock: Clock) -> None:
        self._data_handler = hs.get_replication_data_handler()
        self._streams = streams.get_streams()
        self._clock = clock
        self._silent = {name: SilentMoves() for name in self._streams}
        #: Held positions, by stream and by the writer that announced the position:
        #: the position, and the writer of the row with that id.
        self._held: dict[str, dict[str, tuple[int, str]]] = {}
        #: By (stream, writer): the last token that was fetched and delivered because
        #: of a position of another writer.
        self._fetched: dict[tuple[str, str], int] = {}

    async def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Deliver the rows of one token.

        They are ignored if :meth:`on_position` has already fetched and delivered them.
        """
        if token <= self._fetched.get((stream_name, instance_name), 0):
            return
        await self._data_handler.on_rdata(stream_name, instance_name, token, rows)
        if not self._streams[stream_name].advance(
            instance_name, token, is_position=False
        ):
            self._silent[stream_name].delivered(instance_name, token)
        if stream_name in self._held:
            await self._release(stream_name, instance_name)

    async def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that a writer has no further rows up to ``token``.

        Rows of other writers up to ``token`` are delivered first. If a stream held in
        memory was reset, its writer is queried first, although the queried range is
        empty: the host does so, too, to learn that the writer is running.
        """
        stream = self._streams[stream_name]
        current = stream.current_token(instance_name)
        if stream.description.held_in_memory and token < current:
            await stream.get_updates_since(instance_name, current, token)
        else:
            # Do not rewind below the rows that were delivered ahead of a position.
            token = max(token, self._fetched.get((stream_name, instance_name), token))
        owner = None
        behind = stream.writers_behind(instance_name, token)
        if behind and not await self._deliver_revealed(
            stream, behind, instance_name, token
        ):
            owner = await self._writer_of(stream, behind, token)
        if owner is None and not stream.is_known_to_host(instance_name, token):
            await self._data_handler.on_position(stream_name, instance_name, token)
        stream.advance(instance_name, token, is_position=True)
        self._remember(stream_name, instance_name, current, token, owner)
        if stream_name in self._held:
            await self._release(stream_name, instance_name)

    def _remember(
        self,
        stream_name: str,
        instance_name: str,
        current: int,
        token: int,
        owner: str | None,
    ) -> None:
        silent = self._silent[stream_name]
        if token > current:
            silent.moved(instance_name, current, token, self._clock.seconds())
        elif token < current:
            silent.forget(instance_name)
        held = self._held.setdefault(stream_name, {})
        held.pop(instance_name, None)
        if owner is not None:
            held[instance_name] = token, owner
        if not held:
            del self._held[stream_name]

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
        if not held:
            self._held.pop(stream_name, None)

    async def _writer_of(
        self, stream: HostStream, writers: list[str], token: int
    ) -> str | None:
        """Return which of ``writers`` wrote the row of a token.

        :return: ``None`` if none of them did, or if the row was already delivered.
        """
        for writer in writers:
            if stream.current_token(writer) < token:
                page = await stream.get_updates_since(writer, token - 1, token)
                if page.updates:
                    return writer
        return None

    async def _deliver_revealed(
        self, stream: HostStream, behind: list[str], instance_name: str, token: int
    ) -> bool:
        """Fetch and deliver the rows of other writers at or below a position.

        Rows above an id that may be in flight are not delivered: once committed, the
        row of that id would look like a late row.

        :param behind: the writers whose rows are delivered. The other writers' rows are
            fetched only to learn which ids are committed.
        :param instance_name: the writer that announced ``token``.
        :return: whether all rows up to ``token`` are delivered.
        """
        name = stream.description.name
        upto = stream.seen_by_all(instance_name, token)
        cursors = dict.fromkeys(stream.writers(), upto)
        for writer in behind:
            # Also deliver rows that a false position of this writer may have hidden: a
            # row beyond the false position would otherwise seem to confirm it.
            cursors[writer] = self._silent[name].start_of(
                writer, stream.current_token(writer)
            )
        end = 0
        while end < token or upto < end:
            # Each delivery may have advanced the token that all writers have reached.
            seen = max(upto, stream.seen_by_all(instance_name, token))
            if end and upto < end and seen == upto:
                # The id after ``upto`` may be in flight.
                return False
            upto, end, ends = seen, token, {}
            found: list[tuple[int, str, list[Any]]] = []
            committed = set()
            for writer, cursor in cursors.items():
                if cursor >= token:
                    continue
                page = await stream.get_updates_since(writer, cursor, token)
                ends[writer] = page.upto_token if page.limited else token
                end = min(end, ends[writer])
                for id_, pairs in groupby(page.updates, key=itemgetter(0)):
                    committed.add(id_)
                    if writer in behind:
                        found.append((id_, writer, [value for _, value in pairs]))
            found.sort(key=itemgetter(0))
            while upto < end and (upto + 1 == token or upto + 1 in committed):
                upto += 1
            # Rows beyond the end of the shortest page are fetched again in the next
            # iteration.
            for writer, page_end in ends.items():
                cursors[writer] = max(cursors[writer], min(page_end, end, upto))
            visible = bisect_right(found, min(upto, end), key=itemgetter(0))
            if not await self._deliver_fetched(stream, found[:visible]):
                return False
        return True

    async def _deliver_fetched(
        self, stream: HostStream, found: Iterable[tuple[int, str, list[Any]]]
    ) -> bool:
        """Deliver rows that were fetched; return whether all could be decoded.

        :param found: triples of a token, its writer and its rows as JSON values.
        """
        name, codec = stream.description.name, stream.description.codec
        for token, writer, values in found:
            try:
                rows = [codec.from_json(value) for value in values]
            except RowDecodeError:
                # The catch-up of this writer will report and skip the invalid row.
                return False
            await self.on_rdata(name, writer, token, rows)
            self._fetched[name, writer] = token
        return True


class HostCommands:
    """Dispatches commands without rows to the parts of the host.

    The configuration of a process determines which parts it has. A command for a part
    that this process lacks is meant for another process, and is skipped.
    """

    def __init__(self, hs: Any) -> None:
        self._hs = hs
        worker = hs.config.worker
        instance_name = hs.get_instance_name()
        self._is_main = instance_name == MAIN_INSTANCE
        self._writes_presence = instance_name in worker.writers.presence
        self._runs_background_tasks = bool(worker.run_background_tasks)
        self._queues_federation = self._is_main and not worker.send_federation

    @property
    def stores_user_ips(self) -> bool:
        """Whether USER_IP is needed here: to store it, or to send server notices."""
        return self._is_main or self._runs_background_tasks

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users who sync with this process."""
        now = self._hs.get_clock().time_msec()
        presence = self._hs.get_presence_handler()
        for (
            user_id,
            device_id,
        ) in presence.get_currently_syncing_users_for_replication():
            yield SyncingUser(user_id, device_id, now)

    def on_user_sync(
        self,
        instance_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int,
    ) -> Awaitable[None] | None:
        """Record that a user started, continued or stopped syncing."""
        if not self._writes_presence:
            return None
        updating: Awaitable[None] = (
            self._hs.get_presence_handler().update_external_syncs_row(
                instance_id, user_id, device_id, is_syncing, last_sync_ms
            )
        )
        return updating

    def on_clear_user_sync(self, instance_id: str) -> Awaitable[None] | None:
        """Forget all users that sync with a process."""
        if not self._writes_presence:
            return None
        clearing: Awaitable[None] = (
            self._hs.get_presence_handler().update_external_syncs_clear(instance_id)
        )
        return clearing

    def on_federation_ack(self, instance_name: str | None, token: int) -> None:
        """Record the token up to which a federation sender has sent."""
        if self._queues_federation:
            self._hs.get_federation_sender().federation_ack(instance_name, token)

    async def on_user_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        last_seen_ms: int,
    ) -> None:
        """Record the address of a user, if this process runs background tasks.

        The main process also sends the user's pending server notices.

        :param last_seen_ms: in ms since 1970.
        """
        if self._runs_background_tasks:
            await self._hs.get_datastores().main.insert_client_ip(
                user_id, access_token, ip, user_agent, device_id, last_seen_ms
            )
        if self._is_main:
            await self._hs.get_server_notices_sender().on_user_ip(user_id)

    def on_remote_server_up(self, server: str) -> None:
        """Retry a remote server that is reachable again."""
        self._hs.get_notifier().notify_remote_server_up(server)

    def on_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> None:
        """Notify the waiters of a lock."""
        self._hs.get_notifier().notify_lock_released(instance_name, lock_name, lock_key)

    def on_new_active_task(self, task_id: str) -> None:
        """Launch a scheduled task."""
        if self._runs_background_tasks:
            self._hs.get_task_scheduler().on_new_task(task_id)

    def on_cancel_task(self, task_id: str) -> Awaitable[None] | None:
        """Cancel a scheduled task."""
        # If this process runs no tasks, an attempt to cancel one would interfere with
        # the process that runs it.
        if not self._runs_background_tasks:
            return None
        # Older hosts lack this method.
        cancel = getattr(self._hs.get_task_scheduler(), "on_cancel_task", None)
        return None if cancel is None else _awaitable(cancel(task_id))

    def on_remove_pusher(self, app_id: str, push_key: str, user_id: str) -> None:
        """Ignore the command: only older peers send it."""

    def on_invalidate_cache(self, cache_func: str, keys: list[Any] | None) -> None:
        """Ignore the command: only older peers send it."""


def _awaitable(result: Any) -> Awaitable[None] | None:
    return result if inspect.isawaitable(result) else None


class SynapseHost:
    """A :class:`ReplicationHost` on a homeserver object ``hs``.

    :ivar hooks: delivers replication events to subscribed callbacks.
    :ivar processes: the pool of background processes for replication work.
    """

    def __init__(self, hs: Any, hooks: ReplicationHooks) -> None:
        self.hooks = hooks
        self.identity = Identity(
            hs.hostname, hs.get_instance_name(), hs.get_instance_id()
        )
        self.clock = HostClock(hs.get_clock(), hs.get_reactor())
        self.streams = HostStreams(hs)
        self.rows = HostRows(hs, self.streams, self.clock)
        self.commands = HostCommands(hs)
        self.notifier = hs.get_notifier()
        self.stores_user_ips = self.commands.stores_user_ips
        self.processes = BackgroundProcessPool(hs.run_as_background_process)

    def run_as_background_process(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Awaitable[None]:
        """Run ``func`` in a background process of the host; see ``background.py``."""
        return self.processes.start(description, func)
