"""A clock and background tasks, for a host that does not provide its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from synapse_replication.handlers.observer import ReplicationObserver


class ReactorClock:
    """The :class:`~synapse_replication.handlers.interfaces.Clock` of a reactor.

    :param wall_clock: returns the time in s since the Unix epoch.
    """

    def __init__(
        self, reactor: IReactorTime, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._reactor = reactor
        self._wall_clock = wall_clock

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
        """Return a Deferred that fires when the tasks that run now have ended."""
        return DeferredList(list(self._running)).addCallback(lambda _: None)
