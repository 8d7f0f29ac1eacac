"""Tests for synapse_replication.storage.schema."""

from __future__ import annotations

from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage import schema
from synapse_replication.storage.schema import DELTAS, prepare_database
from synapse_replication.storage.transactions import connect
from synapse_replication.testing.servers import shared_postgres
from tests.storage.doubles import SCHEMA


class PrepareDatabaseTests(SynchronousTestCase):
    """Tests for prepare_database, on a real server."""

    def setUp(self) -> None:
        self.connection = connect(shared_postgres().new_database())
        self.cursor = self.connection.cursor()
        self.addCleanup(self.connection.close)

    def indexes(self) -> list[tuple[str]]:
        self.cursor.execute(
            "SELECT indexdef FROM pg_indexes WHERE tablename = 'stream_positions'"
        )
        return self.cursor.fetchall()

    def test_twice(self) -> None:
        """
        The first call creates the table and its index; a second one changes nothing.
        """
        self.assertEqual(prepare_database(self.cursor), len(DELTAS))
        indexes = self.indexes()
        self.assertEqual(len(indexes), 1)
        self.assertIn("UNIQUE", indexes[0][0])
        self.assertEqual(prepare_database(self.cursor), 0)
        self.assertEqual(self.indexes(), indexes)

    def test_existing_table(self) -> None:
        """The existing table of a homeserver, including its rows, is not changed."""
        self.cursor.execute(SCHEMA)
        self.cursor.execute("INSERT INTO stream_positions VALUES ('events', 'a', 5)")
        prepare_database(self.cursor)
        self.cursor.execute("SELECT * FROM stream_positions")
        self.assertEqual(self.cursor.fetchall(), [("events", "a", 5)])

    def test_interrupted(self) -> None:
        """A preparation that was rolled back starts over."""
        prepare_database(self.cursor)
        self.connection.rollback()
        self.assertEqual(prepare_database(self.cursor), len(DELTAS))

    def test_upgrade(self) -> None:
        """The database of release 0.1.0 gets what it lacks; its rows are kept."""
        with patch.object(schema, "DELTAS", DELTAS[:1]):
            self.assertEqual(prepare_database(self.cursor), 1)
        self.cursor.execute("INSERT INTO stream_positions VALUES ('events', 'a', 5)")
        self.assertEqual(prepare_database(self.cursor), len(DELTAS) - 1)
        self.cursor.execute("SELECT * FROM stream_positions")
        self.assertEqual(self.cursor.fetchall(), [("events", "a", 5)])
        self.cursor.execute("SELECT count(*) FROM synapse_replication_writers")
        self.assertEqual(self.cursor.fetchone(), (0,))
        # Release 0.1.0 knows the first delta only, and starts nevertheless.
        with patch.object(schema, "DELTAS", DELTAS[:1]):
            self.assertEqual(prepare_database(self.cursor), 0)
