"""Round trips to the database that many callers share: :class:`SharedRoundTrip`.

Theory of operation: at most one round trip of a kind is in progress at a time. Callers
that join during it wait for the next one, which serves all of them. If none is in
progress, a new one begins immediately. While callers are notified that their round trip
has ended, they may join again. No round trip begins during these notifications (see
:meth:`RoundTripGate.closed`), so that the next one serves all callers that joined.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class RoundTripGate:
    """Delays all kinds of round trips of one stream while waiters are notified."""

    def __init__(self) -> None:
        self._trips: list[SharedRoundTrip[Any]] = []
        self.is_closed = False

    def add(self, trip: SharedRoundTrip[Any]) -> None:
        """Add a kind of round trip."""
        self._trips.append(trip)

    @contextmanager
    def closed(self) -> Generator[None, None, None]:
        """Return a context manager that delays round trips until it is left."""
        outer, self.is_closed = self.is_closed, True
        try:
            yield
        finally:
            self.is_closed = outer
            for trip in self._trips:
                trip.begin_if_wanted()


class SharedRoundTrip(Generic[T]):
    """One kind of round trip. Use it in the reactor's thread only.

    :param begin: called with all waiters to begin a round trip. The callee must call
        :meth:`end` once, when the round trip has ended or if none is needed; or else
        :meth:`repeat`, which calls ``begin`` again.
    """

    def __init__(self, begin: Callable[[list[T]], object], gate: RoundTripGate) -> None:
        self._begin = begin
        self._gate = gate
        self._waiting: list[T] = []
        self._is_running = False
        gate.add(self)

    def join(self, waiter: T) -> None:
        """Add a waiter to the next round trip, which begins as soon as possible."""
        self._waiting.append(waiter)
        self.begin_if_wanted()

    def begin_if_wanted(self) -> None:
        """Begin a round trip if there are waiters, unless it must be delayed."""
        if self._waiting and not (self._is_running or self._gate.is_closed):
            self._begin_now()

    def end(self) -> None:
        """Record that the round trip has ended, so that the next one may begin."""
        self._is_running = False

    def repeat(self, waiting: Sequence[T]) -> None:
        """Begin another round trip immediately, in place of the current one.

        :param waiting: the waiters of the current round trip; those that have joined
            since are added.
        """
        self._waiting = [*waiting, *self._waiting]
        self._begin_now()

    def _begin_now(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._is_running = True
        self._begin(waiting)
