"""Tests of the machine that decides what a reader does about one writer.

``tests/tools/explore`` explores all its states. These tests show what it decides.
"""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.streams import reader as machine
from synapse_replication.streams.reader import (
    MAX_EXPECTED,
    Reader,
    ReaderPolicy,
    UnexpectedEventError,
)
from synapse_replication.streams.reader_decisions import (
    Action,
    Advance,
    Ask,
    BeginEpoch,
    Connected,
    Fetch,
    Finding,
    Finished,
    Pause,
    Refuted,
    Rewind,
    Verdict,
)
from synapse_replication.streams.reader_state import EMPTY_RANGE_WINDOW
from synapse_replication.streams.reader_table import TABLE, Entry, ReaderEvent, State
from synapse_replication.streams.stream import StreamUpdateResult

DATABASE = ReaderPolicy(tolerance=100)
CACHES = ReaderPolicy(idempotent=True)
MEMORY = ReaderPolicy(resettable=True, held_in_memory=True)
RESETTABLE = ReaderPolicy(resettable=True)


class Driven:
    """A reader, and a driver that carries out its actions.

    :ivar actions: the actions since the last call of :meth:`take`.
    :ivar rows: the tokens that were delivered.
    """

    def __init__(
        self, policy: ReaderPolicy = DATABASE, position: int = 0, links: str = "a"
    ) -> None:
        self.position = position
        self.reader = Reader(policy, lambda token: token <= 1000, lambda: self.position)
        self.now = 0.0
        self.rows: list[int] = []
        for link in links:
            self.reader.link_up(link)

    def take(self) -> list[Action]:
        """Take the actions, up to a fetch, and return them."""
        found: list[Action] = []
        while (action := self.reader.next(self.now)) is not None:
            found.append(action)
            if isinstance(action, (Rewind, Advance)):
                self.position = action.token
            if isinstance(action, Rewind):
                self.reader.rewound(action.epoch)
            elif isinstance(action, BeginEpoch):
                self.reader.epoch_begun(action.epoch)
            elif isinstance(action, Advance):
                self.reader.advanced(action.token, self.now)
        return found

    def open(self, position: int, link: str = "a") -> None:
        """Make a link live at the reader's position."""
        self.reader.announced(link, position, position, self.now)
        self.take()

    def row(self, token: int, link: str = "a") -> Verdict:
        """Receive a row; deliver it if the reader says so."""
        self.reader.gather(link, [token], [b"{}"])
        verdict = self.reader.batch(link, token, 1)
        self.reader._links[link].pending = []
        if verdict is Verdict.DELIVER:
            self.rows.append(token)
            self.position = max(self.position, token)
        return verdict

    def page(self, *tokens: int, upto: int | None = None, **options: Any) -> bool:
        """Answer the request; deliver the page, and return whether it was wanted."""
        fetch = self.reader.request
        assert fetch is not None
        updates: list[tuple[int, Any]] = [(token, None) for token in tokens]
        upto = fetch.upto_token if upto is None else upto
        result = StreamUpdateResult(updates, upto, False, **options)
        page = self.reader.page_fetched(fetch, result)
        if page is None:
            return False
        self.take()
        for token in page.tokens:
            self.rows.append(token)
            self.position = max(self.position, token)
            self.reader.delivered(token)
        self.reader.page_delivered()
        return True

    def requested(self) -> tuple[int, int] | None:
        """Return the range that is being fetched."""
        fetch = self.reader.request
        return None if fetch is None else (fetch.from_token, fetch.upto_token)


class PositionTests(SynchronousTestCase):
    """POSITIONs of a link that is live at 10."""

    def announce(
        self, prev: int, new: int, policy: ReaderPolicy = DATABASE
    ) -> tuple[Finding, Driven]:
        driven = Driven(policy, 9)
        driven.open(9)
        driven.row(10)
        found = driven.reader.announced("a", prev, new, 0.0)
        driven.now = 0.0
        return found, driven

    def test_between_the_two_tokens(self) -> None:
        """A reader between the two tokens, both included, missed no row."""
        found, driven = self.announce(10, 12)
        self.assertIs(found, Finding.EXPECTED)
        self.assertEqual(driven.take(), [Advance(12), Finished(None)])
        self.assertEqual(driven.reader.position, 12)

    def test_behind(self) -> None:
        """A reader below the first token may have missed rows."""
        found, driven = self.announce(11, 12)
        self.assertIs(found, Finding.GAP)
        driven.take()
        self.assertEqual(driven.requested(), (10, 12))

    def test_the_same(self) -> None:
        """A POSITION that repeats the position says nothing."""
        found, driven = self.announce(10, 10)
        self.assertIs(found, Finding.NOTHING)
        self.assertEqual(driven.take(), [])

    def test_below_a_delivered_row(self) -> None:
        """The writer is behind a row that was delivered: this is reported."""
        found, driven = self.announce(5, 8)
        self.assertIs(found, Finding.AHEAD)
        self.assertEqual(driven.take(), [])

    def test_caches(self) -> None:
        """A lower token says nothing about a stream whose rows may be late."""
        found, driven = self.announce(5, 8, CACHES)
        self.assertIs(found, Finding.NOTHING)
        self.assertEqual(driven.take(), [])

    def test_tokens_that_go_backwards(self) -> None:
        """If the tokens are in the wrong order, rows up to the second are fetched."""
        found, driven = self.announce(14, 12)
        self.assertIs(found, Finding.GAP)
        driven.take()
        self.assertEqual(driven.requested(), (10, 12))

    def test_reset(self) -> None:
        """A resettable stream goes to a lower token, and one in memory to 0."""
        found, driven = self.announce(3, 3, RESETTABLE)
        self.assertIs(found, Finding.RESET)
        self.assertEqual(driven.take()[0], Rewind(3))
        found, driven = self.announce(3, 3, MEMORY)
        self.assertIs(found, Finding.RESET)
        self.assertEqual(driven.take()[0], Rewind(0))
        self.assertEqual(driven.requested(), (0, 3))

    def test_false_position(self) -> None:
        """A link that contradicts itself reverts the position to the last row."""
        _, driven = self.announce(10, 20)
        driven.take()
        found = driven.reader.announced("a", 12, 12, 0.0)
        self.assertIs(found, Finding.RESET)
        self.assertEqual(driven.take()[0], Rewind(10))
        self.assertEqual(driven.requested(), (10, 12))

    def test_slower_link(self) -> None:
        """A link that is slower than another one contradicts nothing."""
        driven = Driven(links="ab")
        driven.open(0)
        driven.open(0, "b")
        driven.row(1)
        driven.row(2)
        self.assertIs(driven.reader.announced("b", 1, 1, 0.0), Finding.NOTHING)
        self.assertEqual(driven.take(), [])
        self.assertIs(driven.row(1, "b"), Verdict.OLD)
        self.assertIs(driven.row(3, "b"), Verdict.DELIVER)

    def test_link_that_comes_up_late(self) -> None:
        """Its first POSITION may be from before what another link carried."""
        driven = Driven(MEMORY)
        driven.open(0)
        driven.row(1)
        driven.reader.link_up("b")
        self.assertIs(driven.reader.announced("b", 0, 0, 0.0), Finding.NOTHING)

    def test_check(self) -> None:
        """An empty range is fetched once a second when a POSITION repeats its end."""
        _, driven = self.announce(10, 12)
        driven.take()
        driven.reader.announced("a", 12, 12, 5.0)
        driven.take()
        self.assertEqual(driven.requested(), (10, 12))
        driven.page()
        driven.take()
        driven.reader.announced("a", 12, 12, 5.5)
        self.assertEqual(driven.take(), [])
        driven.reader.announced("a", 12, 12, 6.0)
        driven.take()
        self.assertEqual(driven.requested(), (10, 12))

    def test_check_of_a_range_that_is_stated_again(self) -> None:
        """An empty range is not fetched if POSITION says that all of it is empty."""
        _, driven = self.announce(10, 12)
        driven.take()
        driven.reader.announced("a", 10, 12, 5.0)
        self.assertEqual(driven.take(), [])
        driven.reader.announced("a", 11, 12, 5.0)
        driven.take()
        self.assertEqual(driven.requested(), (10, 12))

    def test_old_claims_are_forgotten(self) -> None:
        """The empty range of an idle writer reaches back for a limited time."""
        driven = Driven()
        driven.open(0)
        for second in range(600):
            driven.now = float(second)
            driven.reader.announced("a", second, second + 1, driven.now)
            driven.take()
        self.assertEqual(driven.reader.position, 600)
        self.assertGreaterEqual(driven.reader.floor, 600 - 2 * EMPTY_RANGE_WINDOW - 2)
        self.assertLessEqual(driven.reader.floor, 600 - EMPTY_RANGE_WINDOW)

    def test_recording(self) -> None:
        """A recording's positions are never reverted."""
        driven = Driven(ReaderPolicy(reverts_positions=False))
        driven.open(0)
        driven.reader.announced("a", 0, 5, 0.0)
        driven.take()
        self.assertEqual(driven.reader.floor, 5)


