"""Tests for :mod:`synapse_replication.pipeline.source.views`."""

from __future__ import annotations

import functools
import json
import typing
from typing import Any

import attrs
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.source.views import (
    create_views,
    field_types,
    typed_view,
    views_of,
)
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.table import TableStream
from tests.pipeline.shared_session import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE


def sent() -> list[tuple[str, str, int, Any]]:
    """Give stream, writer, token and row of what writers sent, of every kind."""
    return [
        *(
            (stream, writer, token, row)
            for (stream, writer), updates in ON_THE_WIRE.items()
            for token, row in updates
        ),
        ("typing", "w", 1, ["!r", ["@a:x", "@b:x"]]),
        ("federation", "w", 1, ["e", {"a": [1, 2]}]),
        ("presence_federation", "w", 1, ["x", "@a:x"]),
        ("events", "w", 9, ["state-all", ["!r"]]),
        # An older peer's, which is shorter.
        ("events", "w", 10, ["ev", ["$e", "!r", "t", None, None, None]]),
    ]


def of_the_wire() -> DataFrame:
    """Make a frame of the rows that writers sent."""
    return shared_session().createDataFrame(
        [
            (stream, writer, token, 0, json.dumps(row), None)
            for stream, writer, token, row in sent()
        ],
        ROWS_SCHEMA,
    )


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
        frame = of_the_wire()
        views = views_of()
        # All views by one job.
        typed = [
            typed_view(frame, view).select(
                sf.lit(name).alias("view"),
                "stream_id",
                sf.to_json(
                    sf.struct(*field_types(view.row_type)),
                    {"ignoreNullFields": "false"},
                ).alias("fields"),
            )
            for name, view in views.items()
        ]
        found: dict[str, list[tuple[int, list[Any]]]] = {name: [] for name in views}
        for row in functools.reduce(DataFrame.unionAll, typed).collect():
            values = list(json.loads(row.fields).values())
            found[row.view].append((row.stream_id, values))
        for name, view in views.items():
            expected = [
                (token, row[1] if view.kind else row)
                for stream, _, token, row in sent()
                if stream == view.stream and (not view.kind or row[0] == view.kind)
            ]
            places = len(field_types(view.row_type))
            expected = [
                (token, [*row, *[None] * (places - len(row))])
                for token, row in expected
            ]
            as_sent = [
                (token, list(map(_as_sent, values, wanted)))
                for (token, values), (_, wanted) in zip(
                    found[name], expected, strict=True
                )
            ]
            self.assertEqual(as_sent, expected, name)
            self.assertTrue(expected, name)

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
