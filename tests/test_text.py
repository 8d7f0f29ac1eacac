"""Tests for synapse_replication.text."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.text import printable


class PrintableTests(SynchronousTestCase):
    """Tests for printable."""

    def test_escapes(self) -> None:
        """Control characters are escaped, other text is left alone."""
        self.assertEqual(printable("caf\u00e9 \u2615"), "caf\u00e9 \u2615")
        self.assertEqual(printable("a\x1b[2Jb\n"), "a\\x1b[2Jb\\n")
