CREATE SEQUENCE orders_stream_seq START 2;
CREATE TABLE orders (
    stream_id bigint NOT NULL,
    instance_name text NOT NULL,
    order_id text NOT NULL,
    note text
);
CREATE INDEX orders_by_writer ON orders (instance_name, stream_id);
