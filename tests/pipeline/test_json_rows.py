"""Tests for :mod:`synapse_replication.pipeline.json_rows`."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.json_rows import json_rows
from synapse_replication.pipeline.tables import (
    Column,
    DatabaseTable,
    standard_tables,
)
from synapse_replication.streams.standard.registry import STANDARD_STREAMS


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
