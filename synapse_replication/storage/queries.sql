-- PostgreSQL statements about sequences, stored positions, and the ids in tables; see
-- queries.py.

-- name: next_ids
-- Allocate ``count`` ids from the sequence ``sequence``, in one round trip.
SELECT nextval(%(sequence)s::regclass) FROM generate_series(1, %(count)s)

-- name: admitted_ids
-- Allocate ``count`` ids as next_ids does, and check the name of this process afterwards.
SELECT unnest(synapse_replication_admit(
    %(writer)s, %(term)s, array_agg(nextval(%(sequence)s::regclass))
)) FROM generate_series(1, %(count)s)

-- name: next_id
-- Allocate one id from the sequence ``sequence``.
SELECT nextval(%(sequence)s::regclass)

-- name: id_and_term
-- The id that this session allocated last, and the term of ``writer``: its snapshot is
-- newer than the id. With next_id in one message, it costs less than admitted_ids.
SELECT currval(%(sequence)s::regclass), term FROM synapse_replication_writers
WHERE instance_name = %(writer)s

-- name: txn_id_and_term
-- The same, with the number of the transaction. The term is null if the snapshot may be
-- older than the id.
SELECT currval(%(sequence)s::regclass), pg_current_xact_id()::text,
    CASE current_setting('transaction_isolation') WHEN 'read committed' THEN term END
FROM synapse_replication_writers WHERE instance_name = %(writer)s

-- name: admit
-- Check the name of this process.
SELECT synapse_replication_admit(%(writer)s, %(term)s)

-- name: txn_ids
-- Allocate ids as next_ids does, and return the number of the transaction with each.
SELECT nextval(%(sequence)s::regclass), pg_current_xact_id()::text
FROM generate_series(1, %(count)s)

-- name: admitted_txn_ids
-- Allocate ids as txn_ids does, and check the name of this process afterwards. Nothing
-- can acquire the name before the end of the transaction.
SELECT unnest(synapse_replication_admit(
    %(writer)s, %(term)s, array_agg(nextval(%(sequence)s::regclass)), true
)), pg_current_xact_id()::text
FROM generate_series(1, %(count)s)

-- name: sequence_options
-- The options of a sequence that decide in which order it allocates ids.
SELECT seqcache, seqincrement, seqcycle FROM pg_sequence
WHERE seqrelid = to_regclass(%(sequence)s)

-- name: skip_ids
-- Allocate ``count`` ids from ``sequence`` without using them; return the last one.
SELECT max(nextval(%(sequence)s::regclass)) FROM generate_series(1, %(count)s)

-- name: advance_sequence
-- Advance a sequence to ``id``, unless it is at or beyond ``id``. Ids that other
-- sessions allocate during this statement may be allocated again.
SELECT setval(%(sequence)s::regclass, greatest(%(id)s, last_value)) FROM {sequence}

-- name: positions
-- The stored writers of a stream and their positions.
SELECT instance_name, stream_id FROM stream_positions
WHERE stream_name = %(stream_name)s

-- name: timeline
-- Values that change if the database goes back: PostgreSQL's timeline (a standby is
-- promoted, or a base backup is restored), or the table's own id (a dump is restored).
SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)
    || '/' || CAST('stream_positions'::regclass::oid AS text)

-- name: all_positions
-- The stored positions of all writers of all streams.
SELECT stream_name, instance_name, stream_id FROM stream_positions

-- name: knowledge
-- An expression: what this snapshot knows about rows. Whether the database is a standby,
-- stored positions (see stored_of_stream), and the age of the last replayed transaction
-- in s.
json_build_array(
    pg_is_in_recovery(),
    ({stored}),
    extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float
)::text

-- name: stored_of_stream
-- The stored positions of a stream, as an object.
SELECT json_object_agg(instance_name, abs(stream_id)) FROM stream_positions
WHERE stream_name = {stream_name}

-- name: role
-- Whether the database is a standby, and whether its transactions are read-only.
SELECT pg_is_in_recovery(), current_setting('transaction_read_only')::bool

