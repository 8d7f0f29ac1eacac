"""The traffic for both sides: lines, and a peer that sends them.

It needs only the standard library, because the real Synapse's side runs in an
environment without this package. As a program, it has three commands: ``serve ROWS``
prints a port, accepts one direct TCP connection, and sends rows of ``events`` at full
speed; ``publish`` and ``count_rows`` are clients of Redis.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

SERVER_NAME = "bench.example"
STREAM = "events"
WRITER = "writer1"
READER = "reader1"
LINES_PER_WRITE = 500


def row_of(token: int) -> list[object]:
    """Return a row of ``events`` as long as a real one."""
    return _row(f"${token:043d}")


def timed_row(nanoseconds: int) -> list[object]:
    """Return a row that contains the time at which it was written."""
    return _row(f"${nanoseconds:043d}")


def _row(event_id: str) -> list[object]:
    room_id = "!abcdefghijklmnopqr:bench.example"
    fields = [event_id, room_id, "m.room.message", *[None] * 4, False, False]
    return ["ev", fields]


def rdata_line(token: int) -> bytes:
    """Return the line of a row, without its line end."""
    row = json.dumps(row_of(token), separators=(",", ":"))
    return f"RDATA {STREAM} {WRITER} {token} {row}".encode()


def received_bytes(rows: int) -> tuple[bytes, list[bytes]]:
    """Return the bytes that a client reads: a server's greeting, and chunks of rows."""
    greeting = f"SERVER {SERVER_NAME}\nPOSITION {STREAM} {WRITER} 0 0\n".encode()
    data = b"".join(rdata_line(token) + b"\n" for token in range(1, rows + 1))
    return greeting, [data[i : i + 65536] for i in range(0, len(data), 65536)]


@contextmanager
def flat_out_peer(rows: int) -> Iterator[int]:
    """Run this file as the peer of a reader, and yield its port."""
    command = [sys.executable, __file__, "serve", str(rows)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def user_ip_line(number: int) -> bytes:
    """Return the line of a USER_IP command."""
    data = json.dumps(
        ["secret", "10.1.2.3", "Element/1.11", "DEVICE", 1700000000000 + number],
        separators=(",", ":"),
    )
    return f"USER_IP @user{number % 100}:{SERVER_NAME} {data}".encode()


def _publish(channel: bytes, lines: Iterable[bytes]) -> bytes:
    head = b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$" % (len(channel), channel)
    return b"".join(b"%b%d\r\n%b\r\n" % (head, len(line), line) for line in lines)


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201 -- read by Child.answer()


def publish(port: int, kind: str, count: int) -> None:
    """Publish lines to Redis at full speed, once a line is read from standard input.

    :param kind: ``rows`` for a POSITION and rows, or ``user_ips``.
    """
    if kind == "rows":
        channel = SERVER_NAME.encode()
        lines = [f"POSITION {STREAM} {WRITER} 0 0".encode()]
        lines += map(rdata_line, range(1, count + 1))
    else:
        channel = f"{SERVER_NAME}/USER_IP".encode()
        lines = [user_ip_line(number) for number in range(count)]
    data = _publish(channel, lines)
    with socket.create_connection(("127.0.0.1", port)) as redis:
        _answer("ready")
        sys.stdin.readline()
        started = time.monotonic()
        reading = threading.Thread(target=_read_replies, args=(redis, len(lines)))
        reading.start()
        redis.sendall(data)
        reading.join()
        _answer({"started": started, "finished": time.monotonic()})
        # Wait until this process is killed.
        sys.stdin.readline()


def _read_replies(redis: socket.socket, count: int) -> None:
    while count > 0:
        count -= _received(redis, 65536).count(b"\n")


def _received(peer: socket.socket, size: int) -> bytes:
    data = peer.recv(size)
    if not data:
        # Without an error, the caller would wait for more data in a busy loop.
        raise ConnectionError("the peer closed the connection during the measurement")
    return data


def count_rows(port: int, count: int) -> None:
    """Subscribe to Redis with a plain socket; report when ``count`` rows arrived."""
    channel = SERVER_NAME.encode()
    mark = f"\r\nRDATA {STREAM} {WRITER} ".encode()
    with socket.create_connection(("127.0.0.1", port)) as redis:
        redis.sendall(
            b"*2\r\n$9\r\nSUBSCRIBE\r\n$%d\r\n%b\r\n" % (len(channel), channel)
        )
        redis.recv(65536)
        _answer("ready")
        data = b""
        while count > 0:
            data = data[1 - len(mark) :] + _received(redis, 1 << 20)
            count -= data.count(mark)
        _answer({"finished": time.monotonic()})


def serve(rows: int) -> None:
    """Serve one direct TCP connection, and send rows at full speed."""
    chunks = [
        b"".join(
            rdata_line(token) + b"\n"
            for token in range(first, min(first + LINES_PER_WRITE, rows + 1))
        )
        for first in range(1, rows + 1, LINES_PER_WRITE)
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)  # noqa: T201 -- the port
        client, _ = listener.accept()
    with client:
        client.sendall(f"SERVER {SERVER_NAME}\nPING 1\n".encode())
        seen = b""
        while b"REPLICATE" not in seen:
            seen += _received(client, 4096)
        client.sendall(f"POSITION {STREAM} {WRITER} 0 0\n".encode())
        for chunk in chunks:
            client.sendall(chunk)
        # Wait until the reader closes the connection.
        while client.recv(4096):
            pass


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        publish(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1] == "count_rows":
        count_rows(int(sys.argv[2]), int(sys.argv[3]))
    else:
        serve(int(sys.argv[2]))
