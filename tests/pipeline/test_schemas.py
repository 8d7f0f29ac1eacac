"""Tests for :mod:`synapse_replication.pipeline.schemas`."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.scan import table_frame
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    ARCHIVED_WIRE_SCHEMA,
    FINDINGS_SCHEMA,
    ROWS_SCHEMA,
    WIRE_SCHEMA,
)
from tests.pipeline.shared_session import shared_session

_DOCS = Path(__file__).parents[2] / "docs" / "pipeline.rst"


class SchemaTests(SynchronousTestCase):
    """Tests for the published schemas."""

    def test_documented(self) -> None:
        """The documentation lists each column."""
        text = _DOCS.read_text()
        named = set(re.findall(r"``(\w+)``", text))
        for schema in (ARCHIVED_ROWS_SCHEMA, WIRE_SCHEMA, FINDINGS_SCHEMA):
            self.assertEqual(set(schema.names) - named, set())

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
