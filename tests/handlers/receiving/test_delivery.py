"""Tests of delivery to the sink."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import DiscardReason
from tests.handlers.fixtures import Receiving, receiving


class DeliveryTests(SynchronousTestCase):
    """Rows that the sink rejects are fetched again."""

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
        """
        If the sink fails synchronously, the rows after the failed one are fetched
        again.
        """
        self.it.host.rows.failures = [None, RuntimeError("disk full")]
        self._receive(1, 2, 3, 4)
        self._assert_fetched(1, 4, lost=3)

    def test_a_host_that_fails_at_once_after_it_was_waited_for(self) -> None:
        """The same if the sink handled the rows before it asynchronously."""
        self.it.host.rows.is_held = True
        self.it.host.rows.failures = [None, None, RuntimeError("disk full")]
        self._receive(1, 2, 3, 4)
        self.it.host.rows.release()
        self.it.host.rows.release()
        self._assert_fetched(2, 4, lost=2)

    def test_a_host_that_fails_while_it_is_waited_for(self) -> None:
        """The same if the sink fails asynchronously."""
        self.it.host.rows.is_held = True
        self._receive(1, 2, 3, 4)
        self.it.host.rows.release()
        self.it.host.rows.release(RuntimeError("disk full"))
        self._assert_fetched(1, 4, lost=3)

    def test_a_host_that_is_waited_for_now_and_then(self) -> None:
        """
        Rows handled synchronously stay in order behind those handled asynchronously.
        """
        self._receive(1)
        self.it.host.rows.is_held = True
        self._receive(2, 3, 4)
        self.it.host.rows.is_held = False
        self.assertEqual(self.it.host.rows.tokens("w"), [1])
        self.it.host.rows.release()
        self.assertEqual(self.it.host.rows.tokens("w"), [1, 2, 3, 4])
        self.assertEqual(self.it.stream.requests, [])

    def test_late_rows_come_in_any_order(self) -> None:
        """If a late row fails, later ones are fetched too, even with a lower token."""
        it = receiving(idempotent=True)
        it.receive("POSITION events w 0 9")
        for n in (3, 7):
            it.stream.persist("w", n, [str(n)])
        it.host.rows.failures = [RuntimeError("disk full")]
        self._receive(7, 3, it=it)
        it.host.reactor.advance(1)
        self.assertEqual(it.stream.requests, [("w", 2, 7)])
        self.assertEqual(it.texts(), [("w", 3, ["3"]), ("w", 7, ["7"])])
