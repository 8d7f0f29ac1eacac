"""Tests of a reader with several links to one writer."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.streams.reader import Reader, ReaderPolicy
from synapse_replication.streams.reader_decisions import Fetch, Rewind, Verdict
from synapse_replication.testing.doubles import MemoryConnection
from tests.handlers.fixtures import Receiving, receiving


def _write(fixture: Receiving, upto: int) -> None:
    for token in range(1, upto + 1):
        fixture.stream.persist("w", token, [str(token)])


class TwoLinksTests(SynchronousTestCase):
    """Two processes that read each other each connect, so each has two links."""

    def test_position_during_the_pages_of_the_other_link(self) -> None:
        """The POSITION of a second link neither repeats nor reorders rows.

        It arrives after each number of pages, with pages of each size.
        """
        for page_rows in range(1, 21):
            for answered in range(-(-20 // page_rows) + 1):
                fixture = receiving(page_rows=page_rows)
                _write(fixture, 20)
                other = fixture.connect()
                fixture.stream.is_held = True
                fixture.receive("POSITION events w 20 20")
                for _ in range(answered):
                    fixture.stream.answer()
                fixture.receive("POSITION events w 20 20", connection=other)
                fixture.stream.is_held = False
                if len(fixture.stream.requests) > answered:
                    fixture.stream.answer()
                self.assertEqual(
                    fixture.host.rows.tokens("w"),
                    list(range(1, 21)),
                    f"{answered} pages of {page_rows} rows",
                )
                self.assertEqual(fixture.host.observer.resets, [])

    def test_one_catch_up(self) -> None:
        """A gap that both links show is fetched once, and both links become live."""
        fixture = receiving()
        _write(fixture, 5)
        other = fixture.connect()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.receive("POSITION events w 5 5", connection=other)
        fixture.stream.is_held = False
        fixture.stream.answer()
        self.assertEqual(fixture.stream.requests, [("w", 0, 5)])
        fixture.receive('RDATA events w 6 ["a"]', connection=other)
        fixture.receive('RDATA events w 7 ["b"]')
        self.assertEqual(fixture.host.rows.tokens("w")[-2:], [6, 7])

    def test_slower_link(self) -> None:
        """The copies that a slower link carries are discarded as repeated."""
        fixture = receiving()
        other = fixture.connect()
        for link in (None, other):
            fixture.receive("POSITION events w 0 0", connection=link)
        lines = [f'RDATA events w {token} ["x"]' for token in (1, 2, 3)]
        fixture.receive(*lines)
        fixture.receive("POSITION events w 3 5")
        fixture.receive(*lines, "POSITION events w 3 5", connection=other)
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])
        self.assertEqual(fixture.stream.requests, [])
        self.assertEqual(fixture.host.observer.resets, [])
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.REPEATED], 3
        )

    def test_late_first_position(self) -> None:
        """A first POSITION may be older than the rows of another link."""
        for held_in_memory in (False, True):
            fixture = receiving(
                resettable=held_in_memory, held_in_memory=held_in_memory
            )
            fixture.receive("POSITION events w 0 0")
            rows = [f'RDATA events w {token} ["x"]' for token in (1, 2)]
            fixture.receive(*rows)
            other = fixture.connect()
            fixture.receive('RDATA events w 3 ["x"]', "POSITION events w 3 5")
            fixture.receive("POSITION events w 1 1", connection=other)
            self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])
            self.assertEqual(fixture.stream.current_token("w"), 5)
            self.assertEqual(fixture.host.observer.resets, [])

    def test_link_during_a_reset(self) -> None:
        """A link that comes up during a rewind does not cause another one."""
        policy = ReaderPolicy(resettable=True, held_in_memory=True)
        reader = Reader(policy, lambda token: True, lambda: 5, "old")
        reader.link_up("a")
        reader.epoch_reported("a", 1, "new", has_restarted=True)
        reader.link_up("b")
        self.assertIsInstance(reader.next(0.0), Rewind)
        reader.rewound()
        reader.announced("b", 1, 1, 0.0)
        self.assertNotIsInstance(reader.next(0.0), Rewind)

    def test_slow_link_of_a_writer_that_restarted(self) -> None:
        """A link that is reset by another one is asked for the writer's position.

        The end that serves a direct link may not ask.
        """
        for relays in (False, True):
            fixture = receiving(resettable=True, held_in_memory=True)
            fixture.receive("POSITION events w 3 3")
            fixture.handler.lost_connection(fixture.connection)
            asked = MemoryConnection("asked", relays=relays)
            fixture.handler.new_connection(asked)
            other = fixture.connect()
            fixture.receive("POSITION events w 4 4", connection=asked)
            del asked.sent[:]
            fixture.receive("POSITION events w 0 0", connection=other)
            self.assertEqual(asked.sent, [] if relays else ["REPLICATE"])
            self.assertEqual(fixture.host.observer.failures, [])

    def test_replaced_rows_of_a_slow_link(self) -> None:
        """A writer's memory may lack rows that a slow link still carries."""
        fixture = receiving(resettable=True, held_in_memory=True)
        other = fixture.connect()
        fixture.receive("POSITION events w 0 0", connection=other)
        fixture.stream.persist("w", 3, ["x"])
        fixture.receive("POSITION events w 4 4")
        fixture.receive('RDATA events w 4 ["replaced"]', connection=other)
        self.assertEqual(fixture.host.rows.tokens("w"), [3])
        self.assertEqual(fixture.stream.current_token("w"), 4)
        self.assertEqual(fixture.host.observer.resets, [])

    def test_false_claim_before_a_reconnection(self) -> None:
        """A position below a false one does not skip the rows that precede it."""
        policy = ReaderPolicy(resettable=True, idempotent=True)
        reader = Reader(policy, lambda token: token < 100, lambda: 56)
        reader.link_up("a")
        reader.announced("a", 56, 56, 0.0)
        reader.reported("a", 1000, 1000, 0.0)
        reader.link_lost("a")
        reader.link_up("b")
        reader.announced("b", 60, 60, 0.0)
        action = reader.next(0.0)
        assert isinstance(action, Fetch)
        self.assertEqual(action.from_token, 56)

    def test_restart_behind_a_half_open_link(self) -> None:
        """A restart is detected once the link to the earlier process is lost."""
        fixture = receiving(resettable=True, held_in_memory=True)
        fixture.receive("POSITION events w 0 0", 'RDATA events w 1 ["x"]')
        other = fixture.connect()
        fixture.receive("POSITION events w 0 0", connection=other)
        self.assertEqual(fixture.host.observer.resets, [])
        fixture.handler.lost_connection(fixture.connection)
        fixture.receive("POSITION events w 0 0", connection=other)
        self.assertEqual(fixture.stream.current_token("w"), 0)

    def test_rows_lost_before_older_ones_are_handled(self) -> None:
        """An older token does not conceal that rows after it were lost."""
        reader = Reader(ReaderPolicy(), lambda token: True, lambda: 61)
        reader.link_up("a")
        reader.announced("a", 61, 61, 0.0)
        reader.batch("a", 66, 1)
        reader.lost_rows("a")
        self.assertIs(reader.batch("a", 62, 1), Verdict.FETCH)
        self.assertTrue(reader._links["a"].is_lossy)

    def test_claim_of_another_link(self) -> None:
        """A writer that is behind the reader's initial position is not contradicted."""
        fixture = receiving()
        fixture.stream.advance("w", 65)
        fixture.reconnect()
        other = fixture.connect()
        fixture.receive("POSITION events w 64 64", "POSITION events w 64 67")
        fixture.receive("POSITION events w 64 64", connection=other)
        self.assertEqual(fixture.stream.current_token("w"), 67)
        self.assertEqual(fixture.host.observer.resets, [])


class LostLinkTests(SynchronousTestCase):
    """The end of a link."""

    def test_idle(self) -> None:
        """An idle stream starts no background process: the host may have shut down."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        before = fixture.host.observer.processes.copy()
        fixture.handler.lost_connection(fixture.connection)
        self.assertEqual(fixture.host.observer.processes, before)
