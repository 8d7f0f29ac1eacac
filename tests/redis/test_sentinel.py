"""Tests for :mod:`synapse_replication.redis.sentinel`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionRefusedError
from twisted.internet.task import deferLater
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import (
    RedisOptions,
    RedisTlsOptions,
    SentinelOptions,
)
from synapse_replication.redis.resp import encode
from synapse_replication.redis.sentinel import MASTER_QUERY_INTERVAL
from synapse_replication.testing.certificates import PrivateAuthority
from synapse_replication.testing.server_binaries import find_redis, has_tls
from synapse_replication.testing.servers import RedisTls
from tests.redis.doubles import (
    Events,
    OrderedObserver,
    RecordingHandler,
    RecordingTransport,
)
from tests.redis.real_redis import RealRedisTestCase
from tests.support.sentinel import PrivateSentinel, private_replica

S1, S2 = ("s1", 26379), ("s2", 26379)
ADDRESS_QUERY = encode(b"SENTINEL", b"get-master-addr-by-name", b"mymaster")


def address_reply(host: bytes, port: bytes = b"6379") -> bytes:
    """Encode a Sentinel's answer with the address of the master."""
    return encode(host, port)


class SentinelTests(SynchronousTestCase):
    """Two Sentinels and both connections, on a reactor in memory."""

    def setUp(self) -> None:
        self.start(SentinelOptions("mymaster", (S1, S2)))

    def start(self, sentinel: SentinelOptions) -> None:
        self.reactor = MemoryReactorClock()
        self.events = Events()
        self.link = RedisReplicationLink(
            self.reactor,
            RedisOptions(password="hush", sentinel=sentinel),
            "hs",
            RecordingHandler(self.events),
            OrderedObserver(self.events),
            lambda count: None,
        )
        self.link.start()

    @property
    def host_ports(self) -> list[tuple[str, int]]:
        """The addresses that were connected to, in order."""
        return [(client[0], client[1]) for client in self.reactor.tcpClients]

    def accept(self, index: int) -> tuple[Any, RecordingTransport]:
        """Establish the connection of the attempt with this index."""
        factory = self.reactor.tcpClients[index][2]
        factory.doStart()
        protocol: Any = factory.buildProtocol(None)
        transport = RecordingTransport()
        protocol.makeConnection(transport)
        return protocol, transport

    def refuse(self, index: int) -> None:
        """Fail the attempt with this index."""
        self.reactor.tcpClients[index][2].clientConnectionFailed(
            self.reactor.connectors[index], Failure(ConnectionRefusedError())
        )

    def answer(self, index: int, reply: bytes) -> RecordingTransport:
        """Answer as the Sentinel to which the attempt with this index connects."""
        protocol, transport = self.accept(index)
        protocol.dataReceived(reply)
        self.assertTrue(transport.disconnecting)
        protocol.connectionLost(Failure(ConnectionDone()))
        return transport

    def find(self, host: bytes = b"r1") -> list[Any]:
        """Answer as the first Sentinel, and establish both connections."""
        self.answer(0, address_reply(host))
        self.assertEqual(self.host_ports[1:], [(host.decode(), 6379)] * 2)
        return [self.accept(1), self.accept(2)]

    def lose(self, index: int, protocol: Any) -> None:
        """Close the connection with this index from Redis's side."""
        reason = Failure(ConnectionDone())
        protocol.connectionLost(reason)
        connector = self.reactor.connectors[index]
        self.reactor.tcpClients[index][2].clientConnectionLost(connector, reason)

    def test_found(self) -> None:
        """One query resolves the address for both connections."""
        self.assertEqual(self.host_ports, [S1])
        transport = self.answer(0, address_reply(b"r1", b"7000"))
        self.assertEqual(transport.writes, [ADDRESS_QUERY])
        self.assertEqual(self.host_ports, [S1, ("r1", 7000), ("r1", 7000)])
        for index in (1, 2):
            _, transport = self.accept(index)
            self.assertIn(b"hush", transport.writes[0])

    def test_answer_in_pieces(self) -> None:
        """An answer may be split anywhere."""
        protocol, _ = self.accept(0)
        for byte in address_reply(b"r1"):
            protocol.dataReceived(bytes([byte]))
        self.assertEqual(self.host_ports[1:], [("r1", 6379)] * 2)

    def test_password_of_its_own(self) -> None:
        """A Sentinel gets its own user and password, never those of Redis."""
        self.start(SentinelOptions("mymaster", (S1,), "bob", "knock"))
        protocol, transport = self.accept(0)
        self.assertEqual(
            transport.writes, [encode(b"AUTH", b"bob", b"knock") + ADDRESS_QUERY]
        )
        protocol.dataReceived(b"+OK\r\n" + address_reply(b"r1"))
        self.assertEqual(self.host_ports[1:], [("r1", 6379)] * 2)

    def test_next_sentinel(self) -> None:
        """
        A Sentinel that is down or silent, or has no such master, is skipped; the one
        that answered last is queried first.
        """
        self.refuse(0)
        self.assertEqual(self.host_ports, [S1, S2])
        self.accept(1)
        self.reactor.advance(3)
        # Both Sentinels were queried: the factories retry.
        reasons = [e[2] for e in self.events.all if e[0] == "again"]
        self.assertEqual(len(reasons), 2)
        self.assertIn(
            "no Sentinel returned the address of the master 'mymaster'", reasons[0]
        )
        self.assertIn("s1:26379: ", reasons[0])
        self.assertIn("s2:26379: no answer within 3 s", reasons[0])
        self.reactor.advance(1)
        self.assertEqual(self.host_ports[2:], [S1])
        self.answer(2, b"*-1\r\n")
        self.assertEqual(self.host_ports[3:], [S2])
        self.answer(3, address_reply(b"r1"))
        self.assertEqual(self.host_ports[4:], [("r1", 6379)] * 2)
        # S2 answered, so that it is queried first.
        self.reactor.advance(MASTER_QUERY_INTERVAL)
        self.assertEqual(self.host_ports[6], S2)

    def test_useless_answers(self) -> None:
        """An invalid answer is reported with its reason, without the password."""
        for reply, why in (
            (b"-NOAUTH Authentication required.\r\n", "NOAUTH"),
            (b"-ERR unknown command 'SENTINEL'\r\n", "is the server a Sentinel"),
            (b"*-1\r\n", "the Sentinel does not monitor a master 'mymaster'"),
            (b"HTTP/1.1 400 Bad Request\r\n", "the server does not speak the Redis"),
            (b"*1\r\n$2\r\nr1\r\n", "the answer is not a host and a port"),
            (address_reply(b"r1", b"0"), "the answer is not a host and a port"),
            (b":1\r\n", "the answer is not a host and a port"),
            (b"$9999\r\n" + b"x" * 5000, "longer than 4096 bytes"),
        ):
            self.start(SentinelOptions("mymaster", (S1,), None, "knock"))
            protocol, _ = self.accept(0)
            protocol.dataReceived(b"+OK\r\n" + reply)
            self.assertIn(why, str(self.events.all))
            self.assertNotIn("knock", str(self.events.all))
            self.assertEqual(self.host_ports, [S1])

    def test_queried_again_after_loss(self) -> None:
        """
        After a loss, the Sentinel is queried again, and the new master is connected to.
        """
        (protocol, _), _ = self.find()
        self.lose(1, protocol)
        self.reactor.advance(1)
        self.assertEqual(self.host_ports[3:], [S1])
        self.answer(3, address_reply(b"r2"))
        self.assertEqual(self.host_ports[4:], [("r2", 6379)])

    def test_back_off(self) -> None:
        """
        While no Sentinel answers, queries are retried with back-off, without a limit.
        """
        for _ in range(600):
            self.reactor.advance(0.1)
            for index in range(len(self.host_ports)):
                if not self.reactor.connectors[index].stoppedConnecting:
                    self.reactor.connectors[index].stoppedConnecting = True
                    self.refuse(index)
        attempts = len(self.host_ports)
        # About every 5 s, both Sentinels are queried up to three times.
        self.assertGreater(attempts, 24)
        self.assertLess(attempts, 150)

    def test_followed(self) -> None:
        """If the master changes, working connections to the old one are aborted."""
        connections = self.find()
        for protocol, _ in connections:
            protocol.connection_established()
        self.reactor.advance(MASTER_QUERY_INTERVAL)
        self.answer(3, address_reply(b"r1"))
        self.assertFalse(any(t.aborted for _, t in connections))
        self.reactor.advance(MASTER_QUERY_INTERVAL)
        self.answer(4, address_reply(b"r2"))
        self.assertTrue(all(t.aborted for _, t in connections))
        for index, (protocol, _) in enumerate(connections, 1):
            self.lose(index, protocol)
        self.assertIn("a new master, r2:6379", str(self.events.all))
        self.reactor.advance(1)
        self.answer(5, address_reply(b"r2"))
        self.assertEqual(self.host_ports[6:], [("r2", 6379)] * 2)

    def test_check_fails(self) -> None:
        """If no Sentinel answers, that is reported, and connections stay open."""
        connections = self.find()
        self.reactor.advance(MASTER_QUERY_INTERVAL)
        self.refuse(3)
        self.refuse(4)
        self.assertEqual(
            self.events.all[-1][:2] + self.events.all[-1][3:],
            ("again", "redis_sentinel", MASTER_QUERY_INTERVAL),
        )
        self.assertFalse(any(t.aborted for _, t in connections))

    def test_stopped_during_query(self) -> None:
        """Stopping during a query leaves no timer and no attempt."""
        self.accept(0)
        self.successResultOf(Deferred.fromCoroutine(self.link.stop()))
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        self.assertEqual(self.host_ports, [S1])


