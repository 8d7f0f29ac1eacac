"""A complete server with replication in one file.

It needs Redis on this machine and the database of the tutorial. Run
``python homeserver.py writer`` and ``python homeserver.py reader`` in two terminals.
"""

import secrets
import sys
from random import random
from typing import Any

import attrs
from twisted.application.internet import TimerService
from twisted.internet import reactor  # noqa: TID251
from twisted.internet.defer import Deferred
from twisted.logger import Logger, globalLogBeginner, textFileLogObserver
from twisted.web.server import Site

from synapse_replication import api

SERVER_NAME = "shop.example.com"
DATABASE = {"dbname": "shop"}
REDIS = api.RedisOptions(host="localhost", port=6379)
SECRET = "a long random text"

# A stream in a table.
ORDERS = api.TableStream(
    name="orders", table="orders", id_column="stream_id",
    writer_column="instance_name", sequence="orders_stream_seq",
    columns={"order_id": "text", "note": "text?"}, writers=["writer"],
)  # fmt: skip


@attrs.frozen
class CursorRow:
    document: str
    offset: int


# A stream held in memory: readers fetch its rows from the writer over HTTP.
CURSORS = api.StreamDescription(
    name="cursors", codec=api.RowCodec("cursors", CursorRow),
    held_in_memory=True, resettable=True,
)  # fmt: skip


@attrs.frozen
class Location:
    host: str
    port: int
    tls: bool = False
    path: str | None = None


INSTANCES = {"writer": Location("127.0.0.1", 9094)}


class PrintingSink:
    def on_rdata(self, stream: str, writer: str, token: int, rows: list[Any]) -> None:
        print(stream, writer, token, *rows, flush=True)

    def on_position(self, stream: str, writer: str, token: int) -> None:
        """Ignore a position without rows; a sink may have to persist it."""


class Server:
    """The host: replication requires only these attributes."""

    def __init__(self, instance_name: str) -> None:
        self.observer = api.LoggingObserver(Logger())
        self.identity = api.Identity(
            SERVER_NAME, instance_name, secrets.token_urlsafe(12)
        )
        self.clock = api.ReactorClock(reactor)
        self.run_as_background_process = api.BackgroundProcesses(self.observer)
        self.streams = api.StreamTable()
        self.notifier = api.WriteNotifier()
        self.commands = api.SyncingUsers()
        self.rows = api.ReplicationDataHandler(
            self.streams.get_streams(), PrintingSink(), self.clock
        )
        self.stores_user_ips = False


async def start(server: Server) -> None:
    name = server.identity.instance_name
    writes = name == "writer"
    database = api.Database(DATABASE, reactor)
    agent, pool = api.make_agent(reactor, INSTANCES)
    client = api.HttpCatchUpClient(agent, INSTANCES, SECRET, reactor)

    # Add the streams first, because peers may request any of them.
    orders_ids = api.IdStream(
        stream_name=ORDERS.name, sequence=ORDERS.sequence,
        tables=ORDERS.id_columns, writers=ORDERS.writers,
    )  # fmt: skip
    ids = await api.load_id_generator(
        database, orders_ids, name, reactor, server.clock,
        on_finished=server.notifier.notify, observer=server.observer,
    )  # fmt: skip
    orders = api.table_stream(ORDERS, database, ids, instance_name=name)
    cursors = api.MemoryStream(
        CURSORS, instance_name=name, key=lambda row: row.document,
        fetch=api.with_retries(client.for_stream("cursors"), server.clock, random),
        on_write=server.notifier.notify,
    )  # fmt: skip
    server.streams.add(orders, is_written_here=writes)
    server.streams.add(cursors, is_written_here=writes)

    # Then start the HTTP server, the links, and sending, in this order.
    handler = api.ReplicationCommandHandler(server, server.observer)
    streamer = api.ReplicationStreamer(server, handler.sender, server.observer)
    if writes:
        resource = api.ReplicationResource(
            server.streams, name, SECRET, server.observer
        )
        port = reactor.listenTCP(
            INSTANCES[name].port, Site(resource.under_root()), interface="127.0.0.1"
        )
    link = api.RedisReplicationLink(
        reactor, REDIS, SERVER_NAME, handler, server.observer,
        lambda lost: handler.sender.announce_positions(), handler.start_replication(),
    )  # fmt: skip
    link.start()
    streamer.start()

    async def write() -> None:
        row = ORDERS.description.codec.row_type
        await orders.write([row(order_id="o1", note=None)])
        cursors.write([CursorRow("d1", cursors.current_token(name))])

    timer = TimerService(0.5, lambda: server.run_as_background_process("write", write))
    if writes:
        timer.startService()

    async def stop() -> None:
        # Stop in the reverse order: stop writing, send pending rows, close.
        if writes:
            await timer.stopService()
        await streamer.stop()
        await handler.wait_until_idle()
        await link.stop()
        if writes:
            await port.stopListening()
        await server.run_as_background_process.wait()
        await pool.closeCachedConnections()
        await database.close()

    reactor.addSystemEventTrigger(
        "before", "shutdown", lambda: Deferred.fromCoroutine(stop())
    )


def main() -> None:
    if sys.argv[1:] not in (["writer"], ["reader"]):
        sys.exit("usage: python homeserver.py writer|reader")
    globalLogBeginner.beginLoggingTo(
        [textFileLogObserver(sys.stderr)], redirectStandardIO=False
    )
    starting = Deferred.fromCoroutine(start(Server(sys.argv[1])))
    starting.addErrback(lambda failure: (failure.printTraceback(), reactor.stop()))
    reactor.run()


if __name__ == "__main__":
    main()
