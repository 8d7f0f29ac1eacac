"""Tests for planning and reading with a real database, without Spark."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import psycopg2
from psycopg2.extensions import parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.ranges import Wanted
from tests.pipeline.histories import (
    ORDERS,
    extract_dsn,
    history_dsn,
    plan,
    read,
    rows_of,
)
from tests.storage.synapse_extract import ON_THE_WIRE
from tests.support.big_database import SHARES


class RowsTests(SynchronousTestCase):
    """Tests for the rows that are read."""

    def test_as_on_the_wire(self) -> None:
        """
        The rows of each stream are those that its writers sent, in the same order.
        """
        found: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        rows = rows_of(extract_dsn(), plan(extract_dsn()))
        for row in sorted(
            rows, key=lambda r: (r["stream"], r["stream_id"], r["row_index"])
        ):
            key = row["stream"], row["instance_name"]
            found.setdefault(key, []).append((row["stream_id"], json.loads(row["row"])))
        for key, expected in ON_THE_WIRE.items():
            if key[0] not in ("account_data", "caches"):
                self.assertEqual(found[key], expected, key)

    def test_account_data_once(self) -> None:
        """Rows of account data without a writer are read once, not once per writer."""
        found = read(extract_dsn(), streams="account_data")
        self.assertEqual([token for _, _, token, _ in found], [2, 3, 4])
        # The writers of the extract are unknown; the history has a sole writer.
        self.assertEqual({writer for _, writer, _, _ in found}, {""})
        dsn = history_dsn()
        writers = {writer for _, writer, _, _ in read(dsn, streams="account_data")}
        self.assertEqual(writers, {"master"})

    def test_row_index(self) -> None:
        """The rows of one token are numbered from 0, across tables."""
        found = read(extract_dsn(), streams="events", writers="p1")
        indexes = [index for _, _, token, index in found if token == 3]
        self.assertEqual(indexes, [0, 1, 2])

    def test_any_partitions_make_the_whole(self) -> None:
        """
        For any number of partitions, each row is read once. Negative ids become
        positive tokens.
        """
        for dsn in (extract_dsn(), history_dsn()):
            streams = ",".join(s.stream.name for task in plan(dsn) for s in task)
            whole = read(dsn, numPartitions="1", streams=streams)
            self.assertEqual(len(whole), len(set(whole)))
            self.assertTrue(all(token > 0 for _, _, token, _ in whole))
            for count in ("2", "7", "40"):
                self.assertEqual(
                    read(dsn, numPartitions=count, streams=streams), whole, count
                )

    def test_number_of_partitions(self) -> None:
        """There are as many tasks as requested, and ranges without rows are removed."""
        self.assertEqual(len(plan(history_dsn(), numPartitions="8")), 8)
        self.assertEqual(len(plan(history_dsn())), 1)
        tokens = '{"receipts": 4000}'
        (task,) = plan(
            history_dsn(), streams="receipts", startingToken=tokens, endingToken="4500"
        )
        (part,) = task
        self.assertEqual((part.low, part.high), (4000, 4500))

    def test_history_is_whole(self) -> None:
        """All rows of the history are read. The history skips one id in a thousand."""
        found = read(history_dsn())
        for stream, share in SHARES.items():
            count = sum(1 for row in found if row[0] == stream and row[3] == 0)
            ids = int(20_000 * share)
            self.assertEqual(count, ids - (ids + 1) // 1000, stream)

    def test_written_ts(self) -> None:
        """
        ``written_ts`` is in UTC, and null if the table does not record the time of
        writing.
        """
        rows = list(rows_of(history_dsn(), plan(history_dsn(), streams="caches")))
        self.assertEqual(rows[0]["written_ts"].isoformat(), "2026-10-10T00:21:36+00:00")
        rows = list(rows_of(history_dsn(), plan(history_dsn(), streams="to_device")))
        self.assertEqual({row["written_ts"] for row in rows}, {None})

    def test_wanted(self) -> None:
        """Conditions that are pushed down select exactly the matching rows."""
        everything = read(history_dsn())
        wanted = Wanted(
            streams=frozenset({"events", "receipts"}),
            writers=frozenset({"writer2"}),
            low=100,
            high=3000,
        )
        expected = [
            row
            for row in everything
            if row[0] in ("events", "receipts")
            and row[1] == "writer2"
            and 100 < row[2] <= 3000
        ]
        self.assertTrue(expected)
        self.assertEqual(read(history_dsn(), wanted), expected)
        self.assertEqual(plan(history_dsn(), Wanted(streams=frozenset())), [])


class DeclaredTests(SynchronousTestCase):
    """Tests for a declared stream."""

    def read(self, **options: str) -> list[tuple[str, int, Any]]:
        """Return ``(writer, token, row)`` of the orders, sorted."""
        settings = PipelineSettings(parse_dsn(extract_dsn()), declared=(ORDERS,))
        given = {**reader_options(settings), "streams": "orders", **options}
        tasks = Planner(SourceOptions.parse(given), continuous=False).batch().tasks
        return sorted(
            (row["instance_name"], row["stream_id"], json.loads(row["row"]))
            for row in rows_of(extract_dsn(), tasks)
        )

    def test_read(self) -> None:
        """
        A declared stream is read like a standard one, including rows of removed
        writers.
        """
        self.assertEqual(
            self.read(),
            [
                ("a", 1, ["pen", "2026-01-02T03:04:05+00:00"]),
                ("b", 2, ['ink, "black"', None]),
                ("gone", 3, ["two\nlines", None]),
            ],
        )

    def test_odd_name(self) -> None:
        """A special character in a writer's name is not interpreted as SQL."""
        self.assertEqual(self.read(writers="' OR TRUE --"), [])
        with (
            closing(psycopg2.connect(extract_dsn())) as connection,
            connection,
            connection.cursor() as txn,
        ):
            for name in ("o'ne\\il", "a"):
                txn.execute("UPDATE orders SET writer = %s WHERE id = -1", (name,))
                connection.commit()
                self.assertEqual(len(self.read(writers=name)), 1)


