"""Tests for synapse_replication.storage.committed_tokens, on a real PostgreSQL."""

from __future__ import annotations

import attrs
import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage import committed_tokens
from synapse_replication.storage.committed_tokens import TokenReader, TokenReading
from synapse_replication.storage.standby import DatabaseRole
from synapse_replication.streams.id_column import IdColumn
from tests.storage.doubles import FOOBAR, PostgresMixin


class TokenReaderTests(PostgresMixin, SynchronousTestCase):
    """A reader of ``foo``, which is called ``foobar`` in the database."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)
        self.store(first=6, second=8)
        self.write_rows("first", 5, 6, 7)
        self.write_rows("second", 8)
        self.reader = TokenReader({"foo": FOOBAR})

    def read(self, upto: int = 9) -> TokenReading:
        with self.connection.cursor() as cursor:
            return self.reader.read(cursor, {("foo", "first"): (5, upto)})

    def test_primary(self) -> None:
        """All committed tokens of a range are read, whatever is stored."""
        reading = self.read()
        self.assertEqual(reading.stored, {("foo", "first"): 6, ("foo", "second"): 8})
        self.assertEqual(reading.newest, {})
        self.assertEqual(reading.committed, {("foo", "first"): ([6, 7], 9)})
        self.assertFalse(reading.is_standby)

    def test_standby(self) -> None:
        """A standby is asked only for tokens up to the position that it shows."""
        self.patch(committed_tokens, "read_role", lambda txn: DatabaseRole(True, True))
        self.assertEqual(self.read().committed, {("foo", "first"): ([6], 6)})
        self.sql("UPDATE stream_positions SET stream_id = 5")
        self.assertEqual(self.read().committed, {})

    def test_newest(self) -> None:
        """The newest tokens take the place of positions that are not stored."""
        stream = attrs.evolve(FOOBAR, writers=())
        self.reader = TokenReader({"foo": stream})
        self.assertEqual(self.read().newest, {}, "no index finds the writers")
        self.sql("CREATE INDEX ON foobar (instance_name, stream_id)")
        newest = {("foo", "first"): 7, ("foo", "second"): 8}
        self.assertEqual(self.read().newest, newest)
        self.reader = TokenReader({"foo": stream}, ["first", "third"])
        self.assertEqual(self.read().newest, {("foo", "first"): 7})

    def test_missing_table(self) -> None:
        """The tables that exist are looked up until a read succeeds, then once."""
        tables = (*FOOBAR.tables, IdColumn("missing", "stream_id", "instance_name"))
        self.reader = TokenReader({"foo": attrs.evolve(FOOBAR, tables=tables)})
        self.sql("ALTER TABLE stream_positions RENAME TO missing")
        self.assertRaises(psycopg2.Error, self.read)
        self.sql("ALTER TABLE missing RENAME TO stream_positions")
        self.assertEqual(self.read().committed, {("foo", "first"): ([6, 7], 9)})
        self.assertEqual(self.reader.streams["foo"].tables, [FOOBAR.tables[0]])