-- name: table_exists
-- Whether a table or sequence exists.
SELECT to_regclass(%(table)s) IS NOT NULL

-- name: insert_position
-- Store the initial position of a writer, unless it has one.
INSERT INTO stream_positions (stream_name, instance_name, stream_id)
VALUES (%(stream_name)s, %(instance_name)s, %(stream_id)s)
ON CONFLICT (stream_name, instance_name) DO NOTHING

-- name: open_transactions
-- The session of this database with the oldest transaction that is at least
-- ``open_for`` s old; one that has written to one of ``tables`` precedes the others. If
-- ``transactions`` are not null, only those, which inserting_transactions selected,
-- count as transactions that have written. Most columns are null for a role that may
-- not see other roles' sessions.
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
    AND coalesce(query, '') NOT LIKE '%%/* lock of a writer''s name */%%'
    AND CASE WHEN xact_start IS NULL THEN writes_stream
        ELSE xact_start < clock_timestamp() - %(open_for)s * interval '1 second'
    END
ORDER BY writes_stream DESC, xact_start NULLS LAST
LIMIT 1

-- name: upsert_position
INSERT INTO stream_positions AS stored (stream_name, instance_name, stream_id)
VALUES (%(stream_name)s, %(instance_name)s, %(stream_id)s)
ON CONFLICT (stream_name, instance_name)
DO UPDATE SET stream_id = EXCLUDED.stream_id
WHERE EXCLUDED.stream_id {further} stored.stream_id

-- name: upsert_admitted_position
-- Like upsert_position, if the process still has its name. The function, which costs
-- more than a subquery, is called to raise the error.
INSERT INTO stream_positions AS stored (stream_name, instance_name, stream_id)
SELECT %(stream_name)s, %(instance_name)s, %(stream_id)s
WHERE CASE
    WHEN (
        SELECT term FROM synapse_replication_writers WHERE instance_name = %(writer)s
    ) = %(term)s THEN true
    ELSE synapse_replication_admit(%(writer)s, %(term)s) IS NULL
END
ON CONFLICT (stream_name, instance_name)
DO UPDATE SET stream_id = EXCLUDED.stream_id
WHERE EXCLUDED.stream_id {further} stored.stream_id

-- name: delete_positions_of_others
-- Delete the positions of all writers that are not in ``writers``.
DELETE FROM stream_positions
WHERE stream_name = %(stream_name)s AND instance_name <> ALL(%(writers)s)

-- name: indexes
-- The key columns of each valid, non-partial B-tree index of a table, and whether it is
-- unique. An expression in place of a column is null.
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

-- name: table_size
-- The size of a table in bytes.
SELECT pg_relation_size(to_regclass(%(table)s))

-- name: inserting_transactions
-- The virtual ids of the open transactions, other than this one, that write or have
-- written to one of ``tables``, or wait for its lock to do so: the server executes a
-- statement that waits even if its client is gone. These ids are not reused.
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND relation = ANY(
    SELECT to_regclass(name)::oid FROM unnest(%(tables)s::text[]) AS name
)
AND pid IS DISTINCT FROM pg_backend_pid()

-- name: lock_positions
-- The advisory lock that serialises repairs of positions, their bootstrap, and schema
-- changes; held until the end of the transaction.
SELECT pg_advisory_xact_lock(hashtext('synapse_replication.positions'))

-- name: no_ids
-- Select no ids of a table, only to check that they could be selected.
SELECT {id} FROM {table} LIMIT 0

-- name: greatest_id
-- Select the id that is farthest from zero. Needs an index on the id.
SELECT {farthest}({id}) FROM {table}

-- name: farthest_id
-- Select null, and the id of the stream's sign that is farthest from zero. If the id is
-- indexed, the server looks it up.
SELECT NULL, {farthest}({id}) FROM {table} WHERE {id} {further} 0

-- name: farthest_ids_by_writer
-- Select each writer that has rows, and null for rows without one, with the id of the
-- stream's sign that is farthest from zero. Reads the whole table.
SELECT {writer}, {farthest}({id}) FROM {table} WHERE {id} {further} 0 GROUP BY 1

