"""Fills a database quickly with a long history: five million rows.

::

    python -m tests.support.big_database --dsn DSN [--rows N]

Tables, indexes, sequences and ``stream_positions`` are those of Synapse, but columns
that none of our queries uses are left out. Events, receipts, device lists and to-device
messages have four writers, whose ids alternate; one id in a thousand was allocated and
rolled back. Every writer writes caches. Names and times are made up, and identical in
each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from types import MappingProxyType

import click

#: The writers.
WRITERS = ("writer1", "writer2", "writer3", "writer4")

#: The shares of the streams in the rows.
SHARES: Mapping[str, float] = MappingProxyType(
    {
        "events": 0.40,
        "receipts": 0.25,
        "device_lists": 0.15,
        "caches": 0.10,
        "to_device": 0.09,
        "account_data": 0.01,
    }
)

#: Time of the first row, ms since the epoch: 10 October 2026, UTC.
FIRST_MS = 1_791_590_400_000

#: Time from the first row to the last, ms: thirty days.
DURATION_MS = 30 * 86_400_000

_TABLES = """
CREATE TABLE events (
    stream_ordering bigint, event_id text NOT NULL, room_id text NOT NULL,
    type text NOT NULL, outlier boolean NOT NULL, received_ts bigint,
    instance_name text);
CREATE TABLE state_events (event_id text, state_key text NOT NULL);
CREATE TABLE redactions (event_id text, redacts text NOT NULL);
CREATE TABLE event_relations (event_id text, relates_to_id text NOT NULL);
CREATE TABLE room_memberships (event_id text, membership text NOT NULL);
CREATE TABLE rejections (event_id text, reason text NOT NULL);
CREATE TABLE ex_outlier_stream (
    event_stream_ordering bigint, event_id text NOT NULL, instance_name text);
CREATE TABLE current_state_delta_stream (
    stream_id bigint NOT NULL, room_id text NOT NULL, type text NOT NULL,
    state_key text NOT NULL, event_id text, instance_name text);
CREATE TABLE receipts_linearized (
    stream_id bigint NOT NULL, room_id text NOT NULL, receipt_type text NOT NULL,
    user_id text NOT NULL, event_id text NOT NULL, data text NOT NULL,
    instance_name text, thread_id text);
CREATE TABLE device_lists_stream (
    stream_id bigint NOT NULL, user_id text NOT NULL, device_id text NOT NULL,
    instance_name text);
CREATE TABLE device_lists_changes_in_room (
    stream_id bigint NOT NULL, user_id text NOT NULL, device_id text NOT NULL,
    room_id text NOT NULL, instance_name text, inserted_ts bigint);
CREATE TABLE user_signature_stream (
    stream_id bigint NOT NULL, from_user_id text NOT NULL, instance_name text);
CREATE TABLE device_lists_outbound_pokes (
    stream_id bigint NOT NULL, destination text NOT NULL, user_id text NOT NULL,
    device_id text NOT NULL, ts bigint NOT NULL, instance_name text);
CREATE TABLE cache_invalidation_stream_by_instance (
    stream_id bigint NOT NULL, instance_name text NOT NULL,
    cache_func text NOT NULL, keys text[], invalidation_ts bigint);
CREATE TABLE device_inbox (
    stream_id bigint NOT NULL, user_id text NOT NULL, device_id text NOT NULL,
    instance_name text);
CREATE TABLE device_federation_outbox (
    stream_id bigint NOT NULL, destination text NOT NULL, queued_ts bigint NOT NULL,
    instance_name text);
CREATE TABLE account_data (
    stream_id bigint NOT NULL, user_id text NOT NULL, account_data_type text NOT NULL,
    instance_name text);
CREATE TABLE room_account_data (
    stream_id bigint NOT NULL, user_id text NOT NULL, room_id text NOT NULL,
    account_data_type text NOT NULL, instance_name text);
CREATE TABLE room_tags_revisions (
    stream_id bigint NOT NULL, user_id text NOT NULL, room_id text NOT NULL,
    instance_name text);
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL);
CREATE SEQUENCE events_stream_seq;
CREATE SEQUENCE events_backfill_stream_seq;
CREATE SEQUENCE receipts_sequence;
CREATE SEQUENCE device_lists_sequence;
CREATE SEQUENCE cache_invalidation_stream_seq;
CREATE SEQUENCE device_inbox_sequence;
CREATE SEQUENCE account_data_sequence;

