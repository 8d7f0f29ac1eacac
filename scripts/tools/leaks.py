"""Reconnects each kind of link many times, and compares what the process occupies.

Theory of operation: each kind of link is a coroutine function that starts a real server
and a link to it, and returns a cycle, which breaks the link and waits until it works
again. The links' own delays are shortened. The process is measured after a few cycles,
which fill caches, and at the end. What does not grow with the number of cycles cannot
leak, so a few hundred cycles are a test, and ten thousand are a proof.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import attrs
import click
from rich.console import Console
from rich.table import Table
from twisted.internet.defer import Deferred
from twisted.internet.task import react
from twisted.web.server import Site

from synapse_replication.handlers.host_parts import ReactorClock, StreamTable
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.location import InstanceLocation
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions, SentinelOptions
from synapse_replication.storage.database import Database
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from synapse_replication.testing.doubles import SourceStream
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis
from synapse_replication.wire.commands import PositionCommand
from tests.support.http_root import under_root
from tests.support.sentinel import PrivateSentinel

SERVER_NAME = "leaks.example"
#: The cycles before the first measurement.
WARM_UP = 150

Cycle: TypeAlias = Callable[[], Awaitable[object]]
Start: TypeAlias = Callable[[Any, contextlib.AsyncExitStack], Awaitable[Cycle]]


@attrs.frozen
class Census:
    """The resources that a process occupies.

    :ivar objects: the number of objects that the garbage collector tracks, by type.
    :ivar memory: the resident memory, in KiB.
    :ivar descriptors: the number of open file descriptors.
    :ivar delayed_calls: the number of pending delayed calls of the reactor.
    :ivar threads: the number of threads.
    """

    objects: Counter[str]
    memory: int
    descriptors: int
    delayed_calls: int
    threads: int

    def growth_since(self, before: Census) -> dict[str, int]:
        """Return by how much each number, and each count by type, has grown."""
        found = {
            name: getattr(self, name) - getattr(before, name)
            for name in ("memory", "descriptors", "delayed_calls", "threads")
        }
        return found | dict((self.objects - before.objects).most_common(5))


def take_census(reactor: Any) -> Census:
    """Collect garbage, and measure the process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Census(
        Counter(type(each).__qualname__ for each in gc.get_objects()),
        pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        len(os.listdir("/proc/self/fd")),
        len(reactor.getDelayedCalls()),
        threading.active_count(),
    )


class _Handler:
    """A handler that echoes a POSITION on each new connection.

    :ivar working: fires when the POSITION has arrived.
    """

    def __init__(self) -> None:
        self.working: Deferred[None] = Deferred()
        self._connection: Any = None

    def new_connection(self, connection: Any) -> None:
        self._connection = connection
        self.send_again(0)

    def send_again(self, lost: int) -> None:
        """Send the POSITION again: it may have been lost with the other connection."""
        if self._connection is not None:
            self._connection.send_command(PositionCommand("events", "writer", 1, 1))

    def received(self, connection: Any, items: Sequence[object]) -> None:
        working, self.working = self.working, Deferred()
        working.callback(None)

    def ready_again(self, connection: Any) -> None:
        """Do nothing."""

    def lost_connection(self, connection: Any) -> None:
        self._connection = None


async def _start_redis_link(
    reactor: Any, stack: contextlib.AsyncExitStack, redis: Any, options: RedisOptions
) -> Cycle:
    handler = _Handler()
    link = RedisReplicationLink(
        reactor,
        options,
        SERVER_NAME,
        handler,
        ReplicationObserver(),
        handler.send_again,
    )
    working = handler.working
    link.start()
    stack.push_async_callback(link.stop)
    await working

    def cycle() -> Deferred[None]:
        working = handler.working
        for kind in ("normal", "pubsub"):
            redis.command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        return working

    return cycle


async def reconnect_redis(reactor: Any, stack: contextlib.AsyncExitStack) -> Cycle:
    """Start a link to Redis, which closes both connections in each cycle."""
    redis = PrivateRedis().start()
    stack.callback(redis.stop)
    options = RedisOptions(host=redis.host, port=redis.port)
    return await _start_redis_link(reactor, stack, redis, options)


async def reconnect_sentinel(reactor: Any, stack: contextlib.AsyncExitStack) -> Cycle:
    """Start a link that asks Sentinel for the master in each cycle."""
    redis = PrivateRedis().start()
    stack.callback(redis.stop)
    sentinel = PrivateSentinel(redis).start()
    stack.callback(sentinel.stop)
    addresses = ((sentinel.host, sentinel.port),)
    options = RedisOptions(sentinel=SentinelOptions("mymaster", addresses))
    return await _start_redis_link(reactor, stack, redis, options)


