"""Tests of what a POSITION means, and of pages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.streams.catchup import (
    Gap,
    InSync,
    Page,
    Redundant,
    Reset,
    check_page,
    plan_catch_up,
)
from synapse_replication.streams.stream import EncodedUpdates, StreamUpdateResult

tokens = st.integers(min_value=0, max_value=50)


class PlanCatchUpTests(SynchronousTestCase):
    """What to do about an announced position."""

    def test_between_the_two_tokens(self) -> None:
        """Who stands between the tokens, or at one of them, missed nothing."""
        for current in (10, 11, 12):
            self.assertEqual(plan_catch_up(current, 10, 12), InSync(12))

    def test_behind(self) -> None:
        """Who stands before the first token may have missed rows."""
        self.assertEqual(plan_catch_up(9, 10, 12), Gap(9, 12))

    def test_first_announcement(self) -> None:
        """A repeated token says nothing of what lies before."""
        self.assertEqual(plan_catch_up(9, 12, 12), Gap(9, 12))

    def test_ahead(self) -> None:
        """Who stands beyond both has nothing to do."""
        self.assertEqual(plan_catch_up(13, 10, 12), Redundant())

    def test_ahead_of_a_stored_stream_that_began_again(self) -> None:
        """The position of a stored stream goes back; nothing is fetched."""
        self.assertEqual(plan_catch_up(90, 10, 12, resettable=True), Reset(12, 12))

    def test_ahead_of_a_stream_in_memory_that_began_again(self) -> None:
        """A stream in memory is fetched from its beginning."""
        self.assertEqual(
            plan_catch_up(90, 10, 12, resettable=True, held_in_memory=True),
            Reset(0, 12),
        )

    def test_tokens_that_go_backwards(self) -> None:
        """A pair in the wrong order asks for what lies up to the second."""
        self.assertEqual(plan_catch_up(9, 12, 10), Gap(9, 10))
        self.assertEqual(plan_catch_up(10, 12, 10), InSync(10))

    @settings(derandomize=True, deadline=None)
    @given(tokens, tokens, tokens, st.booleans(), st.booleans())
    def test_never_passes_what_may_have_been_missed(
        self, current: int, prev: int, new: int, resettable: bool, in_memory: bool
    ) -> None:
        """No plan passes a token between ours and the first one announced."""
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


class CheckPageTests(SynchronousTestCase):
    """What is taken from a source's answer."""

    def test_gathers_by_token(self) -> None:
        """Rows of a token are gathered, in their order."""
        result = StreamUpdateResult([(3, "a"), (3, "b"), (5, "c")], 9, False)
        self.assertEqual(check_page(result, 2, 9), Page([3, 3, 5], ["a", "b", "c"], 9))
        self.assertEqual(
            list(check_page(result, 2, 9).batches()), [(3, ["a", "b"]), (5, ["c"])]
        )
        self.assertEqual(list(Page([], [], 9).batches()), [])

    def test_leaves_out_what_was_not_asked_for(self) -> None:
        """Rows outside the range are left out, and the end is not beyond it."""
        result = StreamUpdateResult([(2, "a"), (3, "b"), (10, "c")], 12, False)
        self.assertEqual(check_page(result, 2, 9), Page([3], ["b"], 9))

    def test_leaves_out_rows_beyond_a_limited_answer(self) -> None:
        """Rows beyond the token that the answer vouches for are asked again."""
        result = StreamUpdateResult([(3, "a"), (4, "b")], 3, True)
        self.assertEqual(check_page(result, 2, 9), Page([3], ["a"], 3))

    def test_sorts(self) -> None:
        """Rows out of order are put in order."""
        result = StreamUpdateResult([(5, "c"), (3, "a"), (5, "d")], 9, False)
        self.assertEqual(check_page(result, 2, 9), Page([3, 5, 5], ["a", "c", "d"], 9))

    def test_takes_rows_as_they_are(self) -> None:
        """Rows that the source has as text stay text for who can read them."""
        updates = EncodedUpdates([(5, '["c"]'), (3, '["a"]'), (5, '["d"]'), (9, "1")])
        result = StreamUpdateResult(updates, 5, True)
        self.assertEqual(
            check_page(result, 2, 9, take_encoded=True),
            Page([3, 5, 5], ['["a"]', '["c"]', '["d"]'], 5, True),
        )
        self.assertEqual(
            check_page(result, 2, 9), Page([3, 5, 5], [["a"], ["c"], ["d"]], 5)
        )
        plain = StreamUpdateResult([(3, "a")], 5, True)
        self.assertFalse(check_page(plain, 2, 9, take_encoded=True).is_encoded)

    def test_an_answer_that_does_not_bring_us_on(self) -> None:
        """An answer that ends where we stand is an error that says so."""
        with self.assertRaisesRegex(CatchUpError, r"up to 2 .* \(2, 9\]"):
            check_page(StreamUpdateResult([], 2, True), 2, 9)
