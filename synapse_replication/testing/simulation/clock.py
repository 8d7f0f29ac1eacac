"""Simulated time, and the reactor of one simulated process."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from twisted.internet.base import DelayedCall
from twisted.internet.task import Clock

if TYPE_CHECKING:
    from twisted.internet.protocol import ClientFactory

    from synapse_replication.testing.simulation.network import (
        SimulatedConnector,
        SimulatedNetwork,
    )

__all__ = ["ProcessReactor", "SimulatedClock", "TooManyCallsError"]

_due = methodcaller("getTime")


class TooManyCallsError(Exception):
    """Something goes round without end."""


class SimulatedClock(Clock):
    """Time that jumps from one call that is due to the next.

    Calls of the same time are made in the order in which they were asked for.

    :ivar made: how many calls were made.
    """

    #: Calls in one run, at most.
    MAX_CALLS = 300_000

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

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

        :raises TooManyCallsError: there is no end of them.
        """
        calls = self.calls
        while calls and calls[0].getTime() <= when:
            call = calls.pop(0)
            if call.delayed_time:
                # It was put off, and stands where it stood.
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


class ProcessReactor:
    """What one life of a process sees of time and network; dies with it.

    :ivar is_alive: once it is not, nothing that was asked for happens.
    """

    def __init__(
        self, clock: SimulatedClock, network: SimulatedNetwork, name: str
    ) -> None:
        self.name = name
        self.is_alive = True
        self._clock = clock
        self._network = network

    def kill(self) -> None:
        """End, as by ``kill -9``."""
        self.is_alive = False
        self._network.process_died(self)

    def seconds(self) -> float:
        return self._clock.rightNow

    def callLater(
        self, delay: float, func: Callable[..., object], *args: object, **kw: object
    ) -> DelayedCall:
        return self._clock.callLater(delay, self._call, func, args, kw)

    def callFromThread(
        self, func: Callable[..., object], *args: object, **kw: object
    ) -> None:
        self.callLater(0, func, *args, **kw)

    def _call(
        self, func: Callable[..., object], args: Any, kw: dict[str, object]
    ) -> None:
        if self.is_alive:
            func(*args, **kw)

    def connectTCP(
        self,
        host: str,
        port: int,
        factory: ClientFactory,
        timeout: float = 30,
        bindAddress: object = None,
    ) -> SimulatedConnector:
        return self._network.connect(self, factory)
