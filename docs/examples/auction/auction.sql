CREATE SEQUENCE bids_seq START 2;
CREATE TABLE bids (
    stream_id bigint NOT NULL,
    instance_name text NOT NULL,
    lot text NOT NULL,
    amount integer NOT NULL
);
CREATE INDEX bids_by_writer ON bids (instance_name, stream_id);
CREATE TABLE lots (lot text PRIMARY KEY, highest integer NOT NULL);
