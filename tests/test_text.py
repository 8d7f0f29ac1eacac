"""Tests for synapse_replication.text."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.text import counted, duration, printable


class CountedTests(SynchronousTestCase):
    """Tests for counted."""

    def test_number(self) -> None:
        """One is singular; thousands are separated."""
        self.assertEqual(
            [counted(n, "stream") for n in (0, 1, 1024)],
            ["0 streams", "1 stream", "1,024 streams"],
        )


class DurationTests(SynchronousTestCase):
    """Tests for duration."""

    def test_units(self) -> None:
        """A duration is in the longest unit that it reaches."""
        for seconds, text in (
            (0.5, "500 ms"),
            (1, "1 s"),
            (60, "1 min"),
            (90, "1.5 min"),
            (1800, "30 min"),
            (7200, "2 h"),
            (5400, "1.5 h"),
            (14 * 86_400, "14 d"),
        ):
            self.assertEqual(duration(seconds * 1000), text)


class PrintableTests(SynchronousTestCase):
    """Tests for printable."""

    def test_escapes(self) -> None:
        """Control characters are escaped, and other text is unchanged."""
        self.assertEqual(printable("caf\u00e9 \u2615"), "caf\u00e9 \u2615")
        self.assertEqual(printable("a\x1b[2Jb\n"), "a\\x1b[2Jb\\n")