class FailoverTests(RealRedisTestCase):
    """A real Sentinel promotes a real replica."""

    timeout = 60

    async def test_failover(self) -> None:
        """After the master is killed, both connections move to the new one."""
        await self.fail_over()

    async def test_failover_over_tls(self) -> None:
        """
        With TLS, client certificates and passwords, both connections move to the new
        master.
        """
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        authority = PrivateAuthority(folder)
        server, client = authority.issue("server"), authority.issue("client")
        await self.fail_over(
            password="hush",
            server=RedisTls(
                server.certificate, server.private_key, authority.certificate
            ),
            client=RedisTlsOptions(
                authority.certificate, client.certificate, client.private_key
            ),
        )

    async def test_split(self) -> None:
        """
        While two Sentinels name different masters, rows that are published at one do
        not arrive at the other; when they agree again, the writer moves within seconds,
        and its POSITION tells the reader what is missing.
        """
        old, new = self.start_redis(), self.start_redis()
        sentinels = [PrivateSentinel(master) for master in (old, new)]
        for sentinel in sentinels:
            self.addCleanup(sentinel.stop)
            sentinel.start()
        first, second = ((each.host, each.port) for each in sentinels)
        writer, reader = (
            self.start_peer(
                RedisOptions(sentinel=SentinelOptions("mymaster", order)),
                instance_name=name,
            )
            for name, order in (
                ("writer", (first, second)),
                ("reader", (second, first)),
            )
        )
        writer.handler.answer = lambda: writer.announce(0)
        reader.handler.waits_for_position = True
        await writer.wait_until_up()
        await reader.wait_until_up()
        writer.write(100)
        await writer.events.until(lambda: writer.handler.seen == 100)
        self.assertEqual(reader.handler.seen, 0)

        healed = self.reactor.seconds()
        sentinels[0].command("SENTINEL", "REMOVE", "mymaster")
        sentinels[0].command("SENTINEL", "MONITOR", "mymaster", new.host, new.port, "1")
        await reader.events.until(lambda: reader.handler.seen == 100)
        self.assertLess(self.reactor.seconds() - healed, 15)
        writer.write(100)
        await reader.events.until(lambda: reader.handler.seen == 200)
        self.assertEqual(reader.handler.gaps, [])

    async def fail_over(
        self,
        *,
        password: str | None = None,
        server: RedisTls | None = None,
        client: RedisTlsOptions | None = None,
    ) -> None:
        """Kill the master under load, and check that the replica takes over."""
        if server is not None and not has_tls(find_redis()):
            raise SkipTest(f"{find_redis()} was built without TLS")
        settings = {"repl-diskless-sync-delay": "0"}
        if password is not None:
            # The master becomes a replica when it restarts.
            settings["masterauth"] = password
        if server is not None:
            settings["tls-replication"] = "yes"
        master = self.start_redis(settings=settings, password=password, tls=server)
        replica = private_replica(master, tls=server)
        self.addCleanup(replica.stop)
        replica.start()
        sentinel = PrivateSentinel(master, password="knock", tls=server)
        self.addCleanup(sentinel.stop)
        sentinel.start()
        await self.until(sentinel.knows_replica)
        port = sentinel.tls_port if server else sentinel.port
        options = RedisOptions(
            password=password,
            tls=client,
            sentinel=SentinelOptions(
                "mymaster",
                # The first Sentinel does not exist.
                (("127.0.0.1", 1), (sentinel.host, port)),
                password="knock",
            ),
        )
        writer = self.start_peer(options)
        writer.handler.answer = lambda: writer.announce(0)
        reader = self.start_peer(options, instance_name="reader")
        reader.handler.waits_for_position = True
        await writer.wait_until_up()
        await reader.wait_for_event("received")
        writer.write(500)
        await reader.events.until(lambda: reader.handler.seen == 500)
        # Two connections of the peers and one of the Sentinel.
        self.assertEqual(len(master.clients("pubsub")), 3)

        started = self.reactor.seconds()
        master.kill()
        while not (
            writer.events.all.count("new_connection") == 2
            and reader.events.all.count("new_connection") == 2
            and writer.events.all.count(("made", "redis_out")) == 2
            and reader.events.all.count(("made", "redis_out")) == 2
        ):
            writer.write(20)
            await deferLater(self.reactor, 0.05, lambda: None)
        self.assertLess(self.reactor.seconds() - started, 30)
        writer.write(500)
        await self.until(lambda: reader.handler.seen == writer.token)
        self.assertEqual(reader.handler.gaps, [])
        self.assertGreater(writer.losses, 0)
        # Both connections of both peers are established.
        self.assertGreaterEqual(len(replica.clients("pubsub")), 2)
        commands = ("publish", "ping", "client|info")
        ours = [c for c in replica.clients("normal") if c["cmd"] in commands]
        self.assertGreaterEqual(len(ours), 2)