async def reconnect_tcp(reactor: Any, stack: contextlib.AsyncExitStack) -> Cycle:
    """Start a direct TCP link, which its ends abort in turn."""
    clock, observer = ReactorClock(reactor), ReplicationObserver()
    handler, ends = _Handler(), [0]
    server = ReplicationStreamProtocolFactory(SERVER_NAME, clock, handler, observer)
    port = reactor.listenTCP(0, server, interface="127.0.0.1")
    client = DirectTcpReplicationClientFactory(
        "client", SERVER_NAME, clock, _Handler(), observer
    )
    working = handler.working
    reactor.connectTCP("127.0.0.1", port.getHost().port, client)
    stack.push_async_callback(_stop_tcp, client, port, server)
    await working

    def cycle() -> Deferred[None]:
        ends[0] += 1
        connection = server.connections[-1] if ends[0] % 2 else client.connection
        assert connection is not None
        working = handler.working
        connection.abort()
        return working

    return cycle


async def _stop_tcp(client: Any, port: Any, server: Any) -> None:
    await client.stop()
    await port.stopListening()
    await server.close_connections()


async def reconnect_http(reactor: Any, stack: contextlib.AsyncExitStack) -> Cycle:
    """Start a listener and a client, which connects for each request."""
    stream = SourceStream("events", _Row, instance_name="writer")
    stream.persist("writer", 1, ["row"])
    observer = ReplicationObserver()
    streams = StreamTable()
    streams.add(stream, is_written_here=True)
    resource = ReplicationResource(streams, "writer", "secret", observer)
    site: Any = Site(under_root(resource))  # type: ignore[no-untyped-call]
    site.log = lambda request: None
    port = reactor.listenTCP(0, site, interface="127.0.0.1")
    stack.push_async_callback(port.stopListening)
    locations = {"writer": InstanceLocation("127.0.0.1", port=port.getHost().port)}
    agent, pool = make_agent(reactor, locations)
    client = HttpCatchUpClient(agent, locations, "secret", reactor)

    async def cycle() -> None:
        page = await client.get_updates_since("events", "writer", 0, 1)
        assert len(page.updates) == 1, page
        await pool.closeCachedConnections()

    return cycle


async def reconnect_postgres(reactor: Any, stack: contextlib.AsyncExitStack) -> Cycle:
    """Start a pool whose connection PostgreSQL ends in each cycle."""
    postgres = PrivatePostgres().start()
    stack.callback(postgres.stop)
    database = Database(postgres.dsn(), reactor, max_connections=2)
    stack.push_async_callback(database.close)

    async def cycle() -> None:
        statements = ["SELECT 1", "SELECT pg_terminate_backend(pg_backend_pid())"]
        await database.transact("select", lambda txn: txn.execute(statements.pop()))

    return cycle


@attrs.frozen
class _Row:
    text: str


#: The kinds of links by name.
KINDS: Mapping[str, Start] = {
    "redis": reconnect_redis,
    "sentinel": reconnect_sentinel,
    "tcp": reconnect_tcp,
    "http": reconnect_http,
    "postgres": reconnect_postgres,
}


async def measure(reactor: Any, kind: str, cycles: int) -> tuple[Census, Census]:
    """Break and restore a link; return the measurements before and after.

    :param kind: a name in :data:`KINDS`.
    """
    with (
        mock.patch.object(SynapseRedisFactory, "initialDelay", 0.001),
        mock.patch.object(DirectTcpReplicationClientFactory, "initialDelay", 0.001),
    ):
        async with contextlib.AsyncExitStack() as stack:
            cycle = await KINDS[kind](reactor, stack)
            for _ in range(WARM_UP):
                await cycle()
            before = take_census(reactor)
            for _ in range(cycles):
                await cycle()
            return before, take_census(reactor)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, default=KINDS
)
@click.option("--cycles", type=int, default=10_000, show_default=True)
def main(kinds: Sequence[str], cycles: int) -> None:
    """Reconnect links many times, and show what the process occupies more than before.

    The exit status is 0 only if no kind of object has grown by a tenth of the number of
    cycles or more.
    """
    table = Table(title=f"After {cycles:,} reconnections, grown by")
    for heading in ("link", "memory, KiB", "descriptors", "delayed calls", "threads"):
        table.add_column(heading)
    table.add_column("objects, the most")
    leaks: list[str] = []

    async def run(reactor: Any) -> None:
        for kind in kinds:
            before, after = await measure(reactor, kind, cycles)
            growth = after.growth_since(before)
            numbers = [f"{growth.pop(name):+,}" for name in tuple(growth)[:4]]
            table.add_row(
                kind, *numbers, ", ".join(f"{n} {c}" for c, n in growth.items())
            )
            leaks.extend(c for c in growth if growth[c] * 10 >= cycles)

    with contextlib.suppress(SystemExit):
        react(lambda reactor: Deferred.fromCoroutine(run(reactor)))
    Console().print(table)
    sys.exit(bool(leaks) or not table.rows)


if __name__ == "__main__":
    main()
