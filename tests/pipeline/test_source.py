"""Tests for :mod:`synapse_replication.pipeline.source` and ``jdbc``, in Spark.

What is read, and in which parts, is tested without Spark in ``test_planning``.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import psycopg2
from pyspark.sql import DataFrame
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.failures import short_failures
from synapse_replication.pipeline.jdbc import (
    DEBIAN_JAR,
    JAR_VARIABLE,
    find_driver_jar,
    has_driver,
    jdbc_url,
    read_backfill,
    read_by_jdbc,
)
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.settings import settings_of_dsn
from synapse_replication.testing.servers import PrivatePostgres
from tests.pipeline.spark import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE, ROWS, SCHEMA


@functools.cache
def server() -> PrivatePostgres:
    """Start a server that is reached by TCP: Java knows no Unix sockets."""
    postgres = PrivatePostgres(tcp=True)
    postgres.start()
    return postgres


@functools.cache
def extract_dsn() -> str:
    """Make a database with the extract, once for all tests."""
    server().new_database("extract")
    dsn = server().dsn("extract", tcp=True)
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(SCHEMA)
        cursor.execute(ROWS)
        cursor.execute("CREATE SEQUENCE cache_invalidation_stream_seq")
        cursor.execute("SELECT setval('cache_invalidation_stream_seq', 5)")
    connection.close()
    return dsn


def read(dsn: str, **options: str) -> DataFrame:
    """Read a database by the data source."""
    source = shared_session().read.format("synapse_replication")
    return source.options(dsn=dsn, **options).load()


def by_writer(frame: DataFrame) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    """Give rows as tests of the wire write them."""
    found: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for row in frame.orderBy("stream", "stream_id", "row_index").collect():
        key = row.stream, row.instance_name
        found.setdefault(key, []).append((row.stream_id, json.loads(row.row)))
    return found


class SourceTests(SynchronousTestCase):
    """Tests for the data source as people use it."""

    def test_rows_are_as_on_the_wire(self) -> None:
        """All streams give the rows that their writers sent, in their order."""
        frame = read(extract_dsn())
        self.assertEqual(frame.schema, ROWS_SCHEMA)
        found = by_writer(frame)
        for key, rows in ON_THE_WIRE.items():
            if key[0] != "account_data":
                self.assertEqual(found.get(key), rows, key)

    def test_conditions_are_pushed_down(self) -> None:
        """Spark checks only what the source cannot; no plan shows the password."""
        frame = read(extract_dsn(), filterPushdown="true").where(
            "stream = 'events' AND instance_name IN ('p1', 'x') AND stream_id >= 5 "
            "AND stream_id < 8 AND row_index = 0"
        )
        self.assertEqual(sorted(row.stream_id for row in frame.collect()), [5, 6, 7])
        plan = frame._jdf.queryExecution().toString()
        (physical,) = plan.split("== Physical Plan ==")[1:]
        self.assertIn("row_index", physical.split("Filter")[1])
        self.assertNotIn("stream_id", physical.split("Filter")[1].split("\n")[0])
        self.assertNotIn(server().password, plan)
        self.assertNotIn(server().password, str(frame))

    def test_a_frame_serves_many_queries(self) -> None:
        """What one query asks for limits no other query of the same frame."""
        frame = read(extract_dsn())
        everything = frame.count()
        caches = frame.where("stream = 'caches'")
        events = frame.where("stream = 'events'")
        counts = caches.count(), events.count()
        self.assertEqual(frame.count(), everything)
        self.assertEqual(caches.union(events).count(), sum(counts))

    def test_nothing_to_read(self) -> None:
        """A query for nothing gives nothing."""
        self.assertEqual(read(extract_dsn()).where("stream = 'none'").collect(), [])

    def test_failure_is_short(self) -> None:
        """What is wrong comes out of Spark as one sentence, without the password."""

        def fail() -> None:
            with short_failures():
                read("host=127.0.0.1 port=1 dbname=x password=hush").collect()

        error = self.assertRaises(PipelineError, fail)
        self.assertIn("host=127.0.0.1 port=1 dbname=x", str(error))
        self.assertLess(len(str(error)), 400)
        self.assertNotIn("hush", str(error))


class JdbcTests(SynchronousTestCase):
    """Tests for Spark's own reader."""

    def test_same_rows(self) -> None:
        """JDBC gives the same rows as the source, with the same types."""
        if not has_driver(shared_session()):
            # Only who has the jar can test it: scripts/test does not install it.
            raise SkipTest("PostgreSQL's JDBC driver is not installed")
        settings = settings_of_dsn(extract_dsn())
        frame = read_by_jdbc(
            shared_session(), settings, streams="events,receipts,caches"
        )
        self.assertEqual(frame.schema, ROWS_SCHEMA)
        source = read(extract_dsn(), streams="events,receipts,caches")
        self.assertEqual(sorted(frame.collect()), sorted(source.collect()))
        self.assertNotIn(server().password, frame._jdf.queryExecution().toString())

    def test_without(self) -> None:
        """Where JDBC cannot be had, the source reads; by a Unix socket, for instance."""
        dsn = server().dsn("extract")
        extract_dsn()
        frame = read_backfill(shared_session(), settings_of_dsn(dsn), streams="pushers")
        self.assertIn("BatchScan", frame._jdf.queryExecution().toString())
        self.assertEqual(frame.count(), 2)

    def test_url(self) -> None:
        """Addresses of IPv6 and odd names of databases reach Java as they are."""
        self.assertEqual(
            jdbc_url("::1", 5432, "a b/c?user=x"),
            "jdbc:postgresql://[::1]:5432/a%20b%2Fc%3Fuser%3Dx",
        )

    def test_find_jar(self) -> None:
        """The driver is found where Debian puts it, or where one says."""
        self.patch(os, "environ", {JAR_VARIABLE: "/nonexistent.jar"})
        self.assertIsNone(find_driver_jar())
        self.patch(os, "environ", {JAR_VARIABLE: __file__})
        self.assertEqual(str(find_driver_jar()), __file__)
        self.patch(os, "environ", {})
        self.assertIn(find_driver_jar(), (None, DEBIAN_JAR))
