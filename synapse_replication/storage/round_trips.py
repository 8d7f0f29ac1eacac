"""Round trips to the database that many callers share: :class:`SharedRoundTrip`.

Theory of operation: at most one round trip of a kind is under way at a time. Whoever
asks meanwhile waits for the next one, which serves all of them. A lone caller waits for
nobody. Those who are served may ask again at once; so while they are woken, inside
:meth:`Gathering.batching`, no round trip begins, and the next serves all of these, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

__all__ = ["Gathering", "SharedRoundTrip"]

T = TypeVar("T")


class Gathering:
    """The round trips that begin only when all who are woken together have asked."""

    def __init__(self) -> None:
        self._trips: list[SharedRoundTrip[Any]] = []
        self.is_active = False

    def add(self, trip: SharedRoundTrip[Any]) -> None:
        """Hold back this one, too."""
        self._trips.append(trip)

    @contextmanager
    def batching(self) -> Generator[None, None, None]:
        """Begin no round trip before all who are woken inside have asked."""
        outer, self.is_active = self.is_active, True
        try:
            yield
        finally:
            self.is_active = outer
            for trip in self._trips:
                trip.begin_if_wanted()


class SharedRoundTrip(Generic[T]):
    """One kind of round trip. Used in the reactor's thread only.

    :param begin: is given all who wait, and begins a round trip for them. When that has
        ended, or if none is needed, it calls :meth:`end`, once.
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
        """Be served by the next round trip, which begins as soon as it may."""
        self._waiting.append(waiter)
        self.begin_if_wanted()

    def begin_if_wanted(self) -> None:
        """Begin a round trip if somebody waits for one, and none is under way."""
        if self._waiting and not (self._is_running or self._gathering.is_active):
            self._begin_now()

    def end(self) -> None:
        """Record that the round trip has ended; the next one may begin."""
        self._is_running = False

    def repeat(self, waiting: Sequence[T]) -> None:
        """Begin another one at once, for these and all who joined meanwhile."""
        self._waiting = [*waiting, *self._waiting]
        self._begin_now()

    def _begin_now(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._is_running = True
        self._begin(waiting)