-- name: greatest_ids_of_writers
-- Select each of ``writers`` with its id that is farthest from zero. A writer without
-- rows has null. Needs an index on writer and id.
SELECT wanted.writer, (
    SELECT {farthest}(source.{id}) FROM {table} AS source
    WHERE source.{writer} = wanted.writer
)
FROM unnest(%(writers)s::text[]) AS wanted (writer)

-- name: writers_of_table
-- Select the name of each writer that has rows, by one index search per name. Needs an
-- index that begins with the writer.
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

-- name: writers_beyond
-- Select the writers of the ``limit`` rows that follow id ``low``. For each writer,
-- also select two values that cover only these rows: its id that is farthest from zero,
-- and its number of rows. Needs an index on the id.
SELECT writer, {farthest}(id), count(*) FROM (
    SELECT source.{writer} AS writer, source.{id} AS id FROM {table} AS source
    WHERE source.{id} {further} %(low)s
    ORDER BY source.{id} {order} LIMIT %(limit)s
) AS beyond
GROUP BY writer

-- name: lock_settings
-- Let the server notice within 25 s that the client of the session is gone.
SELECT set_config('tcp_keepalives_idle', '10', false),
    set_config('tcp_keepalives_interval', '5', false),
    set_config('tcp_keepalives_count', '3', false)

-- name: own_pid
-- The process id of this session.
SELECT pg_backend_pid()

-- name: lock_pid
-- The same; the comment marks the sessions of locks for open_transactions.
SELECT pg_backend_pid() /* lock of a writer's name */

-- name: no_timeouts
-- Let this transaction stay open, and wait as long as it takes.
SELECT set_config(name, '0', true) FROM pg_settings
WHERE name IN (
    'idle_in_transaction_session_timeout', 'transaction_timeout', 'statement_timeout',
    'lock_timeout'
)

-- name: lock_holder
-- The session that holds the advisory lock of a name.
SELECT lock.pid, coalesce(host(client_addr), 'this machine'), application_name,
    backend_start
FROM pg_locks AS lock LEFT JOIN pg_stat_activity AS session USING (pid)
WHERE locktype = 'advisory' AND granted
    AND classid = %(classid)s AND objid = %(objid)s
    AND objsubid = 2 AND lock.database = (
        SELECT oid FROM pg_database WHERE datname = current_database()
    )

-- name: may_acquire_names
-- Whether this role has the privileges for acquire_name, and for checks of a name.
SELECT bool_and(has_table_privilege('synapse_replication_writers', privilege))
FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE']) AS privilege

-- name: acquire_name
-- Acquire a name: its former holder cannot write any more. Waits until the former
-- holder's commits in progress have ended, which share the advisory lock: see
-- synapse_replication_admit.
INSERT INTO synapse_replication_writers AS known (instance_name, term, holder)
SELECT
    %(instance_name)s, 1,
    %(holder)s || to_char(now() AT TIME ZONE 'UTC', ' "since" YYYY-MM-DD HH24:MI:SS "UTC"')
WHERE pg_advisory_xact_lock(
    hashtextextended('synapse_replication.writers ' || %(instance_name)s, 0)
) IS NOT NULL
ON CONFLICT (instance_name)
DO UPDATE SET term = known.term + 1, holder = EXCLUDED.holder
RETURNING term

-- name: name_holder
-- The term and the process that acquired a name last.
SELECT term, holder FROM synapse_replication_writers
WHERE instance_name = %(instance_name)s

-- name: join_name
-- Mark this session, until it ends, as one of the process that holds a name.
SELECT pg_advisory_lock_shared(
    hashtextextended('synapse_replication.sessions ' || %(instance_name)s, 0)
)

-- name: sessions
-- The sessions whose process ids the query ``pids`` selects: one of the three that
-- follow.
SELECT pid, coalesce(usename, ''), coalesce(application_name, ''),
    coalesce(host(client_addr), ''), coalesce(state, ''),
    extract(epoch FROM clock_timestamp() - xact_start)::float, query,
    true, pg_blocking_pids(pid)
