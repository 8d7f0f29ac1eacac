"""Tests of the plans that follow from announced positions, and of pages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.streams.catchup import (
    AheadOfWriter,
    Check,
    Extend,
    Gap,
    InSync,
    Page,
    Plan,
    ReaderPosition,
    Redundant,
    Reset,
    check_page,
    gather_batches,
    plan_catch_up,
    plan_dropped_range,
    plan_position,
    plan_reported_position,
)
from synapse_replication.streams.stream import EncodedUpdates, StreamUpdateResult

tokens = st.integers(min_value=0, max_value=50)


class PlanCatchUpTests(SynchronousTestCase):
    """The plan for an announced position."""

    def test_between_the_two_tokens(self) -> None:
        """A reader between the two tokens, both included, missed no row."""
        for current in (10, 11, 12):
            self.assertEqual(plan_catch_up(current, 10, 12), InSync(12))

    def test_behind(self) -> None:
        """A reader below the first token may have missed rows."""
        self.assertEqual(plan_catch_up(9, 10, 12), Gap(9, 12))

    def test_first_announcement(self) -> None:
        """Two equal tokens state nothing about lower tokens."""
        self.assertEqual(plan_catch_up(9, 12, 12), Gap(9, 12))

    def test_ahead(self) -> None:
        """For a reader above both tokens, the POSITION is redundant."""
        self.assertEqual(plan_catch_up(13, 10, 12), Redundant())

    def test_reset_of_stored_stream(self) -> None:
        """The position of a stored stream is decreased without a fetch."""
        self.assertEqual(plan_catch_up(90, 10, 12, resettable=True), Reset(12, 12))

    def test_reset_of_memory_stream(self) -> None:
        """A stream held in memory is fetched from its beginning."""
        self.assertEqual(
            plan_catch_up(90, 10, 12, resettable=True, held_in_memory=True),
            Reset(0, 12),
        )

    def test_tokens_that_go_backwards(self) -> None:
        """If the tokens are in the wrong order, rows up to the second are fetched."""
        self.assertEqual(plan_catch_up(9, 12, 10), Gap(9, 10))
        self.assertEqual(plan_catch_up(10, 12, 10), InSync(10))

    @settings(derandomize=True, deadline=None)
    @given(tokens, tokens, tokens, st.booleans(), st.booleans())
    def test_never_skips_possibly_missed_rows(
        self, current: int, prev: int, new: int, resettable: bool, in_memory: bool
    ) -> None:
        """
        No plan skips a token between the reader's position and the first announced
        token.
        """
        plan = plan_catch_up(
            current, prev, new, resettable=resettable, held_in_memory=in_memory
        )
        if isinstance(plan, InSync):
            self.assertTrue(prev <= current or current == new)
            self.assertGreaterEqual(plan.upto_token, current)
        elif isinstance(plan, Gap):
            self.assertEqual((plan.from_token, plan.upto_token), (current, new))
            self.assertLess(current, new)
        else:
            self.assertGreater(current, new)
            self.assertEqual(isinstance(plan, Reset), resettable)


#: At 10, reached by a row; at 10, with the last row at 7; catching up from 10 to 20.
_ADVANCED_BY_A_ROW = ReaderPosition(10, 10)
_ADVANCED_WITHOUT_ROWS = ReaderPosition(10, 7)
_CATCHING_UP = ReaderPosition(8, 8, 10, 20)


class PlanPositionTests(SynchronousTestCase):
    """The plan for a POSITION, with or without a running catch-up."""

    def check(
        self, *cases: tuple[ReaderPosition, int, int, Plan], **options: bool
    ) -> None:
        """Check cases of (reader, prev_token, new_token, plan)."""
        for reader, prev, new, plan in cases:
            self.assertEqual(
                plan_position(reader, prev, new, **options), plan, (reader, prev, new)
            )

    def test_live(self) -> None:
        """Without a catch-up, a gap begins at the last row delivered."""
        self.check(
            (_ADVANCED_BY_A_ROW, 10, 12, InSync(12)),
            (_ADVANCED_BY_A_ROW, 11, 12, Gap(10, 12)),
            (_ADVANCED_BY_A_ROW, 8, 9, Redundant()),
            (_ADVANCED_WITHOUT_ROWS, 10, 12, InSync(12)),
            (_ADVANCED_WITHOUT_ROWS, 11, 12, Gap(7, 12)),
            (_ADVANCED_WITHOUT_ROWS, 8, 9, Redundant()),
            (_ADVANCED_WITHOUT_ROWS, 9, 10, InSync(10)),
        )

    def test_confirmed(self) -> None:
        """A POSITION that repeats the reader's token causes a check for missed rows."""
        self.check(
            (_ADVANCED_WITHOUT_ROWS, 10, 10, Check(10)),
            (_ADVANCED_WITHOUT_ROWS, 12, 10, Check(10)),
            (_ADVANCED_BY_A_ROW, 10, 10, Check(10)),
        )

    def test_implausible_range(self) -> None:
        """If the range is implausible, it is fetched, unless its end is not new."""
        self.check(
            (_ADVANCED_BY_A_ROW, 10, 12, Gap(10, 12)),
            (_ADVANCED_BY_A_ROW, 9, 10, InSync(10)),
            is_range_believed=False,
        )

    def test_reset(self) -> None:
        """A reset goes to the new token, or to 0 if the stream is held in memory."""
        self.check((_ADVANCED_WITHOUT_ROWS, 2, 3, Reset(3, 3)), resettable=True)
        self.check(
            (_ADVANCED_WITHOUT_ROWS, 2, 3, Reset(0, 3)),
            (_ADVANCED_WITHOUT_ROWS, -2, -1, Reset(-1, -1)),
            resettable=True,
            held_in_memory=True,
        )

    def test_catching_up(self) -> None:
        """A running catch-up is extended, whatever the tokens are."""
        cases: list[tuple[ReaderPosition, int, int, Plan]] = [
            (_CATCHING_UP, prev, new, Extend(new))
            for prev in (3, 8, 10, 30)
            for new in (5, 8, 10, 20, 30)
        ]
        self.check(*cases)
        self.check(*cases, resettable=True)

    def test_reset_while_catching_up(self) -> None:
        """A lower token resets the catch-up of a stream held in memory."""
        self.check(
            (_CATCHING_UP, 19, 19, Reset(0, 19)),
            (_CATCHING_UP, -1, -1, Reset(-1, -1)),
            (_CATCHING_UP, 20, 20, Extend(20)),
            held_in_memory=True,
        )


