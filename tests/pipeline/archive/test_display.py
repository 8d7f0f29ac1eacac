"""Tests for the display of :mod:`synapse_replication.pipeline.archive.job`."""

from __future__ import annotations

import io
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline import progress
from synapse_replication.pipeline.archive.job import ArchiveProgress, Numbers


class Terminal(io.StringIO):
    """A terminal with eighty columns."""

    def isatty(self) -> bool:
        return True


class ArchiveProgressTests(SynchronousTestCase):
    """Tests for the progress displays."""

    def test_plain(self) -> None:
        """Without a terminal, each event is a line without colours."""
        out = io.StringIO()
        times = iter([10.0, 12.5, 13.0])
        clock = SimpleNamespace(monotonic=lambda: next(times))
        self.patch(progress, "time", clock)
        with ArchiveProgress(out) as reporter:
            reporter.show(Numbers(rows=1234, rows_per_second=617.0), "batch 0")
            reporter.show(Numbers(rows=1234, commands=7, behind=3), "lag read")
        self.assertEqual(
            out.getvalue().splitlines(),
            [
                "     2.5 s  batch 0; 1,234 rows, 617 rows/s",
                "     3.0 s  lag read; 1,234 rows, 7 commands, 3 ids behind",
            ],
        )

    def test_terminal(self) -> None:
        """On a terminal, one line is updated in place."""
        out = Terminal()
        with ArchiveProgress(out) as reporter:
            reporter.show(Numbers(rows=1234, behind=5), "batch 0")
        self.assertIn("1,234 rows, 5 ids behind", out.getvalue())

    def test_lines_above(self) -> None:
        """On a terminal, a line stays above the bar, whatever characters it has."""
        out = Terminal()
        with ArchiveProgress(out) as reporter:
            reporter.write("skipped caches.stream_id = 7: [bold] 5 [/]")
        self.assertIn("skipped caches.stream_id = 7: [bold] 5 [/]\n", out.getvalue())
