"""A complete server with replication in one file.

It needs Redis on this machine and the database of the tutorial. Run
``python homeserver.py writer`` and ``python homeserver.py reader`` in two terminals.
"""

import sys
from typing import Any

import attrs
from twisted.application.internet import TimerService
from twisted.internet import reactor  # noqa: TID251

from synapse_replication import api

# A stream in a table.
ORDERS = api.TableStream(
    name="orders", table="orders", id_column="stream_id",
    writer_column="instance_name", sequence="orders_stream_seq",
    columns={"order_id": "text", "note": "text?"}, writers="writer",
)  # fmt: skip


@attrs.frozen
class CursorRow:
    document: str
    offset: int


# A stream held in memory: a row replaces the older rows of the same document.
CURSORS = api.InMemory(
    name="cursors", row_type=CursorRow, writers="writer",
    key=lambda row: row.document,
)  # fmt: skip


class PrintingSink:
    def on_rdata(self, stream: str, writer: str, token: int, rows: list[Any]) -> None:
        print(stream, writer, token, *rows, flush=True)

    def on_position(self, stream: str, writer: str, token: int) -> None:
        """Ignore a position without rows; a sink may have to persist it."""


def make_service(instance_name: str) -> api.Replication:
    options = api.ReplicationOptions(
        server_name="shop.example.com",
        instance_name=instance_name,
        streams=[ORDERS, CURSORS],
        database={"dbname": "shop"},
        redis=api.RedisOptions(host="localhost", port=6379),
        instances={"writer": api.InstanceLocation("127.0.0.1", 9094)},
        secret="a long random text",
    )
    replication = api.Replication(reactor, options, PrintingSink())

    async def write() -> None:
        orders, cursors = replication[ORDERS], replication[CURSORS]
        row = orders.description.codec.row_type
        await orders.write([row(order_id="o1", note=None)])
        cursors.write([CursorRow("d1", cursors.current_token("writer"))])

    def start() -> Any:  # a failure is logged, and does not stop the timer
        return replication.host.run_as_background_process("write", write)

    if instance_name == "writer":
        TimerService(0.5, start).setServiceParent(replication.services)
    return replication


if __name__ == "__main__":
    if sys.argv[1:] not in (["writer"], ["reader"]):
        sys.exit("usage: python homeserver.py writer|reader")
    api.start_logging(sys.stderr)
    sys.exit(api.run_service(reactor, lambda: make_service(sys.argv[1])))
