"""Timers on a host's clock, and the delays with which timers are started.

The delays are those between attempts, and those until the next periodic work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred

from synapse_replication.handlers.interfaces import Clock, DelayedCall

T = TypeVar("T")

#: The largest exponent, to prevent an overflow. With the parameters that this package
#: uses, delays reach their maximum at a smaller one.
_MAX_EXPONENT = 60

#: How long after a multiple of its interval periodic work takes place, in s. Heartbeats
#: are sent at the multiples: a look at the peers just before their heartbeats arrive
#: would find them silent for the longest time.
AFTER_HEARTBEATS = 1.0


class Timer:
    """A call that is scheduled at most once at a time.

    Use it in the reactor's thread only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._call: DelayedCall | None = None

    @property
    def is_running(self) -> bool:
        """Whether the call is scheduled."""
        return self._call is not None and self._call.active()

    def start(self, delay: float, func: Callable[..., object], *args: object) -> None:
        """Call ``func(*args)`` after ``delay`` s, in place of a scheduled call."""
        self.stop()
        self._call = self._clock.call_later(delay, func, *args)

    def stop(self) -> None:
        """Cancel the call, if it is scheduled."""
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._call = None


class Repeater:
    """Work that is repeated, each time an interval after it has ended.

    Use it in the reactor's thread only.

    :param interval: the time between an end and the next beginning, in s.
    :param work: called each time; returns a Deferred that fires when the work has
        ended, or ``None`` if it has ended. It handles its failures itself: Twisted logs
        others as unhandled.
    """

    def __init__(
        self, clock: Clock, interval: float, work: Callable[[], Deferred[Any] | None]
    ) -> None:
        self._interval = interval
        self._work = work
        self._timer = Timer(clock)
        self._is_running = False

    def start(self) -> None:
        """Begin immediately."""
        self._is_running = True
        self._run()

    def stop(self) -> None:
        """Stop repeating. Work that has begun is not cancelled."""
        self._is_running = False
        self._timer.stop()

    def hurry(self) -> None:
        """Begin now if the next beginning is waiting for its time."""
        if self._timer.is_running:
            self._timer.stop()
            self._run()

    def _run(self) -> None:
        ended = self._work()
        if ended is None:
            self._ended(None)
        else:
            ended.addBoth(self._ended)

    def _ended(self, result: T) -> T:
        if self._is_running:
            self._timer.start(self._interval, self._run)
        return result


@attrs.frozen
class Backoff:
    """Exponential backoff with a maximum and jitter.

    :ivar initial: the delay after the first failure, without jitter, in s.
    :ivar maximum: the longest delay, in s.
    :ivar factor: the ratio of each delay to the previous one, without jitter, until
        the maximum is reached.
    :ivar jitter: returns a number in [0, 1). Half of it is the fraction by which a
        delay is shortened, so that clients that failed together do not retry together.
    """

    initial: float = 0.5
    maximum: float = 30.0
    factor: float = 2.0
    jitter: Callable[[], float] = random.random

    def delay(self, attempt: int) -> float:
        """Return the delay after a failure, in s.

        :param attempt: the number of failures so far; at least 1.
        """
        exponent = min(attempt - 1, _MAX_EXPONENT)
        full = min(self.maximum, self.initial * self.factor**exponent)
        return full * (1 - self.jitter() / 2)


def until_next(clock: Clock, every: float) -> float:
    """Return the time until about ``every`` s from now, in s.

    It is the time until :data:`AFTER_HEARTBEATS` after a multiple of ``every`` in the
    clock's time, so that periodic work with the same interval takes place in one turn
    of the reactor.

    :return: more than a tenth of ``every``, at most 1.1 times ``every``: a timer may
        fire slightly too early.
    """
    left = every - (clock.seconds() - AFTER_HEARTBEATS) % every
    return left if left > every / 10 else left + every
