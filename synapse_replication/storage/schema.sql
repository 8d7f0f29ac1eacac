-- The tables that this package needs; see schema.py. A released delta is never changed.

-- name: version_table
CREATE TABLE IF NOT EXISTS synapse_replication_schema (
    -- the number of the last delta that was applied; one row
    version integer NOT NULL
)

-- name: delta_1
-- An existing table of a homeserver is left unchanged.
DO $$ BEGIN
    IF to_regclass('stream_positions') IS NULL THEN
        CREATE TABLE stream_positions (
            -- the stream; its name in this table may differ from that on the wire
            stream_name text NOT NULL,
            -- the writer: the instance_name of a process
            instance_name text NOT NULL,
            -- the position up to which all ids of this writer are finished;
            -- negative for a stream that counts down
            stream_id bigint NOT NULL
        );
        CREATE UNIQUE INDEX stream_positions_idx
            ON stream_positions (stream_name, instance_name);
    END IF;
END $$

-- name: delta_2
-- Which process writes under each name: see name_lock.py and admission.py.
CREATE TABLE synapse_replication_writers (
    -- the name of the process
    instance_name text PRIMARY KEY,
    -- how often a process has acquired the name; the last one holds it
    term bigint NOT NULL,
    -- that process, for messages
    holder text NOT NULL
);
-- Check that a process still holds its name: raise SR001 if another one has acquired it.
-- In a transaction that writes, the name cannot be acquired before the transaction has
-- ended. In one that has not written yet, the result is only valid for what was done
-- before, unless ``locks`` is true. Returns ``ids``, which a caller computes first.
CREATE FUNCTION synapse_replication_admit(
    writer text, held bigint, ids bigint[] DEFAULT NULL, locks boolean DEFAULT false
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    known bigint;
BEGIN
    IF NOT locks AND pg_current_xact_id_if_assigned() IS NULL THEN
        known := term FROM synapse_replication_writers WHERE instance_name = writer;
    ELSIF current_setting('transaction_isolation') = 'read committed' THEN
        -- An advisory lock writes nothing. The next statement has a newer snapshot.
        locks := pg_advisory_xact_lock_shared(
            hashtextextended('synapse_replication.writers ' || writer, 0)
        ) IS NULL;
        known := term FROM synapse_replication_writers WHERE instance_name = writer;
    ELSE
        -- A snapshot may be older than an advisory lock. This fails if the row changed.
        known := term FROM synapse_replication_writers WHERE instance_name = writer
            FOR SHARE;
    END IF;
    IF known IS DISTINCT FROM held THEN
        RAISE EXCEPTION USING ERRCODE = 'SR001', MESSAGE = coalesce(
            (
                SELECT holder FROM synapse_replication_writers
                WHERE instance_name = writer
            ),
            'an unknown process'
        );
    END IF;
    RETURN ids;
END $$