class PlanReportedPositionTests(SynchronousTestCase):
    """The plan for a reported position."""

    def check(self, *cases: tuple[ReaderPosition, int, Plan], **options: bool) -> None:
        """Check cases of (reader, token, plan); each reader was below on arrival."""
        for reader, token, plan in cases:
            self.assertEqual(
                plan_reported_position(reader, token, was_below=True, **options),
                plan,
                (reader, token),
            )

    def test_missing_rows(self) -> None:
        """A gap begins at the last row delivered."""
        self.check(
            (_ADVANCED_BY_A_ROW, 11, Gap(10, 11)),
            (_ADVANCED_WITHOUT_ROWS, 11, Gap(7, 11)),
            (_ADVANCED_BY_A_ROW, 10, Redundant()),
            (_ADVANCED_WITHOUT_ROWS, 10, Redundant()),
        )

    def test_catching_up(self) -> None:
        """A running catch-up is extended."""
        self.check(*((_CATCHING_UP, token, Extend(token)) for token in (5, 20, 30)))

    def test_ahead_of_the_writer(self) -> None:
        """
        A reader ahead of its writer rewinds to its last row, or reports that it is
        ahead.
        """
        self.check(
            (_ADVANCED_BY_A_ROW, 9, AheadOfWriter()),
            (_ADVANCED_WITHOUT_ROWS, 9, Reset(7, 9)),
            (_ADVANCED_WITHOUT_ROWS, 7, Reset(7, 7)),
            (_ADVANCED_WITHOUT_ROWS, 5, Reset(7, 7)),
        )

    def test_ahead_of_a_writer_in_memory(self) -> None:
        """A stream held in memory is reset if the reader got ahead without a row."""
        self.check(
            (_ADVANCED_BY_A_ROW, 9, Redundant()),
            (_ADVANCED_WITHOUT_ROWS, 9, Reset(0, 9)),
            (_ADVANCED_WITHOUT_ROWS, 5, Reset(0, 5)),
            (_ADVANCED_WITHOUT_ROWS, -1, Reset(-1, -1)),
            held_in_memory=True,
        )

    def test_redundant(self) -> None:
        """A lower token is redundant if the reader advanced since it arrived, or if the
        stream is idempotent.
        """
        self.check(
            (_ADVANCED_WITHOUT_ROWS, 9, Redundant()),
            (_ADVANCED_BY_A_ROW, 9, Redundant()),
            idempotent=True,
        )
        for reader in (_ADVANCED_WITHOUT_ROWS, _ADVANCED_BY_A_ROW):
            self.assertEqual(
                plan_reported_position(reader, 9, was_below=False), Redundant()
            )


