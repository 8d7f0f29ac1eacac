"""Tests for :mod:`synapse_replication.pipeline.source.jdbc`, in Spark."""

from __future__ import annotations

import json
import os

import attrs
import psycopg2.extensions
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.settings import settings_of_dsn
from synapse_replication.pipeline.source.jdbc import (
    DEBIAN_JAR,
    JAR_VARIABLE,
    find_driver_jar,
    has_driver,
    jdbc_url,
    latest_token,
    read_backfill,
    read_by_jdbc,
)
from tests.pipeline.extracts import extract_dsn, read, server
from tests.pipeline.shared_session import shared_session


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

    def test_one_part_or_none(self) -> None:
        """What is so little that it is one part is read; nothing is no rows."""
        settings = settings_of_dsn(extract_dsn())
        for options, count in (({}, 2), ({"endingToken": "0"}, 0)):
            frame = read_backfill(
                shared_session(), settings, streams="pushers", **options
            )
            self.assertEqual(frame.schema.names, ROWS_SCHEMA.names)
            self.assertEqual(frame.count(), count)

    def test_not_understood(self) -> None:
        """What Java's driver would not understand is left to the source, too."""
        port = psycopg2.extensions.parse_dsn(extract_dsn())["port"]
        settings = settings_of_dsn(extract_dsn())
        for odd in (
            {"target_session_attrs": "any"},
            {"host": "127.0.0.1,127.0.0.1", "port": f"{port},{port}"},
        ):
            frame = read_backfill(
                shared_session(),
                attrs.evolve(settings, conninfo={**settings.conninfo, **odd}),
                streams="pushers",
            )
            self.assertIn("BatchScan", frame._jdf.queryExecution().toString())
            self.assertEqual(frame.count(), 2)

    def test_latest_token(self) -> None:
        """Where nothing tells what is complete for good, no token is given."""
        settings = settings_of_dsn(extract_dsn())
        self.assertEqual(
            json.loads(latest_token(settings, streams="caches")),
            {"caches": {"minimum": 5, "writers": {}}},
        )
        with self.assertRaisesRegex(PipelineError, "nothing in stream_positions"):
            latest_token(settings, streams="pushers")

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
