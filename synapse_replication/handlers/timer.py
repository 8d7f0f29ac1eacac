"""A timer on a host's clock."""

from __future__ import annotations

from collections.abc import Callable

from synapse_replication.handlers.interfaces import Clock, DelayedCall


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
