"""Shared fetches of ids from a sequence, for many callers: :class:`IdFetcher`.

A fetch writes no row, but its commit may wait for the disk: ``nextval`` writes a WAL
record about once per 32 ids. An asynchronous commit would be wrong: after a crash of
the server, the sequence could allocate the same ids again. By then, the transactions to
which the ids were allocated first may have been rolled back, and the ids may have been
announced as finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.storage.database import TransactionRunner
from synapse_replication.storage.locked_positions import LockedPositions
from synapse_replication.storage.round_trips import RoundTripGate, SharedRoundTrip


class IdRequest:
    """A request for ``n`` ids.

    :ivar fetched: holds the list of ids after the fetch, until :meth:`claim` returns
        the list.
    :ivar given_up: whether the caller has abandoned the request.
    """

    __slots__ = ("_waiting", "fetched", "given_up", "n")

    def __init__(self, n: int) -> None:
        self.n = n
        self.fetched: deque[list[int]] = deque()
        self.given_up = False
        self._waiting: Deferred[None] = Deferred()

    def answered(self) -> Deferred[None]:
        """Return a Deferred that fires when the ids have been fetched.

        The Deferred fails if the fetch failed. If the request is abandoned, the
        Deferred may never fire.
        """
        return self._waiting

    def claim(self) -> list[int] | None:
        """Return the ids once, after they were fetched; otherwise return ``None``.

        Thread-safe.
        """
        try:
            return self.fetched.pop()
        except IndexError:
            return None

    def wake(self, failure: Failure | None) -> None:
        """Fire the Deferred, unless the request was abandoned."""
        if self._waiting.called or self.given_up:
            return
        if failure is None:
            self._waiting.callback(None)
        else:
            self._waiting.errback(failure)


class IdFetcher:
    """Fetches the ids of one stream for all requests.

    Use it in the reactor's thread, except :meth:`end_fetch` and :meth:`end_unclaimed`,
    which are thread-safe.

    :param fetch_ids: ``(txn, fetch, n) -> ids``; allocates ``n`` ids in a transaction.
        ``fetch`` is the handle that
        :meth:`~synapse_replication.streams.positions.WriterPositions.begin_fetch`
        returned.
    :param on_finished: called after the ids of abandoned requests were finished.
    """

    def __init__(
        self,
        database: TransactionRunner,
        positions: LockedPositions,
        fetch_ids: Callable[[Any, int, int], list[int]],
        on_finished: Callable[[], object],
        gate: RoundTripGate,
    ) -> None:
        self._database = database
        self._positions = positions
        self._fetch_ids = fetch_ids
        self._on_finished = on_finished
        self._gate = gate
        self._fetches = SharedRoundTrip(self._fetch, gate)

    def request(self, n: int) -> IdRequest:
        """Request ``n`` ids, to be fetched together with those of other requests."""
        request = IdRequest(n)
        self._fetches.join(request)
        return request

    def end_fetch(self, fetch: int, ids: list[int]) -> bool:
        """Register the ids that a fetch returned, unless any of them is not new.

        An id is new if
        :meth:`~synapse_replication.streams.positions.WriterPositions.is_usable` is
        true for it. It is not new, for instance, if the sequence went backwards.

        :return: whether all ids were new.
        """
        with self._positions.locked() as positions:
            are_new = all(positions.is_usable(fetch, id_) for id_ in ids)
            positions.end_fetch(fetch, ids if are_new else [])
        return are_new

    def end_unclaimed(self, request: IdRequest) -> bool:
        """Finish the ids of an abandoned request, if they have been fetched.

        :return: whether it finished any.
        """
        # One thread may abandon a request while another thread assigns its ids;
        # claim() returns the ids to only one of the threads.
        ids = request.claim()
        if ids is not None:
            self._positions.finish(ids)
        return ids is not None

    def _fetch(self, wanted: list[IdRequest]) -> None:
        requests = [request for request in wanted if not request.given_up]
        if not requests:
            self._fetches.end()
            return
        with self._positions.locked() as positions:
            fetch = positions.begin_fetch()
        count = sum(request.n for request in requests)
        self._database.transact(
            "get_next_ids",
            lambda txn: self._fetch_ids(txn, fetch, count),
            autocommit=True,
        ).addCallbacks(
            self._assign,
            self._failed,
            callbackArgs=(fetch, requests),
            errbackArgs=(fetch, requests),
        )

    def _assign(self, ids: list[int], fetch: int, requests: list[IdRequest]) -> None:
        if not self.end_fetch(fetch, ids):
            self._fetches.repeat(requests)
            return
        given_up = False
        start = 0
        # Assign all ids before waking any waiter: a waiter may cancel another request.
        for request in requests:
            request.fetched.append(ids[start : start + request.n])
            start += request.n
            given_up = given_up or request.given_up
            if request.given_up:
                self.end_unclaimed(request)
        self._fetches.end()
        with self._gate.closed():
            for request in requests:
                request.wake(None)
            if given_up:
                self._on_finished()

    def _failed(self, failure: Failure, fetch: int, requests: list[IdRequest]) -> None:
        self.end_fetch(fetch, [])
        self._fetches.end()
        with self._gate.closed():
            for request in requests:
                request.wake(failure)
