"""Round trips to the database that many callers share: :class:`SharedRoundTrip`.

Theory of operation: at most one round trip of a kind is in progress at a time. Callers
that join during it wait for the next one, which serves all of them. A single caller
does not wait. Callers that have been served may join again at once. Therefore no round
trip begins while they are being notified, inside :meth:`Gathering.batching`, and the
next one serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

__all__ = ["Gathering", "SharedRoundTrip"]

T = TypeVar("T")


class Gathering:
    """The kinds of round trips that are held back while waiters are notified."""

    def __init__(self) -> None:
        self._trips: list[SharedRoundTrip[Any]] = []
        self.is_active = False

    def add(self, trip: SharedRoundTrip[Any]) -> None:
        """Add a kind of round trip."""
        self._trips.append(trip)

    @contextmanager
    def batching(self) -> Generator[None, None, None]:
        """Begin no round trip until the context ends."""
        outer, self.is_active = self.is_active, True
        try:
            yield
        finally:
            self.is_active = outer
            for trip in self._trips:
                trip.begin_if_wanted()


class SharedRoundTrip(Generic[T]):
    """One kind of round trip. Use it in the reactor's thread only.

    :param begin: called with all waiters to begin a round trip. When that has ended, or
        if none is needed, it must call :meth:`end` once.
    """

    def __init__(
        self, begin: Callable[[list[T]], object], gathering: Gathering
    ) -> None:
        self._begin = begin
        self._gathering = gathering
        self._waiting: list[T] = []
        self._is_running = False
        gathering.add(self)

    def join(self, waiter: T) -> None:
        """Add a waiter to the next round trip, which begins as soon as possible."""
        self._waiting.append(waiter)
        self.begin_if_wanted()

    def begin_if_wanted(self) -> None:
        """Begin a round trip if there are waiters, and none is in progress."""
        if self._waiting and not (self._is_running or self._gathering.is_active):
            self._begin_now()

    def end(self) -> None:
        """Record that the round trip has ended, so that the next one may begin."""
        self._is_running = False

    def repeat(self, waiting: Sequence[T]) -> None:
        """Begin another one at once, for these waiters and those that joined since."""
        self._waiting = [*waiting, *self._waiting]
        self._begin_now()

    def _begin_now(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._is_running = True
        self._begin(waiting)
