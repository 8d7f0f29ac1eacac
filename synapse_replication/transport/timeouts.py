"""Timeouts that tolerate steps of the clock.

Theory of operation: the reactor's clock may step forward by more than a whole timeout
without any code having run, for instance because a laptop was suspended, a virtual
machine was paused or the system clock was set. A plain timeout would then fire before
the reactor could read an answer that has already arrived. A timeout is therefore split
into consecutive delayed calls; a step of the clock can fire at most one of them.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

#: The number of delayed calls per timeout. The reactor reads data between them.
CALLS_PER_TIMEOUT = 6


class Timeout:
    """A delayed call that tolerates steps of the clock.

    A step can make the call early by a sixth of the delay at most. Use this class in
    the reactor's thread only.

    :param seconds: the delay, in s.
    :param func: the function to call, with ``args``.
    """

    def __init__(
        self,
        clock: IReactorTime,
        seconds: float,
        func: Callable[..., object],
        *args: object,
    ) -> None:
        self._clock = clock
        self._interval = seconds / CALLS_PER_TIMEOUT
        self._calls_left = CALLS_PER_TIMEOUT
        self._func = func
        self._args = args
        self._call: IDelayedCall = clock.callLater(self._interval, self._interval_ended)

    def _interval_ended(self) -> None:
        self._calls_left -= 1
        if self._calls_left:
            self._call = self._clock.callLater(self._interval, self._interval_ended)
        else:
            self._func(*self._args)

    def active(self) -> bool:
        """Return whether the call is still pending."""
        return self._call.active()

    def cancel(self) -> None:
        """Cancel the call.

        :raises twisted.internet.error.AlreadyCalled: if the function was called.
        :raises twisted.internet.error.AlreadyCancelled: if it was cancelled before.
        """
        self._call.cancel()


def stop(timeout: Timeout | None) -> None:
    """Cancel a timeout that is pending, if there is one."""
    if timeout is not None and timeout.active():
        timeout.cancel()
