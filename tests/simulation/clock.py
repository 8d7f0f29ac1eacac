"""Simulated time."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import methodcaller

from twisted.internet.base import DelayedCall
from twisted.internet.task import Clock
from typing_extensions import override

_due = methodcaller("getTime")


class TooManyCallsError(Exception):
    """A run made more scheduled calls than allowed: probably an endless loop."""


class SimulatedClock(Clock):
    """A clock that jumps from one scheduled call to the next.

    Calls that are due at the same time run in the order in which they were scheduled.

    :ivar made: the number of calls that were made.
    """

    #: The maximum number of calls in one run.
    MAX_CALLS = 300_000

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    @override
    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> DelayedCall:
        call = DelayedCall(
            self.rightNow + delay,
            callable,
            args,
            kw,
            self.calls.remove,
            lambda _: self._sortCalls(),
            self.seconds,
        )
        insort(self.calls, call, key=_due)
        return call

    def run_until(self, when: float) -> None:
        """Make all calls that are due up to ``when``, each at its time.

        :raises TooManyCallsError: if the run has made more than :attr:`MAX_CALLS`.
        """
        calls = self.calls
        while calls and calls[0].getTime() <= when:
            call = calls.pop(0)
            if call.delayed_time:
                # The call was delayed, but is still sorted by its original time.
                call.activate_delay()
                insort(calls, call, key=_due)
                continue
            self.rightNow = max(self.rightNow, call.getTime())
            call.called = 1
            self.made += 1
            if self.made > self.MAX_CALLS:
                raise TooManyCallsError(
                    f"{self.made} calls by {self.rightNow:.3f} s; the last: {call}"
                )
            call.func(*call.args, **call.kw)
        self.rightNow = max(self.rightNow, when)