CREATE FUNCTION pg_temp.writer(id bigint) RETURNS text IMMUTABLE LANGUAGE sql AS
    $$ SELECT 'writer' || 1 + (id * 7 / 3) % 4 $$;
CREATE FUNCTION pg_temp.event(id bigint) RETURNS text IMMUTABLE LANGUAGE sql AS
    $$ SELECT '$' || md5(id::text) || 'Tk5CW3Wm' $$;
CREATE FUNCTION pg_temp.member(id bigint) RETURNS text IMMUTABLE LANGUAGE sql AS
    $$ SELECT '@user' || (id * 7919) % 5000 || ':example.org' $$;
CREATE FUNCTION pg_temp.room(id bigint) RETURNS text IMMUTABLE LANGUAGE sql AS
    $$ SELECT '!room' || (id * 104729) % 700 || 'AbCdEf:example.org' $$;
"""

# One id in a thousand was allocated and never used.
_IDS = "FROM generate_series(1, %(last)s::bigint) AS id WHERE id %% 1000 <> 999"
_WHEN = "%(first_ms)s + (id::float / %(last)s * %(duration_ms)s)::bigint"

#: The statements that fill the tables of each stream; ids end at ``last``.
_FILL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "events": (
            f"""INSERT INTO events SELECT id, pg_temp.event(id), pg_temp.room(id),
                CASE WHEN id %% 20 = 0 THEN 'm.room.member' WHEN id %% 10 = 1
                THEN 'm.reaction' ELSE 'm.room.message' END, FALSE, {_WHEN},
                pg_temp.writer(id) {_IDS}""",
            f"""INSERT INTO state_events SELECT pg_temp.event(id), pg_temp.member(id)
                {_IDS} AND id %% 20 = 0""",
            f"""INSERT INTO room_memberships SELECT pg_temp.event(id), 'join'
                {_IDS} AND id %% 20 = 0""",
            f"""INSERT INTO event_relations SELECT pg_temp.event(id),
                pg_temp.event(id - 1) {_IDS} AND id %% 10 = 1""",
            f"""INSERT INTO rejections SELECT pg_temp.event(id), 'auth'
                {_IDS} AND id %% 5000 = 7""",
            f"""INSERT INTO current_state_delta_stream SELECT id, pg_temp.room(id),
                'm.room.member', pg_temp.member(id), pg_temp.event(id),
                pg_temp.writer(id) {_IDS} AND id %% 20 = 0""",
        ),
        "receipts": (
            f"""INSERT INTO receipts_linearized SELECT id, pg_temp.room(id), 'm.read',
                pg_temp.member(id), pg_temp.event(id),
                '{{"ts":' || {_WHEN} || '}}', pg_temp.writer(id), NULL {_IDS}""",
        ),
        "device_lists": (
            f"""INSERT INTO device_lists_changes_in_room SELECT id, pg_temp.member(id),
                'DEVICE', pg_temp.room(id), pg_temp.writer(id), {_WHEN} {_IDS}""",
        ),
        "caches": (
            f"""INSERT INTO cache_invalidation_stream_by_instance
                SELECT id, pg_temp.writer(id), 'get_user_by_id',
                ARRAY[pg_temp.member(id)], {_WHEN} {_IDS}""",
        ),
        "to_device": (
            f"""INSERT INTO device_inbox SELECT id, pg_temp.member(id), 'DEVICE',
                'writer1' {_IDS}""",
        ),
        "account_data": (
            f"""INSERT INTO account_data SELECT id, pg_temp.member(id), 'm.direct', NULL
                {_IDS}""",
        ),
    }
)

_INDEXES = """
CREATE UNIQUE INDEX events_stream_ordering ON events (stream_ordering);
CREATE UNIQUE INDEX events_event_id ON events (event_id);
CREATE UNIQUE INDEX state_events_event_id ON state_events (event_id);
CREATE UNIQUE INDEX redactions_event_id ON redactions (event_id);
CREATE UNIQUE INDEX event_relations_event_id ON event_relations (event_id);
CREATE UNIQUE INDEX room_memberships_event_id ON room_memberships (event_id);
CREATE UNIQUE INDEX rejections_event_id ON rejections (event_id);
CREATE UNIQUE INDEX ex_outlier_stream_id ON ex_outlier_stream (event_stream_ordering);
CREATE INDEX current_state_delta_stream_idx ON current_state_delta_stream (stream_id);
CREATE INDEX receipts_linearized_id ON receipts_linearized (stream_id);
CREATE INDEX device_lists_stream_id ON device_lists_stream (stream_id, user_id);
CREATE UNIQUE INDEX device_lists_changes_in_stream_id
    ON device_lists_changes_in_room (stream_id, room_id);