class ReportTests(SynchronousTestCase):
    """Positions that the writer reports."""

    def test_missing_rows(self) -> None:
        """Rows up to a greater token are fetched from the last row on."""
        driven = Driven()
        driven.open(0)
        driven.row(3)
        driven.reader.announced("a", 3, 5, 0.0)
        driven.take()
        self.assertIs(driven.reader.reported("a", 5, 5, 0.0), Finding.NOTHING)
        self.assertIs(driven.reader.reported("a", 7, 7, 0.0), Finding.GAP)
        driven.take()
        self.assertEqual(driven.requested(), (3, 7))
        self.assertIs(driven.reader.reported("a", 9, 9, 0.0), Finding.EXPECTED)

    def test_range_without_rows(self) -> None:
        """A report may say, as a POSITION, that a range has no rows."""
        driven = Driven()
        driven.open(0)
        self.assertIs(driven.reader.reported("a", 0, 5, 0.0), Finding.EXPECTED)
        self.assertEqual(driven.take(), [Advance(5), Finished(None)])
        self.assertIs(driven.reader.reported("a", 6, 7, 0.0), Finding.GAP)
        driven.reader.link_up("b")
        self.assertIs(driven.reader.reported("b", 6, 8, 0.0), Finding.EXPECTED)
        driven.take()
        self.assertEqual(driven.requested(), (0, 8))

    def test_row_that_a_false_position_hides(self) -> None:
        """The last row is fetched if it did not arrive, and a position is above it."""
        for token in (8, 9):
            for is_first in (False, True):
                for method in ("announced", "reported"):
                    driven = Driven()
                    driven.open(0)
                    driven.reader.announced("a", 0, 8, 0.0)
                    driven.take()
                    if is_first:
                        driven.reader.link_lost("a")
                        driven.reader.link_up("a")
                    getattr(driven.reader, method)("a", 3, token, 0.0)
                    driven.take()
                    self.assertEqual(driven.requested(), (0, token))

    def test_positions_that_follow_each_other(self) -> None:
        """POSITIONs that state only what follows the last one cause no fetch."""
        driven = Driven()
        driven.open(0)
        for prev, token in ((0, 3), (3, 5), (5, 8)):
            found = driven.reader.announced("a", prev, token, 0.0)
            self.assertIs(found, Finding.EXPECTED)
            driven.take()
            self.assertIsNone(driven.requested())

    def test_opens_a_link(self) -> None:
        """A report opens a link, unless it is below the position."""
        driven = Driven(position=5)
        self.assertIs(driven.reader.reported("a", 4, 4, 0.0), Finding.NOTHING)
        self.assertIs(driven.reader.state, State.WAITING)
        self.assertIs(driven.reader.reported("a", 5, 5, 0.0), Finding.EXPECTED)
        self.assertIn(Connected("a"), driven.take())

    def test_report_below_an_idempotent_position(self) -> None:
        """A new reader of caches may be above a writer that announces its own moves."""
        driven = Driven(CACHES, 5)
        self.assertIs(driven.reader.reported("a", 3, 3, 0.0), Finding.EXPECTED)
        self.assertEqual(driven.take(), [Advance(5), Finished(None), Connected("a")])
        self.assertIs(driven.reader.state, State.LIVE)
        # If its position may be lowered, only a POSITION lowers it.
        driven = Driven(ReaderPolicy(idempotent=True, resettable=True), 5)
        self.assertIs(driven.reader.reported("a", 3, 3, 0.0), Finding.NOTHING)

    def test_restart_shown_by_a_new_link(self) -> None:
        """A new link that states less than a lost one claimed has another process."""
        for is_paused in (False, True):
            driven = Driven(MEMORY, links="ac")
            driven.reader.announced("a", 9, 9, 0.0)
            driven.take()
            fetch = driven.reader.request
            assert fetch is not None
            driven.reader.link_lost("a")
            if is_paused:
                driven.reader.failed()
            else:
                page = StreamUpdateResult([(1, None)], 1, True)
                driven.reader.page_fetched(fetch, page)
            driven.reader.link_up("b")
            state = State.PAUSED if is_paused else State.DELIVERING
            self.assertIs(driven.reader.state, state)
            driven.reader.reported("b", 5, 5, 0.0)
            self.assertIs(driven.reader.state, State.DUE)
            self.assertIsNone(driven.reader.page)
            driven.take()
            self.assertEqual(driven.requested(), (0, 5))

    def test_stored(self) -> None:
        """A stored position is fetched if it is new, and is no evidence otherwise."""
        driven = Driven(position=5)
        driven.open(5)
        self.assertIs(driven.reader.stored(5), Finding.NOTHING)
        self.assertIs(driven.reader.stored(7), Finding.GAP)
        self.assertIs(driven.reader.stored(7), Finding.NOTHING)
        driven.take()
        self.assertEqual(driven.requested(), (5, 7))


