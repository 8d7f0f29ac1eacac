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
