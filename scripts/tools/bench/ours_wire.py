"""Measures of lines and TCP in this package: ``ours_wire.py MEASURE PARAMETERS``."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Awaitable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransport

from scripts.tools.bench.ours_host import CountingSink, Process
from scripts.tools.bench.side import Counting, main, run
from scripts.tools.bench.traffic import (
    READER,
    SERVER_NAME,
    STREAM,
    WRITER,
    flat_out_peer,
    rdata_line,
    received_bytes,
    row_of,
)
from synapse_replication.handlers.command_handler import HandlerOptions
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.streams.rows import encode_json_rows
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.tcp.factory import DirectTcpReplicationClientFactory
from synapse_replication.tcp.protocol import ClientReplicationStreamProtocol
from synapse_replication.wire.commands import (
    RdataCommand,
    parse_command_from_line,
)
from synapse_replication.wire.rdata import RdataGroup, rdata_lines, read_lines


def parse_commands(lines: int) -> dict[str, float]:
    """Parse lines into commands, whose rows are JSON values."""
    read = [rdata_line(token) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for line in read:
        parse_command_from_line(line.decode())
    return {"seconds": time.perf_counter() - started}


def parse(lines: int) -> dict[str, float]:
    """Parse lines into typed rows, in chunks of 500 as from a socket."""
    chunks = [
        [rdata_line(token) for token in range(first, first + 500)]
        for first in range(1, lines, 500)
    ]
    codec = STANDARD_STREAMS[STREAM].description.codec
    started = time.perf_counter()
    for chunk in chunks:
        for item in read_lines(chunk):
            assert isinstance(item, RdataGroup)
            codec.decode(item.rows)
    return {"seconds": time.perf_counter() - started}


def serialise(lines: int) -> dict[str, float]:
    """Encode JSON values as lines of rows, 500 at a time as a streamer does."""
    rows = [row_of(token) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for first in range(0, lines, 500):
        texts = encode_json_rows(rows[first : first + 500])
        batches = [(token, (text,)) for token, text in enumerate(texts, first + 1)]
        rdata_lines(STREAM, WRITER, batches)
    return {"seconds": time.perf_counter() - started}


def serialise_commands(lines: int) -> dict[str, float]:
    """Encode JSON values as lines of rows, one command at a time."""
    rows = [row_of(token) for token in range(1, lines + 1)]
    started = time.perf_counter()
    for token, row in enumerate(rows, 1):
        RdataCommand(STREAM, WRITER, token, row).encode()
    return {"seconds": time.perf_counter() - started}


def receive_tcp(rows: int) -> dict[str, float]:
    """Receive and handle rows over direct TCP, from connecting to the last row."""

    async def receive(reactor: Any) -> dict[str, float]:
        counting = Counting(rows)
        process = Process(reactor, READER, CountingSink(counting))
        with flat_out_peer(rows) as port:
            factory = DirectTcpReplicationClientFactory(
                READER, SERVER_NAME, process.clock, process.handler, process.observer
            )
            started = time.monotonic()
            reactor.connectTCP("127.0.0.1", port, factory)
            await counting.done
            await factory.stop()
        return {"seconds": counting.finished - started}

    result: dict[str, float] = run(receive)
    return result


class StuckSink:
    """A sink that never finishes handling its first row."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        return Deferred()

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        return None


def memory(rows: int) -> dict[str, float]:
    """Measure the memory of queued rows that arrived over TCP."""
    from twisted.internet import reactor  # noqa: TID251 -- this is a program

    # Queue as many rows as the other side; by default, rows beyond the bound would be
    # dropped and fetched later.
    options = HandlerOptions(receiver=ReceiverOptions(max_queue_size=1 << 30))
    process = Process(reactor, READER, StuckSink(), options=options)
    protocol = ClientReplicationStreamProtocol(
        READER, SERVER_NAME, process.clock, process.handler, process.observer
    )
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
    "serialise": serialise,
    "serialise_commands": serialise_commands,
    "receive_tcp": receive_tcp,
    "memory": memory,
}


if __name__ == "__main__":
    main(MEASURES)
