"""A small database whose rows are archived in tests: two streams, three writers."""

from __future__ import annotations

import secrets
from contextlib import closing

import psycopg2
from psycopg2.extensions import parse_dsn

from synapse_replication.testing.servers import shared_postgres

#: Identifies a row: stream, writer, token.
Key = tuple[str, str, int]

_TABLES = """
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL,
    UNIQUE (stream_name, instance_name));
CREATE TABLE receipts_linearized (
    stream_id bigint PRIMARY KEY, room_id text NOT NULL, receipt_type text NOT NULL,
    user_id text NOT NULL, event_id text NOT NULL, data text NOT NULL,
    instance_name text, thread_id text);
CREATE INDEX ON receipts_linearized (instance_name, stream_id);
CREATE SEQUENCE receipts_sequence;
CREATE TABLE cache_invalidation_stream_by_instance (
    stream_id bigint PRIMARY KEY, instance_name text NOT NULL,
    cache_func text NOT NULL, keys text[], invalidation_ts bigint);
CREATE INDEX ON cache_invalidation_stream_by_instance (instance_name, stream_id);
CREATE SEQUENCE cache_invalidation_stream_seq;
INSERT INTO stream_positions VALUES
    ('receipts', 'w1', 0), ('receipts', 'w2', 0), ('receipts', 'slow', 0);
"""

# Writer "slow" has every tenth row, and its position is stored only on request.
_RECEIPTS = """
INSERT INTO receipts_linearized
SELECT nextval('receipts_sequence'), '!room' || n % 7, 'm.read', '@user' || n % 50,
       '$event' || n, '{{"ts": ' || n || '}}',
       CASE WHEN n % 10 = 0 THEN 'slow' WHEN n % 2 = 0 THEN 'w1' ELSE 'w2' END, NULL
FROM generate_series(1, {count}) AS n;
UPDATE stream_positions SET stream_id = (
    SELECT coalesce(max(stream_id), 0) FROM receipts_linearized AS r
    WHERE r.instance_name = stream_positions.instance_name)
WHERE stream_name = 'receipts' AND ({with_slow} OR instance_name <> 'slow')
"""

# 2026-01-01 and the two days after it.
_CACHES = """
INSERT INTO cache_invalidation_stream_by_instance
SELECT nextval('cache_invalidation_stream_seq'), 'w' || 1 + n % 2, 'get_user',
ARRAY['u'],
       1767225600000 + 86400000 * (n % 3)::bigint
FROM generate_series(1, {count}) AS n
"""

_KEYS = """
SELECT 'receipts', instance_name, stream_id FROM receipts_linearized
UNION ALL
SELECT 'caches', instance_name, stream_id FROM cache_invalidation_stream_by_instance
"""


def make_tables(dsn: str) -> None:
    """Create the tables, empty."""
    with closing(psycopg2.connect(dsn)) as connection, connection:
        connection.cursor().execute(_TABLES)


def copy_database(dsn: str) -> str:
    """Copy a database of the shared server; return the DSN of the copy.

    Nothing may be connected to the database.
    """
    name, copy = parse_dsn(dsn)["dbname"], f"copy_{secrets.token_hex(6)}"
    server = shared_postgres()
    with closing(psycopg2.connect(server.dsn())) as connection:
        connection.autocommit = True
        connection.cursor().execute(f'CREATE DATABASE "{copy}" TEMPLATE "{name}"')
    return server.dsn(copy)


def add_rows(dsn: str, count: int, *, with_slow: bool = True) -> None:
    """Write ``count`` rows of each stream, and the positions of their writers.

    :param with_slow: also store the position of the slow writer: without it, its rows
        exist but do not count as complete.
    """
    with closing(psycopg2.connect(dsn)) as connection, connection:
        cursor = connection.cursor()
        cursor.execute(_RECEIPTS.format(count=count, with_slow=with_slow))
        cursor.execute(_CACHES.format(count=count))


def read_keys(dsn: str) -> list[Key]:
    """Return all rows of both tables, in order."""
    with closing(psycopg2.connect(dsn)) as connection, connection:
        cursor = connection.cursor()
        cursor.execute(_KEYS)
        return sorted(cursor.fetchall())
