"""The tables that the benchmarks of positions and of catch-up work on.

Both sides use this module, which needs only the PostgreSQL driver.
"""

from __future__ import annotations

import contextlib

import psycopg2

_GENERATOR_TABLES = """
    CREATE TABLE stream_positions (
        stream_name TEXT NOT NULL,
        instance_name TEXT NOT NULL,
        stream_id BIGINT NOT NULL
    );
    CREATE UNIQUE INDEX stream_positions_idx
        ON stream_positions (stream_name, instance_name);
    CREATE TABLE events (
        stream_ordering BIGINT UNIQUE, event_id TEXT UNIQUE, room_id TEXT, type TEXT,
        outlier BOOLEAN, instance_name TEXT
    );
    CREATE SEQUENCE events_stream_seq;
    CREATE TABLE background_updates (update_name TEXT);
"""

#: Further tables that the query for the rows of ``events`` joins.
_EVENT_TABLES = """
    CREATE TABLE state_events (event_id TEXT UNIQUE, state_key TEXT);
    CREATE TABLE redactions (event_id TEXT UNIQUE, redacts TEXT);
    CREATE TABLE event_relations (event_id TEXT UNIQUE, relates_to_id TEXT);
    CREATE TABLE room_memberships (event_id TEXT UNIQUE, membership TEXT);
    CREATE TABLE rejections (event_id TEXT UNIQUE, reason TEXT);
    CREATE TABLE ex_outlier_stream (
        event_stream_ordering BIGINT PRIMARY KEY, event_id TEXT, state_group BIGINT,
        instance_name TEXT
    );
    CREATE TABLE current_state_delta_stream (
        stream_id BIGINT, room_id TEXT, type TEXT, state_key TEXT, event_id TEXT,
        instance_name TEXT
    );
    CREATE INDEX ON current_state_delta_stream (stream_id);
"""

_FILL = """
    INSERT INTO events (
        stream_ordering, event_id, room_id, type, outlier, instance_name
    )
    SELECT n, '$' || lpad(n::text, 43, '0'), '!abcdefghijklmnopqr:bench.example',
        'm.room.message', FALSE, 'writer1'
    FROM generate_series(1, %(rows)s) AS n;
    SELECT setval('events_stream_seq', %(rows)s);
    INSERT INTO stream_positions VALUES ('events', 'writer1', %(rows)s);
"""

#: Rows of the further tables, for a share of the events.
_VARIED = """
    INSERT INTO state_events SELECT event_id, '' FROM events WHERE {n} % 3 = 0;
    INSERT INTO room_memberships SELECT event_id, 'join' FROM events WHERE {n} % 6 = 0;
    INSERT INTO event_relations SELECT event_id, event_id FROM events WHERE {n} % 5 = 1;
    INSERT INTO redactions SELECT event_id, event_id FROM events WHERE {n} % 50 = 2;
    INSERT INTO rejections SELECT event_id, 'auth' FROM events WHERE {n} % 1000 = 4;
""".format(n="stream_ordering")


def make_generator_tables(dsn: str) -> None:
    """Create the tables that an id generator of ``events`` uses, without any rows."""
    _execute(dsn, _GENERATOR_TABLES)


def fill_events(dsn: str, rows: int, *, varied: bool = False) -> None:
    """Create all tables of ``events``, with rows of one writer and ids from 1.

    :param varied: whether to include state, relations and so on in addition to
        messages.
    """
    _execute(dsn, _GENERATOR_TABLES + _EVENT_TABLES)
    _execute(dsn, _FILL, rows=rows)
    if varied:
        _execute(dsn, _VARIED)
    _execute(dsn, "VACUUM ANALYZE")


def _execute(dsn: str, sql: str, **parameters: int) -> None:
    with contextlib.closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
