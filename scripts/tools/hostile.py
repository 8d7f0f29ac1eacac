"""Bounded input as from hostile, broken or misconfigured peers.

It is sent only to this machine.

All functions block. ``scripts/faults`` sends the input to a deployment under load and
checks every row; ``scripts/faults --costs`` measures the cost of the input.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, cycle, islice
from pathlib import Path

_LOCALHOST = "127.0.0.1"
_TIMEOUT = 5.0
#: The number of lines that are sent in one write.
_BATCH = 200
_STATUS_LINE = b"HTTP/1.1 "

#: Lines without line ends.
Lines = Iterable[bytes]


# -- input ----------------------------------------------------------------------------


def server_up_lines() -> Iterator[bytes]:
    """Yield an endless sequence of well-formed lines of small commands."""
    return (b"REMOTE_SERVER_UP s%d.example" % number for number in count())


def made_up_writers() -> Iterator[bytes]:
    """Yield positions of undeclared writers, each with a different name."""
    return (b"POSITION events ghost%d 0 7" % number for number in count())


def long_names(size: int) -> Iterator[bytes]:
    """Yield positions of writers with long names, each with a different name."""
    name = b"n" * size
    return (b"POSITION events %d%b 0 7" % (number, name) for number in count())


def gap_positions(start: int) -> Iterator[bytes]:
    """Yield positions of a declared writer, each after a gap."""
    for token in count(start, 2):
        yield b"POSITION events event_writer1 %d %d" % (token, token + 1)


def open_batches() -> Iterator[bytes]:
    """Yield rows of a declared writer whose batch never ends."""
    return (b'RDATA events event_writer1 batch ["ev",%d]' % n for n in count())


def gap_rows() -> Iterator[bytes]:
    """Yield rows of a stream held in memory, each after a gap."""
    for token in count(10**6, 2):
        yield b'RDATA typing typing_writer %d ["!r:x",[]]' % token


def forged_epochs() -> Iterator[bytes]:
    """Yield messages in which a writer appears to restart repeatedly."""
    for number in count():
        yield json.dumps(
            {
                "v": 1,
                "type": "heartbeat",
                "instance": "typing_writer",
                "epoch": f"forged{number}",
                "time": int(time.time() * 1000),
                "positions": {"typing": [1, int(time.time() * 1000)]},
            }
        ).encode()


def large_rows(size: int) -> Iterator[bytes]:
    """Yield rows of empty lists, and rows of one number, of a size in bytes."""
    while True:
        yield b"RDATA events event_writer1 7 [%b[]]" % (b"[]," * (size // 3))
        yield b"RDATA events event_writer1 7 [%b]" % (b"7" * size)


def invalid_lines() -> Iterator[bytes]:
    """Yield lines that no version of the protocol accepts."""
    return cycle(
        (
            b"",
            b"\xff\x00\x1b[2J",
            b"RDATA events",
            b"RDATA events event_writer1 seven [1]",
            b"RDATA events event_writer1 7 {",
            b"RDATA events event_writer1 7 " + b"[" * 5000,
            b"POSITION events event_writer1 -5 1e3",
            b'{"v": 1, "type": "heartbeat", "instance": 7}',
            b"POST / HTTP/1.1",
        )
    )


def requests_for_positions() -> Iterator[bytes]:
    """Yield requests for all positions."""
    while True:
        yield b"REPLICATE"


def made_up_hellos() -> Iterator[bytes]:
    """Yield the first messages of instances that do not exist."""
    for number in count():
        yield json.dumps(
            {
                "v": 1,
                "type": "hello",
                "instance": f"ghost{number}",
                "epoch": f"e{number}",
                "time": int(time.time() * 1000),
            }
        ).encode()


# -- sending --------------------------------------------------------------------------


def send_lines(port: int, lines: Lines, seconds: float, most: int = 10**9) -> int:
    """Send lines to a direct TCP listener, reconnecting if it closes the connection.

    :return: the number of sent lines.
    """
    sent = 0
    deadline = time.monotonic() + seconds
    source = iter(islice(lines, most))
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((_LOCALHOST, port), _TIMEOUT) as peer,
        ):
            peer.sendall(b"NAME stranger\n")
            while time.monotonic() < deadline:
                chunk = list(islice(source, _BATCH))
                if not chunk:
                    return sent
                peer.sendall(b"\n".join(chunk) + b"\n")
                sent += len(chunk)
    return sent


def relay_storm(port: int) -> None:
    """Send commands that servers relay, and wait 0.5 s."""
    with socket.create_connection((_LOCALHOST, port), _TIMEOUT) as peer:
        peer.sendall(b"NAME stranger\nREMOTE_SERVER_UP matrix.example.org\n")
        peer.sendall(b'LOCK_RELEASED ["stranger","lock","key"]\n')
        time.sleep(0.5)


def publish(
    port: int, channel: str, messages: Lines, seconds: float, most: int = 10**9
) -> int:
    """Publish messages on a channel of Redis, and return their number."""
    sent = 0
    deadline = time.monotonic() + seconds
    source = iter(islice(messages, most))
    with socket.create_connection((_LOCALHOST, port), _TIMEOUT) as redis:
        while time.monotonic() < deadline and (chunk := list(islice(source, _BATCH))):
            for message in chunk:
                parts = (b"PUBLISH", channel.encode(), message)
                redis.sendall(
                    b"*3\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)
                )
            answered = 0
            while answered < len(chunk):
                answered += redis.recv(65536).count(b"\n")
            sent += len(chunk)
    return sent


def connect_with_names(port: int, most: int, seconds: float) -> int:
    """Connect repeatedly, each time with another NAME.

    :return: the number of connections.
    """
    return _repeat(
        lambda number: _exchange(
            socket.create_connection((_LOCALHOST, port), _TIMEOUT),
            b"NAME ghost%d\n" % number,
        ),
        most,
        seconds,
    )


def connect_silently(port: int, most: int, seconds: float) -> int:
    """Open connections without sending anything, and return their number."""
    with contextlib.ExitStack() as stack:

        def connect(_: int) -> None:
            connection = socket.create_connection((_LOCALHOST, port), _TIMEOUT)
            stack.enter_context(connection)

        started = time.monotonic()
        opened = _repeat(connect, most, seconds)
        time.sleep(max(0.0, seconds - (time.monotonic() - started)))
        return opened


def post_lines(port: int, lines: Lines) -> bytes:
    """Post lines to a direct TCP listener as a web page does; return the response."""
    body = b"x\n" + b"\n".join(lines) + b"\n"
    request = (
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    return _exchange(socket.create_connection((_LOCALHOST, port), _TIMEOUT), request)


def post_bodies(path: Path, size: int, most: int, seconds: float) -> int:
    """Post forms to a process's HTTP socket, without a secret; return their number."""
    body = b"&".join(b"a%d=b" % number for number in range(size // 8))
    paths = ("/health", "/metrics", "/_synapse/replication/x", "/nothing")

    def post(number: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_TIMEOUT)
        connection.connect(str(path))
        head = (
            f"POST {paths[number % len(paths)]} HTTP/1.1\r\nHost: localhost\r\n"
            "Content-Type: application/x-www-form-urlencoded\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        _exchange(connection, head.encode() + body)

    return _repeat(post, most, seconds)


def get_often(path: Path, url: str, most: int, seconds: float) -> int:
    """Request a URL from a process's HTTP socket, often on the same connection.

    :return: the number of responses.
    """
    request = f"GET {url} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    deadline = time.monotonic() + seconds
    answered = 0
    while answered < most and time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
            peer.settimeout(_TIMEOUT)
            peer.connect(str(path))
            pending = min(_BATCH, most - answered)
            peer.sendall(request * pending)
            tail = b""
            while pending and (data := peer.recv(65536)):
                found = (tail + data).count(_STATUS_LINE)
                # A status line may be split over two reads.
                tail = data[1 - len(_STATUS_LINE) :]
                pending -= found
                answered += found
    return answered


def send_incomplete_requests(port: int, most: int, seconds: float) -> int:
    """Send the beginning of HTTP requests, and keep their connections open.

    :return: the number of connections.
    """
    with contextlib.ExitStack() as stack:

        def connect(_: int) -> None:
            connection = socket.create_connection((_LOCALHOST, port), _TIMEOUT)
            stack.enter_context(connection)
            connection.sendall(b"GET /health HTTP/1.1\r\n")

        started = time.monotonic()
        opened = _repeat(connect, most, seconds)
        time.sleep(max(0.0, seconds - (time.monotonic() - started)))
        return opened


def _repeat(act: Callable[[int], object], most: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    done = 0
    while done < most and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            act(done)
        done += 1
    return done


def _exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send data, and return the first bytes of the response."""
    with connection, contextlib.suppress(OSError):
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return connection.recv(65536)
    return b""
