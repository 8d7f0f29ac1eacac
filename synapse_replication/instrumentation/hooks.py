"""Hooks: callbacks with which a host's code observes its replication.

Theory of operation: :class:`ReplicationHooks` is an observer. Momentary events (a link
comes up, rows are fetched) arrive as the observer's events; lasting states (a
writer is stalled, an instance has stopped) are detected by comparing the status with
the previous status every second. Callbacks run in the reactor's thread, in the order of
the events, and never inside replication code, so they may call anything.

A failure of a callback is reported, and the other callbacks still run. The queue of
events is bounded: for each writer of a stream, only the newest event of catch-up
progress, and of the beginning, the end and the failure of persisting a position is
queued; events beyond :data:`MAX_WAITING` are discarded, and their number is reported.

docs/plugging-in.rst has examples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias, TypeVar

import attrs
from twisted.internet.defer import maybeDeferred
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.errors import HooksOverflowError
from synapse_replication.handlers import events
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.handlers.timer import Timer
from synapse_replication.instrumentation.status.model import (
    Condition,
    ProcessStatus,
    StallReason,
)
from synapse_replication.recent import RecentDict

#: The maximum number of events that wait for delivery.
MAX_WAITING = 1000
#: The maximum number of instances whose streams are recorded: those that were heard
#: last.
MAX_INSTANCES = 1000
#: The interval at which the status is checked, in s.
STATUS_CHECK_INTERVAL = 1.0


@attrs.frozen
class PeerOnline(events.Event):
    """Another instance appeared or returned; ``where`` is text for display."""

    instance_name: str
    where: str


@attrs.frozen
class PeerOffline(events.Event):
    """Another instance sent a goodbye, or its heartbeats stopped."""

    instance_name: str


@attrs.frozen
class CaughtUp(events.WriterEvent):
    """A writer has become live: none of its announced rows is missing here."""


@attrs.frozen
class CatchUpProgress(events.WriterEvent):
    """A catch-up began or resumed at ``from_token``, or has delivered a page.

    Rows up to ``position`` were delivered; the catch-up continues to ``upto_token``.
    """

    from_token: int
    position: int
    upto_token: int


@attrs.frozen
class Stalled(events.WriterEvent):
    """A writer has stalled; ``detail`` is text for display."""

    reason: StallReason
    detail: str


@attrs.frozen
class WriterRoleChanged(events.WriterEvent):
    """A known instance started or stopped writing a stream."""

    is_writer: bool


@attrs.frozen
class ConfigurationReloaded(events.Event):
    """The configuration was reloaded, or the reload failed.

    :ivar problem: why the old configuration stays in use, as text for display; empty if
        the new one is in use.
    :ivar needs_restart: the keys whose changes take effect only after a restart.
    """

    problem: str
    needs_restart: tuple[str, ...]


@attrs.frozen
class ModuleLoaded(events.Event):
    """A function that the configuration names in ``modules`` has returned.

    :ivar name: the dotted name of the function. Inside a homeserver, it is one of those
        that subscribe to hooks.
    """

    name: str


@attrs.frozen
class ModuleUnloaded(events.Event):
    """A loaded module is not used any more: its service and all links have stopped.

    Modules are unloaded in the reverse order of their loading.
    """

    name: str


@attrs.frozen
class Stopping(events.Event):
    """The process begins to stop: its links are still up, and rows can be written."""


HookEvent: TypeAlias = (
    events.LinkUp
    | events.LinkDown
    | PeerOnline
    | PeerOffline
    | CaughtUp
    | CatchUpProgress
    | Stalled
    | events.Resynced
    | events.LateRows
    | WriterRoleChanged
    | events.StreamReset
    | events.PositionPersistBegun
    | events.PositionPersisted
    | events.PositionPersistFailed
    | ConfigurationReloaded
    | ModuleLoaded
    | ModuleUnloaded
    | Stopping
)
#: Events for which the queue is never full: each occurs once, or once per module.
_UNBOUNDED = (ModuleUnloaded, Stopping)
#: Events of which only the newest about a writer's stream waits for delivery.
_OF_POSITIONS = (
    events.PositionPersistBegun,
    events.PositionPersisted,
    events.PositionPersistFailed,
)
_Event = TypeVar("_Event", bound=HookEvent)
_Key: TypeAlias = tuple[str, str]


class ReplicationHooks(ReplicationObserver):
    """Delivers replication events to subscribed callbacks.

    Call all methods in the reactor's thread.

    :param clock: the host's clock.
    :param snapshot: returns the current status.
    :param report: called with a description and the exception of each failure.
    """

    def __init__(
        self,
        clock: Clock,
        snapshot: Callable[[], ProcessStatus],
        report: Callable[[str, BaseException], None],
    ) -> None:
        self._clock = clock
        self._snapshot = snapshot
        self._report = report
        self._callbacks: dict[type, list[Callable[[Any], object]]] = {}
        self._waiting: dict[Hashable, events.Event] = {}
        self._discarded = 0
        self._delivery = Timer(clock)
        self._is_started = False
        self._next_check = Timer(clock)
        self._conditions: dict[_Key, Condition] = {}
        self._online: set[str] = set()
        self._roles: RecentDict[str, frozenset[str]] = RecentDict(MAX_INSTANCES)
        self._loaded: list[str] = []

    def subscribe(
        self, kind: type[_Event], callback: Callable[[_Event], object]
    ) -> Callable[[], None]:
        """Call ``callback`` for each event of one class.

        :param callback: a function or a coroutine function. An awaitable that it
            returns is not awaited before the next event is delivered.
        :return: a function that ends the subscription.
        """
        is_first = not any(self._callbacks.values())
        if is_first and self._is_started:
            # Without subscribers the states were not tracked: record the current ones,
            # so that they are not delivered as changes.
            self._compare()
        callbacks = self._callbacks.setdefault(kind, [])
        # Wrap the callback, so that it can be subscribed more than once.
        entry = lambda event: callback(event)  # noqa: E731
        callbacks.append(entry)
        if is_first and self._is_started:
            self._check_later()

        def unsubscribe() -> None:
            if entry in callbacks:
                callbacks.remove(entry)

        return unsubscribe

    def start(self) -> None:
        """Start the periodic checks of the status.

        They are made only while there are callbacks, because they cost half a percent
        of the CPU time of a process that only receives.
        """
        self._is_started = True
        self._check_later()

    def stop(self) -> None:
        """Stop the periodic checks; events that wait are still delivered."""
        self._is_started = False
        self._next_check.stop()

    def configuration_reloaded(
        self, problem: str, needs_restart: Iterable[str]
    ) -> None:
        """Deliver a :class:`ConfigurationReloaded`."""
        self._enqueue(ConfigurationReloaded(problem, tuple(needs_restart)))

    def stopping(self) -> None:
        """Deliver all events that wait, and then a :class:`Stopping`, synchronously."""
        self._enqueue(Stopping())
        self._deliver_now()

    def module_loaded(self, module: Callable[..., object]) -> None:
        """Deliver a :class:`ModuleLoaded`.

        :param module: the function that returned.
        """
        name = name_function(module)
        self._loaded.append(name)
        self._enqueue(ModuleLoaded(name))

    def unload_modules(self) -> None:
        """Deliver a :class:`ModuleUnloaded` for each loaded module, synchronously."""
        while self._loaded:
            self._enqueue(ModuleUnloaded(self._loaded.pop()))
        self._deliver_now()

    # -- delivery ---------------------------------------------------------------------

    def _enqueue(self, event: events.Event, key: Hashable = None) -> None:
        if not self._callbacks.get(type(event)):
            return
        # An event replaces a waiting event with the same key. An event without a key
        # replaces none.
        key = object() if key is None else key
        may_exceed = isinstance(event, _UNBOUNDED) or key in self._waiting
        if len(self._waiting) >= MAX_WAITING and not may_exceed:
            self._discarded += 1
            return
        self._waiting.pop(key, None)
        self._waiting[key] = event
        if not self._delivery.is_running:
            self._delivery.start(0, self._deliver)

    def _deliver_now(self) -> None:
        if self._delivery.is_running:
            self._delivery.stop()
            self._deliver()

    def _deliver(self) -> None:
        waiting, self._waiting = self._waiting, {}
        discarded, self._discarded = self._discarded, 0
        for event in waiting.values():
            for callback in list(self._callbacks[type(event)]):
                # maybeDeferred also catches the failure of a coroutine.
                maybeDeferred(callback, event).addErrback(self._report_failure, event)
        if discarded:
            self._report("delivering events to hooks", HooksOverflowError(discarded))

    def _report_failure(self, failure: Failure, event: events.Event) -> None:
        assert failure.value is not None
        self._report(f"a hook for {type(event).__name__}", failure.value)

    # -- momentary events --------------------------------------------------------------

    @override
    def observe(self, event: events.Event) -> None:
        if isinstance(event, _OF_POSITIONS):
            key = (type(event), event.stream_name, event.instance_name)
            self._enqueue(event, key)
        else:
            self._enqueue(event)
            super().observe(event)

    @handles(events.CatchUpEvent)
    def _catch_up(self, event: events.CatchUpEvent) -> None:
        self._enqueue_progress(event, event.from_token)

    @handles(events.CatchUpPage)
    def _catch_up_page(self, event: events.CatchUpPage) -> None:
        self._enqueue_progress(event.catch_up, event.upto_token)

    def _enqueue_progress(self, event: events.CatchUpEvent, position: int) -> None:
        key = event.stream_name, event.instance_name
        progress = CatchUpProgress(*key, event.from_token, position, event.upto_token)
        self._enqueue(progress, key)

    @handles(events.PeerHeartbeat)
    def _peer_heartbeat(self, heartbeat: events.PeerHeartbeat) -> None:
        name = heartbeat.instance_name
        if heartbeat.is_leaving:
            return
        streams = frozenset(heartbeat.positions)
        before = self._roles.get(name, streams)
        self._roles[name] = streams
        for stream_name in sorted(streams ^ before):
            self._enqueue(WriterRoleChanged(stream_name, name, stream_name in streams))

    # -- lasting states ----------------------------------------------------------------

    def _check_later(self) -> None:
        if any(self._callbacks.values()) and not self._next_check.is_running:
            self._next_check.start(STATUS_CHECK_INTERVAL, self._check_status)

    def _check_status(self) -> None:
        # Reschedule first, so that an exception cannot stop the timer.
        self._check_later()
        if any(self._callbacks.values()):
            self._compare()

    def _compare(self) -> None:
        status = self._snapshot()
        online = {peer.instance_name: peer for peer in status.peers if not peer.is_gone}
        for name in sorted(online.keys() - self._online):
            self._enqueue(PeerOnline(name, online[name].where))
        for name in sorted(self._online - online.keys()):
            self._enqueue(PeerOffline(name))
        self._online = set(online)
        conditions = {}
        for writer in status.writers:
            key = (writer.stream_name, writer.instance_name)
            before = self._conditions.get(key)
            conditions[key] = writer.condition
            if writer.condition is before:
                continue
            if writer.condition is Condition.LIVE:
                self._enqueue(CaughtUp(*key))
            elif writer.reason is not None:
                self._enqueue(Stalled(*key, writer.reason, writer.detail))
        self._conditions = conditions


def name_function(function: Callable[..., object]) -> str:
    """Return the dotted name of a function, or of an object's class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
