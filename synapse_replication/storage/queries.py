"""SQL statements about sequences, stored positions, and the ids in tables.

Values are named parameters. Identifiers (tables, columns, sequences) are quoted by
:func:`identifier`. They are inserted into the statement, or are parameters that
PostgreSQL converts with ``regclass``. A stream's table may have columns of any name.
Where columns of another table or subquery are in scope, too, column names are
qualified.

The ids of a stream that counts down are negative, both in ``stream_positions`` and in
the stream's tables. A statement that "needs" an index works without it, but reads the
whole table.
"""

from __future__ import annotations

from synapse_replication.streams.id_column import IdColumn

#: Allocate ``count`` ids from the sequence ``sequence``, in one round trip.
NEXT_IDS = """
    SELECT nextval(%(sequence)s::regclass) FROM generate_series(1, %(count)s)
"""

#: Allocate ``count`` ids from ``sequence`` without using them; return the last one.
SKIP_IDS = """
    SELECT max(nextval(%(sequence)s::regclass)) FROM generate_series(1, %(count)s)
"""

#: The stored writers of a stream and their positions.
POSITIONS = """
    SELECT instance_name, stream_id FROM stream_positions
    WHERE stream_name = %(stream_name)s
"""

#: Values that change if the database goes back: PostgreSQL's timeline (a standby is
#: promoted, or a base backup is restored), or the table's own id (a dump is restored).
TIMELINE = """
    SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)
        || '/' || CAST('stream_positions'::regclass::oid AS text)
"""

#: The stored positions of all writers of all streams.
ALL_POSITIONS = "SELECT stream_name, instance_name, stream_id FROM stream_positions"

#: Whether a table or sequence exists.
TABLE_EXISTS = "SELECT to_regclass(%(table)s) IS NOT NULL"

#: Store the initial position of a writer, unless it has one.
INSERT_POSITION = """
    INSERT INTO stream_positions (stream_name, instance_name, stream_id)
    VALUES (%(stream_name)s, %(instance_name)s, %(stream_id)s)
    ON CONFLICT (stream_name, instance_name) DO NOTHING
"""

#: The session of this database with the oldest transaction that is at least
#: ``open_for`` s old; one that has written to one of ``tables`` precedes the others. If
#: ``transactions`` are not null, only those, which :data:`INSERTING_TRANSACTIONS`
#: selected, count as transactions that have written.
#: Most columns are null for a role that may not see other roles' sessions.
OPEN_TRANSACTIONS = """
    SELECT pid, coalesce(usename, ''), coalesce(application_name, ''),
        coalesce(host(client_addr), ''), coalesce(state, ''),
        extract(epoch FROM clock_timestamp() - xact_start)::float, query,
        writes_stream, pg_blocking_pids(pid)
    FROM pg_stat_activity AS activity, LATERAL (
        SELECT EXISTS (
            SELECT FROM pg_locks AS held
            WHERE held.pid = activity.pid AND held.mode = 'RowExclusiveLock'
                AND CASE WHEN %(transactions)s::text[] IS NULL THEN held.granted
                    ELSE held.virtualtransaction = ANY(%(transactions)s::text[])
                END
                AND held.database = activity.datid
                AND held.relation IN (
                    SELECT to_regclass(name) FROM unnest(%(tables)s::text[]) AS name
                )
        ) AS writes_stream
    ) AS locks
    WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND CASE WHEN xact_start IS NULL THEN writes_stream
            ELSE xact_start < clock_timestamp() - %(open_for)s * interval '1 second'
        END
    ORDER BY writes_stream DESC, xact_start NULLS LAST
    LIMIT 1
"""

_UPSERT_POSITION = """
    INSERT INTO stream_positions AS stored (stream_name, instance_name, stream_id)
    VALUES (%(stream_name)s, %(instance_name)s, %(stream_id)s)
    ON CONFLICT (stream_name, instance_name)
    DO UPDATE SET stream_id = EXCLUDED.stream_id
    WHERE EXCLUDED.stream_id {further} stored.stream_id
"""

#: Delete the positions of all writers that are not in ``writers``.
DELETE_POSITIONS_OF_OTHERS = """
    DELETE FROM stream_positions
    WHERE stream_name = %(stream_name)s AND instance_name <> ALL(%(writers)s)
"""

#: The key columns of each valid, non-partial B-tree index of a table, and whether it is
#: unique. An expression in place of a column is null.
INDEXES = """
    SELECT
        ARRAY(
            SELECT attname::text
            FROM unnest(indkey) WITH ORDINALITY AS part (attnum, place)
            LEFT JOIN pg_attribute AS attribute
                ON attrelid = indrelid AND attribute.attnum = part.attnum
            WHERE place <= indnkeyatts
            ORDER BY place
        ),
        indisunique
    FROM pg_index
    JOIN pg_class AS class ON class.oid = indexrelid
    JOIN pg_am AS method ON method.oid = relam
    WHERE indrelid = to_regclass(%(table)s) AND indisvalid AND indpred IS NULL
    AND amname = 'btree'
"""

#: The size of a table in bytes.
TABLE_SIZE = "SELECT pg_relation_size(to_regclass(%(table)s))"

#: The virtual ids of the open transactions, other than this one, that write or have
#: written to one of ``tables``, or wait for its lock to do so: the server executes a
#: statement that waits even if its client is gone. These ids are not reused.
INSERTING_TRANSACTIONS = """
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND relation = ANY(
        SELECT to_regclass(name)::oid FROM unnest(%(tables)s::text[]) AS name
    )
    AND pid IS DISTINCT FROM pg_backend_pid()
"""

