"""Measures of writing processes of this package: ``ours_write.py MEASURE PARAMETERS``.

They use only the public interface, so that another version of the package, which lacks
this program, is measured by it as well.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2.extensions import make_dsn, parse_dsn
from twisted.internet.defer import Deferred, gatherResults, maybeDeferred

from scripts.tools.bench.side import main, run
from synapse_replication import api

_TABLES = """
    CREATE TABLE orders (stream_id BIGINT NOT NULL, instance_name TEXT, note TEXT);
    CREATE INDEX ON orders (instance_name, stream_id);
    CREATE SEQUENCE orders_seq START 2;
"""
#: Most bytes forwarded at a time.
CHUNK = 65536

_ORDERS = api.TableStream(
    name="orders",
    table="orders",
    id_column="stream_id",
    writer_column="instance_name",
    sequence="orders_seq",
    columns={"note": "text"},
    writers=["writer1"],
)

Write = Callable[[], Coroutine[Any, Any, Any]]


def writes(dsn: str, port: int, rows: int, callers: int, kind: str) -> dict[str, float]:
    """Write rows, each in a transaction of its own, with concurrent callers.

    :param kind: ``get_next``, ``write`` or ``write_txn``.
    """

    async def measure(write: Write) -> dict[str, float]:
        async def call() -> None:
            for _ in range(rows // callers):
                await write()

        await write()
        cpu, started = time.process_time(), time.perf_counter()
        await gatherResults([Deferred.fromCoroutine(call()) for _ in range(callers)])
        return {
            "seconds": time.perf_counter() - started,
            "cpu": 1000 * (time.process_time() - cpu) / rows,
        }

    return _run(dsn, port, kind, measure)


def messages(dsn: str, port: int, rows: int, kind: str) -> dict[str, float]:
    """Count the messages to PostgreSQL, and the statements in them, for each write.

    The messages of other parts of the process are few, and are counted, too.
    """
    with _counting(dsn) as (counted_dsn, counts):

        async def measure(write: Write) -> dict[str, float]:
            # Prepare the statements on all connections that are used.
            for _ in range(5):
                await write()
            before = list(counts)
            for _ in range(rows):
                await write()
            sent, statements = (
                now - then for now, then in zip(counts, before, strict=True)
            )
            return {"messages": sent / rows, "statements": statements / rows}

        return _run(counted_dsn, port, kind, measure)


def _run(
    dsn: str,
    port: int,
    kind: str,
    measure: Callable[[Write], Coroutine[Any, Any, dict[str, float]]],
) -> dict[str, float]:
    """Run a measure in a writing process."""
    with contextlib.closing(psycopg2.connect(dsn)) as connection, connection:
        connection.cursor().execute(_TABLES)

    async def work(reactor: Any) -> dict[str, float]:
        options = api.ReplicationOptions(
            server_name="bench.example",
            instance_name="writer1",
            streams=[_ORDERS],
            database=dsn,
            redis=api.RedisOptions(host="127.0.0.1", port=port),
        )
        service = api.Replication(reactor, options)
        service.startService()
        await service.started
        orders = service["orders"]
        row = orders.description.codec.row_type(note="a note")

        async def get_next() -> None:
            async with orders._ids._own.get_next():  # noqa: SLF001 -- not public
                pass

        async def write() -> None:
            await orders.write([row])

        async def write_txn() -> None:
            await service.database.transact(
                "write", lambda txn: orders.write_txn(txn, [row])
            )

        kinds = {"get_next": get_next, "write": write, "write_txn": write_txn}
        result = await measure(kinds[kind])
        await maybeDeferred(service.stopService)
        return result

    found: dict[str, float] = run(work)
    return found


@contextlib.contextmanager
def _counting(dsn: str) -> Iterator[tuple[str, list[int]]]:
    """Count what is sent to a server on Unix sockets.

    :return: the connection string to use, and two counts: messages and statements.
    """
    parameters = parse_dsn(dsn)
    name = f".s.PGSQL.{parameters['port']}"
    target = str(Path(parameters["host"]) / name)
    counts = [0, 0]
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(str(Path(folder) / name))
        listener.listen()

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                server = socket.socket(socket.AF_UNIX)
                server.connect(target)
                _in_thread(_forward, server, client, None)
                _in_thread(_forward, client, server, counts)

        _in_thread(accept)
        yield make_dsn(**{**parameters, "host": folder}), counts
        listener.shutdown(socket.SHUT_RDWR)


def _in_thread(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _forward(
    source: socket.socket, target: socket.socket, counts: list[int] | None
) -> None:
    data = b""
    # The first message has no type.
    start = 0
    with source, target, contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK):
            target.sendall(chunk)
            if counts is None:
                continue
            data += chunk
            while len(data) >= start + 4:
                end = start + int.from_bytes(data[start : start + 4], "big")
                if len(data) < end:
                    break
                message, data = data[:end], data[end:]
                if message[:1] == b"Q" and start:
                    counts[0] += 1
                    counts[1] += len(
                        list(filter(bytes.strip, message[5:-1].split(b";")))
                    )
                start = 1


MEASURES: dict[str, Any] = {"writes": writes, "messages": messages}


if __name__ == "__main__":
    main(MEASURES)
