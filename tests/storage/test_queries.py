"""Tests for synapse_replication.storage.queries."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import IdStream, greatest_ids
from synapse_replication.streams.id_column import IdColumn
from tests.storage.doubles import PostgresMixin

#: The names that the statements themselves use, as columns of a table.
_COLUMN = IdColumn("source", "id", "writer")
_STREAM = IdStream(
    stream_name="source", sequence="source_seq", tables=[_COLUMN], writers=()
)


class ColumnNamesTests(PostgresMixin, SynchronousTestCase):
    """A stream's table may have columns with the names that the statements use."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)
        self.sql(
            "CREATE TABLE source (id bigint, writer text, name text, wanted text, "
            "found text, beyond text, farthest text, sign text)"
        )
        for id_, writer in ((1, "a"), (2, "b"), (3, "a"), (-4, "b"), (-5, "a")):
            # Every writer is above the empty name: a recursion that compares writers
            # with this column has no end.
            self.sql("INSERT INTO source VALUES (%s, %s, '', '')", id_, writer)
        # A recursion without an end must not block the tests.
        self.sql("SET statement_timeout = '5s'")

    def select(self, statement: str, **parameters: object) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return sorted(cursor.fetchall())

    def test_by_writer(self) -> None:
        """Rows are found by their writers."""
        for negative, of_a, of_b in ((False, 3, 2), (True, -5, -4)):
            each = queries.for_table("greatest_ids_of_writers", _COLUMN, negative)
            self.assertEqual(
                self.select(each, writers=["a", "b"]), [("a", of_a), ("b", of_b)]
            )
            between = queries.ids_between(_COLUMN, negative, of_writer=True)
            found = self.select(between, instance_name="a", after=0, up_to=9, limit=9)
            self.assertEqual(found, [(5,)] if negative else [(1,), (3,)])

    def test_greatest(self) -> None:
        """The greatest id of each writer excludes those with the other sign."""
        self.sql("INSERT INTO source VALUES (-6, 'c', '', '')")
        writers = ["a", "b", "c", "none"]
        with self.connection.cursor() as cursor:
            found = greatest_ids(cursor, _STREAM, _COLUMN, writers)
            self.assertEqual(found, {"a": 3, "b": 2})
            stream = attrs.evolve(_STREAM, negative=True)
            found = greatest_ids(cursor, stream, _COLUMN, writers)
            self.assertEqual(found, {"a": 5, "b": 4, "c": 6})

    def test_writers(self) -> None:
        """Each writer of the table is found once."""
        writers = self.select(queries.for_table("writers_of_table", _COLUMN))
        self.assertEqual(writers, [("a",), ("b",)])
        beyond = queries.for_table("writers_beyond", _COLUMN)
        found = self.select(beyond, low=1, limit=9)
        self.assertEqual(found, [("a", 3, 1), ("b", 2, 1)])

    def test_ids(self) -> None:
        """The greatest id, and the ids beyond an id, are those of all writers."""
        self.assertEqual(self.select(queries.for_table("greatest_id", _COLUMN)), [(3,)])
        self.assertEqual(
            self.select(queries.for_table("greatest_id", _COLUMN, True)), [(-5,)]
        )
        between = queries.ids_between(_COLUMN, False, of_writer=False)
        found = self.select(between, after=1, up_to=9, limit=1)
        self.assertEqual(found, [(2,)])
