"""Measures of lines and TCP in stock Synapse: ``stock_wire.py MEASURE PARAMETERS``.

See ``stock_host.py``.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

from side import Counting, main, run
from stock_host import CountingDataHandler, Process
from synapse.replication.tcp.commands import RdataCommand, parse_command_from_line
from synapse.replication.tcp.protocol import ClientReplicationStreamProtocol
from synapse.replication.tcp.streams import EventsStream
from traffic import (
    READER,
    SERVER_NAME,
    STREAM,
    WRITER,
    flat_out_peer,
    rdata_line,
    received_bytes,
    row_of,
)
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ClientFactory
from twisted.internet.testing import StringTransport


def parse_commands(lines: int) -> dict[str, float]:
    """Parse lines into commands, whose rows are JSON values."""
    read = [rdata_line(token) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for line in read:
        parse_command_from_line(line.decode("utf-8"))
    return {"seconds": time.perf_counter() - started}


def parse(lines: int) -> dict[str, float]:
    """Parse lines into typed rows, in chunks of 500 as from a socket."""
    chunks = [
        [rdata_line(token) for token in range(first, first + 500)]
        for first in range(1, lines, 500)
    ]
    started = time.perf_counter()
    for chunk in chunks:
        for line in chunk:
            command = parse_command_from_line(line.decode("utf-8"))
            EventsStream.parse_row(command.row)
    return {"seconds": time.perf_counter() - started}


def serialise(lines: int) -> dict[str, float]:
    """Encode JSON values as lines of rows, one command at a time."""
    rows = [row_of(token) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for token, row in enumerate(rows, 1):
        command = RdataCommand(STREAM, WRITER, token, row)
        f"{command.NAME} {command.to_line()}".encode()
    return {"seconds": time.perf_counter() - started}


def _protocol(process: Process) -> Any:
    return ClientReplicationStreamProtocol(
        process.hs, READER, SERVER_NAME, process.hs.get_clock(), process.handler
    )


def receive_tcp(rows: int) -> dict[str, float]:
    """Receive and handle rows over direct TCP, from connecting to the last row."""

    async def receive(reactor: Any) -> dict[str, float]:
        counting = Counting(rows)
        process = Process(reactor, READER, CountingDataHandler(counting))

        class Factory(ClientFactory):
            def buildProtocol(self, address: object) -> Any:
                return _protocol(process)

        with flat_out_peer(rows) as port:
            started = time.monotonic()
            connector = reactor.connectTCP("127.0.0.1", port, Factory())
            await counting.done
            connector.disconnect()
        return {"seconds": counting.finished - started}

    result: dict[str, float] = run(receive)
    return result


class StuckDataHandler(CountingDataHandler):
    """A data handler that never finishes handling its first row."""

    async def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        await Deferred()


def memory(rows: int) -> dict[str, float]:
    """Measure the memory of queued rows that arrived over TCP."""
    from twisted.internet import reactor  # noqa: TID251 -- it only gives the time

    process = Process(reactor, READER, StuckDataHandler(Counting(0)))
    protocol = _protocol(process)
    protocol.makeConnection(StringTransport())
    greeting, data = received_bytes(rows)
    protocol.dataReceived(greeting)
    tracemalloc.start()
    for chunk in data:
        protocol.dataReceived(chunk)
    used, _ = tracemalloc.get_traced_memory()
    return {"bytes": used / rows}


#: The measures by name. Each performs its work once, and returns the result.
MEASURES: dict[str, Any] = {
    "parse": parse,
    "parse_commands": parse_commands,
    # Synapse encodes only single commands, so both measures are the same.
    "serialise": serialise,
    "serialise_commands": serialise,
    "receive_tcp": receive_tcp,
    "memory": memory,
}


if __name__ == "__main__":
    main(MEASURES)
