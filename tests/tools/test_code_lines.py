"""Tests for scripts.tools.code_lines."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.code_lines import count_code_lines


class CountCodeLinesTests(SynchronousTestCase):
    def test_counts_code_only(self) -> None:
        """Docstrings, comments and blank lines are not counted; other strings are."""
        source = (
            '"""Module.\n\nText.\n"""\n\n# A comment.\nx = 1  # one\n\n'
            'def f(\n    a,\n):\n    """Function."""\n    return """\ntext\n"""\n'
        )
        self.assertEqual(count_code_lines(source), 1 + 3 + 3)
