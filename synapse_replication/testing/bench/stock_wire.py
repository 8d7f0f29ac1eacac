"""A real Synapse's side: ``python stock.py TASK PARAMETERS``, in its environment.

Drives public classes of an installed Synapse. What they ask of a homeserver
object and the tasks do not use is answered by a stand-in that costs them nothing;
where rows end, this counts them, as on our side.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parent))

from psycopg2.extensions import parse_dsn
from synapse.config.database import DatabaseConnectionConfig
from synapse.metrics.background_process_metrics import run_as_background_process
from synapse.replication.tcp.commands import RdataCommand, parse_command_from_line
from synapse.replication.tcp.handler import ReplicationCommandHandler
from synapse.replication.tcp.protocol import ClientReplicationStreamProtocol
from synapse.storage.database import DatabasePool, make_conn
from synapse.storage.engines import create_engine
from synapse.storage.util.id_generators import MultiWriterIdGenerator
from synapse.util.clock import Clock
from traffic import (
    READER,
    SERVER_NAME,
    STREAM,
    WRITER,
    flat_out_peer,
    make_generator_tables,
    rdata_line,
    row_of,
)
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import ClientFactory
from twisted.internet.task import react

__all__ = ["MEASURES"]


def parse(lines: int) -> float:
    """Make commands of lines; the rows in them stay lists."""
    read = [rdata_line(token) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for line in read:
        parse_command_from_line(line.decode("utf-8"))
    return time.perf_counter() - started


def serialise(lines: int) -> float:
    """Make lines of rows."""
    rows = [row_of(token) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for token, row in enumerate(rows, 1):
        command = RdataCommand(STREAM, WRITER, token, row)
        f"{command.NAME} {command.to_line()}".encode()
    return time.perf_counter() - started


class CountingDataHandler:
    """Counts rows up to a number, then fires; keeps positions."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.positions: dict[str, int] = {}
        self.done: Deferred[None] = Deferred()

    async def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        self.positions[instance_name] = token
        self.wanted -= len(rows)
        if self.wanted == 0:
            self.done.callback(None)

    async def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self.positions[instance_name] = token


def _homeserver(reactor: Any, data_handler: CountingDataHandler) -> Any:
    hs = MagicMock()
    hs.hostname = SERVER_NAME
    hs.get_instance_name.return_value = READER
    hs.get_reactor.return_value = reactor
    hs.get_clock.return_value = Clock(reactor, server_name=SERVER_NAME)
    hs.get_replication_data_handler.return_value = data_handler
    hs.config.redis.redis_enabled = False
    hs.config.worker.writers.events = [WRITER]

    def run_in_background(
        description: str, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return run_as_background_process(
            description, SERVER_NAME, func, *args, **kwargs
        )

    hs.run_as_background_process = run_in_background
    return hs


def receive_tcp(rows: int) -> float:
    """Receive and handle rows over direct TCP, from connecting to the last row."""

    async def receive(reactor: Any) -> float:
        data_handler = CountingDataHandler(rows)
        hs = _homeserver(reactor, data_handler)
        handler = ReplicationCommandHandler(hs)
        positions = data_handler.positions
        handler.get_streams()[STREAM].current_token = lambda name: positions.get(
            name, 0
        )

        class Factory(ClientFactory):
            def buildProtocol(self, address: object) -> Any:
                return ClientReplicationStreamProtocol(
                    hs, READER, SERVER_NAME, hs.get_clock(), handler
                )

        with flat_out_peer(rows) as port:
            started = time.perf_counter()
            connector = reactor.connectTCP("127.0.0.1", port, Factory())
            await data_handler.done
            seconds = time.perf_counter() - started
            connector.disconnect()
        return seconds

    return run(receive)


def get_next(dsn: str, blocks: int, callers: int) -> float:
    """Allocate an id and finish it, by callers at a time; the positions are kept."""
    arguments = parse_dsn(dsn)
    options = {"name": "psycopg2", "args": {**arguments, "cp_min": 5, "cp_max": 10}}
    make_generator_tables(dsn)

    async def allocate(reactor: Any) -> float:
        hs = _homeserver(reactor, CountingDataHandler(0))
        config = DatabaseConnectionConfig("master", options)
        engine = create_engine(options)
        pool = DatabasePool(hs, config, engine)
        connection = make_conn(
            db_config=config,
            engine=engine,
            default_txn_name="bench",
            server_name=SERVER_NAME,
        )
        generator = MultiWriterIdGenerator(
            db_conn=connection,
            db=pool,
            notifier=MagicMock(),
            stream_name=STREAM,
            server_name=SERVER_NAME,
            instance_name=WRITER,
            tables=[("events", "instance_name", "stream_ordering")],
            sequence_name="events_stream_seq",
            writers=[WRITER],
        )
        connection.close()

        async def call(count: int) -> None:
            for _ in range(count):
                async with generator.get_next():
                    pass

        started = time.perf_counter()
        await gatherResults(
            [Deferred.fromCoroutine(call(blocks // callers)) for _ in range(callers)]
        )
        return time.perf_counter() - started

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
