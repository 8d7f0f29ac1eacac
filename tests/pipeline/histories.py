"""Databases shared by tests of the source, and helpers that read them without Spark."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import psycopg2

from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.ranges import EVERYTHING, Part, Wanted
from synapse_replication.pipeline.source.reading import read_parts
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres
from tests.storage.synapse_extract import ROWS, SCHEMA
from tests.support.big_database import fill_database

_ORDERS = """
CREATE TABLE orders (id bigint NOT NULL, writer text NOT NULL, item text, at
timestamptz); CREATE INDEX orders_idx ON orders (writer, id); CREATE SEQUENCE
orders_seq; SELECT setval('orders_seq', 10); INSERT INTO orders VALUES (-1, 'a', 'pen',
'2026-01-02T03:04:05Z'),
    (-2, 'b', 'ink, "black"', NULL), (-3, 'gone', E'two\nlines', NULL);
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL);
INSERT INTO stream_positions VALUES ('orders', 'a', -3), ('orders', 'b', -3);
"""


@functools.cache
def extract_dsn() -> str:
    """Create a database with the extract and a custom table, once for all tests."""
    dsn = shared_postgres().new_database()
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        for statements in (SCHEMA, ROWS, _ORDERS):
            cursor.execute(statements)
    connection.close()
    return dsn


@functools.cache
def history_dsn() -> str:
    """Create a database with a generated history, once for all tests."""
    dsn = shared_postgres().new_database()
    fill_database(dsn, 20_000)
    return dsn


ORDERS = TableStream(
    name="orders",
    table="orders",
    id_column="id",
    writer_column="writer",
    columns=["item", "at"],
    sequence="orders_seq",
    writers=["a", "b"],
    negative=True,
)


def plan(
    dsn: str, wanted: Wanted = EVERYTHING, **options: str
) -> list[tuple[Part, ...]]:
    """Return the planned tasks of a batch read."""
    given = SourceOptions.parse({"dsn": dsn, **options})
    return Planner(given, continuous=False).batch(wanted).tasks


def rows_of(dsn: str, tasks: list[tuple[Part, ...]]) -> Iterator[dict[str, Any]]:
    """Return the rows of the given tasks."""
    conninfo = SourceOptions.parse({"dsn": dsn}).conninfo
    for task in tasks:
        for batch in read_parts(conninfo, task):
            yield from batch.to_pylist()


def read(
    dsn: str, wanted: Wanted = EVERYTHING, **options: str
) -> list[tuple[Any, ...]]:
    """
    Read a database; return ``(stream, writer, token, row index)`` of each row, sorted.
    """
    conninfo = SourceOptions.parse({"dsn": dsn}).conninfo
    names = ("stream", "instance_name", "stream_id", "row_index")
    found: list[tuple[Any, ...]] = []
    for task in plan(dsn, wanted, **options):
        for batch in read_parts(conninfo, task):
            columns = (batch.column(name).to_pylist() for name in names)
            found += zip(*columns, strict=True)
    return sorted(found)
