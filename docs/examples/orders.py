"""Orders: a stream declared by its table."""

# fmt: off
# begin declaration
from synapse_replication.streams.table import TableStream

ORDERS = TableStream(
    name="orders", table="orders", id_column="stream_id",
    writer_column="instance_name", sequence="orders_stream_seq",
    columns={"order_id": "text", "note": "text?"},
    writers=["writer1", "writer2"],
)
# end declaration
