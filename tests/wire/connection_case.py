"""Connections without a transport, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from synapse_replication.wire.connection import LineConnection

TLS_CLIENT_HELLO = bytes.fromhex("160301020001000001fc0303")


TLS_ALERT = bytes.fromhex("15030300020246")


def server(now: float = 0.0) -> LineConnection:
    connection = LineConnection("repl.test", now, is_server=True)
    connection.receive_data(b"NAME peer\n", now)
    return connection


def client() -> LineConnection:
    connection = LineConnection("repl.test", 0.0, is_server=False)
    connection.receive_data(b"SERVER repl.test\n", 0.0)
    return connection


def drain(connection: LineConnection) -> bytes:
    return b"".join(iter(connection.data_to_send, b""))


def run_ticks(
    connection: LineConnection,
    until: float,
    on_ping: Callable[[float], object] = lambda now: None,
) -> Iterator[float]:
    """Call ``tick``, and send a PING, whenever they are due; yield the times."""
    now = 0.0
    while now <= until and not connection.close_hangs:
        if connection.is_ping_due(now):
            connection.send_lines("PING", [b"PING 1"], now)
            on_ping(now)
        delay = connection.tick(now)
        yield now
        now += delay
