"""Tests for :mod:`synapse_replication.instrumentation.log_lines`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.instrumentation.log_lines import MAX_LOG_LINE, clean_lines


class CleanLinesTests(SynchronousTestCase):
    """Tests for :func:`clean_lines`."""

    def test_short(self) -> None:
        """Short lines stay unchanged."""
        for text in (None, "", "a\n", "a" * (MAX_LOG_LINE - 1), "a\n" * MAX_LOG_LINE):
            self.assertEqual(clean_lines(text), text)

    def test_long(self) -> None:
        """
        A line that is too long is truncated and marked; other lines stay unchanged.
        """
        text = clean_lines("first\n" + "x" * 4_000_000 + "\nlast\n")
        assert text is not None
        first, cut, last, end = text.split("\n")
        self.assertEqual((first, last, end), ("first", "last", ""))
        self.assertLess(len(cut), MAX_LOG_LINE)
        wide = clean_lines("\U0001f600" * 3000)
        assert wide is not None
        self.assertLess(len(wide.encode()), MAX_LOG_LINE)
        self.assertTrue(cut.endswith("more characters)"))

    def test_control_characters(self) -> None:
        """No text can control a terminal, or reorder what it shows."""
        self.assertEqual(
            clean_lines("\x1b[2J \u202e\n\t\tin\x00\ud800\tdent\n"),
            "\\x1b[2J \\u202e\n\t\tin\\x00\\ud800\\tdent\n",
        )
