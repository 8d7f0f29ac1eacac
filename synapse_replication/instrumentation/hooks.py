"""Hooks: code of a host that wants to know how its replication fares.

Theory of operation: :class:`ReplicationHooks` is an observer. What happens at a moment
(a link comes up, rows are fetched) it takes from what it hears; what lasts (a writer is
stalled, a process is gone) it finds by comparing the status of now with the one before,
each second. Callbacks are called later, in the reactor's thread and in the order in
which things happened, never from inside replication: they may do what they like.

A callback that fails is reported, and the others are called all the same. What waits to
be told is bounded: of the progress of one catch-up only the newest waits, and beyond
:data:`MAX_WAITING` events are left out and their number is reported.

docs/plugging-in.rst.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import attrs
from twisted.internet.defer import maybeDeferred
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.errors import HooksOverflowError
from synapse_replication.handlers.interfaces import Clock, DelayedCall
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    CloseReason,
    PeerHeartbeat,
    ReplicationObserver,
    Resync,
)
from synapse_replication.instrumentation.status.model import (
    Condition,
    ProcessStatus,
    StallReason,
)

__all__ = [
    "CatchUpProgress",
    "CaughtUp",
    "ConfigurationReloaded",
    "LinkDown",
    "LinkUp",
    "PeerOffline",
    "PeerOnline",
    "PositionPersistFailed",
    "PositionPersisted",
    "ReplicationHooks",
    "Resynced",
    "Stalled",
    "Stopping",
    "StreamReset",
    "WriterRoleChanged",
]

#: How many events may wait to be told.
MAX_WAITING = 1000
#: How many processes are remembered.
MAX_MEMBERS = 1000
#: How often the status is looked at, in s.
LOOK_EVERY = 1.0


@attrs.frozen
class LinkUp:
    """A link came up."""

    connection: str


@attrs.frozen
class LinkDown:
    """A link went down; ``why`` is for people."""

    connection: str
    why: str


@attrs.frozen
class PeerOnline:
    """Another process came, or came back; ``where`` is for people."""

    instance_name: str
    where: str


@attrs.frozen
class PeerOffline:
    """Another process said goodbye, or was silent for too long."""

    instance_name: str


@attrs.frozen
class CaughtUp:
    """A writer's rows are live: none is missing."""

    stream_name: str
    instance_name: str


@attrs.frozen
class CatchUpProgress:
    """A page was fetched, up to ``position`` of ``upto_token``."""

    stream_name: str
    instance_name: str
    from_token: int
    position: int
    upto_token: int


@attrs.frozen
class Stalled:
    """A writer's rows have ceased to arrive; ``detail`` is for people."""

    stream_name: str
    instance_name: str
    reason: StallReason
    detail: str


@attrs.frozen
class Resynced:
    """Rows that did not come were fetched, or could not be."""

    stream_name: str
    instance_name: str
    kind: Resync


@attrs.frozen
class WriterRoleChanged:
    """A process that was known before writes a stream now, or writes it no more."""

    stream_name: str
    instance_name: str
    is_writer: bool


@attrs.frozen
class StreamReset:
    """A writer's stream went backwards, because it started again or may have.

    Rows at or below ``to_token`` may be other ones than before: drop what was cached
    of this writer's rows.
    """

    stream_name: str
    instance_name: str
    from_token: int
    to_token: int


@attrs.frozen
class PositionPersisted:
    """The position of this process as a writer was persisted in the database."""

    stream_name: str
    instance_name: str
    token: int


@attrs.frozen
class PositionPersistFailed:
    """That failed, and is tried again; ``why`` is for people."""

    stream_name: str
    instance_name: str
    token: int
    why: str


@attrs.frozen
class ConfigurationReloaded:
    """The configuration was read again.

    :ivar problem: why the old one stays in use, for people; empty if it does not.
    :ivar needs_restart: the keys whose changes are in use after a restart only.
    """

    problem: str
    needs_restart: tuple[str, ...]


@attrs.frozen
class Stopping:
    """The process begins to stop: links are still up, and rows can be written."""


HookEvent: TypeAlias = (
    LinkUp
    | LinkDown
    | PeerOnline
    | PeerOffline
    | CaughtUp
    | CatchUpProgress
    | Stalled
    | Resynced
    | WriterRoleChanged
    | StreamReset
    | PositionPersisted
    | PositionPersistFailed
    | ConfigurationReloaded
    | Stopping
)
_Event = TypeVar("_Event", bound=HookEvent)
_Key: TypeAlias = tuple[str, str]


