"""This package's side of the benchmark: ``python -m ...ours TASK PARAMETERS``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import react

from synapse_replication.app.clock import BackgroundProcesses, ReactorClock
from synapse_replication.app.host import StandaloneHost
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import load_id_generator
from synapse_replication.storage.sequences import IdStream
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.registry import STANDARD_STREAMS
from synapse_replication.streams.table import IdColumn
from synapse_replication.tcp.factory import DirectTcpReplicationClientFactory
from synapse_replication.testing.bench.traffic import (
    READER,
    SERVER_NAME,
    STREAM,
    WRITER,
    flat_out_peer,
    make_generator_tables,
    rdata_line,
    row_of,
)
from synapse_replication.wire.batching import RdataRun, rdata_lines, read_lines

__all__ = ["MEASURES"]


def parse(lines: int) -> float:
    """Make typed rows of lines, in chunks of 500 as they come from a socket."""
    chunks = [
        [rdata_line(token) for token in range(first, first + 500)]
        for first in range(1, lines, 500)
    ]
    codec = STANDARD_STREAMS[STREAM].description.codec
    started = time.perf_counter()
    for chunk in chunks:
        for item in read_lines(chunk):
            assert isinstance(item, RdataRun)
            codec.decode(item.rows)
    return time.perf_counter() - started


def serialise(lines: int) -> float:
    """Make lines of typed rows."""
    codec = STANDARD_STREAMS[STREAM].description.codec
    rows = [codec.from_json(row_of(token)) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for first in range(0, lines, 500):
        chunk = rows[first : first + 500]
        batches = ((first + n, (codec.encode(row),)) for n, row in enumerate(chunk, 1))
        rdata_lines(STREAM, WRITER, batches)
    return time.perf_counter() - started


class CountingSink:
    """Counts rows up to a number, then fires."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done: Deferred[None] = Deferred()

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        self.wanted -= len(rows)
        if self.wanted == 0:
            self.done.callback(None)
        return None

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        return None


def _reader(reactor: Any, sink: CountingSink) -> ReplicationCommandHandler:
    observer = ReplicationObserver()
    host = StandaloneHost(
        Identity(SERVER_NAME, READER, "bench"),
        ReactorClock(reactor),
        observer,
        BackgroundProcesses(observer),
        stores_user_ips=False,
    )
    for standard in STANDARD_STREAMS.values():
        host.streams.add(
            MemoryStream(standard.description, instance_name=READER),
            is_written_here=False,
        )
    host.set_sink(sink)
    return ReplicationCommandHandler(host, observer)


def receive_tcp(rows: int) -> float:
    """Receive and handle rows over direct TCP, from connecting to the last row."""

    async def receive(reactor: Any) -> float:
        sink = CountingSink(rows)
        handler = _reader(reactor, sink)
        with flat_out_peer(rows) as port:
            factory = DirectTcpReplicationClientFactory(
                READER,
                SERVER_NAME,
                ReactorClock(reactor),
                handler,
                ReplicationObserver(),
            )
            started = time.perf_counter()
            reactor.connectTCP("127.0.0.1", port, factory)
            await sink.done
            seconds = time.perf_counter() - started
            await factory.stop()
        return seconds

    return run(receive)


def get_next(dsn: str, blocks: int, callers: int) -> float:
    """Allocate an id and finish it, by callers at a time; the positions are kept."""
    make_generator_tables(dsn)

    async def allocate(reactor: Any) -> float:
        # As many connections as the other side has.
        database = Database(dsn, reactor, max_connections=10)
        stream = IdStream(
            stream_name=STREAM,
            sequence="events_stream_seq",
            tables=(IdColumn("events", "stream_ordering", "instance_name"),),
            writers=(WRITER,),
        )
        generator = await load_id_generator(
            database, stream, WRITER, reactor, ReactorClock(reactor)
        )

        async def call(count: int) -> None:
            for _ in range(count):
                async with generator.get_next():
                    pass

        started = time.perf_counter()
        await gatherResults(
            [Deferred.fromCoroutine(call(blocks // callers)) for _ in range(callers)]
        )
        seconds = time.perf_counter() - started
        await database.close()
        return seconds

    return run(allocate)


def run(work: Callable[[Any], Coroutine[Any, Any, float]]) -> float:
    """Run work on the reactor of this process, which ends with it."""
    results: list[float] = []

    async def keep(reactor: Any) -> None:
        results.append(await work(reactor))

    try:
        react(lambda reactor: Deferred.fromCoroutine(keep(reactor)))
    except SystemExit as ended:
        if ended.code:
            raise
    return results[0]


#: Each does its work once and tells how many s it took.
MEASURES: dict[str, Callable[..., float]] = {
    "parse": parse,
    "serialise": serialise,
    "receive_tcp": receive_tcp,
    "get_next": get_next,
}


if __name__ == "__main__":
    result = MEASURES[sys.argv[1]](**json.loads(sys.argv[2]))
    json.dump(result, sys.stdout)
