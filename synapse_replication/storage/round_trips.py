"""Round trips of an id generator to the database, shared by many callers.

Theory of operation: at most one round trip of a kind is in progress at a time
(:class:`SharedRoundTrip`): one fetch of ids, for :class:`IdRequest` objects, and one
upsert of the position, by the ``PositionPersister``. Callers that join during it wait
for the next one, which serves all of them. If none is in progress, a new one begins
immediately. While callers are notified that their round trip has ended, they may join
again. No round trip begins during these notifications (see
:meth:`RoundTripGate.closed`), so that the next one serves all callers that joined.

A fetch of ids writes no row, but its commit may wait for the disk: ``nextval`` writes a
WAL record about once per 32 ids. An asynchronous commit would be wrong: after a crash
of the server, the sequence could allocate the same ids again. By then, the transactions
to which the ids were allocated first may have been rolled back, and the ids may have
been announced as finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")


class RoundTripGate:
    """Delays all kinds of round trips of one stream while waiters are notified."""

    def __init__(self) -> None:
        #: All kinds of round trips of the stream.
        self.trips: list[SharedRoundTrip[Any]] = []
        self.is_closed = False

    @contextmanager
    def closed(self) -> Generator[None, None, None]:
        """Return a context manager that delays round trips until it is left."""
        outer, self.is_closed = self.is_closed, True
        try:
            yield
        finally:
            self.is_closed = outer
            for trip in self.trips:
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
        gate.trips.append(self)

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


class IdRequest:
    """A request for ``n`` ids.

    :ivar fetched: holds the list of ids after the fetch, until :meth:`claim` returns
        the list.
    :ivar given_up: whether the caller has abandoned the request.
    :ivar answered: fires when the ids have been fetched, and fails if the fetch failed.
        If the request is abandoned, it may never fire.
    """

    __slots__ = ("answered", "fetched", "given_up", "n")

    def __init__(self, n: int) -> None:
        self.n = n
        self.fetched: deque[list[int]] = deque()
        self.given_up = False
        self.answered: Deferred[None] = Deferred()

    def claim(self) -> list[int] | None:
        """Return the ids once, after they were fetched; otherwise return ``None``.

        Thread-safe.
        """
        try:
            return self.fetched.pop()
        except IndexError:
            return None

    def wake(self, error: Exception | None) -> None:
        """Fire the Deferred, unless the request was abandoned."""
        if self.answered.called or self.given_up:
            return
        if error is None:
            self.answered.callback(None)
        else:
            self.answered.errback(error)