class ReplicationHooks(ReplicationObserver):
    """Lets code subscribe to what happens.

    :param clock: the host's.
    :param snapshot: gives the status of now.
    :param report: is told what failed, and how.
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
        self._waiting: dict[Hashable, HookEvent] = {}
        self._left_out = 0
        self._delivery: DelayedCall | None = None
        self._tick: DelayedCall | None = None
        self._conditions: dict[_Key, Condition] = {}
        self._online: set[str] = set()
        self._roles: dict[str, frozenset[str]] = {}

    def subscribe(
        self, kind: type[_Event], callback: Callable[[_Event], object]
    ) -> Callable[[], None]:
        """Have a callback called for each event of one class.

        :param callback: a function or a coroutine function; nobody waits for what it
            gives, the next event neither.
        :return: call it to have the callback called no more.
        """
        callbacks = self._callbacks.setdefault(kind, [])
        # So that one that was subscribed twice is two.
        entry = lambda event: callback(event)  # noqa: E731
        callbacks.append(entry)

        def unsubscribe() -> None:
            if entry in callbacks:
                callbacks.remove(entry)

        return unsubscribe

    def start(self) -> None:
        """Look at the status from now on."""
        self._tick = self._clock.call_later(LOOK_EVERY, self._look)

    def stop(self) -> None:
        """Look no more. What waits is told."""
        if self._tick is not None and self._tick.active():
            self._tick.cancel()

    def configuration_reloaded(
        self, problem: str, needs_restart: Iterable[str]
    ) -> None:
        """Report that the configuration was read again."""
        self._tell(ConfigurationReloaded(problem, tuple(needs_restart)))

    def stopping(self) -> None:
        """Report that the process begins to stop, to the callbacks, at once."""
        self._tell(Stopping())
        if self._delivery is not None:
            self._delivery.cancel()
            self._deliver()

    # -- telling ----------------------------------------------------------------------

    def _tell(self, event: HookEvent, key: Hashable = None) -> None:
        if not self._callbacks.get(type(event)):
            return
        # Events without a key do not replace one another.
        key = object() if key is None else key
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            self._left_out += 1
            return
        self._waiting.pop(key, None)
        self._waiting[key] = event
        if self._delivery is None:
            self._delivery = self._clock.call_later(0, self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        waiting, self._waiting = self._waiting, {}
        left_out, self._left_out = self._left_out, 0
        for event in waiting.values():
            for callback in list(self._callbacks[type(event)]):
                # Of a coroutine, too, the failure is seen.
                maybeDeferred(callback, event).addErrback(self._failed, event)
        if left_out:
            self._report("telling hooks", HooksOverflowError(left_out))

    def _failed(self, failure: Failure, event: HookEvent) -> None:
        assert failure.value is not None
        self._report(f"a hook for {type(event).__name__}", failure.value)

    # -- what happens at a moment ------------------------------------------------------

    @override
    def connection_made(self, connection: str) -> None:
        self._tell(LinkUp(connection))

    @override
    def connection_lost(self, connection: str, reason: CloseReason, why: str) -> None:
        self._tell(LinkDown(connection, why))

    @override
    def catch_up(self, event: CatchUpEvent) -> AbstractContextManager[object]:
        self._progress(event, event.from_token)
        return contextlib.nullcontext()

    @override
    def catch_up_page(self, event: CatchUpEvent, rows: int, upto_token: int) -> None:
        self._progress(event, upto_token)

    def _progress(self, event: CatchUpEvent, position: int) -> None:
        stream_name, instance_name = event.stream_name, event.instance_name
        self._tell(
            CatchUpProgress(
                stream_name,
                instance_name,
                event.from_token,
                position,
                event.upto_token,
            ),
            (stream_name, instance_name),
        )

    @override
    def resynced(self, stream_name: str, instance_name: str, kind: Resync) -> None:
        self._tell(Resynced(stream_name, instance_name, kind))

    @override
    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        self._tell(StreamReset(stream_name, instance_name, from_token, to_token))

    @override
    def position_persisted(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        # Looked at first: this is called for each write of a position.
        if PositionPersisted in self._callbacks:
            event = PositionPersisted(stream_name, instance_name, token)
            self._tell(event, (PositionPersisted, stream_name, instance_name))

    @override
    def position_persist_failed(
        self, stream_name: str, instance_name: str, token: int, error: BaseException
    ) -> None:
        event = PositionPersistFailed(stream_name, instance_name, token, str(error))
        self._tell(event, (PositionPersistFailed, stream_name, instance_name))

    @override
    def peer_heard(self, news: PeerHeartbeat) -> None:
        name = news.instance_name
        if news.is_leaving:
            return
        streams = frozenset(news.positions)
        before = self._roles.get(name)
        if before is None:
            if len(self._roles) < MAX_MEMBERS:
                self._roles[name] = streams
            return
        self._roles[name] = streams
        for stream_name in sorted(streams ^ before):
            self._tell(WriterRoleChanged(stream_name, name, stream_name in streams))

    # -- what lasts --------------------------------------------------------------------

    def _look(self) -> None:
        # First, so that nothing that fails ends it.
        self._tick = self._clock.call_later(LOOK_EVERY, self._look)
        status = self._snapshot()
        self._compare_members(status)
        self._compare_writers(status)

    def _compare_members(self, status: ProcessStatus) -> None:
        here = {m.instance_name: m for m in status.members if not m.is_gone}
        for name in sorted(here.keys() - self._online):
            self._tell(PeerOnline(name, here[name].where))
        for name in _gone(self._online, here):
            self._tell(PeerOffline(name))
        self._online = set(here)

    def _compare_writers(self, status: ProcessStatus) -> None:
        conditions = {}
        for writer in status.writers:
            key = (writer.stream_name, writer.instance_name)
            before = self._conditions.get(key)
            conditions[key] = writer.condition
            if writer.condition is before:
                continue
            if writer.condition is Condition.LIVE:
                self._tell(CaughtUp(*key))
            elif writer.reason is not None:
                self._tell(Stalled(*key, writer.reason, writer.detail))
        self._conditions = conditions


def _gone(before: Iterable[str], now: Iterable[str]) -> list[str]:
    return sorted(set(before).difference(now))
