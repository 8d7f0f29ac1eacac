"""Tests for :mod:`synapse_replication.pipeline.archive.closed_recordings`."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.closed_recordings import (
    Recording,
    find_closed_recordings,
    plan_recordings,
)


class FindTests(SynchronousTestCase):
    """Tests for finding the closed recordings."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()

    def test_folder(self) -> None:
        """
        Closed recordings are found at any depth, once each; an empty folder has none.
        """
        self.assertEqual(find_closed_recordings([self.folder]), [])
        (self.folder / "deep").mkdir()
        for name in ("b.jsonl", "deep/a.jsonl.gz", "c.jsonl.partial", "d.txt"):
            (self.folder / name).write_text("12345")
        found = find_closed_recordings([self.folder, self.folder / "b.jsonl"])
        self.assertEqual(
            [(each.name, each.size) for each in found],
            [("b.jsonl", 5), ("a.jsonl.gz", 5)],
        )

    def test_missing(self) -> None:
        """The error names the path that does not exist."""
        error = self.assertRaises(
            PipelineError, find_closed_recordings, [self.folder / "x"]
        )
        self.assertIn(str(self.folder / "x"), str(error))

    def test_one_name(self) -> None:
        """
        Two recordings with the same name are an error, because the archive could not
        distinguish them.
        """
        (self.folder / "deep").mkdir()
        for name in ("a.jsonl", "deep/a.jsonl"):
            (self.folder / name).write_text("")
        error = self.assertRaises(PipelineError, find_closed_recordings, [self.folder])
        self.assertIn("rename one", str(error))


class PlanTests(SynchronousTestCase):
    """Tests for planning batches of recordings."""

    def plan(self, archived: dict[str, int], *recordings: Recording) -> list[list[str]]:
        return [
            [recording.name for recording in batch]
            for batch in plan_recordings(recordings, archived.get, batch_bytes=10)
        ]

    def test_each_once(self) -> None:
        """An archived recording is not planned again."""
        planned = self.plan({"a": 5}, Recording(Path("a"), 5), Recording(Path("b"), 1))
        self.assertEqual(planned, [["b"]])

    def test_batches_are_bounded(self) -> None:
        """
        A batch has at most the maximum number of bytes, but at least one recording.
        """
        sizes = (4, 6, 1, 99, 1)
        recordings = [Recording(Path(str(n)), size) for n, size in enumerate(sizes)]
        self.assertEqual(self.plan({}, *recordings), [["0", "1"], ["2"], ["3"], ["4"]])

    def test_changed(self) -> None:
        """A recording that has grown is an error."""
        error = self.assertRaises(
            PipelineError, self.plan, {"a": 5}, Recording(Path("a"), 6)
        )
        self.assertIn("had 5 bytes when it was archived, and now has 6", str(error))
