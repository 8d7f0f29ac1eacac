"""Tests for :mod:`synapse_replication.data_files`."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.data_files import read_queries, read_table


class ReadTableTests(SynchronousTestCase):
    def test_columns(self) -> None:
        """A row has its texts by the names of the columns; an empty cell is empty."""
        path = Path(self.mktemp())
        path.write_text('Name,Line\nfirst,"one, two"\nsecond,\n', "utf-8")
        self.assertEqual(
            read_table(path),
            [{"Name": "first", "Line": "one, two"}, {"Name": "second", "Line": ""}],
        )

    def test_every_table_is_complete(self) -> None:
        """No row of any table that ships has too few or too many cells."""
        package = Path(__file__).parents[1] / "synapse_replication"
        tables = sorted(package.rglob("*.csv"))
        self.assertGreater(len(tables), 5)
        for path in tables:
            for row in read_table(path):
                self.assertNotIn(None, row, path)
                self.assertNotIn(None, row.values(), path)


class ReadQueriesTests(SynchronousTestCase):
    def test_parts(self) -> None:
        """Each statement has a name; comments are omitted."""
        path = Path(self.mktemp())
        path.write_text(
            "-- A file.\n-- name: one\n-- Why.\nSELECT 1\n\n-- name: two\nSELECT\n  2\n"
        )
        self.assertEqual(read_queries(path), {"one": "SELECT 1", "two": "SELECT\n  2"})
