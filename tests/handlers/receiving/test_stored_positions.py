"""Tests of stored positions at a reader, which their writers did not announce."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from tests.handlers.fixtures import receiving
from tests.handlers.receiving.live_reader import FAR, live, tokens


class StoredPositionTests(SynchronousTestCase):
    def test_ahead(self) -> None:
        """The rows up to a stored position are fetched, once."""
        process = live(last_token=9)
        process.stream.persist("w", 7, ["seven"])
        for _ in range(2):
            process.handler.stored_position("events", "w", 7)
        self.assertEqual(tokens(process), [5, 7])
        self.assertEqual(process.stream.requests, [("w", 0, 4), ("w", 5, 7)])
        self.assertEqual(process.host.observer.unannounced, [("events", "w", 5, 7)])
        # The link is still complete: later rows are delivered as they arrive.
        process.receive('RDATA events w 8 ["eight"]', 'RDATA events w 7 ["seven"]')
        self.assertEqual(tokens(process), [5, 7, 8])

    def test_not_ahead(self) -> None:
        """A stored position never rewinds, and costs no query if it is not ahead."""
        process = live(last_token=9)
        process.handler.stored_position("events", "w", 5)
        process.handler.stored_position("events", "w", 1)
        self.assertEqual(process.handler.receivers["events"].claimed_position("w"), 5)
        self.assertEqual(process.stream.requests, [("w", 0, 4)])
        self.assertEqual(process.host.observer.unannounced, [])

    def test_while_fetching(self) -> None:
        """Rows being fetched are known; a greater position extends the catch-up."""
        process = live(last_token=9)
        process.stream.is_held = True
        process.receive("POSITION events w 6 6")
        self.assertEqual(process.handler.receivers["events"].claimed_position("w"), 6)
        process.stream.persist("w", 6, ["six"])
        process.stream.persist("w", 8, ["eight"])
        process.handler.stored_position("events", "w", 6)
        self.assertEqual(process.host.observer.unannounced, [])
        process.handler.stored_position("events", "w", 8)
        process.stream.is_held = False
        process.stream.answer()
        self.assertEqual(tokens(process), [5, 6, 8])

    def test_without_position(self) -> None:
        """The rows of a writer that never announced anything are fetched, too."""
        process = receiving()
        process.stream.persist("w", 2, ["two"])
        process.handler.stored_position("events", "w", 2)
        self.assertEqual(tokens(process), [2])
        process.receive('RDATA events w 3 ["three"]')
        self.assertEqual(tokens(process), [2])
        process.stream.persist("w", 3, ["three"])
        process.receive("POSITION events w 3 3")
        self.assertEqual(tokens(process), [2, 3])

    def test_without_a_link(self) -> None:
        """Without a link, stored positions are ignored: nothing can be announced."""
        process = live(last_token=9)
        process.handler.lost_connection(process.connection)
        process.stream.persist("w", 7, ["seven"])
        process.handler.stored_position("events", "w", 7)
        self.assertEqual(tokens(process), [5])

    def test_implausible(self) -> None:
        """An implausible position is refuted by the source, like any other claim."""
        process = live()
        process.handler.stored_position("events", "w", FAR)
        self.assertEqual(process.stream.current_token("w"), 5)
        observer = process.host.observer
        self.assertEqual(observer.discards["events", "w", DiscardReason.IMPLAUSIBLE], 1)
        self.assertEqual(observer.refuted, [("events", "w", FAR, 5)])
