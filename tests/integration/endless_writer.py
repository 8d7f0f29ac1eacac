"""A server of its own, whose code writes until its writes are refused.

Tests run it as a process: ``python -m tests.integration.endless_writer OPTIONS``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import attrs
from twisted.internet import reactor  # noqa: TID251
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import deferLater

from synapse_replication import api

#: The time between two writes, so that the writer does not take all of a core.
_PAUSE_SECONDS = 0.01

NOTES = api.TableStream(
    name="notes",
    table="notes",
    id_column="stream_id",
    writer_column="instance_name",
    sequence="notes_seq",
    columns={"note": "text", "part": "integer"},
    writers="master",
)


@attrs.frozen
class Options:
    """What a test passes, as JSON.

    :ivar server_name: a part of the channel.
    :ivar dsn: the database.
    :ivar redis: its host and port.
    :ivar socket: the path at which it serves its rows.
    :ivar refused: a file for the errors with which the writes ended.
    :ivar mark: a part of each note.
    """

    server_name: str
    dsn: str
    redis: tuple[str, int]
    socket: str
    refused: str
    mark: str = ""


def make_service(options: Options) -> api.Replication:
    """Return a service in which code writes that does not end with the service."""
    host, port = options.redis
    replication = api.Replication(
        reactor,
        api.ReplicationOptions(
            server_name=options.server_name,
            instance_name="master",
            streams=[NOTES, "typing"],
            database={"dsn": options.dsn},
            redis=api.RedisOptions(host=host, port=port),
            listeners=[api.Listener(path=options.socket)],
            secret="knock",
        ),
    )
    refused: list[str] = []
    numbers = count()

    def insert(txn: api.Transaction, kind: str) -> None:
        text = f"{kind} {options.mark}{next(numbers)}"
        notes = replication[NOTES]
        notes.write_txn(txn, [notes.description.codec.from_json([text, 0])])
        typing = replication["typing"]
        row = typing.description.codec.from_json([f"!{text}:x", []])
        txn.call_after(typing.write, [row])

    def insert_slowly(txn: api.Transaction) -> None:
        txn.execute("SELECT pg_sleep(2)")
        insert(txn, "slow")

    def begin(_: None) -> None:
        database = replication.database
        notes = replication[NOTES]
        row = notes.description.codec.from_json(["alone", 0])
        writes: list[Callable[[], Awaitable[object]]] = [
            lambda: database.transact("fast", lambda txn: insert(txn, "fast")),
            lambda: database.transact("slow", insert_slowly),
            lambda: notes.write([row]),
            lambda: notes.write([row]),
        ]
        ended = [Deferred.fromCoroutine(until_refused(write)) for write in writes]
        # Otherwise, the process may end while the code pauses.
        reactor.addSystemEventTrigger("before", "shutdown", DeferredList, ended)

    async def until_refused(write: Callable[[], Awaitable[object]]) -> None:
        try:
            while True:
                await write()
                await deferLater(reactor, _PAUSE_SECONDS)
        except api.ReplicationError as error:
            refused.append(type(error).__name__)
            Path(options.refused).write_text(json.dumps(refused))

    replication.started.addCallback(begin)
    return replication


if __name__ == "__main__":
    api.start_logging(sys.stderr)
    arguments = Options(**json.loads(sys.argv[1]))
    sys.exit(api.run_service(reactor, lambda: make_service(arguments)))
