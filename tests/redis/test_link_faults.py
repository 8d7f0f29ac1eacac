"""Tests for links to a real Redis with faults, or with TLS."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SkipTest

from synapse_replication.errors import ServerStartError
from synapse_replication.redis.options import RedisOptions, RedisTlsOptions
from synapse_replication.testing.certificates import PrivateAuthority
from synapse_replication.testing.server_binaries import find_redis, has_tls
from synapse_replication.testing.servers import (
    PrivateRedis,
    RedisTls,
)
from synapse_replication.wire.close_reason import CloseReason
from tests.redis.real_redis import (
    ClosingServer,
    Peer,
    RealRedisTestCase,
    SteppedReactor,
    by_port,
)
from tests.support.link_proxy import Cut, LinkProxy


class FaultTests(RealRedisTestCase):
    """Real faults of a real Redis: the link reconnects, and no row is skipped."""

    async def write_rounds(self, writer: Peer, rounds: int) -> None:
        """Write 20 rows in each round, with 2 ms between rounds."""
        for _ in range(rounds):
            writer.write(20)
            await deferLater(self.reactor, 0.002, lambda: None)

    async def test_restarted_under_load(self) -> None:
        """Redis restarts while rows are written; every gap is announced."""
        redis = self.start_redis()
        writer, reader = await self.start_pair(redis)
        await self.write_rounds(writer, 30)
        redis.kill()
        await self.write_rounds(writer, 10)
        redis.start()
        await writer.wait_until_up(2)
        await reader.wait_until_up(2)
        await self.write_rounds(writer, 30)
        await self.until(lambda: reader.handler.seen == writer.token)
        self.assertEqual(reader.handler.gaps, [])
        self.assertGreater(writer.losses, 0)

    async def start_pair(self, redis: PrivateRedis) -> tuple[Peer, Peer]:
        """Start a writer, and a reader that has received its position."""
        writer = self.start_peer(by_port(redis))
        writer.handler.answer = lambda: writer.announce(0)
        reader = self.start_peer(by_port(redis), instance_name="reader")
        reader.handler.waits_for_position = True
        await writer.wait_until_up()
        await reader.wait_for_event("received")
        return writer, reader

    async def test_outbound_only(self) -> None:
        """If only the sending connection is lost repeatedly, every gap is announced."""
        redis = self.start_redis()
        writer, reader = await self.start_pair(redis)
        for _ in range(5):
            made = writer.events.all.count(("made", "redis_out"))
            await self.write_rounds(writer, 3)
            writer.write(200)
            writer.sender.flush()
            redis.command("CLIENT", "KILL", "TYPE", "normal")
            await self.write_rounds(writer, 3)
            await writer.events.until(
                lambda made=made: (  # type: ignore[misc]
                    writer.events.all.count(("made", "redis_out")) > made
                )
            )
        await self.write_rounds(writer, 3)
        await self.until(lambda: reader.handler.seen == writer.token)
        self.assertEqual(reader.handler.gaps, [])
        self.assertEqual(reader.events.all.count("new_connection"), 1)

    async def test_slow_subscriber(self) -> None:
        """A subscriber that does not read is disconnected by Redis, and reconnects."""
        redis = self.start_redis(
            settings={"client-output-buffer-limit": "pubsub 200kb 0 0"}
        )
        writer = self.start_peer(by_port(redis))
        slow = self.start_peer(by_port(redis))
        await writer.wait_until_up()
        await slow.wait_until_up()
        transport: Any = slow.handler.connection.transport  # type: ignore[union-attr]
        transport.pauseProducing()
        line = b"RDATA events writer 1 [%b]" % (b"1," * 5000 + b"1")
        while len(redis.clients("pubsub")) == 2:
            writer.handler.connection.send_lines("RDATA", [line] * 100)  # type: ignore[union-attr]
            await writer.sender.drained()
            # The paused subscriber must not delay the writer's own copy.
            await deferLater(self.reactor, 0.001, lambda: None)
        transport.resumeProducing()
        await slow.wait_until_up(1)
        await slow.events.until(lambda: slow.events.all.count("new_connection") == 2)
        self.assertIn("lost_connection", slow.events.all)
        # The missed rows are announced to it, and later ones arrive.
        slow.handler.answer = lambda: None
        writer.announce(0)
        writer.write(100)
        await self.until(lambda: slow.handler.seen == writer.token)
        self.assertEqual(slow.handler.gaps, [])

    async def test_frozen(self) -> None:
        """Both connections detect a Redis that does not answer."""
        redis = self.start_redis()
        peer = self.start_peer(by_port(redis), interval=0.2)
        await peer.wait_until_up()
        redis.freeze()
        await peer.wait_for_event("lost", "'redis'", "TIMED_OUT")
        await peer.wait_for_event("lost", "'redis_out'", "TIMED_OUT")
        redis.thaw()
        await peer.wait_until_up(2)

    async def until_up(self, peers: Iterable[Peer]) -> None:
        """Wait until the last change of each link of each peer is that it was made."""

        def is_up() -> bool:
            last = {
                (peer.instance_name, event[1]): event[0]
                for peer in peers
                for event in peer.events.all
                if event[0] in ("made", "lost")
            }
            return all(change == "made" for change in last.values())

        await self.until(is_up)

    async def test_cut_in_one_direction(self) -> None:
        """A connection that is cut in either direction is replaced; no row is lost."""
        redis = self.start_redis()
        proxy = LinkProxy((redis.host, redis.port))
        self.addCleanup(proxy.close)
        cut_off = RedisOptions(host="127.0.0.1", port=proxy.port)
        writer = self.start_peer(cut_off, interval=0.3, handshake_timeout=0.3)
        writer.handler.answer = lambda: writer.announce(0)
        reader = self.start_peer(
            cut_off, instance_name="reader", interval=0.3, handshake_timeout=0.3
        )
        reader.handler.waits_for_position = True
        await writer.wait_until_up()
        await reader.wait_for_event("received")
        both = (writer, reader)
        for cut, name in (
            (Cut.PUBLISHES, "redis_out"),
            (Cut.REPLIES, "redis_out"),
            (Cut.SUBSCRIPTION, "redis"),
            (Cut.PINGS, "redis"),
        ):
            await self.write_rounds(writer, 3)
            # A process without CPU time may have lost a link that was not cut. While
            # the link is cut, it cannot be made again, so it would never be lost.
            await self.until_up(both)
            for peer in both:
                peer.events.all[:] = [("made", "redis"), ("made", "redis_out")]
            proxy.cut(cut)
            await self.write_rounds(writer, 3)
            # If publishes are cut, no later row is written, because it would reveal the
            # loss. If only PINGs are cut, rows that arrive must not hide the cut.
            while not all(
                any(event[:2] == ("lost", name) for event in peer.events.all)
                for peer in both
            ):
                await self.write_rounds(writer, 0 if cut is Cut.PUBLISHES else 3)
                await deferLater(self.reactor, 0.01, lambda: None)
            for peer in both:
                (reason, *_) = [
                    event[2] for event in peer.events.all if event[:2] == ("lost", name)
                ]
                self.assertEqual(reason, CloseReason.TIMED_OUT, cut)
            proxy.heal()
            await self.until_up(both)
            await deferLater(self.reactor, 0, lambda: None)
            await self.write_rounds(writer, 3)
            await self.until(lambda: reader.handler.seen == writer.token)
            self.assertEqual(reader.handler.gaps, [], cut)

    async def test_too_many_clients(self) -> None:
        """A connection refused because of ``maxclients`` is established later."""
        redis = self.start_redis(password="hush")
        redis.command("CONFIG", "SET", "maxclients", "1")
        other_client = self.reactor.connectTCP(
            redis.host, redis.port, ClientFactory.forProtocol(Protocol)
        )
        await self.until(lambda: other_client.state == "connected")
        peer = self.start_peer(by_port(redis, password="hush"))
        await peer.wait_for_event("again", "'redis'", "max number of clients")
        await peer.wait_for_event("again", "'redis_out'")
        other_client.disconnect()
        await self.until(lambda: self.raise_limit(redis))
        await peer.wait_until_up()

    def raise_limit(self, redis: PrivateRedis) -> bool:
        """Raise ``maxclients``, if a connection is possible."""
        try:
            return bool(redis.command("CONFIG", "SET", "maxclients", "100") == "OK")
        except OSError:
            return False

    async def test_password_corrected(self) -> None:
        """After Redis's password was corrected, both connections are established."""
        redis = self.start_redis(password="other")
        peer = self.start_peer(by_port(redis, password="hush"))
        await peer.wait_for_event("again", "'redis'", "WRONGPASS")
        await peer.wait_for_event("again", "'redis_out'", "WRONGPASS")
        self.assertNotIn("hush", str(peer.events.all))
        redis.command("CONFIG", "SET", "requirepass", "hush")
        await peer.wait_until_up()

    async def test_accepts_then_closes(self) -> None:
        """
        If a server closes each connection, with or without an answer, retries happen at
        the reported times only, with growing delays.
        """
        for answer in (b"", b"+PONG\r\n"):
            closing = ClosingServer(answer)
            port = self.reactor.listenTCP(0, closing, interface="127.0.0.1")
            clock = Clock()
            options = RedisOptions("127.0.0.1", port.getHost().port)
            peer = Peer(SteppedReactor(self.reactor, clock), options, "hs")
            for attempt in range(1, 9):
                delays = await self.wait_for_attempts(peer, attempt)
                self.assertEqual(closing.accepted, 2 * attempt)
                clock.advance(max(delays))
            self.assertGreaterEqual(min(await self.wait_for_attempts(peer, 9)), 2.5)
            await peer.link.stop()
            self.assertEqual(clock.getDelayedCalls(), [])
            await port.stopListening()

    async def wait_for_attempts(self, peer: Peer, attempt: int) -> list[float]:
        """
        Wait until both connections have failed this often; return their latest delays.
        """
        events = peer.events
        delays: list[float] = []
        for name in ("redis_out", "redis"):
            key = ("again", name)
            await events.until(
                lambda key=key: (  # type: ignore[misc]
                    sum(event[:2] == key for event in events.all) >= attempt
                )
            )
            delays.append([e[3] for e in events.all if e[:2] == key][-1])
        return delays

    async def test_stalling_server(self) -> None:
        """A server that does not answer AUTH is replaced by one that does."""
        redis = self.start_redis(password="hush")
        accepted: list[Any] = []

        class Silent(Protocol):
            def connectionMade(self) -> None:
                accepted.append(self)

        port = self.reactor.listenTCP(
            0, Factory.forProtocol(Silent), interface="127.0.0.1"
        )
        options = RedisOptions("127.0.0.1", port.getHost().port, password="hush")
        peer = self.start_peer(options, handshake_timeout=0.1)
        await peer.wait_for_event("again", "'redis'", "no answer")
        await peer.wait_for_event("again", "'redis_out'", "no answer")
        for silent in accepted:
            silent.transport.loseConnection()
        await port.stopListening()
        for factory in (peer.link._inbound, peer.link._outbound):
            connector: Any = factory.connector
            connector.port = redis.port
        await peer.wait_until_up()


