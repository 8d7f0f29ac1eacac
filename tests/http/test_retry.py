"""Tests for retried requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock as ReactorClock, deferLater
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.interfaces import Clock, DelayedCall
from synapse_replication.http.client import with_retries
from synapse_replication.streams.stream import StreamUpdateResult

_PAGE = StreamUpdateResult([], 9, False)


class TestClock:
    """A host's clock over Twisted's test clock."""

    def __init__(self) -> None:
        self.reactor = ReactorClock()

    def seconds(self) -> float:
        return self.reactor.seconds()

    def time_msec(self) -> int:
        return int(self.reactor.seconds() * 1000)

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        return self.reactor.callLater(delay, func, *args)

    def sleep(self, delay: float) -> Awaitable[None]:
        return deferLater(self.reactor, delay, lambda: None)


_: Clock = TestClock()


class WithRetriesTests(SynchronousTestCase):
    """Tests for :func:`with_retries`."""

    def setUp(self) -> None:
        self.clock = TestClock()
        self.statuses: list[int | None] = []
        self.errors: list[HttpCatchUpError] = []
        self.request_count = 0

    async def fetch(
        self, instance_name: str, from_token: int, upto_token: int, limit: int
    ) -> StreamUpdateResult:
        """Fail with the next error or status, or return a page if none remains."""
        self.request_count += 1
        if self.errors:
            raise self.errors.pop(0)
        if self.statuses:
            raise HttpCatchUpError("GET", "http://x", self.statuses.pop(0), "no")
        return _PAGE

    def start(self) -> Deferred[StreamUpdateResult]:
        """Fetch once, with retries."""
        retrying = with_retries(self.fetch, self.clock, lambda: 0.5)

        async def fetch() -> StreamUpdateResult:
            return await retrying("w", 1, 9, 100)

        return Deferred.fromCoroutine(fetch())

    def test_answer(self) -> None:
        """A response is returned immediately."""
        self.assertEqual(self.successResultOf(self.start()), _PAGE)

    def test_lost_answer(self) -> None:
        """A request without a response, or with a 503, is retried after a delay."""
        self.statuses = [None, 503]
        response = self.start()
        self.assertEqual(self.request_count, 1)
        self.clock.reactor.advance(0.25)
        self.assertEqual(self.request_count, 2)
        self.clock.reactor.advance(0.25)
        self.assertNoResult(response)
        self.clock.reactor.advance(0.25)
        self.assertEqual(self.successResultOf(response), _PAGE)

    def test_bounded(self) -> None:
        """After the last attempt, its error is raised."""
        self.statuses = [None, None, 500, None]
        response = self.start()
        self.clock.reactor.pump([1.0] * 10)
        error = self.failureResultOf(response, HttpCatchUpError).value
        self.assertEqual((self.request_count, error.status), (3, 500))

    def test_refusal(self) -> None:
        """An error that a retry cannot help is not retried."""
        self.statuses = [401]
        self.failureResultOf(self.start(), HttpCatchUpError)
        self.assertEqual(self.request_count, 1)

    def test_unsent(self) -> None:
        """A request that could not be sent for lack of an address is not retried."""
        unsent = HttpCatchUpError("GET", "s of w", None, "no address", was_sent=False)
        self.errors = [unsent]
        failure = self.failureResultOf(self.start(), HttpCatchUpError)
        self.assertIs(failure.value, unsent)