class RowTests(SynchronousTestCase):
    """Rows that arrive."""

    def test_without_position(self) -> None:
        """Rows before the first POSITION of a link are dropped."""
        driven = Driven()
        self.assertIsNone(driven.reader.gather("a", [None, 1], [b"{}", b"{}"]))
        self.assertFalse(driven.reader._links["a"].is_lossy)
        self.assertIsNone(driven.reader.gather("a", [2, None], [b"{}", b"{}"]))
        driven.open(0)
        self.assertIs(driven.row(3), Verdict.FETCH)

    def test_batches(self) -> None:
        """The rows without a token belong to the next token."""
        driven = Driven()
        driven.open(0)
        texts = [b"1", b"2", b"3", b"4"]
        complete = driven.reader.gather("a", [None, 4, 5, None], texts)
        self.assertEqual(complete, [(4, [b"1", b"2"]), (5, [b"3"])])
        self.assertFalse(driven.reader.is_live_on("a"))
        self.assertEqual(driven.reader.drop_unfinished("a"), 1)
        self.assertEqual(driven.reader.drop_unfinished("a"), 0)
        self.assertIs(driven.row(6), Verdict.FETCH)

    def test_old(self) -> None:
        """Rows at or below the last delivered one are old."""
        driven = Driven()
        driven.open(0)
        self.assertIs(driven.row(3), Verdict.DELIVER)
        self.assertIs(driven.row(3), Verdict.OLD)
        self.assertIs(driven.row(2), Verdict.OLD)

    def test_late_in_caches(self) -> None:
        """Late rows of a stream whose rows may be late are delivered."""
        driven = Driven(CACHES)
        driven.open(0)
        self.assertIs(driven.row(3), Verdict.DELIVER)
        self.assertIs(driven.row(2), Verdict.DELIVER)

    def test_in_an_empty_range(self) -> None:
        """A row shows that a claim was false."""
        for policy in (DATABASE, MEMORY):
            driven = Driven(policy)
            driven.open(0)
            driven.reader.announced("a", 0, 9, 0.0)
            driven.take()
            self.assertIs(driven.row(4), Verdict.FETCH)
            self.assertEqual(driven.take()[0], Rewind(0))
            self.assertEqual(driven.requested(), (0, 4))

    def test_overflow_during_a_page(self) -> None:
        """A given-up row that the page lacks was committed after it: fetch again."""
        driven = Driven(CACHES)
        driven.open(0)
        driven.reader.announced("a", 9, 9, 0.0)
        driven.take()
        fetch = driven.reader.request
        assert fetch is not None
        result = StreamUpdateResult([(4, None), (9, None)], 9, False)
        self.assertIsNotNone(driven.reader.page_fetched(fetch, result))
        driven.reader.overflow(4)
        self.assertIs(driven.reader.state, State.DELIVERING)
        driven.reader.overflow(6)
        self.assertIs(driven.reader.state, State.DUE)

    def test_row_that_earlier_pages_lack(self) -> None:
        """
        A slow link carries a row that the source had replaced, after the page and while
        the next one is being fetched: the rows above the floor are fetched again.
        """
        driven = Driven(MEMORY, links="ab")
        driven.open(0)
        driven.open(0, "b")
        driven.row(4)
        driven.reader.announced("b", 7, 7, 0.0)
        driven.take()
        driven.reader.reported("b", 9, 9, 0.0)
        self.assertTrue(driven.page())
        self.assertIs(driven.reader.state, State.FETCHING)
        self.assertIs(driven.row(5), Verdict.FETCH)
        self.assertIs(driven.reader.state, State.DUE)
        driven.take()
        self.assertEqual(driven.requested(), (4, 9))

    def test_false_position_of_memory(self) -> None:
        """Its sink forgets all rows when its position moves back: all are fetched."""
        driven = Driven(MEMORY)
        driven.open(0)
        driven.row(2)
        driven.reader.announced("a", 2, 9, 0.0)
        driven.take()
        self.assertIs(driven.row(4), Verdict.FETCH)
        self.assertEqual(driven.take()[0], Rewind(0))
        self.assertEqual(driven.requested(), (0, 4))

    def test_lost(self) -> None:
        """After a lost row, the next batch is fetched, with what is before it."""
        driven = Driven()
        driven.open(0)
        self.assertEqual(driven.reader.lost_rows("a"), 0)
        self.assertFalse(driven.reader.is_live_on("a"))
        self.assertIs(driven.row(3), Verdict.FETCH)
        driven.take()
        self.assertEqual(driven.requested(), (0, 3))

    def test_lost_above_rows_that_are_handled(self) -> None:
        """Rows lost above a batch that is still handled are not taken for its own."""
        driven = Driven()
        driven.open(0)
        driven.reader.reported("a", 6, 6, 0.0)
        driven.take()
        driven.reader.lost_rows("a")
        self.assertIs(driven.row(6), Verdict.FETCH)
        self.assertTrue(driven.reader._links["a"].is_lossy)

    def test_implausible(self) -> None:
        """A token that is too far above all known ones is fetched first."""
        driven = Driven()
        driven.open(0)
        self.assertIs(driven.row(5000), Verdict.FETCH)
        driven.take()
        self.assertFalse(driven.page(last_token=7, upto=0))
        self.assertEqual(driven.take(), [Refuted(5000, 7), Finished(None)])

    def test_undecodable(self) -> None:
        """A row that cannot be decoded is fetched from the stream's own source."""
        driven = Driven()
        driven.open(0)
        driven.reader.unreadable(3)
        fetch = driven.take()[0]
        assert isinstance(fetch, Fetch)
        self.assertEqual((driven.requested(), fetch.from_source), ((0, 3), True))

    def test_undecodable_row_after_another_failure(self) -> None:
        """It is fetched from the source, too, and does not end a pause."""
        driven = Driven()
        driven.open(0)
        driven.reader.overflow()
        driven.reader.unreadable(3)
        driven.reader.delivery_failed([4])
        driven.reader.unreadable(5)
        self.assertEqual(driven.reader.delivery_failed([6]), 2)
        self.assertIs(driven.reader.state, State.PAUSED)
        driven.reader.timer_due()
        fetch = driven.take()[0]
        assert isinstance(fetch, Fetch)
        self.assertEqual((driven.requested(), fetch.from_source), ((0, 6), True))

    def test_overflow(self) -> None:
        """What is given up is fetched."""
        driven = Driven()
        driven.open(0)
        driven.reader.overflow()
        driven.reader.overflow(3)
        self.assertIs(driven.row(4), Verdict.FETCH)
        driven.take()
        self.assertEqual(driven.requested(), (0, 4))


