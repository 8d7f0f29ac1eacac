"""
A database with rows of all streams on a TCP port, and helpers that read it in Spark.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import psycopg2
from pyspark.sql import DataFrame

from synapse_replication.testing.servers import PrivatePostgres
from tests.pipeline.shared_session import shared_session
from tests.storage.synapse_extract import ROWS, SCHEMA


@functools.cache
def server() -> PrivatePostgres:
    """Start a PostgreSQL server on TCP, because JDBC does not support Unix sockets."""
    postgres = PrivatePostgres(tcp=True)
    postgres.start()
    return postgres


@functools.cache
def extract_dsn() -> str:
    """
    Create the database with the extract, once for all tests; return its connection
    string.
    """
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
    """Read a database through the Spark data source."""
    source = shared_session().read.format("synapse_replication")
    return source.options(dsn=dsn, **options).load()


def by_writer(frame: DataFrame) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    """Return the rows of each ``(stream, writer)``, in the form of ``ON_THE_WIRE``."""
    found: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for row in frame.orderBy("stream", "stream_id", "row_index").collect():
        key = row.stream, row.instance_name
        found.setdefault(key, []).append((row.stream_id, json.loads(row.row)))
    return found
