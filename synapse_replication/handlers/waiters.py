"""Deferreds that fire together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure


def wait_for_all(waiting: Iterable[Deferred[Any]]) -> Deferred[None]:
    """Return a Deferred that fires when all of ``waiting`` have fired.

    It has fired already if all of them have. If one fails, it fails with the error of
    the first one in their order, after all have fired. Cancelling it cancels them; in
    contrast to a ``DeferredList``, it then does not succeed. Use it in the reactor's
    thread only.
    """
    return DeferredList(list(waiting), consumeErrors=True).addCallback(_first_failure)


def _first_failure(results: list[tuple[bool, Any]]) -> Failure | None:
    return next((each for is_success, each in results if not is_success), None)


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