class ErrorTests(SynchronousTestCase):
    """Tests for errors of planning and reading."""

    def refuse(self, *parts: str, **options: str) -> None:
        """Check that planning fails with a message that contains these parts."""
        dsn = options.pop("dsn", None) or history_dsn()
        given = SourceOptions.parse({"dsn": dsn, **options})
        error = self.assertRaises(PipelineError, Planner(given, continuous=False).batch)
        for part in parts:
            self.assertIn(part, str(error))
        self.assertLess(len(str(error)), 500)

    def test_unreachable(self) -> None:
        """
        The error for an unreachable database names the database, without its password.
        """
        self.refuse(
            "host=127.0.0.1 port=1 dbname=x",
            "cannot be reached",
            "is it running",
            dsn="host=127.0.0.1 port=1 dbname=x password=hush",
        )

    def test_no_such_table(self) -> None:
        """
        If a stream has no table in the database, the error names the stream and the
        table.
        """
        self.refuse("stream presence", "presence_stream", streams="presence")

    def test_token_of_the_future(self) -> None:
        """The error for a token beyond the sequence names the token and the last id."""
        for option in ("startingToken", "endingToken"):
            self.refuse(option, "events", "9999999", "8000", **{option: "9999999"})
        self.refuse(
            "startingToken", "receipts", "6000", startingToken='{"receipts": 6000}'
        )

    def test_token_of_another_stream(self) -> None:
        """A token for a stream that is not read is an error."""
        self.refuse(
            "endingToken: stream caches is not read",
            streams="events",
            endingToken='{"caches": 1}',
        )

    def test_read_only(self) -> None:
        """The connection is read-only."""
        conninfo = SourceOptions.parse({"dsn": history_dsn()}).conninfo

        def write() -> None:
            with read_transaction(conninfo) as txn:
                txn.execute("DELETE FROM events")

        error = self.assertRaises(PipelineError, write)
        self.assertIn("read-only transaction", str(error))

    def test_time_limit(self) -> None:
        """A statement that exceeds the time limit is cancelled with an error."""
        conninfo = SourceOptions.parse({"dsn": history_dsn()}).conninfo

        def sleep() -> None:
            with read_transaction(conninfo, 0.05) as txn:
                txn.execute("SELECT pg_sleep(60)")

        error = self.assertRaises(PipelineError, sleep)
        self.assertIn("statement timeout", str(error))
