"""Tests for :mod:`synapse_replication.instrumentation.log_lines`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.instrumentation.log_lines import MAX_LOG_LINE, cut_lines


class CutLinesTests(SynchronousTestCase):
    """Tests for :func:`cut_lines`."""

    def test_short(self) -> None:
        """Short lines stay unchanged."""
        for text in (None, "", "a\n", "a" * (MAX_LOG_LINE - 1), "a\n" * MAX_LOG_LINE):
            self.assertEqual(cut_lines(text), text)

    def test_long(self) -> None:
        """
        A line that is too long is truncated and marked; other lines stay unchanged.
        """
        text = cut_lines("first\n" + "x" * 4_000_000 + "\nlast\n")
        assert text is not None
        first, cut, last, end = text.split("\n")
        self.assertEqual((first, last, end), ("first", "last", ""))
        self.assertLess(len(cut), MAX_LOG_LINE)
        wide = cut_lines("\U0001f600" * 3000)
        assert wide is not None
        self.assertLess(len(wide.encode()), MAX_LOG_LINE)
        self.assertTrue(cut.endswith("more characters)"))
