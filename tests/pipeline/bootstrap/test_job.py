"""Tests for :mod:`synapse_replication.pipeline.bootstrap` and its parts."""

from __future__ import annotations

import contextlib
import functools
import json
from typing import Any

import psycopg2
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.deployment import bootstrap_command
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.bootstrap import (
    Bootstrap,
    read_bootstrap,
    write_bootstrap,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres

TABLES = """
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL);
CREATE UNIQUE INDEX stream_positions_idx
    ON stream_positions (stream_name, instance_name);
CREATE TABLE events (stream_ordering bigint UNIQUE, instance_name text);
CREATE TABLE current_state_delta_stream (stream_id bigint, instance_name text);
CREATE INDEX ON current_state_delta_stream (stream_id);
CREATE SEQUENCE events_stream_seq;
CREATE SEQUENCE events_backfill_stream_seq;
CREATE TABLE presence_stream (stream_id bigint, instance_name text);
CREATE SEQUENCE presence_stream_sequence;
CREATE TABLE receipts_linearized (stream_id bigint, instance_name text);
CREATE INDEX ON receipts_linearized (stream_id);
CREATE SEQUENCE receipts_sequence;
CREATE TABLE account_data (stream_id bigint, instance_name text);
CREATE TABLE room_account_data (stream_id bigint, instance_name text);
CREATE SEQUENCE account_data_sequence;
CREATE TABLE orders (id bigint PRIMARY KEY, writer text);
CREATE SEQUENCE orders_seq;
INSERT INTO events
    SELECT id, CASE WHEN id % 10 = 0 THEN 'persister2' ELSE 'persister1' END
    FROM generate_series(2, 500) AS id;
INSERT INTO current_state_delta_stream VALUES (505, 'persister2');
INSERT INTO events SELECT -id, 'persister1' FROM generate_series(2, 40) AS id;
INSERT INTO events VALUES (503, NULL), (-45, 'gone1');
INSERT INTO presence_stream VALUES (7, 'presence1'), (9, 'presence1');
INSERT INTO account_data VALUES (11, NULL), (13, NULL);
INSERT INTO room_account_data VALUES (12, NULL);
INSERT INTO orders VALUES (3, 'shop1');
SELECT setval('events_stream_seq', 510), setval('events_backfill_stream_seq', 45),
    setval('presence_stream_sequence', 9), setval('account_data_sequence', 13),
    setval('orders_seq', 3);
"""

WRITERS = {
    "events": ("persister1", "persister2"),
    "backfill": ("persister1", "persister2"),
    "presence": ("presence1", "presence2"),
    "receipts": ("master",),
    "account_data": ("master",),
    "caches": (),
    "orders": ("shop1",),
}

ORDERS = TableStream(
    name="orders",
    table="orders",
    id_column="id",
    writer_column="writer",
    sequence="orders_seq",
    positions_name="orders_stream",
    columns=["id"],
    writers=["shop1"],
)

#: The expected changes for the database above, if no positions are stored.
EXPECTED = {
    ("account_data", "master"): (None, 13),
    ("backfill", "persister1"): (None, -40),
    # This writer has no rows, and no transaction is in progress.
    ("backfill", "persister2"): (None, -45),
    ("events", "persister1"): (None, 499),
    ("events", "persister2"): (None, 505),
    ("orders", "shop1"): (None, 3),
    ("presence", "presence1"): (None, 9),
    ("presence", "presence2"): (None, 9),
}


def to_write(found: Bootstrap) -> dict[tuple[str, str], tuple[int | None, int | None]]:
    return {
        (change.stream, change.instance_name): (change.old, change.new)
        for change in found.changes
        if change.is_written
    }


class BootstrapTests(SynchronousTestCase):
    """Tests for the job on a real database."""

    def setUp(self) -> None:
        self.dsn = shared_postgres().new_database()
        self.sql(TABLES)
        self.settings = PipelineSettings(
            PipelineSettings.of_dsn(self.dsn).conninfo, WRITERS, (ORDERS,)
        )

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def stored(self) -> set[tuple[Any, ...]]:
        return set(self.sql("SELECT * FROM stream_positions"))

    def read(self) -> Bootstrap:
        """Compute the positions."""
        return read_bootstrap(self.settings)

    def test_from_nothing(self) -> None:
        """Reading plans each writer's last row as its position, and writes nothing.

        Positions are stored under the names and with the signs of stream_positions.
        Writing them again changes nothing.
        """
        found = self.read()
        self.assertEqual(to_write(found), EXPECTED)
        self.assertEqual(found.without_writer, {"events": 503})
        self.assertEqual(self.stored(), set())
        write_bootstrap(self.settings, found)
        stored = {
            ("account_data", "master", 13),
            ("backfill", "persister1", -40),
            ("backfill", "persister2", -45),
            ("events", "persister1", 499),
            ("events", "persister2", 505),
            ("orders_stream", "shop1", 3),
            ("presence_stream", "presence1", 9),
            ("presence_stream", "presence2", 9),
        }
        self.assertEqual(self.stored(), stored)
        self.assertEqual(to_write(self.read()), {})

    def test_never_rewinds(self) -> None:
        """A stale position is advanced; a position beyond all rows is unchanged."""
        self.sql(
            "INSERT INTO stream_positions VALUES ('events', 'persister1', 509), "
            "('events', 'persister2', 20), ('backfill', 'persister1', -44), "
            "('backfill', 'persister2', -3), ('backfill', 'gone1', -1)"
        )
        found = self.read()
        changes = {
            key: value
            for key, value in to_write(found).items()
            if key[0] in ("events", "backfill")
        }
        self.assertEqual(
            changes,
            {
                ("events", "persister2"): (20, 505),
                ("backfill", "persister2"): (-3, -45),
            },
        )
        write_bootstrap(self.settings, found)
        self.assertLessEqual(
            {
                ("events", "persister1", 509),
                ("events", "persister2", 505),
                ("backfill", "persister1", -44),
                ("backfill", "persister2", -45),
                ("backfill", "gone1", -1),
            },
            self.stored(),
        )

    def test_table_missing(self) -> None:
        """If stream_positions is missing, it is created in the same transaction."""
        self.sql("DROP TABLE stream_positions")
        found = self.read()
        self.assertEqual(to_write(found), EXPECTED)
        write_bootstrap(self.settings, found)
        self.assertEqual(len(self.stored()), len(EXPECTED))

    def test_sequence_behind(self) -> None:
        """
        A sequence behind its table is an error, which has the sequence's name and both
        values.
        """
        self.sql("SELECT setval('events_backfill_stream_seq', 44)")
        error = self.assertRaises(PipelineError, self.read)
        self.assertIn(
            "sequence events_backfill_stream_seq of backfill is at 44, but table "
            "events has the id -45",
            str(error),
        )

    def test_transaction_in_flight(self) -> None:
        """An uncommitted row or id is detected, and no result is returned."""
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("INSERT INTO receipts_linearized VALUES (2, 'master')")
            error = self.assertRaises(PipelineError, self.read)
            connection.rollback()
            cursor.execute("SELECT nextval('presence_stream_sequence')")
            begun = self.assertRaises(PipelineError, self.read)
        self.assertIn("is writing to receipts_linearized", str(error))
        self.assertIn("is writing to presence_stream_sequence", str(begun))

    def test_writer_took_an_id(self) -> None:
        """If a writer has allocated an id since the read, nothing is written."""
        found = self.read()
        self.sql("SELECT nextval('presence_stream_sequence')")
        error = self.assertRaises(PipelineError, write_bootstrap, self.settings, found)
        self.assertIn(
            "writers are running: "
            "sequence presence_stream_sequence changed from 9 to 10",
            str(error),
        )
        self.assertEqual(self.stored(), set())

    def test_position_moved(self) -> None:
        """If a position has changed since the read, nothing is written."""
        found = self.read()
        self.sql("INSERT INTO stream_positions VALUES ('events', 'persister1', 500)")
        error = self.assertRaises(PipelineError, write_bootstrap, self.settings, found)
        self.assertIn("positions of events changed", str(error))
        self.assertEqual(len(self.stored()), 1)

    def test_no_homeserver(self) -> None:
        """A database without any known table is rejected."""
        settings = PipelineSettings.of_dsn(shared_postgres().new_database())
        error = self.assertRaises(PipelineError, read_bootstrap, settings)
        self.assertIn("no table of a homeserver", str(error))

    def test_command(self) -> None:
        """
        The command writes only with ``--write``, and derives the writers from the rows.
        """
        run = functools.partial(CliRunner().invoke, catch_exceptions=False)
        shown = run(bootstrap_command, ["--dsn", self.dsn])
        self.assertEqual(shown.exit_code, 0)
        self.assertIn("nothing was written; --write writes 5 positions", shown.output)
        self.assertIn("events: rows up to 503 have no writer", shown.output)
        self.assertIn("Without -c, the declared writers are unknown", shown.output)
        self.assertEqual(self.stored(), set())
        done = run(bootstrap_command, ["--dsn", self.dsn, "--write", "--json"])
        output = json.loads(done.stdout)
        self.assertTrue(output["written"])
        self.assertIn(
            {
                "stream": "presence",
                "stored_as": "presence_stream",
                "writer": "presence1",
                "old": None,
                "new": 9,
                "change": "new",
            },
            output["positions"],
        )
        self.assertIn(("backfill", "gone1", -45), self.stored())
