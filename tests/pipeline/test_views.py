"""Tests for :mod:`synapse_replication.pipeline.views`."""

from __future__ import annotations

import json
import typing
from typing import Any

import attrs
from pyspark.sql import DataFrame
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.views import (
    create_views,
    field_types,
    typed_view,
    views_of,
)
from synapse_replication.streams.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream
from tests.pipeline.spark import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE


def of_the_wire() -> DataFrame:
    """Make a frame of the rows that writers sent."""
    records = [
        (stream, writer, token, 0, json.dumps(row), None)
        for (stream, writer), updates in ON_THE_WIRE.items()
        for token, row in updates
    ]
    records += [
        ("typing", "w", 1, 0, '["!r",["@a:x","@b:x"]]', None),
        ("federation", "w", 1, 0, '["e",{"a":[1,2]}]', None),
        ("presence_federation", "w", 1, 0, '["x","@a:x"]', None),
        ("events", "w", 9, 0, '["state-all",["!r"]]', None),
        ("events", "w", 10, 0, '["ev",["$e","!r","t",null,null,null]]', None),
    ]
    return shared_session().createDataFrame(records, ROWS_SCHEMA)


def fields_on_wire(row: list[Any], kind: str | None) -> list[Any]:
    """Give the places of a row that its fields stand in."""
    return row[1] if kind is not None else row


class ViewsTests(SynchronousTestCase):
    """Tests for typed columns."""

    def test_all_streams(self) -> None:
        """Each of the standard streams has a view, and each kind of event one."""
        views = views_of()
        self.assertEqual({v.stream for v in views.values()}, set(STANDARD_STREAMS))
        self.assertEqual(len(STANDARD_STREAMS), 19)
        of_events = [v.kind for v in views.values() if v.stream == "events"]
        self.assertEqual(of_events, ["ev", "state", "state-all"])

    def test_types_are_those_of_the_rows(self) -> None:
        """A view's columns are the fields of the row's type, in order and in type."""
        expected = {str: "string", int: "bigint", bool: "boolean", float: "double"}
        for view in views_of().values():
            hints = typing.get_type_hints(view.row_type)
            types = field_types(view.row_type)
            self.assertEqual(
                list(types), [field.name for field in attrs.fields(view.row_type)]
            )
            for name, type_ in types.items():
                plain = [h for h in typing.get_args(hints[name]) if h in expected]
                if hints[name] in expected:
                    self.assertEqual(type_, expected[hints[name]], (view, name))
                elif plain and type(None) in typing.get_args(hints[name]):
                    self.assertEqual(type_, expected[plain[0]], (view, name))
                else:
                    self.assertIn(type_, ("string", "array<string>"))

    def test_values(self) -> None:
        """Each field has the value that the row has on the wire."""
        frame = of_the_wire().cache()
        sent = [
            (row.stream, row.stream_id, row.instance_name, json.loads(row.row))
            for row in frame.collect()
        ]
        for view in views_of().values():
            types = field_types(view.row_type)
            found = [
                (row.stream_id, row.instance_name, [row[name] for name in types])
                for row in typed_view(frame, view).collect()
            ]
            expected = []
            for stream, token, writer, row in sent:
                if stream != view.stream or (view.kind and row[0] != view.kind):
                    continue
                values = fields_on_wire(row, view.kind)
                values = [*values, *[None] * (len(types) - len(values))]
                expected.append((token, writer, values))
            found = [
                (token, writer, list(map(_as_sent, values, wanted)))
                for (token, writer, values), (_, _, wanted) in zip(
                    found, expected, strict=True
                )
            ]
            self.assertEqual(found, expected, view.name)
            self.assertTrue(found, view.name)

    def test_declared(self) -> None:
        """A stream of the user's own table has its columns, whatever their names."""
        orders = TableStream(
            name="orders",
            table="orders",
            id_column="id",
            sequence="s",
            columns={"stream_id": str, "amount": "number", "more": "json?"},
            writers=["w"],
        )
        view = views_of([orders])["orders"]
        frame = shared_session().createDataFrame(
            [("orders", "w", 7, 0, '["a",1.5,{"b":[1]}]', None)], ROWS_SCHEMA
        )
        (row,) = typed_view(frame, view).collect()
        self.assertEqual(
            (row.stream_id, row.row_stream_id, row.amount, row.more),
            (7, "a", 1.5, '{"b":[1]}'),
        )

    def test_sql(self) -> None:
        """Views are there for SQL."""
        names = create_views(of_the_wire(), ["receipts"], prefix="wire_")
        self.assertEqual(names, ["wire_receipts"])
        (row,) = (
            shared_session()
            .sql(
                "SELECT count(*) AS n FROM wire_receipts WHERE receipt_type = 'm.read'"
            )
            .collect()
        )
        self.assertEqual(row.n, 2)
        error = self.assertRaises(PipelineError, create_views, of_the_wire(), ["x"])
        self.assertIn("receipts", str(error))


def _as_sent(value: Any, wanted: Any) -> Any:
    """Read what stays JSON text in a view."""
    if isinstance(wanted, dict) and value is not None:
        return json.loads(value)
    return value
