"""Tests for :mod:`synapse_replication.pipeline.descriptions`."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.descriptions import COLUMNS, describe_table
from synapse_replication.pipeline.tables import standard_tables

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.rst"


class DescriptionTests(SynchronousTestCase):
    """Tests for the descriptions of tables and columns."""

    def test_all_columns(self) -> None:
        """Each column of each table has a description; no other column has one."""
        names = set()
        for table in standard_tables().values():
            for field in table.archive_schema:
                names.add(field.name)
                self.assertIn(b"comment", field.metadata or {}, field.name)
        self.assertEqual(names, set(COLUMNS))

    def test_manual(self) -> None:
        """The manual contains the descriptions."""
        lines = {" ".join(line.split()) for line in PAGE.read_text().splitlines()}
        for name, text in COLUMNS.items():
            self.assertIn(f"``{name}`` {text}", lines)

    def test_tables(self) -> None:
        """The description of a table has its sources and what they retain."""
        self.assertIn("from receipts_linearized, which", describe_table("receipts"))
        self.assertIn("only the newest", describe_table("receipts"))
        self.assertIn("one row for each change", describe_table("caches"))
        self.assertIn("declares", describe_table("orders"))

    def test_times(self) -> None:
        """Each column whose name ends with ``_ts`` is a timestamp."""
        for table in standard_tables().values():
            for field in table.archive_schema:
                if field.name.endswith("_ts"):
                    self.assertEqual(str(field.type), "timestamp[us, tz=UTC]")
