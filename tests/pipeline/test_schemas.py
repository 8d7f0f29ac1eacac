"""Tests for :mod:`synapse_replication.pipeline.schemas`."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline import schemas
from synapse_replication.pipeline.scan import table_frame
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    ARCHIVED_WIRE_SCHEMA,
    FINDINGS_SCHEMA,
    MEANINGS,
    ROWS_SCHEMA,
    WIRE_SCHEMA,
)
from synapse_replication.pipeline.tables import describe_table, standard_tables
from tests.pipeline.shared_session import shared_session

_DOCS = Path(__file__).parents[2] / "docs"

#: Hints in errors, settings of reads, types of columns, and tables that no user sees.
_INTERNAL = (
    "hints.csv",
    "source/parameters.csv",
    "source/settings.csv",
    "columns/types.csv",
    "columns/sightings.csv",
    "columns/ids.csv",
)


class SchemaTests(SynchronousTestCase):
    """Tests for the published schemas."""

    def test_documented(self) -> None:
        """The documentation includes each table that is not only for the code."""
        pages = (_DOCS / page for page in ("pipeline.rst", "questions.rst"))
        included = [
            path
            for page in pages
            for path in re.findall(r":file: \.\./(\S+)", page.read_text())
        ]
        folder = Path(schemas.__file__).parent
        self.assertEqual(
            {(_DOCS.parent / path).resolve() for path in included},
            {path.resolve() for path in folder.rglob("*.csv")}
            - {(folder / name).resolve() for name in _INTERNAL},
        )

    def test_archive_has_rows(self) -> None:
        """The archive has all columns of the source, in the same order."""
        for archived, read in (
            (ARCHIVED_ROWS_SCHEMA, ROWS_SCHEMA),
            (ARCHIVED_WIRE_SCHEMA, WIRE_SCHEMA),
        ):
            self.assertEqual(list(archived)[: len(read)], list(read))

    def test_key_columns_are_not_nullable(self) -> None:
        """The key columns of rows, recorded lines and findings are not nullable."""

        def nullable(schema: pa.Schema) -> set[str]:
            return {field.name for field in schema if field.nullable}

        self.assertEqual(nullable(ROWS_SCHEMA), {"written_ts"})
        for key in ("recording", "line_number", "t", "channel", "line"):
            self.assertNotIn(key, nullable(WIRE_SCHEMA))
        for name in ("kind", "severity", "count", "message", "evidence"):
            self.assertNotIn(name, nullable(FINDINGS_SCHEMA))

    def test_spark_accepts_each_schema(self) -> None:
        """Tokens are 64 bits wide, and Spark accepts each schema unchanged."""
        for schema, token in (
            (ROWS_SCHEMA, "stream_id"),
            (WIRE_SCHEMA, "token"),
            (FINDINGS_SCHEMA, "last_token"),
        ):
            frame = table_frame(shared_session(), schema.empty_table())
            self.assertEqual(frame.columns, schema.names)
            self.assertEqual(dict(frame.dtypes)[token], "bigint")


class DescriptionTests(SynchronousTestCase):
    """Tests for the descriptions of tables and columns."""

    def test_all_columns(self) -> None:
        """Each column of each table has a description; no other column has one."""
        names = set()
        for table in standard_tables().values():
            for field in table.archive_schema:
                names.add(field.name)
                self.assertIn(b"comment", field.metadata or {}, field.name)
        self.assertEqual(names, set(MEANINGS))

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
