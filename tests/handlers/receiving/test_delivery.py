"""Tests of delivery to the sink."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from tests.handlers.fixtures import Receiving, receiving


class DeliveryTests(SynchronousTestCase):
    """Rows that the sink rejects are fetched again."""

    def setUp(self) -> None:
        self.fixture = receiving()
        self.fixture.receive("POSITION events w 0 0")
        for n in range(1, 5):
            self.fixture.stream.persist("w", n, [str(n)])

    def _receive(self, *tokens: int, fixture: Receiving | None = None) -> None:
        (fixture or self.fixture).receive(
            *(f'RDATA events w {n} ["{n}"]' for n in tokens)
        )

    def _assert_fetched(self, from_token: int, upto_token: int, lost: int) -> None:
        self.assertEqual(
            self.fixture.host.observer.discards[
                "events", "w", DiscardReason.HANDLER_FAILED
            ],
            lost,
        )
        self.fixture.host.rows.is_held = False
        self.fixture.host.reactor.advance(1)
        self.assertEqual(self.fixture.stream.requests, [("w", from_token, upto_token)])
        self.assertEqual(self.fixture.host.rows.tokens("w"), [1, 2, 3, 4])

    def test_sink_fails_synchronously(self) -> None:
        """
        If the sink fails synchronously, all rows from the failed one on are fetched.
        """
        self.fixture.host.rows.failures = [None, RuntimeError("disk full")]
        self._receive(1, 2, 3, 4)
        self._assert_fetched(1, 4, lost=3)

    def test_sink_fails_after_asynchronous_rows(self) -> None:
        """
        If the sink fails synchronously after asynchronous rows, all rows from the
        failed one on are fetched.
        """
        self.fixture.host.rows.is_held = True
        self.fixture.host.rows.failures = [None, None, RuntimeError("disk full")]
        self._receive(1, 2, 3, 4)
        self.fixture.host.rows.release()
        self.fixture.host.rows.release()
        self._assert_fetched(2, 4, lost=2)

    def test_sink_fails_asynchronously(self) -> None:
        """
        If the sink fails asynchronously, all rows from the failed one on are fetched.
        """
        self.fixture.host.rows.is_held = True
        self._receive(1, 2, 3, 4)
        self.fixture.host.rows.release()
        self.fixture.host.rows.release(RuntimeError("disk full"))
        self._assert_fetched(1, 4, lost=3)

    def test_sink_waits_sometimes(self) -> None:
        """
        Rows handled synchronously are delivered after earlier rows handled
        asynchronously.
        """
        self._receive(1)
        self.fixture.host.rows.is_held = True
        self._receive(2, 3, 4)
        self.fixture.host.rows.is_held = False
        self.assertEqual(self.fixture.host.rows.tokens("w"), [1])
        self.fixture.host.rows.release()
        self.assertEqual(self.fixture.host.rows.tokens("w"), [1, 2, 3, 4])
        self.assertEqual(self.fixture.stream.requests, [])
        self.assertEqual(self.fixture.host.observer.positions, {("events", "w"): 4})

    def test_late_rows_in_any_order(self) -> None:
        """If a late row fails, it is fetched; a later one is delivered nevertheless."""
        fixture = receiving(idempotent=True)
        fixture.receive("POSITION events w 0 9")
        for n in (3, 7):
            fixture.stream.persist("w", n, [str(n)])
        fixture.host.rows.failures = [RuntimeError("disk full")]
        self._receive(7, 3, fixture=fixture)
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.stream.requests, [("w", 6, 7)])
        self.assertEqual(fixture.texts(), [("w", 3, ["3"]), ("w", 7, ["7"])])
