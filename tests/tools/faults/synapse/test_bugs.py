"""The deliberate bugs lose rows, and nothing of the reader repairs that."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.bugs import drop_fetched_events
from synapse_replication.handlers.receiving.decoding import RowDecoder
from tests.handlers.fixtures import receiving


class BugTests(SynchronousTestCase):
    """A reader that does not receive event 2."""

    def delivered(self) -> list[int]:
        fixture = receiving()
        fixture.receive("POSITION events w 0 0", 'RDATA events w 1 ["1"]')
        for token in (2, 3):
            fixture.stream.persist("w", token, [str(token)])
        for _ in range(2):
            fixture.receive("POSITION events w 3 3")
            fixture.host.reactor.advance(60.0)
        fixture.receive('RDATA events w 4 ["4"]')
        self.assertEqual(fixture.stream.current_token("w"), 4)
        return fixture.host.rows.tokens("w")

    def test_drops_fetched_events(self) -> None:
        self.assertEqual(self.delivered(), [1, 2, 3, 4])
        # Restored when the test ends.
        self.patch(RowDecoder, "decode_page", RowDecoder.decode_page)
        drop_fetched_events()
        self.assertEqual(self.delivered(), [1, 4])
