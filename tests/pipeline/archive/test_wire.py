"""Tests for synapse_replication.pipeline.archive.wire."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.wire import (
    Recording,
    WireLedger,
    find_closed_recordings,
)
from synapse_replication.pipeline.archive.writer import Batch, Manifest


class FindTests(SynchronousTestCase):
    """Tests for which recordings are closed."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()

    def test_folder(self) -> None:
        """A folder may be empty; what is being written is passed over."""
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
        """A path that does not exist is named."""
        error = self.assertRaises(
            PipelineError, find_closed_recordings, [self.folder / "x"]
        )
        self.assertIn(str(self.folder / "x"), str(error))

    def test_one_name(self) -> None:
        """Two recordings of one name are refused: one would be taken for the other."""
        (self.folder / "deep").mkdir()
        for name in ("a.jsonl", "deep/a.jsonl"):
            (self.folder / name).write_text("")
        error = self.assertRaises(PipelineError, find_closed_recordings, [self.folder])
        self.assertIn("rename one", str(error))


class LedgerTests(SynchronousTestCase):
    """Tests for what is archived already."""

    def plan(
        self, ledger: WireLedger, *recordings: Recording
    ) -> list[tuple[int, list[str]]]:
        return [
            (batch.number, [path.name for path in paths])
            for batch, paths in ledger.plan(recordings, batch_bytes=10)
        ]

    def test_each_once(self) -> None:
        """What a manifest lists is not planned again."""
        batch = Batch(4, "recordings", [["a", 5]])
        ledger = WireLedger([Manifest(batch, "x", 1, ())])
        self.assertEqual(
            self.plan(ledger, Recording(Path("a"), 5), Recording(Path("b"), 1)),
            [(5, ["b"])],
        )

    def test_batches_are_bounded(self) -> None:
        """A batch takes as much as it may, and at least one recording."""
        ledger = WireLedger([])
        planned: list[list[str]] = []
        sizes = (4, 6, 1, 99, 1)
        recordings = [Recording(Path(str(n)), size) for n, size in enumerate(sizes)]
        for batch, paths in ledger.plan(recordings, batch_bytes=10):
            planned.append([path.name for path in paths])
            ledger.add(Manifest(batch, "x", 1, ()))
            self.assertEqual(batch.number, len(planned) - 1)
        self.assertEqual(planned, [["0", "1"], ["2"], ["3"], ["4"]])

    def test_changed(self) -> None:
        """A recording that grew is refused."""
        ledger = WireLedger([Manifest(Batch(0, "recordings", [["a", 5]]), "x", 1, ())])
        error = self.assertRaises(
            PipelineError, self.plan, ledger, Recording(Path("a"), 6)
        )
        self.assertIn("had 5 bytes when it was archived, and has 6 now", str(error))