class PlanDroppedRangeTests(SynchronousTestCase):
    """The plan for a range that was dropped from a full queue."""

    def check(
        self,
        *cases: tuple[ReaderPosition, int | None, int, int | None, Plan],
        was_reset: bool = False,
        **options: bool,
    ) -> None:
        """Check cases of (reader, lowest, upto, lowest_position, plan)."""
        for reader, lowest, upto, position, plan in cases:
            self.assertEqual(
                plan_dropped_range(
                    reader, lowest, upto, position, was_reset=was_reset, **options
                ),
                plan,
                (reader, lowest, upto, position),
            )

    def test_rows(self) -> None:
        """Rows are fetched from the position of the reader or of its catch-up."""
        self.check(
            (_ADVANCED_BY_A_ROW, 11, 15, None, Gap(10, 15)),
            (_ADVANCED_BY_A_ROW, 3, 15, 12, Gap(10, 15)),
            (_ADVANCED_BY_A_ROW, 3, 9, None, Gap(9, 9)),
            (_CATCHING_UP, 11, 15, None, Extend(15, 10)),
            (_CATCHING_UP, 3, 30, 12, Extend(30, 10)),
        )

    def test_skipped_ranges(self) -> None:
        """Ranges that were skipped without a row are fetched, too."""
        catching_up = ReaderPosition(10, 7, 10, 20)
        self.check(
            (_ADVANCED_WITHOUT_ROWS, 8, 9, None, Gap(7, 9)),
            (_ADVANCED_WITHOUT_ROWS, 11, 15, None, Gap(7, 15)),
            (_ADVANCED_WITHOUT_ROWS, 3, 6, None, Gap(6, 6)),
            (catching_up, 8, 15, None, Extend(15, 7)),
        )

    def test_late_rows_of_an_idempotent_stream(self) -> None:
        """Late rows of an idempotent stream are fetched, too."""
        self.check(
            (_ADVANCED_BY_A_ROW, 5, 15, None, Gap(4, 15)),
            (_ADVANCED_BY_A_ROW, None, 15, 15, Gap(10, 15)),
            (_ADVANCED_BY_A_ROW, 12, 15, 15, Gap(10, 15)),
            (_CATCHING_UP, 5, 15, None, Extend(15, 4)),
            (_CATCHING_UP, 12, 15, None, Extend(15, 10)),
            idempotent=True,
        )

    def test_reset_of_stored_stream(self) -> None:
        """A stored stream is reset only if the whole range is below the reader."""
        for was_reset in (False, True):
            self.check(
                (_ADVANCED_BY_A_ROW, None, 5, 3, Reset(3, 5)),
                (_ADVANCED_BY_A_ROW, None, 10, 3, Gap(10, 10)),
                (_ADVANCED_BY_A_ROW, 4, 5, None, Gap(5, 5)),
                (_CATCHING_UP, None, 9, 9, Reset(9, 9)),
                (_CATCHING_UP, None, 10, 9, Extend(10, 10)),
                resettable=True,
                was_reset=was_reset,
            )

    def test_reset_of_memory_stream(self) -> None:
        """After a reset, a stream held in memory is fetched from its beginning."""
        self.check(
            (_ADVANCED_BY_A_ROW, None, 15, 9, Reset(0, 15)),
            (_ADVANCED_BY_A_ROW, None, 15, -2, Reset(-2, 15)),
            (_ADVANCED_BY_A_ROW, None, 15, 10, Gap(10, 15)),
            (_ADVANCED_BY_A_ROW, 2, 15, None, Gap(10, 15)),
            (_CATCHING_UP, None, 15, 9, Reset(0, 15)),
            (_CATCHING_UP, None, 15, 10, Extend(15, 10)),
            resettable=True,
            held_in_memory=True,
        )
        self.check(
            (_ADVANCED_BY_A_ROW, None, 15, 12, Reset(0, 15)),
            resettable=True,
            held_in_memory=True,
            was_reset=True,
        )

    def test_not_resettable(self) -> None:
        """
        A lower position of a stream that is not resettable does not count as a reset.
        """
        for was_reset in (False, True):
            self.check((_ADVANCED_BY_A_ROW, None, 5, 3, Gap(5, 5)), was_reset=was_reset)


