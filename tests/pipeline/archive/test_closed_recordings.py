"""Tests for finding and planning the recordings of an archive job."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import job
from synapse_replication.pipeline.archive.job import (
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
            [each.name for each in found],
            ["b.jsonl", "a.jsonl.gz"],
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

    def plan(self, archived: dict[str, int], *sizes: int) -> list[dict[str, int]]:
        """Plan recordings with these sizes, which are named by their indexes."""
        self.patch(job, "_BATCH_BYTES", 10)
        paths = [Path(self.mktemp() + str(index)) for index, _ in enumerate(sizes)]
        for path, size in zip(paths, sizes, strict=True):
            path.write_bytes(b"x" * size)
        known = {path.name: archived.get(path.name[-1]) for path in paths}
        return [
            {path.name[-1]: size for path, size in batch.items()}
            for batch in plan_recordings(paths, known.get)
        ]

    def test_each_once(self) -> None:
        """An archived recording is not planned again."""
        self.assertEqual(self.plan({"0": 5}, 5, 1), [{"1": 1}])
        self.assertEqual(self.plan({"0": 5}, 5), [])

    def test_batches_are_bounded(self) -> None:
        """
        A batch has at most the maximum number of bytes, but at least one recording.
        """
        planned = self.plan({}, 4, 6, 1, 99, 1)
        self.assertEqual(planned, [{"0": 4, "1": 6}, {"2": 1}, {"3": 99}, {"4": 1}])

    def test_changed(self) -> None:
        """A recording that has grown is an error."""
        error = self.assertRaises(PipelineError, self.plan, {"0": 5}, 6)
        self.assertIn("had 5 bytes when it was archived, and now has 6", str(error))

    def test_deleted(self) -> None:
        """
        An archived recording may be deleted after it was listed; a new one must not.
        """
        gone = Path(self.mktemp())
        self.assertEqual(list(plan_recordings([gone], lambda name: 5)), [])
        with self.assertRaises(PipelineError) as caught:
            list(plan_recordings([gone], lambda name: None))
        self.assertIn(f"{gone} was deleted", str(caught.exception))

    def test_checked_first(self) -> None:
        """
        All recordings are checked before the first batch: nothing is archived if one of
        them has grown, and those that are archived may be deleted between two batches.
        """
        paths = [Path(self.mktemp() + str(index)) for index in range(3)]
        for path in paths:
            path.write_bytes(b"12345")
        archived = {paths[2].name: 5}
        self.patch(job, "_BATCH_BYTES", 5)
        batches = plan_recordings(paths, archived.get)
        self.assertEqual(next(batches), {paths[0]: 5})
        paths[2].unlink()
        self.assertEqual(list(batches), [{paths[1]: 5}])
        paths[2].write_bytes(b"123456")
        grown = plan_recordings(paths, archived.get)
        self.assertRaises(PipelineError, next, grown)
