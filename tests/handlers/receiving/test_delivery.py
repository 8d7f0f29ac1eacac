"""Tests of rows on their way to the host."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import DiscardReason
from tests.handlers.fixtures import Receiving, receiving


class DeliveryTests(SynchronousTestCase):
    """What the host does not take is fetched for it."""

    def setUp(self) -> None:
        self.it = receiving()
        self.it.receive("POSITION events w 0 0")
        for n in range(1, 5):
            self.it.stream.persist("w", n, [str(n)])

    def _receive(self, *tokens: int, it: Receiving | None = None) -> None:
        (it or self.it).receive(*(f'RDATA events w {n} ["{n}"]' for n in tokens))

    def _assert_fetched(self, from_token: int, upto_token: int, lost: int) -> None:
        self.assertEqual(
            self.it.host.observer.discards["events", "w", DiscardReason.HANDLER_FAILED],
            lost,
        )
        self.it.host.rows.is_held = False
        self.it.host.reactor.advance(1)
        self.assertEqual(self.it.stream.requests, [("w", from_token, upto_token)])
        self.assertEqual(self.it.host.rows.tokens("w"), [1, 2, 3, 4])

    def test_a_host_that_fails_at_once(self) -> None:
        """Rows behind the one that failed are not delivered before it."""
        self.it.host.rows.failures = [None, RuntimeError("disk full")]
        self._receive(1, 2, 3, 4)
        self._assert_fetched(1, 4, lost=3)

    def test_a_host_that_fails_at_once_after_it_was_waited_for(self) -> None:
        """The same where the rows before it had to be waited for."""
        self.it.host.rows.is_held = True
        self.it.host.rows.failures = [None, None, RuntimeError("disk full")]
        self._receive(1, 2, 3, 4)
        self.it.host.rows.release()
        self.it.host.rows.release()
        self._assert_fetched(2, 4, lost=2)

    def test_a_host_that_fails_while_it_is_waited_for(self) -> None:
        """The same where it failed a while after it was given the row."""
        self.it.host.rows.is_held = True
        self._receive(1, 2, 3, 4)
        self.it.host.rows.release()
        self.it.host.rows.release(RuntimeError("disk full"))
        self._assert_fetched(1, 4, lost=3)

    def test_a_host_that_is_waited_for_now_and_then(self) -> None:
        """Rows that are taken at once keep their place behind those that were not."""
        self._receive(1)
        self.it.host.rows.is_held = True
        self._receive(2, 3, 4)
        self.it.host.rows.is_held = False
        self.assertEqual(self.it.host.rows.tokens("w"), [1])
        self.it.host.rows.release()
        self.assertEqual(self.it.host.rows.tokens("w"), [1, 2, 3, 4])
        self.assertEqual(self.it.stream.requests, [])

    def test_late_rows_come_in_any_order(self) -> None:
        """A late row behind one that failed is fetched, too, if its token is lower."""
        it = receiving(idempotent=True)
        it.receive("POSITION events w 0 9")
        for n in (3, 7):
            it.stream.persist("w", n, [str(n)])
        it.host.rows.failures = [RuntimeError("disk full")]
        self._receive(7, 3, it=it)
        it.host.reactor.advance(1)
        self.assertEqual(it.stream.requests, [("w", 2, 7)])
        self.assertEqual(it.texts(), [("w", 3, ["3"]), ("w", 7, ["7"])])
