"""The cost of a received row: ``python ours_growth.py MEASURE PARAMETERS``.

Each row passes from the bytes of a socket to the host's sink and positions, in one
process that does nothing else. Processor time is measured, because other processes
affect it less than elapsed time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from scripts.tools.bench.ours_host import CountingSink, Process, Source
from scripts.tools.bench.side import Counting, main
from scripts.tools.bench.traffic import (
    READER,
    SERVER_NAME,
    STREAM,
    WRITER,
    rdata_line,
)
from synapse_replication.streams.writer_positions import FIRST_POSITION, WriterPositions
from synapse_replication.tcp.protocol import ClientReplicationStreamProtocol
from synapse_replication.transport.buffers import DEFAULT_READ_SIZE

#: The number of rows if another quantity grows.
_ROWS = 100_000
#: The number of rows before the measurement, as a warm-up.
_WARM_UP = 5_000


class PositionedSource(Source):
    """A stream that tracks the positions of several writers as an id generator does."""

    def __init__(self, writers: Sequence[str]) -> None:
        super().__init__()
        self._writer_positions = WriterPositions(
            READER, tuple(writers), {}, [], FIRST_POSITION
        )

    def current_token(self, instance_name: str) -> int:
        return self._writer_positions.current_token(instance_name)

    def advance(self, instance_name: str, token: int) -> None:
        self._writer_positions.advance(instance_name, token)


class Transport(StringTransport):
    """A transport whose reads always return ``bufferSize`` bytes."""

    bufferSize = DEFAULT_READ_SIZE  # noqa: N815


def _read(waiting: bytearray, lines: Iterator[bytes], size: int) -> bytes:
    """Return the next ``size`` bytes of the lines; fewer at their end."""
    while len(waiting) < size and (line := next(lines, None)) is not None:
        waiting += line
    data = bytes(waiting[:size])
    del waiting[:size]
    return data


def _receive(
    sources: Sequence[Source],
    writers: Sequence[str],
    rows: int,
    line_of: Callable[[int], bytes],
) -> dict[str, float]:
    clock: Any = Clock()
    counting = Counting(rows + _WARM_UP)
    process = Process(clock, READER, CountingSink(counting), sources=sources)
    protocol = ClientReplicationStreamProtocol(
        READER, SERVER_NAME, process.clock, process.handler, process.observer
    )
    transport = Transport()
    protocol.makeConnection(transport)
    protocol.dataReceived(f"SERVER {SERVER_NAME}\n".encode())
    for source in sources:
        for writer in writers:
            line = f"POSITION {source.description.name} {writer} 1 1\n"
            protocol.dataReceived(line.encode())
            clock.advance(0)
    seconds = 0.0
    measured = 0
    waiting = bytearray()
    lines = (line_of(token) + b"\n" for token in range(2, rows + _WARM_UP + 2))
    while data := _read(waiting, lines, transport.bufferSize):
        count = data.count(b"\n")
        wanted = counting.wanted - count
        started = time.process_time()
        protocol.dataReceived(data)
        # Delivering a chunk takes a few iterations of the reactor. The limit ends the
        # loop if a row is not delivered.
        for _ in range(count):
            if counting.wanted == wanted:
                break
            clock.advance(0)
        if counting.wanted < rows:
            seconds += time.process_time() - started
            measured += count
    if counting.wanted:
        raise AssertionError(f"{counting.wanted} rows were not delivered")
    return {"microseconds": 1e6 * seconds / measured}


def rows(size: int) -> dict[str, float]:
    """Receive ``size`` rows."""
    return _receive([PositionedSource([WRITER])], [WRITER], size, rdata_line)


def streams(size: int) -> dict[str, float]:
    """Receive rows of ``size`` streams in turn."""
    sources = []
    for number in range(size):
        source = PositionedSource([WRITER])
        source.description = attrs.evolve(source.description, name=f"stream{number}")
        sources.append(source)

    def line_of(token: int) -> bytes:
        # Each stream has ids of its own.
        name = f"stream{(token - 2) % size}"
        line = rdata_line((token - 2) // size + 2)
        return line.replace(STREAM.encode(), name.encode(), 1)

    return _receive(sources, [WRITER], _ROWS, line_of)


def writers(size: int) -> dict[str, float]:
    """Receive rows of one stream from ``size`` writers in turn."""
    names = [f"writer{number}" for number in range(size)]

    def line_of(token: int) -> bytes:
        name = names[token % size]
        return rdata_line(token).replace(WRITER.encode(), name.encode(), 1)

    return _receive([PositionedSource(names)], names, _ROWS, line_of)


MEASURES: dict[str, Any] = {
    "rows": rows,
    "streams": streams,
    "writers": writers,
}


if __name__ == "__main__":
    main(MEASURES)
