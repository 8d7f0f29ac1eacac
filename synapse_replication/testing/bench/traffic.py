"""What both sides are given: lines and a peer that sends them.

Nothing here needs more than the standard library: the real Synapse's side runs in
an environment without this package. As a program, it is the peer of a
direct TCP connection: ``python traffic.py SERVER_NAME ROWS`` prints its port,
takes one client, and sends it that many rows of ``events`` as fast as it reads.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SERVER_NAME = "bench.example"
STREAM = "events"
WRITER = "writer1"
READER = "reader1"
LINES_PER_WRITE = 500

__all__ = [
    "READER",
    "SERVER_NAME",
    "STREAM",
    "WRITER",
    "flat_out_peer",
    "make_generator_tables",
    "rdata_line",
    "row_of",
]


def row_of(token: int) -> list[object]:
    """Make a row of ``events`` as long as a real one."""
    event_id = f"${token:043d}"
    room_id = "!abcdefghijklmnopqr:bench.example"
    fields = [event_id, room_id, "m.room.message", *[None] * 4, False, False]
    return ["ev", fields]


def rdata_line(token: int) -> bytes:
    """Make the line of a row, without its end."""
    row = json.dumps(row_of(token), separators=(",", ":"))
    return f"RDATA {STREAM} {WRITER} {token} {row}".encode()


@contextmanager
def flat_out_peer(rows: int) -> Iterator[int]:
    """Run this file as the peer of a reader; give its port."""
    command = [sys.executable, __file__, SERVER_NAME, str(rows)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def make_generator_tables(dsn: str) -> None:
    """Make what an id generator of ``events`` works on, without any row."""
    # Only this needs the driver.
    import psycopg2

    connection = psycopg2.connect(dsn)
    with connection, connection.cursor() as cursor:
        cursor.execute(
            """
            CREATE TABLE stream_positions (
                stream_name TEXT NOT NULL,
                instance_name TEXT NOT NULL,
                stream_id BIGINT NOT NULL
            );
            CREATE UNIQUE INDEX stream_positions_idx
                ON stream_positions (stream_name, instance_name);
            CREATE TABLE events (stream_ordering BIGINT UNIQUE, instance_name TEXT);
            CREATE SEQUENCE events_stream_seq;
            """
        )
    connection.close()


def _serve(server_name: str, rows: int) -> None:
    chunks = [
        b"".join(
            rdata_line(token) + b"\n"
            for token in range(first, min(first + LINES_PER_WRITE, rows + 1))
        )
        for first in range(1, rows + 1, LINES_PER_WRITE)
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)  # noqa: T201 -- its answer
        client, _ = listener.accept()
    with client:
        client.sendall(f"SERVER {server_name}\nPING 1\n".encode())
        seen = b""
        while b"REPLICATE" not in seen:
            seen += client.recv(4096)
        client.sendall(f"POSITION {STREAM} {WRITER} 0 0\n".encode())
        for chunk in chunks:
            client.sendall(chunk)
        # Until the reader, who has what it wanted, goes.
        while client.recv(4096):
            pass


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