class TlsTests(RealRedisTestCase):
    """TLS with client certificates on both connections."""

    def setUp(self) -> None:
        super().setUp()
        try:
            available = has_tls(find_redis())
        except ServerStartError as error:
            raise SkipTest(str(error)) from error
        if not available:
            raise SkipTest(
                f"{find_redis()} was built without TLS; install Debian's redis-server"
            )
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.authority = PrivateAuthority(self.folder)
        server = self.authority.issue("server")
        self.redis = self.start_redis(
            tls=RedisTls(
                server.certificate, server.private_key, self.authority.certificate
            )
        )
        client = self.authority.issue("client")
        self.tls = RedisTlsOptions(
            self.authority.certificate, client.certificate, client.private_key
        )

    def options(self, tls: RedisTlsOptions | None) -> RedisOptions:
        """Return options for the TLS port."""
        return RedisOptions(self.redis.host, self.redis.tls_port, tls=tls)

    async def test_tls(self) -> None:
        """Rows, including those published right before the stop, are sent over TLS."""
        reader = self.start_peer(self.options(self.tls))
        writer = Peer(self.reactor, self.options(self.tls), self.server_name)
        await reader.wait_until_up()
        await writer.wait_until_up()
        writer.write(5000)
        await writer.link.stop()
        await reader.events.until(lambda: reader.handler.seen == 5000)

    async def test_other_authority(self) -> None:
        """
        A server with an untrusted authority is refused; the report states the reason.
        """
        other = PrivateAuthority(self.folder, "other")
        peer = self.start_peer(self.options(RedisTlsOptions(other.certificate)))
        await peer.wait_for_event("again", "'redis'", "certificate verify failed")

    async def test_no_certificate(self) -> None:
        """If Redis requires a client certificate, the report states this."""
        peer = self.start_peer(
            self.options(RedisTlsOptions(self.authority.certificate))
        )
        for name in ("'redis'", "'redis_out'"):
            await peer.wait_for_event("again", name, "the peer requires a certificate")

    async def test_another_name(self) -> None:
        """A server certificate for another name is refused and reported."""
        options = attrs.evolve(self.tls, hostname="redis.example")
        peer = self.start_peer(self.options(options))
        for name in ("'redis'", "'redis_out'"):
            await peer.wait_for_event("again", name, "is not for redis.example")

    async def test_mismatch(self) -> None:
        """The report mentions TLS if only one end uses it."""
        plain = self.start_peer(self.options(None))
        await plain.wait_for_event("again", "'redis'", "TLS")
        wrong = self.start_peer(
            by_port(self.redis, tls=self.tls), handshake_timeout=0.5
        )
        await wrong.wait_for_event("again", "'redis'", "TLS")
