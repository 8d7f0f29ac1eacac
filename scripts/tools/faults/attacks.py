"""Faults that a hostile or misconfigured peer causes, each for some seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice

from scripts.tools import hostile
from scripts.tools.faults.deployment import FaultDeployment
from synapse_replication.demo.deployment import SERVER_NAME, WRITERS

#: A position that no stream reaches.
FAR = 2**62

#: The longest duration of an attack, in s.
DURATION = 4.0


def attack_with_relay_storm(deployment: FaultDeployment, chance: random.Random) -> None:
    """Send commands that servers relay, to each writer."""
    for port in deployment.tcp_ports.values():
        hostile.relay_storm(port)


def attack_with_long_names(deployment: FaultDeployment, chance: random.Random) -> None:
    """Send very long names, over Redis or over direct TCP."""
    if deployment.redis is not None:
        port = deployment.redis.port
        for size, most in ((16_000, 1000), (2_000_000, 20)):
            names = hostile.long_names(size)
            hostile.publish(port, SERVER_NAME, names, DURATION / 2, most)
    for port in deployment.tcp_ports.values():
        names = hostile.long_names(16_000)
        hostile.send_lines(port, names, DURATION / len(WRITERS), 1000)


def attack_with_connections(deployment: FaultDeployment, chance: random.Random) -> None:
    """Open connections, some silent and some with invented names."""
    for port in deployment.tcp_ports.values():
        hostile.connect_with_names(port, 1000, DURATION / 8)
        hostile.connect_silently(port, 400, DURATION / 8)


def attack_with_bodies(deployment: FaultDeployment, chance: random.Random) -> None:
    """Send forms of 5 MiB to every process, without a secret."""
    for name in deployment.processes:
        hostile.post_bodies(deployment.socket_of(name), 5 << 20, 4, DURATION)


def _far_tokens() -> list[bytes]:
    lines = []
    for writer in ("event_writer1", "event_writer2"):
        lines += [
            f"POSITION events {writer} {FAR} {FAR}".encode(),
            f"POSITION events {writer} 0 {FAR}".encode(),
            f"RDATA events {writer} {FAR} ".encode() + b'["ev",["$e","!r:x","t",null]]',
        ]
    return lines


def attack_with_far_tokens(deployment: FaultDeployment, chance: random.Random) -> None:
    """Announce, in the names of writers, positions far beyond their real ones."""
    _publish(deployment, _far_tokens())


def attack_with_undeclared_writer(
    deployment: FaultDeployment, chance: random.Random
) -> None:
    """Announce positions as an instance that is not a writer."""
    _publish(
        deployment,
        [
            f"POSITION {stream} zz {FAR} {FAR}".encode()
            for stream in ("events", "receipts")
        ],
    )


def false_messages() -> tuple[tuple[str, Iterator[bytes], int], ...]:
    """Return kinds of false or invalid messages that may not affect any row.

    A forged restart of a writer is not among them: readers deliver its streams in
    memory again.

    :return: for each kind, the suffix of the channel, an endless sequence of messages,
        and how many to publish at a time.
    """
    extension = "/replication_ext"
    return (
        ("", cycle(_far_tokens()), 6),
        ("", hostile.made_up_writers(), 200),
        ("", hostile.long_names(16_000), 50),
        ("", hostile.long_names(2_000_000), 2),
        ("", hostile.large_rows(2_000_000), 2),
        ("", hostile.invalid_lines(), 50),
        ("", hostile.requests_for_positions(), 200),
        ("", hostile.server_up_lines(), 500),
        (extension, hostile.made_up_hellos(), 200),
        (extension, hostile.invalid_lines(), 50),
    )


def _publish(deployment: FaultDeployment, lines: list[bytes]) -> None:
    if deployment.redis is not None:
        port = deployment.redis.port
        hostile.publish(port, SERVER_NAME, lines * 20, DURATION)


def attack_with_http(deployment: FaultDeployment, chance: random.Random) -> None:
    """Inject rows and positions through each direct TCP port, as a web page could."""
    lines = [
        b"NAME w",
        b"POSITION typing typing_writer 0 900000",
        b'RDATA typing typing_writer 900001 ["!r:x",[]]',
        b"REPLICATE",
        *islice(hostile.server_up_lines(), 100),
    ]
    for port in deployment.tcp_ports.values():
        for _ in range(10):
            hostile.post_lines(port, lines)