CREATE UNIQUE INDEX user_signature_stream_idx ON user_signature_stream (stream_id);
CREATE INDEX device_lists_outbound_pokes_stream
    ON device_lists_outbound_pokes (stream_id);
CREATE UNIQUE INDEX cache_invalidation_stream_by_instance_id
    ON cache_invalidation_stream_by_instance (stream_id);
CREATE INDEX cache_invalidation_stream_by_instance_instance_index
    ON cache_invalidation_stream_by_instance (instance_name, stream_id);
CREATE INDEX device_inbox_stream_id_user_id ON device_inbox (stream_id, user_id);
CREATE INDEX device_federation_outbox_id ON device_federation_outbox (stream_id);
CREATE UNIQUE INDEX stream_positions_idx
    ON stream_positions (stream_name, instance_name);
"""

#: Sequence, name in ``stream_positions``, table and id column of each stream.
_SEQUENCES: Mapping[str, tuple[str, str | None, str, str]] = MappingProxyType(
    {
        "events": ("events_stream_seq", "events", "events", "stream_ordering"),
        "receipts": (
            "receipts_sequence",
            "receipts",
            "receipts_linearized",
            "stream_id",
        ),
        "device_lists": (
            "device_lists_sequence",
            "device_lists_stream",
            "device_lists_changes_in_room",
            "stream_id",
        ),
        "caches": ("cache_invalidation_stream_seq", None, "", ""),
        "to_device": (
            "device_inbox_sequence",
            "to_device",
            "device_inbox",
            "stream_id",
        ),
        "account_data": ("account_data_sequence", "account_data", "", ""),
    }
)


def fill_database(dsn: str, rows: int = 5_000_000) -> dict[str, int]:
    """Create the tables in an empty database and fill them.

    :param dsn: of the database, in libpq's format.
    :param rows: approximate total number of rows.
    :return: the last id of each stream.
    """
    import psycopg2

    last_ids = {name: max(int(rows * share), 8) for name, share in SHARES.items()}
    with closing(psycopg2.connect(dsn)) as connection, connection:
        with connection.cursor() as txn:
            txn.execute("SET LOCAL synchronous_commit = off")
            txn.execute("SET LOCAL maintenance_work_mem = '128MB'")
            txn.execute(_TABLES)
            for stream, statements in _FILL.items():
                values = {
                    "last": last_ids[stream],
                    "first_ms": FIRST_MS,
                    "duration_ms": DURATION_MS,
                }
                for statement in statements:
                    txn.execute(statement, values)
            txn.execute(_INDEXES)
            for stream, last in last_ids.items():
                sequence, name, table, id_column = _SEQUENCES[stream]
                txn.execute("SELECT setval(%s, %s)", (sequence, last))
                if table:
                    txn.execute(
                        "INSERT INTO stream_positions SELECT %s, instance_name, "
                        f"max({id_column}) FROM {table} GROUP BY instance_name",
                        (name,),
                    )
                elif name is not None:
                    txn.execute(
                        "INSERT INTO stream_positions VALUES (%s, 'master', %s)",
                        (name, last),
                    )
        connection.commit()
    with closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as txn:
            txn.execute("VACUUM ANALYZE")
    return last_ids


@click.command()
@click.option("--dsn", required=True, help="DSN of an empty database.")
@click.option(
    "--rows", default=5_000_000, show_default=True, help="About how many rows."
)
def main(dsn: str, rows: int) -> None:
    """Fill an empty database with the history of a made-up homeserver."""
    for stream, last in fill_database(dsn, rows).items():
        click.echo(f"{stream}: ids up to {last}")


if __name__ == "__main__":
    main()