class CheckPageTests(SynchronousTestCase):
    """Tests for the page that is created from a source's answer."""

    def test_gathers_by_token(self) -> None:
        """Rows of one token are grouped, in order."""
        result = StreamUpdateResult([(3, "a"), (3, "b"), (5, "c")], 9, False)
        self.assertEqual(check_page(result, 2, 9), Page([3, 3, 5], ["a", "b", "c"], 9))
        self.assertEqual(
            list(check_page(result, 2, 9).batches()), [(3, ["a", "b"]), (5, ["c"])]
        )
        self.assertEqual(list(Page([], [], 9).batches()), [])

    def test_skips_rows_outside_the_range(self) -> None:
        """Rows outside the range are skipped, and the page ends within it."""
        result = StreamUpdateResult([(2, "a"), (3, "b"), (10, "c")], 12, False)
        self.assertEqual(check_page(result, 2, 9), Page([3], ["b"], 9))

    def test_skips_rows_beyond_a_limited_answer(self) -> None:
        """Rows above the answer's ``upto_token`` are skipped, to be fetched again."""
        result = StreamUpdateResult([(3, "a"), (4, "b")], 3, True)
        self.assertEqual(check_page(result, 2, 9), Page([3], ["a"], 3))

    def test_sorts(self) -> None:
        """Rows are sorted by token."""
        result = StreamUpdateResult([(5, "c"), (3, "a"), (5, "d")], 9, False)
        self.assertEqual(check_page(result, 2, 9), Page([3, 5, 5], ["a", "c", "d"], 9))

    def test_encoded_rows(self) -> None:
        """Encoded rows stay encoded with ``allow_encoded``, and are decoded without."""
        updates = EncodedUpdates([(5, '["c"]'), (3, '["a"]'), (5, '["d"]'), (9, "1")])
        result = StreamUpdateResult(updates, 5, True)
        self.assertEqual(
            check_page(result, 2, 9, allow_encoded=True),
            Page([3, 5, 5], ['["a"]', '["c"]', '["d"]'], 5, True),
        )
        self.assertEqual(
            check_page(result, 2, 9), Page([3, 5, 5], [["a"], ["c"], ["d"]], 5)
        )
        plain = StreamUpdateResult([(3, "a")], 5, True)
        self.assertFalse(check_page(plain, 2, 9, allow_encoded=True).is_encoded)

    def test_answer_without_progress(self) -> None:
        """An answer without progress raises an error that names the range."""
        with self.assertRaisesRegex(CatchUpError, r"up to 2, .* \(2, 9\]"):
            check_page(StreamUpdateResult([], 2, True), 2, 9)


class GatherBatchesTests(SynchronousTestCase):
    """Grouping rows by token."""

    def test_rows_of_one_token(self) -> None:
        """Adjacent rows of one token form one batch."""
        self.assertEqual(
            list(gather_batches([0, 0, 1, 1, 3], "abcde")),
            [(0, ["a", "b"]), (1, ["c", "d"]), (3, ["e"])],
        )
        self.assertEqual(list(gather_batches([], "")), [])

    def test_fewer_tokens_than_rows(self) -> None:
        """A row without a token raises an error."""
        self.assertRaises(ValueError, list, gather_batches([1], "ab"))
