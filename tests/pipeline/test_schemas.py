"""Tests for :mod:`synapse_replication.pipeline.schemas`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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
    Column,
    DatabaseTable,
    describe_table,
    json_rows,
    standard_tables,
)
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from tests.pipeline.shared_session import shared_session

_DOCS = Path(__file__).parents[2] / "docs"

#: Tables that no user sees.
_INTERNAL = (
    "columns/keys.csv",
    "columns/streams.csv",
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


def rows_of(table: DatabaseTable, rows: list[dict[str, Any]]) -> list[Any]:
    """Return the wire rows of a table's columns, parsed; omitted columns are null."""
    schema = pa.schema([column.arrow for column in table.columns])
    batch = pa.RecordBatch.from_pylist(
        [{name: row.get(name) for name in schema.names} for row in rows], schema=schema
    )
    return [json.loads(text) for text in json_rows(table, batch).to_pylist()]


class JsonRowsTests(SynchronousTestCase):
    """Tests for wire rows that are built from columns."""

    def test_every_type(self) -> None:
        """Each type is encoded as JSON, including nulls and special characters."""
        types = ("string", "bigint", "double", "boolean", "strings", "json")
        names = tuple(f"a_{type_}" for type_ in types)
        table = DatabaseTable("s", tuple(map(Column, names, types)), ((None, names),))
        values: list[list[Any]] = [
            [
                '"\\\n\t\x01é\U0001f600',
                -(2**63),
                1.5,
                True,
                ['a"', None, ""],
                {"x": [1]},
            ],
            ["plain", 0, 1e300, False, [], None],
            [None] * 6,
        ]
        found = rows_of(
            table,
            [
                dict(zip(names, [*row[:5], row[5] and json.dumps(row[5])], strict=True))
                for row in values
            ],
        )
        self.assertEqual(found, values)
        (odd,) = rows_of(table, [{"a_double": float("nan")}])
        self.assertEqual(odd[2], "nan")

    def test_kinds(self) -> None:
        """A row contains the columns of its kind, in the order of the kind."""
        table = standard_tables()["events"]
        given: list[dict[str, Any]] = [
            {"kind": "state", "room_id": "!r", "type": "t", "state_key": "k"},
            {"kind": "ev", "event_id": "$e", "room_id": "!r", "rejected": False},
            {"kind": "state-all", "room_id": "!s"},
            {"kind": "state", "room_id": "!q", "event_id": "$e"},
        ]
        self.assertEqual(
            rows_of(table, given),
            [
                ["state", ["!r", "t", "k", None]],
                ["ev", ["$e", "!r", *[None] * 5, False, None]],
                ["state-all", ["!s"]],
                ["state", ["!q", None, None, "$e"]],
            ],
        )
        self.assertEqual(rows_of(table, []), [])

    def test_slices(self) -> None:
        """A slice of a batch yields only its own rows, also if they contain lists."""
        table = standard_tables()["caches"]
        schema = pa.schema([column.arrow for column in table.columns])
        batch = pa.RecordBatch.from_pylist(
            [
                {"cache_func": "f", "keys": [str(n)] * n or None, "invalidation_ts": n}
                for n in range(5)
            ],
            schema=schema,
        )
        whole = json_rows(table, batch).to_pylist()
        self.assertEqual(json_rows(table, batch.slice(2, 2)).to_pylist(), whole[2:4])


class ColumnsTests(SynchronousTestCase):
    """Tests for the columns of streams, which are derived from the stream registry."""

    def test_every_stream_has_a_table(self) -> None:
        """Each stream has a table, and no table has two columns of the same name."""
        tables = standard_tables()
        self.assertEqual(tables.keys(), STANDARD_STREAMS.keys())
        self.assertEqual(
            [column.name for column in tables["receipts"].columns],
            ["room_id", "receipt_type", "user_id", "event_id", "thread_id", "data"],
        )
        self.assertEqual(tables["receipts"].columns[-1].type, "json")
        self.assertEqual(tables["caches"].columns[1].type, "strings")
        events = tables["events"]
        self.assertEqual(
            [kind for kind, _ in events.kinds], ["ev", "state", "state-all"]
        )
        for table in tables.values():
            names = table.archive_schema.names
            self.assertEqual(len(names), len(set(names)), table.name)
