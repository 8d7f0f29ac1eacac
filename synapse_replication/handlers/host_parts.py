"""Ready-made parts of a host.

A homeserver usually has its own clock, background tasks, notifier and table of streams;
other hosts can use these classes. Use them in the reactor's thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.handlers.data_handler import AdvancingStream
from synapse_replication.handlers.interfaces import SyncingUser
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.recent import GroupedRecentDict, RecentDict
from synapse_replication.streams.stream import Stream
from synapse_replication.streams.table import to_names
from synapse_replication.wire import commands

#: The default limit of stored users; each counts once per device and instance.
MAX_USERS = 100_000
#: The time without USER_SYNC after which an instance's users are removed, in s.
USERS_EXPIRE_AFTER = 300.0


@attrs.define(eq=False, repr=False, slots=False)
class ReactorClock:
    """The :class:`~synapse_replication.handlers.interfaces.Clock` of a reactor.

    :param wall_clock: returns the time in s since the Unix epoch.
    """

    _reactor: IReactorTime
    _wall_clock: Callable[[], float] = time.time

    def seconds(self) -> float:
        """Return the reactor's time in s.

        Unless ``run_service`` runs the reactor, it jumps when the system clock is set.
        """
        return float(self._reactor.seconds())

    def time_msec(self) -> int:
        """Return the wall-clock time in ms since the Unix epoch."""
        return int(self._wall_clock() * 1000)

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> IDelayedCall:
        """Call ``func(*args)`` after ``delay`` s."""
        return self._reactor.callLater(delay, func, *args)

    def sleep(self, delay: float) -> Deferred[None]:
        """Return a Deferred that fires after ``delay`` s.

        With 0 it fires in the reactor's next iteration.
        """
        return deferLater(self._reactor, delay)


async def _await_call(func: Callable[[], Awaitable[Any]]) -> None:
    await func()


class BackgroundProcesses:
    """Runs background tasks, and can wait for those that are running.

    :param observer: notified of each task that fails.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        self._observer = observer
        self._running: set[Deferred[None]] = set()

    def __call__(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Deferred[None]:
        """Start ``func``.

        :return: a Deferred that fires when the awaitable of ``func`` has finished. If
            ``func`` or its awaitable fails, the observer is notified, and the Deferred
            fires with ``None``.
        """
        process = Deferred.fromCoroutine(_await_call(func))
        if process.called and not isinstance(process.result, Failure):
            # The task ended synchronously, as most tasks that handle received rows do.
            return process

        def failed(failure: Failure) -> None:
            assert failure.value is not None
            self._observer.failure(description, failure.value)

        def ended(_: object) -> None:
            self._running.discard(process)

        self._running.add(process)
        return process.addErrback(failed).addBoth(ended)

    @property
    def count(self) -> int:
        """The number of running tasks."""
        return len(self._running)

    def wait(self) -> Deferred[None]:
        """Return a Deferred that fires when the tasks that run now have ended.

        Cancelling it cancels the tasks; it succeeds when they have ended.
        """
        return DeferredList(list(self._running)).addCallback(lambda _: None)


class WriteNotifier:
    """Notifier that calls the registered functions after each write."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add_replication_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each write of this process."""
        self._callbacks.append(callback)

    def notify(self) -> None:
        """Call the registered functions, because this process has written rows."""
        for callback in self._callbacks:
            callback()


class StreamTable:
    """The streams of this process, in the order in which they were added.

    :ivar writers: the declared writers of streams, by the stream's name.
    """

    def __init__(self) -> None:
        self._streams: dict[str, AdvancingStream] = {}
        self._written: list[Stream] = []
        self.writers: dict[str, Sequence[str]] = {}

    def add(
        self,
        stream: AdvancingStream,
        *,
        is_written_here: bool,
        writers: str | Sequence[str] = (),
    ) -> None:
        """Add a stream. Call it in the reactor's thread, before replication starts.

        :param is_written_here: whether this process writes the stream.
        :param writers: the name or names of the instances that may write it. Rows of
            others are discarded, and a writer that is absent is shown as stalled. By
            default, every instance may write it; or, if the options declare the stream,
            its writers there.
        :raises StreamConfigurationError: if a stream of that name exists.
        """
        name = stream.description.name
        if name in self._streams:
            raise StreamConfigurationError(
                f"stream {name} is declared twice; rename or remove one of the two"
            )
        self._streams[name] = stream
        if writers:
            self.writers[name] = to_names(writers)
        if is_written_here:
            self._written.append(stream)

    def get_streams(self) -> Mapping[str, AdvancingStream]:
        """Return every stream, by its name on the wire."""
        return self._streams

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        """Return the streams that this process writes."""
        return self._written


class SyncingUsers:
    """A command sink that stores the users syncing with each instance.

    It handles USER_SYNC and CLEAR_USER_SYNC, and ignores all other commands: a
    stand-alone process has no caches, pushers or clients. The function that the
    configuration key ``command_sink`` names can return a subclass.

    An instance that was killed sends no CLEAR_USER_SYNC. Its users are therefore
    removed if it has sent nothing about any user for :data:`USERS_EXPIRE_AFTER`, as in
    a homeserver.

    :param max_users: the largest number of stored users; each counts once per device
        and instance. Beyond it, the least recently updated users are evicted.
    :param own: returns the users syncing with this process.
    :param monotonic: returns a monotonic time in s.
    """

    def __init__(
        self,
        max_users: int = MAX_USERS,
        own: Callable[[], Iterable[SyncingUser]] = tuple,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._monotonic = monotonic
        # instance_id -> when it last sent USER_SYNC, in s; the oldest first.
        self._last_sent: RecentDict[str, float] = RecentDict(max_users)
        # (instance_id, user_id, device_id) -> last_sync_ms, least recently updated
        # first.
        self._users: GroupedRecentDict[int] = GroupedRecentDict(max_users)

    def syncing_users(self) -> Mapping[tuple[str, str, str | None], int]:
        """Return ``last_sync_ms`` by ``(instance_id, user_id, device_id)``."""
        self._remove_expired()
        return dict(self._users)

    def _remove_expired(self) -> None:
        before = self._monotonic() - USERS_EXPIRE_AFTER
        while self._last_sent:
            instance_id, at = next(iter(self._last_sent.items()))
            if at > before:
                return
            self._remove_instance(instance_id)

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users syncing with this process."""
        return self._own()

    def on_command(self, command: commands.Command) -> Awaitable[None] | None:
        """Record a USER_SYNC or a CLEAR_USER_SYNC; ignore any other command."""
        if isinstance(command, commands.UserSyncCommand):
            key = (command.instance_id, command.user_id, command.device_id)
            self._remove_expired()
            self._last_sent[command.instance_id] = self._monotonic()
            if key in self._users:
                del self._users[key]
            if command.is_syncing:
                self._users[key] = command.last_sync_ms
        elif isinstance(command, commands.ClearUserSyncsCommand):
            self._remove_instance(command.instance_id)
        return None

    def _remove_instance(self, instance_id: str) -> None:
        self._last_sent.pop(instance_id, None)
        self._users.remove_group(instance_id)
