"""Time-outs that are not misled by a clock that steps.

Theory of operation: the reactor's clock may step forward by more than a whole time-out
while nothing ran: a laptop was suspended, a virtual machine was paused, the machine's
clock was set, a test advanced it. What was to time out would do so at once, before the
reactor had a chance to read an answer that is there already. So a time-out is waited
for in several steps, one after another; a step of the clock ends one of them at most.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

__all__ = ["Timeout"]

#: Between them the reactor reads what has arrived.
STEPS = 6


class Timeout:
    """Calls a function after a time in which the reactor ran.

    Used in the reactor's thread only.

    :param seconds: the time, in s.
    :param func: called with ``args``.
    """

    def __init__(
        self,
        clock: IReactorTime,
        seconds: float,
        func: Callable[..., object],
        *args: object,
    ) -> None:
        self._clock = clock
        self._step = seconds / STEPS
        self._left = STEPS
        self._func = func
        self._args = args
        self._call: IDelayedCall = clock.callLater(self._step, self._step_ended)

    def _step_ended(self) -> None:
        self._left -= 1
        if self._left:
            self._call = self._clock.callLater(self._step, self._step_ended)
        else:
            self._func(*self._args)

    def active(self) -> bool:
        """Return whether the function is still to be called."""
        return self._call.active()

    def cancel(self) -> None:
        """Never call the function.

        :raises twisted.internet.error.AlreadyCalled: if it was called.
        :raises twisted.internet.error.AlreadyCancelled: if this is the second time.
        """
        self._call.cancel()
