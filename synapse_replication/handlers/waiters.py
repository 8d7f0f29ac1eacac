"""Deferreds that fire together."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure


class Waiters:
    """A Deferred for each caller that waits for the same event.

    They are independent: cancelling one does not affect the others. Use it in the
    reactor's thread only.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Deferred[None]] = []

    def __bool__(self) -> bool:
        """Return whether anybody waits."""
        return bool(self._waiting)

    def add(self) -> Deferred[None]:
        """Return a Deferred that fires at the next :meth:`fire`."""
        waiter: Deferred[None] = Deferred()
        self._waiting.append(waiter)
        return waiter

    def fire(self, failure: Failure | None = None) -> None:
        """Fire the Deferreds, in order; those that are added meanwhile are not fired.

        :param failure: fails the Deferreds.
        """
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if failure is None:
                waiter.callback(None)
            else:
                waiter.errback(failure)
