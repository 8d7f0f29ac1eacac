"""Tests of a writer's backlog."""

from __future__ import annotations

import json

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.backlog import (
    Backlog,
    BacklogOptions,
    StreamBacklog,
)
from synapse_replication.streams.stream import StreamUpdateResult


def batch(token: int, rows: int = 1) -> tuple[int, list[bytes]]:
    """Return a token with its rows."""
    return token, [b"[%d,%d]" % (token, index) for index in range(rows)]


class StreamBacklogTests(SynchronousTestCase):
    """Tests for :class:`StreamBacklog`."""

    def make(
        self, max_rows: int = 100, max_bytes: int = 100_000, page_rows: int = 100
    ) -> StreamBacklog:
        return StreamBacklog(BacklogOptions(max_rows, max_bytes, page_rows))

    def test_rows_in_a_range(self) -> None:
        """``read`` returns the rows above the lower token, up to the upper one."""
        backlog = self.make()
        backlog.add(1, [batch(2), batch(4, 2)])
        backlog.add(4, [batch(7)])
        self.assertEqual(
            backlog.read(2, 4), StreamUpdateResult([(4, [4, 0]), (4, [4, 1])], 4, False)
        )
        self.assertEqual(backlog.read(4, 6), StreamUpdateResult([], 6, False))

    def test_range_outside_the_backlog(self) -> None:
        """A range that begins outside the backlog is not answered."""
        backlog = self.make()
        self.assertIsNone(backlog.read(0, 9))
        backlog.add(5, [batch(6)])
        self.assertIsNone(backlog.read(4, 6))
        self.assertIsNone(backlog.read(6, 9))
        # The writer has not sent more rows yet.
        self.assertEqual(backlog.read(5, 9), StreamUpdateResult([(6, [6, 0])], 6, True))

    def test_lower_limit(self) -> None:
        """
        A lower limit evicts the oldest rows immediately, and applies to later rows.
        """
        backlog = self.make()
        backlog.add(1, [batch(2), batch(3), batch(4)])
        backlog.resize(BacklogOptions(2, 100_000))
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (2, 4, 2))
        backlog.add(4, [batch(5)])
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (3, 5, 2))
        backlog.resize(BacklogOptions(2, 10))
        self.assertEqual((backlog.start, backlog.rows, backlog.size), (5, 0, 0))

    def test_higher_limit(self) -> None:
        """A higher limit applies to later rows."""
        backlog = self.make(max_rows=1)
        backlog.add(1, [batch(2), batch(3)])
        backlog.resize(BacklogOptions(3, 100_000))
        backlog.add(3, [batch(4), batch(5)])
        self.assertEqual((backlog.start, backlog.rows), (2, 3))

    def test_hole(self) -> None:
        """
        A range with unknown rows clears the backlog; a range that is certainly empty
        does not.
        """
        backlog = self.make()
        backlog.add(1, [batch(2)])
        backlog.skip_range(2, 5)
        backlog.add(5, [batch(6)])
        self.assertEqual(backlog.start, 1)
        backlog.add(8, [batch(9)])
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (8, 9, 1))
        backlog.add(None, [batch(20)])
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (19, 20, 1))
        backlog.skip_range(30, 31)
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (30, 31, 0))

    def test_disorder(self) -> None:
        """Rows at or below the end clear the backlog."""
        backlog = self.make()
        backlog.add(1, [batch(9)])
        backlog.add(9, [batch(5)])
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (4, 5, 1))
        self.assertEqual(
            backlog.read(4, 5), StreamUpdateResult([(5, [5, 0])], 5, False)
        )
        backlog.add(5, [batch(5)])
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (4, 5, 1))

    def test_bounds_after_a_hole(self) -> None:
        """The rows before a hole are not counted or evicted a second time."""
        backlog = self.make(max_rows=2)
        backlog.add(1, [batch(2)])
        backlog.add(8, [batch(9), batch(10), batch(11)])
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (9, 11, 2))

    def test_bounds(self) -> None:
        """
        Rows and bytes are limited; the oldest tokens are evicted, each as a whole.
        """
        backlog = self.make(max_rows=3)
        backlog.add(0, [batch(1, 2), batch(2), batch(3)])
        self.assertEqual((backlog.start, backlog.rows), (1, 2))
        backlog.add(3, [batch(4, 9)])
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (4, 4, 0))
        backlog = self.make(max_bytes=500)
        for token in range(1, 1000):
            backlog.add(token - 1, [batch(token)])
        self.assertLess(backlog.rows, 7)
        self.assertGreater(backlog.rows, 3)
        backlog = self.make()
        backlog.add(0, [batch(1)])
        exact = self.make(max_bytes=2 * backlog.size)
        exact.add(0, [batch(1), batch(2)])
        self.assertEqual(exact.rows, 2)
        exact = self.make(max_rows=2)
        exact.add(0, [batch(1), batch(2)])
        self.assertEqual(exact.rows, 2)
        empty = self.make(max_rows=0)
        empty.add(0, [batch(1)])
        self.assertIsNone(empty.read(0, 1))

    def test_pages(self) -> None:
        """A page is limited and never splits a token."""
        backlog = self.make(page_rows=3)
        backlog.add(0, [batch(1, 2), batch(2, 2), batch(3)])
        page = backlog.read(0, 3)
        assert page is not None
        self.assertEqual(
            (len(page.updates), page.upto_token, page.limited), (4, 2, True)
        )
        self.assertEqual(
            backlog.read(2, 3), StreamUpdateResult([(3, [3, 0])], 3, False)
        )
        backlog = self.make(page_rows=2)
        backlog.add(0, [batch(1), batch(2), batch(3)])
        self.assertEqual(
            backlog.read(0, 3), StreamUpdateResult([(1, [1, 0]), (2, [2, 0])], 2, True)
        )

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.booleans())),
        st.integers(0, 60),
        st.integers(0, 60),
    )
    def test_never_a_hole(
        self, steps: list[tuple[int, int, bool]], from_token: int, more: int
    ) -> None:
        """An answer contains all rows written in the range that it states."""
        backlog = self.make(max_rows=8, page_rows=4)
        written: list[tuple[int, list[int]]] = []
        token = 0
        for step, rows, is_sent in steps:
            prev, token = token, token + step
            texts = batch(token, rows)[1]
            written += [(token, json.loads(text)) for text in texts]
            if not is_sent:
                continue
            if rows:
                backlog.add(prev, [(token, texts)])
            else:
                backlog.skip_range(prev, token)
        result = backlog.read(from_token, from_token + more)
        if result is not None:
            self.assertEqual(
                result.updates,
                [w for w in written if from_token < w[0] <= result.upto_token],
            )
            self.assertLessEqual(result.upto_token, from_token + more)
            self.assertEqual(result.limited, result.upto_token < from_token + more)


class BacklogTests(SynchronousTestCase):
    """Tests for :class:`Backlog`."""

    def test_streams(self) -> None:
        """Each stream has its own backlog, which is empty at first."""
        backlog = Backlog(BacklogOptions())
        backlog.of("a").add(0, [batch(1)])
        self.assertIsNone(backlog.read("b", 0, 1))
        result = backlog.read("a", 0, 1)
        assert result is not None
        self.assertEqual(result.updates, [(1, [1, 0])])

    def test_resize(self) -> None:
        """New limits apply to existing and future streams."""
        backlogs = Backlog(BacklogOptions(100))
        backlogs.of("a").add(1, [batch(2), batch(3)])
        backlogs.resize(BacklogOptions(1))
        backlogs.of("b").add(1, [batch(2), batch(3)])
        self.assertEqual({name: each.rows for name, each in backlogs}, {"a": 1, "b": 1})
