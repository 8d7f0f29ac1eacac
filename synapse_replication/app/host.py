"""A host for people who have no homeserver, and the shortest example of one.

Spec, sections 1, 5 and 6; docs/plugging-in.rst.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from synapse_replication.clock import BackgroundProcesses, ReactorClock
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import StreamConfigurationError
from synapse_replication.handlers.data import (
    AdvancingStream,
    ReplicationDataHandler,
)
from synapse_replication.handlers.interfaces import Identity, RowSink, SyncingUser
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.streams.stream import Stream, UpdateFunction

__all__ = [
    "PositionsOnlySink",
    "StandaloneHost",
    "StreamTable",
    "SyncingUsers",
    "WriteNotifier",
]


class WriteNotifier:
    """Tells whoever listens that something was written."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add_replication_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after each write of this process."""
        self._callbacks.append(callback)

    def notify(self) -> None:
        """Tell that something was written."""
        for callback in self._callbacks:
            callback()


class StreamTable:
    """The streams of this process, in the order in which they were added."""

    def __init__(self) -> None:
        self._streams: dict[str, AdvancingStream] = {}
        self._written: list[Stream] = []

    def add(self, stream: AdvancingStream, *, is_written_here: bool) -> None:
        """Add a stream. Only before replication starts.

        :raises StreamConfigurationError: there is one of its name.
        """
        name = stream.description.name
        if name in self._streams:
            raise StreamConfigurationError(
                f"stream {name} is declared twice; give one of them another name"
            )
        self._streams[name] = stream
        if is_written_here:
            self._written.append(stream)

    def get_streams(self) -> Mapping[str, AdvancingStream]:
        """Give every stream, by its name on the wire."""
        return self._streams

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        """Give those that this process writes."""
        return self._written


class PositionsOnlySink:
    """A row sink that wants no rows: the streams' positions are kept, that is all."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Do nothing with rows."""

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Do nothing with a position."""


class SyncingUsers:
    """Who is syncing with which process, as the others tell.

    Other commands without rows are passed over: a stand-alone process has no
    caches, pushers or clients. Subclass it to do something with them.

    :param max_users: pairs of user and device at most; past it, those that were
        seen longest ago are forgotten.
    """

    def __init__(self, max_users: int = 100_000) -> None:
        self._max_users = max_users
        # (instance_id, user_id, device_id) -> last_sync_ms, oldest news first.
        self._users: dict[tuple[str, str, str | None], int] = {}

    def syncing_users(self) -> Mapping[tuple[str, str, str | None], int]:
        """Give ``(instance_id, user_id, device_id) -> last_sync_ms``."""
        return dict(self._users)

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Give nobody: clients do not sync with a stand-alone process."""
        return ()

    def on_user_sync(
        self,
        instance_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int,
    ) -> None:
        """Note that a user began, goes on, or ceased to sync with a process."""
        key = (instance_id, user_id, device_id)
        self._users.pop(key, None)
        if not is_syncing:
            return
        self._users[key] = last_sync_ms
        if len(self._users) > self._max_users:
            del self._users[next(iter(self._users))]

    def on_clear_user_sync(self, instance_id: str) -> None:
        """Forget the users of a process."""
        for key in [key for key in self._users if key[0] == instance_id]:
            del self._users[key]

    def on_federation_ack(self, instance_name: str | None, token: int) -> None:
        """Do nothing."""

    def on_user_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        last_seen_ms: int,
    ) -> None:
        """Do nothing."""

    def on_remote_server_up(self, server: str) -> None:
        """Do nothing."""

    def on_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> None:
        """Do nothing."""

    def on_new_active_task(self, task_id: str) -> None:
        """Do nothing."""

    def on_cancel_task(self, task_id: str) -> None:
        """Do nothing."""

    def on_remove_pusher(self, app_id: str, push_key: str, user_id: str) -> None:
        """Do nothing."""

    def on_invalidate_cache(self, cache_func: str, keys: list[Any] | None) -> None:
        """Do nothing."""


@attrs.define(eq=False)
class StandaloneHost:
    """A :class:`~synapse_replication.handlers.interfaces.ReplicationHost`.

    ``rows`` is set once there is a sink, which may want the host; code that is
    plugged in by ``modules`` finds it set.

    :ivar observer: told of everything.
    :ivar hooks: lets code subscribe to what happens; set by the process.
    :ivar fetch_from_writer: makes, of the name of a stream held in memory, what
        asks its writers for rows over HTTP, with retries. For the code that is
        plugged in by ``modules``, too, and set as ``rows`` is.
    """

    identity: Identity
    clock: ReactorClock
    observer: ReplicationObserver
    run_as_background_process: BackgroundProcesses
    stores_user_ips: bool
    streams: StreamTable = attrs.field(factory=StreamTable)
    commands: SyncingUsers = attrs.field(factory=SyncingUsers)
    notifier: WriteNotifier = attrs.field(factory=WriteNotifier)
    rows: ReplicationDataHandler = attrs.field(init=False)
    hooks: ReplicationHooks = attrs.field(init=False)
    fetch_from_writer: Callable[[str], UpdateFunction] = attrs.field(init=False)

    @classmethod
    def from_config(
        cls, config: ProcessConfig, clock: ReactorClock, observer: ReplicationObserver
    ) -> StandaloneHost:
        """Make the host of a process, as yet without streams and sink."""
        return cls(
            Identity(
                config.server_name, config.instance_name, secrets.token_urlsafe(12)
            ),
            clock,
            observer,
            BackgroundProcesses(observer),
            config.stores_user_ips,
        )

    def set_sink(self, sink: RowSink) -> None:
        """Say where received rows go."""
        self.rows = ReplicationDataHandler(self.streams.get_streams(), sink, self.clock)

    def row_to_json(self, stream_name: str, row: Any) -> Any:
        """Give the JSON value of a typed row."""
        stream = self.streams.get_streams()[stream_name]
        return stream.description.codec.to_json(row)
