"""Tests for :mod:`synapse_replication.pipeline.bootstrap`, on a real database.

The whole bootstrap is tested in ``test_job``.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.bootstrap import (
    Bootstrap,
    Change,
    PlannedChange,
    check_no_writers,
    check_sequences,
    open_connection,
    read_farthest,
    read_report,
    stored_ids,
    write_bootstrap,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.storage.consistency import StreamState
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres

_SCHEMA = """
CREATE TABLE orders (id bigint NOT NULL, writer text, item text);
CREATE SEQUENCE orders_seq;
SELECT setval('orders_seq', 260);
INSERT INTO orders SELECT -id, CASE WHEN id % 2 = 0 THEN 'a' ELSE 'b' END
    FROM generate_series(41, 250) AS id;
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL);
INSERT INTO stream_positions VALUES ('orders', 'a', -250);
"""

ORDERS = TableStream(
    name="orders",
    table="orders",
    id_column="id",
    writer_column="writer",
    columns=["item"],
    sequence="orders_seq",
    writers=["a", "b"],
    negative=True,
)


class PositionStoreTests(SynchronousTestCase):
    """Tests with a custom stream that has the ids from -250 to -41."""

    def setUp(self) -> None:
        self.dsn = shared_postgres().new_database()
        self.connection = psycopg2.connect(self.dsn)
        self.addCleanup(self.connection.close)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        self.cursor.execute(_SCHEMA)
        conninfo = PipelineSettings.of_dsn(self.dsn).conninfo
        self.settings = PipelineSettings(conninfo, {"orders": ("a", "b")}, (ORDERS,))

    def states(self) -> Sequence[StreamState]:
        return read_report(self.cursor, self.settings).streams

    def test_history(self) -> None:
        """
        Sequence, positions and writers of a stream are read; streams without tables are
        omitted.
        """
        (state,) = self.states()
        self.assertEqual(state.name, "orders")
        self.assertEqual(state.sequence_value, 260)
        self.assertEqual(stored_ids(state), {"a": -250})
        self.assertEqual(state.stream.writers, ("a", "b"))
        self.cursor.execute("ALTER SEQUENCE orders_seq RESTART")
        (state,) = self.states()
        self.assertEqual(state.sequence_value, 0)

    def test_stored_twice(self) -> None:
        """
        Two positions of one instance in a stream are an error, because either may be
        right.
        """
        self.cursor.execute("INSERT INTO stream_positions VALUES ('orders', 'a', -9)")
        with self.assertRaisesRegex(PipelineError, "has two rows for a of orders"):
            self.states()

    def test_beyond_sequence(self) -> None:
        """
        A position beyond the sequence is an error, also that of an instance that is not
        a writer.
        """
        for writer in ("a", "old"):
            for position in (-260, -261):
                self.cursor.execute(
                    "DELETE FROM stream_positions; "
                    "INSERT INTO stream_positions VALUES ('orders', %s, %s)",
                    (writer, position),
                )
                report = read_report(self.cursor, self.settings)
                if position == -260:
                    check_sequences(report, [])
                    continue
                error = self.assertRaises(PipelineError, check_sequences, report, [])
                self.assertIn(f"orders: {writer}", str(error))
                self.assertIn(
                    "is stored at -261, but sequence orders_seq is at 260", str(error)
                )

    def test_farthest(self) -> None:
        """
        Each writer has its greatest token, whatever the sign of ids; an id of the other
        sign, of a backfilled row for instance, does not count.
        """
        self.cursor.execute("INSERT INTO orders VALUES (900, 'a')")
        states = self.states()
        self.assertEqual(
            sorted(read_farthest(self.cursor, states)),
            [("orders", "orders", "a", 250), ("orders", "orders", "b", 249)],
        )
        (state,) = states
        (column,) = state.stream.tables
        tables = (attrs.evolve(column, writer_column=None),)
        nameless = attrs.evolve(state, stream=attrs.evolve(state.stream, tables=tables))
        self.assertEqual(
            list(read_farthest(self.cursor, [nameless])),
            [("orders", "orders", None, 250)],
        )
        self.cursor.execute("DELETE FROM orders")
        self.assertEqual(list(read_farthest(self.cursor, [state, nameless])), [])

    def test_idle_deployment(self) -> None:
        """
        An idle deployment passes the check; an advanced sequence or position is
        reported.
        """
        before = self.states()
        check_no_writers(self.cursor, before, self.states())
        self.cursor.execute("SELECT nextval('orders_seq')")
        with self.assertRaisesRegex(
            PipelineError, "orders_seq changed from 260 to 261"
        ):
            check_no_writers(self.cursor, before, self.states())
        writers = [attrs.evolve(before[0].writers[0], stored=-251)]
        moved = [attrs.evolve(before[0], writers=writers)]
        with self.assertRaisesRegex(PipelineError, "positions of orders changed"):
            check_no_writers(self.cursor, before, moved)

    def test_open_transactions(self) -> None:
        """
        An open transaction of another session is reported with the table that it writes
        to.
        """
        before = self.states()
        other = psycopg2.connect(self.dsn)
        self.addCleanup(other.close)
        for statement, what in (
            ("INSERT INTO orders VALUES (-251, 'a')", "orders"),
            ("UPDATE stream_positions SET stream_id = -251", "stream_positions"),
            ("SELECT setval('orders_seq', 260)", "orders_seq"),
        ):
            with other.cursor() as cursor:
                cursor.execute(statement)
                check_no_writers(cursor, before, before)
            with self.assertRaisesRegex(PipelineError, rf"is writing to {what}\b"):
                check_no_writers(self.cursor, before, before)
            other.rollback()
        check_no_writers(self.cursor, before, before)

    def test_write(self) -> None:
        """
        New and advancing positions are written; a position that would decrease is an
        error.
        """
        self.cursor.execute(
            "CREATE UNIQUE INDEX ON stream_positions (stream_name, instance_name)"
        )
        before = self.states()
        stored = Change("orders", "orders", "a", -250, -250, PlannedChange.KEPT)
        new = Change("orders", "orders", "b", None, -249, PlannedChange.NEW)
        write_bootstrap(self.settings, Bootstrap(before, [stored, new], {}))
        (state,) = self.states()
        self.assertEqual(stored_ids(state), {"a": -250, "b": -249})
        back = Change("orders", "orders", "a", -250, -249, PlannedChange.FORWARD)
        found = Bootstrap(self.states(), [back], {})
        with self.assertRaisesRegex(PipelineError, "of a in orders has advanced"):
            write_bootstrap(self.settings, found)

    def test_connected(self) -> None:
        """
        A read-only connection rejects writes; the error contains the database's
        message.
        """
        with (
            self.assertRaisesRegex(PipelineError, "failed: .*read-only"),
            open_connection(self.settings.conninfo, readonly=True) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("DELETE FROM orders")
        with (
            self.assertRaisesRegex(PipelineError, "cannot be reached"),
            open_connection(
                {**self.settings.conninfo, "dbname": "none"}, readonly=True
            ),
        ):
            pass