class PageTests(SynchronousTestCase):
    """Pages that arrive."""

    def fetching(self, upto: int = 9, **options: Any) -> Driven:
        driven = Driven(**options)
        driven.reader.announced("a", upto, upto, 0.0)
        driven.take()
        self.assertEqual(driven.requested(), (0, upto))
        return driven

    def test_delivered(self) -> None:
        """After the last page, the position is at the target, and the link is live."""
        driven = self.fetching()
        self.assertTrue(driven.page(2, 5))
        self.assertEqual(driven.take(), [Advance(9), Finished(None), Connected("a")])
        self.assertTrue(driven.reader.follows("a", 9) is False)
        self.assertTrue(driven.reader.is_live_on("a"))
        self.assertEqual(driven.rows, [2, 5])

    def test_reads_ahead(self) -> None:
        """While a page is delivered, the next one is requested."""
        driven = self.fetching()
        self.assertTrue(driven.page(2, 5, upto=5))
        self.assertEqual(driven.requested(), (5, 9))

    def test_caches_are_not_read_ahead(self) -> None:
        """Rows of a stream whose rows may be late may be committed meanwhile."""
        driven = self.fetching(policy=CACHES)
        self.assertTrue(driven.page(2, 5, upto=5))
        self.assertIsNone(driven.requested())

    def test_rows_that_arrived(self) -> None:
        """A page ends before the first row that arrived, and that it lacks."""
        driven = self.fetching()
        for token in (2, 4, 6):
            self.assertIs(driven.row(token), Verdict.FETCH)
        self.assertTrue(driven.page(2, 6))
        self.assertEqual(driven.rows, [2])
        driven.take()
        self.assertEqual(driven.requested(), (2, 9))

    def test_many_rows_that_arrived(self) -> None:
        """The number of tokens that are stored is limited; the page ends there."""
        self.patch(machine, "MAX_EXPECTED", 2)
        driven = self.fetching()
        for token in (6, 4, 2, 4):
            driven.row(token)
        self.assertEqual(driven.reader._expected, [2, 4])
        self.assertTrue(driven.page(2, 4, 5))
        self.assertEqual(driven.rows, [2, 4])
        self.assertGreater(MAX_EXPECTED, 2)

    def test_nothing_of_it_is_complete(self) -> None:
        """If the first row is missing, the page is requested again."""
        driven = self.fetching()
        driven.row(1)
        self.assertFalse(driven.page(2))
        driven.take()
        self.assertEqual(driven.requested(), (0, 9))

    def test_row_that_the_delivered_page_lacks(self) -> None:
        """A row that arrives, and that the page lacks, comes first."""
        driven = self.fetching(9)
        fetch = driven.reader.request
        assert fetch is not None
        driven.reader.page_fetched(fetch, StreamUpdateResult([(5, None)], 9, False))
        driven.row(5)
        self.assertIsNotNone(driven.reader.page)
        driven.row(4)
        self.assertIsNone(driven.reader.page)

    def test_refuted(self) -> None:
        """A claim that the source refutes is dropped; a near one is not."""
        driven = self.fetching(500)
        self.assertFalse(driven.page(2, upto=3, last_token=3))
        self.assertEqual(driven.take(), [Refuted(500, 3), Finished(None)])
        self.assertEqual(driven.reader.position, 0)
        self.assertIs(driven.reader.state, State.WAITING)
        driven = self.fetching(103)
        self.assertTrue(driven.page(2, upto=3, last_token=3))
        driven.take()
        self.assertEqual(driven.requested(), (2, 103))

    def test_rows_that_arrived_during_an_earlier_fetch(self) -> None:
        """A page need not have the rows that an earlier one had to have."""
        driven = Driven(position=5)
        driven.open(5)
        driven.reader.reported("a", 8, 8, 0.0)
        driven.take()
        driven.row(7)
        self.assertTrue(driven.page(6, 7))
        driven.take()
        driven.reader.reported("a", 12, 12, 0.0)
        driven.take()
        self.assertTrue(driven.page(10))

    def test_source_is_behind(self) -> None:
        """A source that does not have all rows yet is not asked again at once."""
        driven = Driven()
        driven.open(0)
        driven.reader.announced("a", 9, 9, 0.0)
        driven.take()
        with self.assertRaisesRegex(CatchUpError, "rows up to 9 were announced"):
            driven.page(upto=5, last_token=5)
        self.assertEqual(driven.reader.failed(), 1)
        self.assertEqual(driven.take(), [])
        driven.reader.timer_due()
        driven.take()
        self.assertTrue(driven.page(4, upto=5, last_token=5))
        self.assertEqual(driven.rows, [4])

    def test_source_was_behind_a_later_claim(self) -> None:
        """A claim that arrived after the source answered is fetched without a pause."""
        driven = Driven()
        driven.open(0)
        driven.reader.reported("a", 5000, 5000, 0.0)
        driven.take()
        self.assertEqual(driven.requested(), (0, 5000))
        driven.reader.reported("a", 9, 9, 0.0)
        self.assertTrue(driven.page(upto=5, last_token=5))
        driven.take()
        self.assertEqual(driven.requested(), (0, 9))

    def test_refuted_claims_may_have_hidden_true_ones(self) -> None:
        """After claims were refuted, the rows below the next one are fetched."""
        for claims in ((8, 500), (2000, 3000)):
            driven = Driven(position=5)
            driven.open(5)
            for claim in claims:
                driven.reader.reported("a", claim, claim, 0.0)
            driven.take()
            self.assertFalse(driven.page(upto=5, last_token=5))
            driven.take()
            self.assertIs(driven.row(9), Verdict.FETCH)
            driven.take()
            self.assertEqual(driven.requested(), (5, 9))

    def test_rows_delivered_before_the_position_is_lowered(self) -> None:
        """It is lowered only to the last row that was delivered meanwhile."""
        for token, lowered in ((10, [Rewind(10)]), (25, [])):
            driven = Driven(position=5)
            driven.open(5)
            driven.reader.announced("a", 5, 20, 0.0)
            driven.take()
            driven.reader.reported("a", 30, 30, 0.0)
            driven.take()
            driven.page(6, upto=8)
            driven.take()
            fetch = driven.reader.request
            assert fetch is not None
            result = StreamUpdateResult([(10, None), (25, None)], 30, False)
            driven.reader.page_fetched(fetch, result)
            # The row is in the range that the first page covered.
            self.assertIs(driven.row(7), Verdict.FETCH)
            driven.position = max(20, token)
            driven.reader.delivered(token)
            actions = driven.take()
            self.assertEqual([a for a in actions if isinstance(a, Rewind)], lowered)

    def test_removed(self) -> None:
        """The last rows of a removed writer come from the stream's own source."""
        driven = Driven()
        self.assertIs(driven.reader.removed(0, is_deleted=True), Finding.EXPECTED)
        self.assertIs(driven.reader.removed(4, is_deleted=True), Finding.GAP)
        fetch = driven.take()[0]
        assert isinstance(fetch, Fetch)
        self.assertTrue(fetch.from_source)
        driven.page(4)
        self.assertIn(Finished(4), driven.take())
        self.assertIs(driven.reader.state, State.WAITING)
        driven.open(4)
        driven.reader.removed(5, is_deleted=True)
        driven.take()
        driven.page(5)
        driven.take()
        # If the writer returns, it announces its position first.
        self.assertIs(driven.reader.state, State.WAITING)

    def test_not_removed(self) -> None:
        """A writer that announces its rows is not removed, unless it is deleted."""
        driven = Driven()
        driven.open(0)
        self.assertIs(driven.reader.removed(4, is_deleted=False), Finding.NOTHING)
        self.assertIs(driven.reader.removed(4, is_deleted=True), Finding.GAP)


