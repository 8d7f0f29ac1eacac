"""Tests for :mod:`synapse_replication.streams.table`."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    LocalProtocolError,
    RowDecodeError,
    StreamConfigurationError,
)
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.table import TableStream


def declare(**changes: Any) -> TableStream:
    """Declare a stream of orders, with some arguments replaced."""
    facts: dict[str, Any] = {
        "name": "orders",
        "table": "orders",
        "id_column": "stream_id",
        "writer_column": "instance_name",
        "columns": {"order_id": str, "note": str | None},
        "sequence": "orders_stream_seq",
        "writers": ["writer1", "writer2"],
    }
    return TableStream(**(facts | changes))


class TableStreamTests(SynchronousTestCase):
    """Tests for declaring a stream by its table."""

    def test_minimal_declaration(self) -> None:
        """Name, table, columns, sequence and writers suffice for typed rows."""
        stream = declare()

        decoded = stream.description.codec.decode([b'["o1",null]', b'["o2","late"]'])

        self.assertEqual(stream.description.name, "orders")
        self.assertEqual(
            [(row.order_id, row.note) for row in decoded.rows],
            [("o1", None), ("o2", "late")],
        )
        self.assertEqual(stream.row_type.__name__, "OrdersStreamRow")
        self.assertFalse(hasattr(decoded.rows[0], "__dict__"))

    def test_defaults(self) -> None:
        """
        By default, ``stream_positions`` has the stream's name, and ids are positive.
        """
        stream = declare()

        self.assertEqual(stream.positions_name, "orders")
        self.assertFalse(stream.negative)
        self.assertEqual(
            stream.id_columns, (IdColumn("orders", "stream_id", "instance_name"),)
        )

    def test_columns_without_types_hold_any_json(self) -> None:
        """Columns may be a list of names; each then holds any JSON value."""
        codec = declare(columns=["order_id", "note"]).description.codec

        row = codec.decode([b'[{"a":1},[true]]']).rows[0]

        self.assertEqual(codec.to_json(row), [{"a": 1}, [True]])

    def test_columns_of_json_hold_any_number(self) -> None:
        """A number within JSON has no bound, as in PostgreSQL."""
        codec = declare(columns={"content": "json"}).description.codec
        for number in (2**63, 2**70, -(10**30)):
            for content in (number, {"a": [number]}):
                row = codec.row_type(content)
                self.assertEqual(codec.decode([codec.encode_new(row)]).rows, [row])

    def test_types_by_name(self) -> None:
        """Types may be given by name; a type with ``?`` may be null."""
        stream = declare(columns={"order_id": "text", "amount": "integer?"})

        self.assertEqual(stream.columns, (("order_id", str), ("amount", int | None)))

    def test_range_of_integers(self) -> None:
        """An integer that does not fit into bigint is refused, with its column."""
        stream = TableStream(
            name="s", table="s", id_column="id", sequence="q", writers="w",
            columns={"n": "integer", "m": "integer?"},
        )  # fmt: skip
        codec = stream.description.codec
        for number in (2**63 - 1, -(2**63)):
            row = codec.row_type(number, number)
            self.assertEqual(codec.decode([codec.encode_new(row)]).rows, [row])
        for numbers in ((2**63, 0), (0, -(2**63) - 1), (2**64, None), (10**30, 1)):
            error = self.assertRaises(
                LocalProtocolError, codec.encode_new, codec.row_type(*numbers)
            )
            self.assertRegex(str(error), "a row of s cannot be written: ")

    def test_last_columns_may_be_missing(self) -> None:
        """The last columns that may be null are null if a row does not have them."""
        stream = declare(columns={"order_id": str, "size": int, "note": str | None})
        codec = stream.description.codec

        (row,) = codec.decode([b'["o1",3]']).rows

        self.assertEqual((row.order_id, row.size, row.note), ("o1", 3, None))
        self.assertRaises(RowDecodeError, codec.decode, [b'["o1"]'])

    def test_own_row_type(self) -> None:
        """A class with a field for each column replaces the generated one."""

        @attrs.frozen
        class Order:
            identifier: str
            remark: str | None

        stream = declare(row_type=Order)

        self.assertEqual(
            stream.description.codec.decode([b'["o1",null]']).rows, [Order("o1", None)]
        )

    def test_a_row_type_must_fit_the_columns(self) -> None:
        """A class with too few fields is refused."""

        @attrs.frozen
        class Order:
            identifier: str

        error = self.assertRaises(StreamConfigurationError, declare, row_type=Order)

        self.assertIn("has 1 fields for 2 columns", str(error))

    def test_a_keyword_column_needs_a_row_type(self) -> None:
        """A column called ``from`` cannot be a field of the generated class."""
        error = self.assertRaises(StreamConfigurationError, declare, columns=["from"])

        self.assertIn("row_type", str(error))

    def test_invalid_arguments(self) -> None:
        """Each invalid argument raises an error with its name, its value and a hint."""
        for changes, expected in (
            ({"name": "two words"}, "name is 'two words'"),
            ({"name": ""}, "name is ''"),
            ({"positions_name": " "}, "positions_name is ' '"),
            ({"table": "orders; DROP TABLE x"}, "table is 'orders; DROP TABLE x'"),
            ({"table": "Orders"}, "lower-case"),
            ({"table": "a.b.c"}, "table is 'b.c'"),
            ({"table": None}, "table is 'None'"),
            ({"id_column": 'a"b'}, "id_column is 'a\"b'"),
            ({"id_column": "x" * 64}, "at most 63"),
            ({"writer_column": "a b"}, "writer_column is 'a b'"),
            ({"sequence": "1st"}, "sequence is '1st'"),
            ({"columns": ["a b"]}, "columns is 'a b'"),
            ({"columns": []}, "at least one column"),
            ({"columns": ["a", "a"]}, "name each column once"),
            ({"columns": "a, b"}, "write a list of column names"),
            ({"columns": {"a": "varchar"}}, "unknown type varchar"),
            ({"writers": []}, "at least one instance"),
            ({"writers": ["a", "a"]}, "name each instance once"),
            ({"writers": ["a b"]}, "writers is 'a b'"),
            ({"writer_column": None}, "name the writer_column"),
        ):
            with self.subTest(changes=changes):
                error = self.assertRaises(StreamConfigurationError, declare, **changes)
                self.assertIn(expected, str(error))

    def test_a_single_writer_needs_no_column(self) -> None:
        """A stream with a single writer needs no writer column."""
        stream = declare(writer_column=None, writers="writer1")

        self.assertEqual(stream.writers, ("writer1",))

    def test_a_table_may_name_its_schema(self) -> None:
        """Tables and sequences may be qualified with a schema."""
        stream = declare(table="shop.orders", sequence="shop.orders_seq")

        self.assertEqual(stream.table, "shop.orders")
