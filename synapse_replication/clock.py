"""Time and background work, for a host that has nothing of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from synapse_replication.handlers.observer import ReplicationObserver

__all__ = ["BackgroundProcesses", "ReactorClock"]


class ReactorClock:
    """The :class:`~synapse_replication.handlers.interfaces.Clock` of a reactor.

    :param wall_clock: gives s since the epoch.
    """

    def __init__(
        self, reactor: IReactorTime, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._reactor = reactor
        self._wall_clock = wall_clock

    def seconds(self) -> float:
        """Return the reactor's time in s; it steps with the machine's clock."""
        return float(self._reactor.seconds())

    def time_msec(self) -> int:
        """Wall-clock time in ms since the epoch."""
        return int(self._wall_clock() * 1000)

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> IDelayedCall:
        """Call ``func(*args)`` after ``delay`` s."""
        return self._reactor.callLater(delay, func, *args)

    def sleep(self, delay: float) -> Deferred[None]:
        """Wait ``delay`` s; 0 lets the reactor do what else is ready."""
        return deferLater(self._reactor, delay)


async def _run(func: Callable[[], Awaitable[Any]]) -> None:
    await func()


class BackgroundProcesses:
    """Starts work that nobody waits for, and can wait for all of it.

    :param observer: told of what failed.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        self._observer = observer
        self._running: set[Deferred[None]] = set()

    def __call__(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Deferred[None]:
        """Start ``func``; the Deferred fires when it has ended, and never fails."""
        process = Deferred.fromCoroutine(_run(func))
        if process.called and not isinstance(process.result, Failure):
            # Nothing to wait for, as with most chunks of rows.
            return process
        return self._watch(description, process)

    def _watch(self, description: str, process: Deferred[None]) -> Deferred[None]:
        def failed(failure: Failure) -> None:
            assert failure.value is not None
            self._observer.failure(description, failure.value)

        def ended(_: object) -> None:
            self._running.discard(process)

        self._running.add(process)
        return process.addErrback(failed).addBoth(ended)

    @property
    def count(self) -> int:
        """How many are running."""
        return len(self._running)

    def wait(self) -> Deferred[None]:
        """Wait for those that are running now."""
        return DeferredList(list(self._running)).addCallback(lambda _: None)