class PauseTests(SynchronousTestCase):
    """Pauses, and their ends."""

    def test_failures(self) -> None:
        """Failures are counted until there is progress; a POSITION ends the pause."""
        driven = Driven()
        driven.reader.announced("a", 9, 9, 0.0)
        driven.take()
        self.assertEqual(driven.reader.failed(), 1)
        self.assertEqual(driven.take(), [])
        driven.reader.timer_due()
        driven.take()
        self.assertEqual(driven.reader.failed(), 2)
        driven.reader.announced("a", 9, 9, 0.0)
        driven.take()
        driven.page(2, upto=2)
        driven.take()
        self.assertEqual(driven.reader.failed(), 1)

    def test_progress_between_failures(self) -> None:
        """A part of a page that was delivered is progress, and is not fetched again."""
        driven = Driven(CACHES)
        driven.reader.announced("a", 5, 5, 0.0)
        driven.take()
        self.assertEqual(driven.reader.failed(), 1)
        driven.reader.timer_due()
        driven.take()
        fetch = driven.reader.request
        assert fetch is not None
        result = StreamUpdateResult([(1, None), (2, None)], 5, False)
        driven.reader.page_fetched(fetch, result)
        driven.reader.delivered(1)
        self.assertEqual(driven.reader.failed(), 1)
        driven.reader.timer_due()
        driven.take()
        self.assertEqual(driven.requested(), (1, 5))

    def test_rejected_rows(self) -> None:
        """Rows that the sink rejects are fetched after a pause."""
        driven = Driven()
        driven.open(0)
        driven.row(1)
        self.assertEqual(driven.reader.delivery_failed([4, 3]), 1)
        self.assertIs(driven.reader.state, State.PAUSED)
        driven.reader.timer_due()
        driven.take()
        self.assertEqual(driven.requested(), (1, 4))

    def test_first_link_ends_a_pause(self) -> None:
        """Without a link, nothing is fetched; the first link ends a pause."""
        driven = Driven()
        driven.open(0)
        driven.reader.delivery_failed([4])
        driven.reader.link_lost("a")
        driven.reader.link_up("b")
        driven.take()
        self.assertEqual(driven.requested(), (0, 4))

    def test_many_claims(self) -> None:
        """Claims delay a fetch by a tenth of a second, however many there are."""
        self.patch(machine, "BURST", 1)
        driven = Driven()
        driven.open(0)
        driven.reader.reported("a", 5, 5, 0.0)
        driven.take()
        driven.page()
        driven.take()
        driven.reader.reported("a", 9, 9, 0.0)
        self.assertEqual(driven.take(), [Pause(0.1)])
        for moment in (0.03, 0.06, 0.09):
            driven.now = moment
            driven.reader.announced("a", 9, 9, moment)
            (again,) = driven.take()
            assert isinstance(again, Pause)
            self.assertAlmostEqual(moment + again.seconds, 0.1)
        driven.now = 0.1
        driven.reader.timer_due()
        driven.take()
        self.assertEqual(driven.requested(), (0, 9))


