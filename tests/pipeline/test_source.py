"""Tests for :mod:`synapse_replication.pipeline.source`, with a real database."""

from __future__ import annotations

import functools
import json
from typing import Any

import psycopg2
from pyspark.sql import DataFrame
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.spark import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE, ROWS, SCHEMA


@functools.cache
def extract_dsn() -> str:
    """Make a database with the extract, once for all tests."""
    dsn = shared_postgres().new_database()
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


class BatchTests(SynchronousTestCase):
    """Tests for reading what is there now."""

    def test_schema(self) -> None:
        """The columns are those of the rows' schema."""
        self.assertEqual(read(extract_dsn()).schema, ROWS_SCHEMA)

    def test_rows_are_as_on_the_wire(self) -> None:
        """All streams give the rows that their writers sent, in their order."""
        found = by_writer(read(extract_dsn()))
        for key, rows in ON_THE_WIRE.items():
            if key[0] == "account_data":
                continue
            self.assertEqual(found.get(key), rows, key)