FROM pg_stat_activity WHERE pid IN ({pids})

-- name: joined_pids
-- The sessions that join_name has marked.
SELECT pid FROM pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND (classid::bigint << 32) | objid::bigint = hashtextextended(
    'synapse_replication.sessions ' || %(instance_name)s, 0
)

-- name: blocking_pids
-- The sessions for whose locks the session ``pid`` waits.
SELECT unnest(pg_blocking_pids(%(pid)s))

-- name: pids_of_transactions
-- The sessions that execute ``transactions``, which inserting_transactions selected.
SELECT pid FROM pg_locks WHERE virtualtransaction = ANY(%(transactions)s::text[])

-- name: end_own_session
-- End a session of this role; none is selected if it is of another one.
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid = %(pid)s AND usename = current_user

-- name: backend
-- The session, its start in us, which does not depend on a time zone, and the history of
-- its server. The start is null if the current role may not see it.
SELECT pid, floor(extract(epoch FROM backend_start) * 1000000)::bigint::text, CASE WHEN pg_is_in_recovery() THEN ''
    WHEN %(has_history)s THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END
FROM pg_stat_get_activity(pg_backend_pid())

-- name: transaction_status
-- Whether this server is a standby, whether it has the history of a session, the status
-- of a transaction of that history, and the state of the session.
SELECT pg_is_in_recovery(), is_same,
    CASE WHEN is_same AND %(xid)s IS NOT NULL
        THEN pg_xact_status(%(xid)s::text::xid8) END,
    (
        SELECT coalesce(state, 'hidden')
        FROM pg_stat_get_activity(NULL)
        WHERE pid = %(pid)s AND coalesce(
            floor(extract(epoch FROM backend_start) * 1000000)::bigint::text
                = %(started)s,
            true
        )
    )
FROM (
    SELECT CASE WHEN pg_is_in_recovery() THEN false
        WHEN %(history)s IS NULL THEN true
        ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) = %(history)s
    END AS is_same
) AS server

-- name: end_backend
-- End a session that waits for its client within a transaction.
SELECT pg_terminate_backend(pid) FROM pg_stat_get_activity(NULL)
WHERE pid = %(pid)s
    AND floor(extract(epoch FROM backend_start) * 1000000)::bigint::text = %(started)s
    AND state LIKE 'idle in transaction%%'

-- name: tables
-- The columns of each existing table with whether they may be null, and the columns of
-- its indexes.
SELECT wanted.name,
    (
        SELECT coalesce(json_object_agg(attname, NOT attnotnull), '{}')
        FROM pg_attribute
        WHERE attrelid = to_regclass(wanted.name)
          AND attnum > 0 AND NOT attisdropped
    ),
    ARRAY(
        SELECT json_build_object('is_unique', indisunique, 'columns', ARRAY(
            SELECT attname
            FROM unnest(indkey) WITH ORDINALITY AS part (number, place)
            LEFT JOIN pg_attribute ON attrelid = indrelid AND attnum = number
            WHERE place <= indnkeyatts ORDER BY place
        ))
        FROM pg_index
        WHERE indrelid = to_regclass(wanted.name) AND indisvalid
          AND indpred IS NULL
    )
FROM unnest(%s::text[]) AS wanted (name)
WHERE to_regclass(wanted.name) IS NOT NULL

-- name: writing_transactions
-- The tables and sequences to which other transactions write, and who they are.
SELECT DISTINCT c.relname, coalesce('process ' || l.pid, 'prepared')
FROM pg_locks AS l
JOIN pg_class AS c ON c.oid = l.relation
WHERE l.mode = 'RowExclusiveLock' AND l.granted
    AND l.database =
        (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.relation IN (SELECT to_regclass(name) FROM unnest(%(relations)s) AS name)
    AND l.pid IS DISTINCT FROM pg_backend_pid()