#: The advisory lock that serialises repairs of positions, their bootstrap, and schema
#: changes; held until the end of the transaction.
LOCK_POSITIONS = """
    SELECT pg_advisory_xact_lock(hashtext('synapse_replication.positions'))
"""


def identifier(name: str) -> str:
    """Quote a name, which may be qualified by a schema."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in name.split("."))


def literal(text: str) -> str:
    """Quote a text as a literal, for statements without parameters."""
    return "'" + text.replace("'", "''") + "'"


def sequence_state(sequence: str) -> str:
    """Select ``last_value`` and ``is_called`` of a sequence."""
    return f"SELECT last_value, is_called FROM {identifier(sequence)}"


def raise_sequence(sequence: str) -> str:
    """Advance a sequence to ``id``, unless it is at or beyond ``id``.

    Ids that other sessions allocate during this statement may be allocated again.
    """
    return (
        "SELECT setval(%(sequence)s::regclass, greatest(%(id)s, last_value)) "
        f"FROM {identifier(sequence)}"
    )


def upsert_position(negative: bool) -> str:
    """Insert a writer's position, or advance the stored one.

    A stored position never moves back. If it is unchanged, the row is not updated.
    """
    return _UPSERT_POSITION.format(further="<" if negative else ">")


def no_ids(column: IdColumn) -> str:
    """Select no ids of a table, only to check that they could be selected."""
    return (
        f"SELECT {identifier(column.id_column)} FROM {identifier(column.table)} LIMIT 0"
    )


def greatest_id(column: IdColumn, negative: bool) -> str:
    """Select the id that is farthest from zero. Needs an index on the id."""
    return f"""
        SELECT {_farthest(negative)}({identifier(column.id_column)})
        FROM {identifier(column.table)}
    """


def greatest_ids_of_writers(column: IdColumn, negative: bool) -> str:
    """Select each of ``writers`` with its id that is farthest from zero.

    A writer without rows has ``NULL``. Needs an index on writer and id.
    """
    assert column.writer_column is not None
    return f"""
        SELECT wanted.writer, (
            SELECT {_farthest(negative)}(source.{identifier(column.id_column)})
            FROM {identifier(column.table)} AS source
            WHERE source.{identifier(column.writer_column)} = wanted.writer
        )
        FROM unnest(%(writers)s::text[]) AS wanted (writer)
    """


def id_expressions(id_column: str, negative: bool) -> tuple[str, str, str]:
    """Return the expressions of a query that walks an index of the ids.

    :param id_column: the column, quoted if necessary.
    :param negative: whether ids count down.
    :return: the token, the order, and the condition for ``after`` and ``up_to``.
    """
    if negative:
        bounds = f"{id_column} < -%(after)s AND {id_column} >= -%(up_to)s"
        return f"-{id_column}", f"{id_column} DESC", bounds
    bounds = f"{id_column} > %(after)s AND {id_column} <= %(up_to)s"
    return id_column, id_column, bounds


def ids_between(column: IdColumn, negative: bool, *, of_writer: bool) -> str:
    """Select at most ``limit`` tokens ``after`` one and ``up_to`` another, in order.

    :param of_writer: whether to select only those of the writer ``instance_name``.
    """
    id_, order, bounds = id_expressions(identifier(column.id_column), negative)
    if of_writer:
        assert column.writer_column is not None
        writer = identifier(column.writer_column)
        bounds = f"{writer} = %(instance_name)s AND {bounds}"
    return f"""
        SELECT {id_} FROM {identifier(column.table)}
        WHERE {bounds} ORDER BY {order} LIMIT %(limit)s
    """


def writers_of_table(column: IdColumn) -> str:
    """Select the name of each writer that has rows, by one index search per name.

    Needs an index that begins with the writer.
    """
    assert column.writer_column is not None
    table, writer = identifier(column.table), identifier(column.writer_column)
    return f"""
        WITH RECURSIVE found (name) AS (
            (SELECT {writer} FROM {table} ORDER BY {writer} LIMIT 1)
            UNION ALL
            SELECT (
                SELECT source.{writer} FROM {table} AS source
                WHERE source.{writer} > found.name ORDER BY source.{writer} LIMIT 1
            )
            FROM found WHERE found.name IS NOT NULL
        )
        SELECT name FROM found WHERE name IS NOT NULL
    """


def writers_beyond(column: IdColumn, negative: bool) -> str:
    """Select the writers of the ``limit`` rows that follow id ``low``.

    For each writer, also select two values that cover only these rows: its id that is
    farthest from zero, and its number of rows. Needs an index on the id.
    """
    assert column.writer_column is not None
    id_, writer = identifier(column.id_column), identifier(column.writer_column)
    sign, order = ("<", "DESC") if negative else (">", "ASC")
    return f"""
        SELECT writer, {_farthest(negative)}(id), count(*) FROM (
            SELECT source.{writer} AS writer, source.{id_} AS id
            FROM {identifier(column.table)} AS source
            WHERE source.{id_} {sign} %(low)s
            ORDER BY source.{id_} {order} LIMIT %(limit)s
        ) AS beyond
        GROUP BY writer
    """


def _farthest(negative: bool) -> str:
    return "min" if negative else "max"