class BehindTests(SynchronousTestCase):
    """A source that does not have the claimed rows yet, or never will."""

    def claimed(self, *tokens: int, links: str = "a") -> Driven:
        """Return a reader at 0 of which each link, in order, claims a token."""
        driven = Driven(links=links)
        for link in links:
            driven.open(0, link)
        for link, token in zip(links, tokens, strict=True):
            driven.reader.announced(link, token, token, 0.0)
        driven.take()
        return driven

    def behind(self, driven: Driven) -> list[Action]:
        """Let the source be behind, and the pause end; return the actions."""
        driven.reader.source_behind()
        found = driven.take()
        driven.reader.timer_due()
        return found + driven.take()

    def test_claim_that_is_repeated(self) -> None:
        """A claim that its link does not contradict remains."""
        driven = self.claimed(9)
        for _ in range(10):
            self.behind(driven)
            driven.reader.reported("a", 9, 9, 0.0)
        self.assertEqual(driven.requested(), (0, 9))

    def test_false_position(self) -> None:
        """A claim is dropped if its link says less, and the rows up to that remain."""
        for false in (500, 5000):
            driven = self.claimed(false)
            self.behind(driven)
            driven.reader.reported("a", 3, 3, 0.0)
            self.assertTrue(driven.page(3, upto=3))
            driven.take()
            self.assertEqual(driven.rows, [3])
            self.assertEqual(driven.reader.position, 3)
            self.assertIs(driven.reader.state, State.LIVE)

    def test_false_position_is_reported(self) -> None:
        """A claim that is dropped is reported."""
        for false in (500, 5000):
            driven = self.claimed(false)
            self.behind(driven)
            driven.reader.announced("a", 0, 0, 0.0)
            self.assertEqual(driven.take()[0], Refuted(false, 0))
            self.behind(driven)
            self.assertIs(driven.reader.state, State.LIVE)

    def test_false_lower_position(self) -> None:
        """Rows are not lost if what contradicts the claim is the false statement."""
        for links in ("a", "ab"):
            driven = Driven(position=3, links=links)
            for link in links:
                driven.open(3, link)
                driven.reader.announced(link, 5, 5, 0.0)
            driven.take()
            self.behind(driven)
            driven.reader.source_behind()
            for link in links:
                driven.reader.reported(link, 3, 3, 0.0)
            driven.reader.timer_due()
            self.assertEqual(driven.take()[0], Refuted(5, 3))
            self.assertIs(driven.reader.state, State.LIVE)
            for link in links:
                self.assertIs(driven.row(6, link), Verdict.FETCH)
            driven.take()
            self.assertTrue(driven.page(4, 5, 6))
            driven.take()
            self.assertIs(driven.row(7), Verdict.DELIVER)
            self.assertEqual(driven.rows, [4, 5, 6, 7])

    def test_not_tried(self) -> None:
        """A claim about which the source was not asked remains."""
        driven = self.claimed(500)
        driven.reader.reported("a", 3, 3, 0.0)
        self.assertEqual(driven.requested(), (0, 500))

    def test_other_failures(self) -> None:
        """Rows that the sink rejected, or could not be fetched, are not dropped."""
        rejected = self.claimed(0)
        self.assertIs(rejected.reader.batch("a", 9, 1), Verdict.DELIVER)
        rejected.reader.delivery_failed([9])
        not_fetched = self.claimed(9)
        not_fetched.reader.failed()
        for driven in (rejected, not_fetched):
            driven.reader.reported("a", 0, 0, 0.0)
            driven.reader.timer_due()
            driven.take()
            self.assertEqual(driven.requested(), (0, 9))

    def test_slower_link(self) -> None:
        """A link does not contradict what only another one says."""
        driven = self.claimed(9, 3, links="ab")
        self.behind(driven)
        driven.reader.announced("b", 4, 4, 0.0)
        driven.take()
        self.assertEqual(driven.requested(), (0, 9))

    def test_claim_of_another_link(self) -> None:
        """Of several claims, those of other links remain, even if not plausible."""
        for other, expected in ((7, 7), (4000, 4000)):
            driven = self.claimed(5000, other, links="ab")
            self.behind(driven)
            driven.reader.announced("a", 0, 0, 0.0)
            driven.take()
            self.behind(driven)
            self.assertEqual(driven.requested(), (0, expected))

    def test_claim_of_a_lost_link(self) -> None:
        """What only a lost link said is dropped, if another link is up."""
        driven = self.claimed(500, 3, links="ab")
        driven.reader.link_lost("a")
        self.behind(driven)
        self.assertEqual(driven.requested(), (0, 3))

    def test_empty_range(self) -> None:
        """A position that was believed, and that its link contradicts, is lowered."""
        driven = self.claimed(0)
        driven.reader.announced("a", 0, 500, 0.0)
        driven.take()
        self.assertEqual(driven.position, 500)
        driven.reader.announced("a", 500, 500, 0.0)
        driven.take()
        self.behind(driven)
        driven.reader.announced("a", 3, 3, 0.0)
        driven.take()
        self.assertEqual((driven.position, driven.requested()), (0, (0, 3)))

    def test_last_rows_of_a_removed_writer(self) -> None:
        """They are not claimed by any link."""
        driven = self.claimed(4)
        driven.reader.removed(9, is_deleted=True)
        driven.take()
        self.behind(driven)
        driven.reader.reported("a", 3, 3, 0.0)
        self.assertEqual(driven.take(), [])
        self.assertEqual(driven.requested(), (0, 9))

    def test_caches(self) -> None:
        """The tokens of an idempotent stream may descend."""
        driven = Driven(CACHES)
        driven.open(0)
        driven.reader.announced("a", 500, 500, 0.0)
        driven.take()
        self.behind(driven)
        driven.reader.reported("a", 3, 3, 0.0)
        driven.take()
        self.assertEqual(driven.requested(), (0, 500))

    def test_writer_is_asked(self) -> None:
        """
        The writer's position is requested on the links that claim rows, less and less
        often.
        """
        driven = self.claimed(9, 0, links="ab")
        asked = [n for n in range(1, 20) if Ask("a") in self.behind(driven)]
        self.assertEqual(asked, [2, 4, 8, 16])
        self.assertNotIn(Ask("b"), self.behind(driven))


