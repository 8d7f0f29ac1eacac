"""Tests of pages of fetched rows."""

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.streams.pages import (
    PAGE_BYTES,
    Page,
    gather_batches,
    read_page,
    to_page,
)
from synapse_replication.streams.rows import MAX_VALUES
from synapse_replication.streams.stream import EncodedUpdates, StreamUpdateResult


class CheckPageTests(SynchronousTestCase):
    """Tests for the page that is created from a source's answer."""

    def test_gathers_by_token(self) -> None:
        """Rows of one token are grouped, in order."""
        result = StreamUpdateResult([(3, "a"), (3, "b"), (5, "c")], 9, False)
        self.assertEqual(to_page(result, 2, 9), Page([3, 3, 5], ["a", "b", "c"], 9))
        self.assertEqual(
            list(to_page(result, 2, 9).batches()), [(3, ["a", "b"]), (5, ["c"])]
        )
        self.assertEqual(list(Page([], [], 9).batches()), [])

    def test_skips_rows_outside_the_range(self) -> None:
        """Rows outside the range are skipped, and the page ends within it."""
        result = StreamUpdateResult([(2, "a"), (3, "b"), (10, "c")], 12, False)
        self.assertEqual(to_page(result, 2, 9), Page([3], ["b"], 9))

    def test_skips_rows_beyond_a_limited_answer(self) -> None:
        """Rows above the answer's ``upto_token`` are skipped, to be fetched again."""
        result = StreamUpdateResult([(3, "a"), (4, "b")], 3, True)
        self.assertEqual(to_page(result, 2, 9), Page([3], ["a"], 3))

    def test_sorts(self) -> None:
        """Rows are sorted by token."""
        result = StreamUpdateResult([(5, "c"), (3, "a"), (5, "d")], 9, False)
        self.assertEqual(to_page(result, 2, 9), Page([3, 5, 5], ["a", "c", "d"], 9))

    def test_encoded_rows(self) -> None:
        """Encoded rows stay encoded with ``allow_encoded``, and are decoded without."""
        updates = EncodedUpdates([(5, '["c"]'), (3, '["a"]'), (5, '["d"]'), (9, "1")])
        result = StreamUpdateResult(updates, 5, True)
        self.assertEqual(
            to_page(result, 2, 9, allow_encoded=True),
            Page([3, 5, 5], ['["a"]', '["c"]', '["d"]'], 5, True),
        )
        self.assertEqual(
            to_page(result, 2, 9), Page([3, 5, 5], [["a"], ["c"], ["d"]], 5)
        )
        plain = StreamUpdateResult([(3, "a")], 5, True)
        self.assertFalse(to_page(plain, 2, 9, allow_encoded=True).is_encoded)

    def test_answer_without_progress(self) -> None:
        """An answer without progress raises an error that names the range."""
        with self.assertRaisesRegex(CatchUpError, r"up to 2, .* \(2, 9\]"):
            to_page(StreamUpdateResult([], 2, True), 2, 9)


class ReadPageTests(SynchronousTestCase):
    """Tests for the page that is read from rows in memory."""

    def page_ends(self, *batches: tuple[int, list[bytes]]) -> list[int]:
        """Return the last token of each page of some rows."""
        ends, after, upto = [], 0, batches[-1][0]
        while after < upto:
            left = [each for each in batches if each[0] > after]
            page = read_page(left, after, upto, 1000)
            self.assertEqual(page.limited, page.upto_token < upto)
            after = page.upto_token
            ends.append(after)
        return ends

    def test_bytes(self) -> None:
        """A page ends before a token that does not fit; it may consist of one token."""
        half = b'"%b"' % (b"a" * (PAGE_BYTES // 2 - 2))
        big = b'"%b"' % (b"a" * (3 * PAGE_BYTES))
        ends = self.page_ends(
            (1, [half]), (2, [half]), (3, [half]), (4, [big]), (5, [big, big]), (6, [])
        )
        self.assertEqual(ends, [2, 3, 4, 5, 6])

    def test_values(self) -> None:
        """A page ends before it has more values than a reader accepts."""
        many = b"[%b0]" % (b"0," * (MAX_VALUES // 5))
        ends = self.page_ends(*((token, [many]) for token in range(1, 6)))
        self.assertEqual(ends, [2, 4, 5])


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


class CutTests(SynchronousTestCase):
    """Tests for the part of a page up to a token."""

    def test_between_rows(self) -> None:
        """The rows of the token are part of it; it ends at the token."""
        page = Page([3, 3, 5], ["a", "b", "c"], 9, True)
        self.assertEqual(page.cut(4), Page([3, 3], ["a", "b"], 4, True))
        self.assertEqual(page.cut(3), Page([3, 3], ["a", "b"], 3, True))
        self.assertEqual(page.cut(2), Page([], [], 2, True))

    def test_batches(self) -> None:
        """A page iterates over its tokens, each with its rows."""
        page = Page([3, 3, 5], ["a", "b", "c"], 9)
        self.assertEqual(list(page.batches()), [(3, ["a", "b"]), (5, ["c"])])