class EpochTests(SynchronousTestCase):
    """Epochs of a stream that is held in memory."""

    def test_known_early(self) -> None:
        """An epoch that is known before the first row costs nothing."""
        driven = Driven(MEMORY)
        driven.reader.epoch_reported("a", 0, "e", has_restarted=True)
        self.assertEqual(driven.take(), [BeginEpoch("e"), Finished(None)])
        driven.open(0)
        self.assertIs(driven.row(1), Verdict.DELIVER)
        found = driven.reader.epoch_reported("a", 1, "e", has_restarted=False)
        self.assertIs(found, Finding.NOTHING)
        self.assertTrue(driven.reader.follows_epoch("a", "e"))

    def test_known_late(self) -> None:
        """An epoch that is known late costs no second delivery."""
        driven = Driven(MEMORY)
        driven.open(0)
        driven.row(1)
        found = driven.reader.epoch_reported("a", 1, "e", has_restarted=False)
        self.assertIs(found, Finding.EXPECTED)
        self.assertEqual(driven.take(), [BeginEpoch("e"), Finished(None)])

    def test_of_a_page(self) -> None:
        """The epoch of a page is that of its rows."""
        driven = Driven(MEMORY)
        driven.reader.announced("a", 1, 1, 0.0)
        driven.take()
        driven.page(1, epoch="e")
        driven.take()
        self.assertEqual(driven.reader.epoch, "e")
        found = driven.reader.epoch_reported("a", 1, "e", has_restarted=False)
        self.assertIs(found, Finding.NOTHING)
        self.assertEqual(driven.rows, [1])

    def test_another_one(self) -> None:
        """Rows of another epoch are obsolete."""
        driven = Driven(MEMORY)
        driven.reader.epoch_reported("a", 0, "e", has_restarted=True)
        driven.open(0)
        driven.row(1)
        found = driven.reader.epoch_reported("a", 1, "f", has_restarted=True)
        self.assertIs(found, Finding.RESET)
        self.assertEqual(driven.take()[0], Rewind(0, "f"))
        self.assertEqual(driven.requested(), (0, 1))

    def test_rows_of_a_link_without_it(self) -> None:
        """Rows are fetched until the link has stated the epoch."""
        driven = Driven(MEMORY)
        driven.reader.announced("a", 1, 1, 0.0)
        driven.take()
        driven.page(1, epoch="e")
        driven.take()
        self.assertIs(driven.row(2), Verdict.FETCH)
        driven.take()
        self.assertFalse(driven.page(2, epoch="f"))
        self.assertEqual(driven.take()[0], Rewind(0, "f"))

    def test_page_of_another_epoch(self) -> None:
        """Only the tokens that exist in the new epoch are then fetched."""
        driven = Driven(MEMORY)
        driven.reader.epoch_reported("a", 0, "e", has_restarted=True)
        driven.open(5)
        self.assertEqual(driven.requested(), (0, 5))
        self.assertFalse(driven.page(upto=2, last_token=2, epoch="f"))
        self.assertEqual(driven.take()[0], BeginEpoch("f"))
        self.assertEqual(driven.requested(), (0, 2))

    def test_late_with_the_first_message_of_a_process(self) -> None:
        """The delivered rows may be those of an earlier process."""
        driven = Driven(MEMORY)
        driven.open(0)
        driven.row(1)
        found = driven.reader.epoch_reported("a", 1, "f", has_restarted=True)
        self.assertIs(found, Finding.RESET)

    def test_begun_by_a_rewind(self) -> None:
        """An epoch that began with a rewind does not begin again."""
        driven = Driven(MEMORY)
        driven.reader.epoch_reported("a", 0, "e", has_restarted=True)
        driven.open(0)
        driven.row(1)
        driven.reader.epoch_reported("a", 0, "f", has_restarted=True)
        taken = driven.take()
        self.assertEqual(taken[0], Rewind(0, "f"))
        self.assertNotIn(BeginEpoch("f"), taken)
        self.assertEqual(driven.reader.epoch, "f")

    def test_stated_before_the_rewind(self) -> None:
        """An epoch that is stated before the rewind to 0 begins with the rewind."""
        driven = Driven(MEMORY, position=2)
        driven.reader.announced("a", 0, 0, 0.0)
        driven.reader.failed()
        found = driven.reader.epoch_reported("a", 0, "f", has_restarted=False)
        self.assertIs(found, Finding.EXPECTED)
        driven.reader.timer_due()
        self.assertEqual(driven.take()[0], Rewind(0, "f"))

    def test_stated_while_a_page_without_it_is_delivered(self) -> None:
        """A page that states no epoch is completed; then the epoch is compared."""
        driven = Driven(MEMORY)
        driven.reader.announced("a", 2, 2, 0.0)
        driven.take()
        fetch = driven.reader.request
        assert fetch is not None
        driven.reader.page_fetched(fetch, StreamUpdateResult([(1, None)], 1, True))
        found = driven.reader.epoch_reported("a", 2, "e", has_restarted=False)
        self.assertIs(found, Finding.NOTHING)
        self.assertIsNotNone(driven.reader.page)
        driven.position = 1
        driven.reader.delivered(1)
        driven.reader.page_delivered()
        found = driven.reader.epoch_reported("a", 2, "e", has_restarted=False)
        self.assertIs(found, Finding.EXPECTED)
        self.assertEqual(driven.take()[0], BeginEpoch("e"))

    def test_slow_link_after_a_reset(self) -> None:
        """A link that lags says nothing about a writer that began anew on another."""
        driven = Driven(MEMORY, links="ab")
        driven.open(0, "b")
        driven.row(1, "b")
        driven.open(0, "a")
        driven.reader.link_lost("b")
        driven.reader.link_up("b")
        found = driven.reader.epoch_reported("b", 1, "e", has_restarted=False)
        self.assertIs(found, Finding.RESET)
        driven.take()
        driven.page(1, epoch="e")
        driven.take()
        found = driven.reader.announced("a", 0, 0, 0.0)
        self.assertIs(found, Finding.NOTHING)

    def test_restart_without_epoch(self) -> None:
        """After a reset, a link is compared with what it has said since then."""
        driven = Driven(MEMORY, links="ab")
        driven.open(0, "a")
        driven.open(0, "b")
        for link, token in (("b", 1), ("a", 1), ("b", 2)):
            driven.row(token, link)
        driven.reader.link_lost("b")
        found = driven.reader.announced("a", 0, 0, 0.0)
        self.assertIs(found, Finding.RESET)
        self.assertIn(Rewind(0), driven.take())
        found = driven.reader.announced("a", 0, 0, 0.0)
        self.assertIs(found, Finding.NOTHING)
        self.assertIs(driven.row(1), Verdict.DELIVER)

    def test_restart_seen_on_a_link_that_came_up_before_the_loss(self) -> None:
        """A new link may come up before the loss of the old one is reported."""
        driven = Driven(MEMORY, links="a")
        driven.open(0, "a")
        driven.row(1, "a")
        driven.reader.link_up("b")
        driven.reader.link_lost("a")
        found = driven.reader.announced("b", 0, 0, 0.0)
        self.assertIs(found, Finding.RESET)
        self.assertIn(Rewind(0), driven.take())

    def test_late_first_position_while_another_link_carries_more(self) -> None:
        """A slow link that was up at a loss shows no restart if others are ahead."""
        driven = Driven(MEMORY, links="ab")
        driven.open(0, "a")
        driven.row(1, "a")
        driven.reader.link_lost("a")
        driven.reader.link_up("c")
        driven.open(1, "c")
        found = driven.reader.announced("b", 0, 0, 0.0)
        self.assertIs(found, Finding.NOTHING)

    def test_other_links_are_asked_after_a_reset(self) -> None:
        """Other links of a writer that seems to have restarted are asked once."""
        driven = Driven(MEMORY, 3, links="ab")
        driven.open(3, "a")
        driven.row(4, "a")
        found = driven.reader.announced("b", 1, 1, 0.0)
        self.assertIs(found, Finding.RESET)
        self.assertEqual(driven.take()[:2], [Ask("a"), Rewind(0)])
        self.assertIs(driven.reader.announced("b", 0, 0, 0.0), Finding.RESET)
        self.assertNotIn(Ask("a"), driven.take())
        driven.reader.announced("a", 4, 4, 0.0)
        driven.take()
        self.assertTrue(driven.page(1, 2, 3, 4))

    def test_epoch_of_a_row_that_is_being_delivered(self) -> None:
        """A row that the sink is handling is of the epoch that its link states."""
        driven = Driven(MEMORY)
        driven.open(0)
        driven.reader.gather("a", [1], [b"{}"])
        self.assertIs(driven.reader.batch("a", 1, 1), Verdict.DELIVER)
        driven.reader.overflow()
        driven.reader.epoch_reported("a", 1, "e", has_restarted=False)
        driven.position = 1
        self.assertEqual(driven.take()[:1], [BeginEpoch("e")])
        self.assertEqual(driven.reader.position, 1)

    def test_links_with_an_epoch_are_not_asked(self) -> None:
        """The next heartbeat states the position of a link that states epochs."""
        driven = Driven(MEMORY, links="ab")
        for link in "ab":
            driven.open(0, link)
            driven.reader.epoch_reported(link, 0, "e", has_restarted=False)
        driven.row(1, "a")
        driven.reader.epoch_reported("a", 0, "f", has_restarted=True)
        self.assertNotIn(Ask("b"), driven.take())

    def test_restart_seen_on_the_link_that_carried_the_rows(self) -> None:
        """Rows from before a restart are not taken for those of the new process."""
        driven = Driven(MEMORY, links="ab")
        driven.open(0, "a")
        driven.open(0, "b")
        driven.row(1, "a")
        found = driven.reader.epoch_reported("a", 0, "f", has_restarted=True)
        self.assertIs(found, Finding.RESET)

    def test_claims_of_an_earlier_process(self) -> None:
        """Rows that only an earlier process has claimed are not fetched any more."""
        driven = Driven(MEMORY)
        driven.reader.announced("a", 5, 5, 0.0)
        driven.reader.epoch_reported("a", 2, "f", has_restarted=True)
        driven.take()
        self.assertEqual(driven.requested(), (0, 2))


class TableTests(SynchronousTestCase):
    """The table of states and events."""

    def test_unexpected_event(self) -> None:
        """An event that a state does not expect is an error."""
        driven = Driven()
        with self.assertRaisesRegex(UnexpectedEventError, "REWOUND in state WAITING"):
            driven.reader.rewound()

    def test_unexpected_state(self) -> None:
        """So is a state that does not follow."""
        driven = Driven()
        driven.open(0)
        self.patch(Reader, "_miss", lambda *_args: None)
        with self.assertRaisesRegex(UnexpectedEventError, "OVERFLOW led from .* LIVE"):
            self.patch(Reader, "_begin", lambda *_args: None)
            driven.reader.overflow()

    def test_result_of_an_unexpected_event(self) -> None:
        """A method returns a result of its type for an unexpected event, too."""
        driven = Driven()
        errors: list[UnexpectedEventError] = []
        driven.reader._report = errors.append
        driven.reader.page_delivered()
        fetch, page = Fetch(0, 1, False), StreamUpdateResult([], 1, False)
        self.assertIsNone(driven.reader.page_fetched(fetch, page))
        self.assertEqual(driven.reader.source_behind(), 1)
        self.assertEqual(
            list(map(str, errors)),
            [
                "PAGE_DELIVERED in state WAITING",
                "PAGE in state DUE",
                "BEHIND in state DUE",
            ],
        )

    def check_that_a_row_is_fetched(
        self, event: ReaderEvent, state: State, entry: Entry | None
    ) -> None:
        """Change an entry of the table: rows that then arrive are fetched."""
        driven = Driven()
        errors: list[UnexpectedEventError] = []
        driven.reader._report = errors.append
        driven.open(0)
        driven.row(1)
        row = {**TABLE[event], state: entry}
        if entry is None:
            del row[state]
        self.patch(machine, "TABLE", {**TABLE, event: row})
        driven.row(2)
        driven.row(3)
        driven.take()
        self.assertEqual(driven.requested(), (driven.rows[-1], 3))
        self.assertIn("BATCH", str(errors[0]))
        driven.page(*range(driven.rows[-1] + 1, 4))
        driven.take()
        self.assertEqual(driven.rows, [1, 2, 3])
        self.assertIs(driven.reader.state, State.LIVE)

    def test_recovery_from_an_unexpected_event(self) -> None:
        """If the error is reported, the event is handled as if all was missing."""
        self.check_that_a_row_is_fetched(ReaderEvent.BATCH, State.LIVE, None)

    def test_recovery_from_an_unexpected_state(self) -> None:
        """So are those that follow, after a state that is not expected."""
        entry = Entry("A defect.", (State.WAITING,))
        self.check_that_a_row_is_fetched(ReaderEvent.BATCH, State.LIVE, entry)

    def test_recovery_during_a_catch_up(self) -> None:
        """What was found to be empty is fetched again, too."""
        driven = Driven()
        driven.reader._report = lambda error: None
        driven.reader.announced("a", 5, 5, 0.0)
        driven.take()
        driven.page(upto=2)
        driven.take()
        self.assertEqual(driven.requested(), (2, 5))
        driven.reader.page_delivered()
        driven.take()
        self.assertEqual(driven.requested(), (0, 5))

    def test_unexpected_page(self) -> None:
        """A page that is not expected is not wanted."""
        driven = Driven()
        driven.reader._report = lambda error: None
        driven.open(0)
        result = StreamUpdateResult([(1, None)], 1, False)
        self.assertIsNone(driven.reader.page_fetched(Fetch(0, 1, False), result))

    def test_every_event(self) -> None:
        """Each event is expected in some state, and each effect is described."""
        for event in ReaderEvent:
            self.assertTrue(TABLE[event], event)
            for entry in TABLE[event].values():
                self.assertRegex(entry.effect, r"\w\.$")


class FieldTests(SynchronousTestCase):
    """What others may read. ``ruff`` (SLF001) reports who reads what is private."""

    def test_fields_are_private(self) -> None:
        """Nobody else can set what a reader knows about a writer, or see its parts."""
        names = [field.name for field in attrs.fields(Reader)]
        self.assertEqual([name for name in names if not name.startswith("_")], [])
        for name, member in vars(Reader).items():
            if isinstance(member, property):
                self.assertIsNone(member.fset, name)
