"""Tests for synapse_replication.app.passive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet import reactor  # noqa: TID251 -- a real Redis is waited for
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.trial.unittest import SynchronousTestCase, TestCase

from synapse_replication.app.passive import (
    Follower,
    PassiveRedisLink,
    PassiveTcpLink,
    _TappedParser,
)
from synapse_replication.app.stop_steps import DRAIN_TIMEOUT
from synapse_replication.config.process import load_config
from synapse_replication.errors import ConfigError
from synapse_replication.handlers.events import LinkUp
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.redis.options import RedisOptions, SentinelOptions
from synapse_replication.redis.resp import ReplyParser, encode
from synapse_replication.testing.servers import PrivateRedis, shared_redis
from synapse_replication.transport.reactor import as_reactor
from tests.support.sentinel import PrivateSentinel


class PassiveDirectTcpLinkTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.seen: list[tuple[str, bytes]] = []
        factory = PassiveTcpLink(
            "follow",
            "x.test",
            ReactorClock(self.clock, lambda: 7.0),
            ReplicationObserver(),
            lambda channel, line: self.seen.append((channel, line)),
        )
        self.protocol = factory.buildProtocol(None)
        self.transport = StringTransport()
        self.protocol.makeConnection(self.transport)

    def sent(self) -> list[bytes]:
        value = self.transport.value()
        self.transport.clear()
        return [line.split()[0] for line in value.splitlines()]

    def test_sends_only_name_ping_and_error(self) -> None:
        """Only NAME, PING and ERROR are ever sent, whatever is received."""
        self.protocol.dataReceived(
            b"SERVER x.test\nPING 1\nPOSITION events w 1 9\nREMOTE_SERVER_UP h\n"
            b"REPLICATE\nRDATA events w x y\n"
        )
        for _ in range(20):
            self.clock.advance(1)
            self.protocol.dataReceived(b"PING 1\n")
        self.assertEqual(set(self.sent()) - {b"ERROR"}, {b"NAME", b"PING"})

    def test_sees_lines_in_order(self) -> None:
        """Each line is reported once and unchanged, wherever the network splits it."""
        data = (
            b'SERVER x.test\nPOSITION a w 1 2\n\r\nRDATA b w 3 ["\xc3\xa9"]\r\nPING 1\n'
        )
        for split in range(len(data)):
            self.setUp()
            self.protocol.dataReceived(data[:split])
            self.protocol.dataReceived(data[split:])
            self.assertEqual(
                self.seen,
                [
                    ("x.test", b"SERVER x.test"),
                    ("x.test", b"POSITION a w 1 2"),
                    ("x.test", b'RDATA b w 3 ["\xc3\xa9"]'),
                    ("x.test", b"PING 1"),
                ],
            )


class PassiveRedisLinkTests(TestCase):
    timeout = 30

    async def test_publishes_nothing(self) -> None:
        """
        The link receives both channels exactly as published, and publishes nothing.
        """
        redis = shared_redis()
        redis.command("CONFIG", "RESETSTAT")
        await self.check_link(redis, RedisOptions(redis.host, redis.port))
        self.assertIn("cmdstat_publish:calls=4,", redis.command("INFO", "commandstats"))

    async def test_sentinel(self) -> None:
        """With Sentinel, the link is to the master, whatever ``host`` and ``port``."""
        redis = PrivateRedis()
        self.addCleanup(redis.stop)
        redis.start()
        sentinel = PrivateSentinel(redis)
        self.addCleanup(sentinel.stop)
        sentinel.start()
        addresses = ((sentinel.host, sentinel.port),)
        options = RedisOptions(
            "nowhere.invalid",
            1,
            sentinel=SentinelOptions("mymaster", addresses),
        )
        await self.check_link(redis, options)

    async def check_link(self, redis: PrivateRedis, options: RedisOptions) -> None:
        """Publish lines on two channels, and check that a link receives them."""
        seen: list[tuple[str, bytes]] = []
        all_seen: Deferred[None] = Deferred()

        def record(channel: str, line: bytes) -> None:
            seen.append((channel, line))
            if len(seen) == 3:
                all_seen.callback(None)

        class Subscribed(ReplicationObserver):
            def __init__(self) -> None:
                self.up: Deferred[None] = Deferred()

            @handles(LinkUp)
            def _link_up(self, event: LinkUp) -> None:
                self.up.callback(None)

        observer = Subscribed()
        link = PassiveRedisLink(
            as_reactor(reactor),
            options,
            "follow.test",
            record,
            observer,
        )
        link.start()
        await observer.up
        redis.command("PUBLISH", "follow.test", "POSITION events w 1 2 ")
        redis.command("PUBLISH", "follow.test/USER_IP", "not even a command")
        redis.command("PUBLISH", "other.test", "PING 1")
        redis.command("PUBLISH", "follow.test", "REPLICATE ")
        await all_seen
        await link.stop()
        self.assertEqual(
            seen,
            [
                ("follow.test", b"POSITION events w 1 2 "),
                ("follow.test/USER_IP", b"not even a command"),
                ("follow.test", b"REPLICATE "),
            ],
        )


class FollowerTests(TestCase):
    async def test_invalid_tls_file(self) -> None:
        """An invalid file of the Redis TLS options is a problem of ``redis``."""
        authority, path = Path(self.mktemp()), Path(self.mktemp())
        authority.write_text("garbage")
        path.write_text(
            "server_name: x.test\n"
            f"redis: {{enabled: true, use_tls: true, ca_file: {authority}}}\n"
        )
        config = load_config([str(path)], "follow")
        ended: list[str] = []
        follower = Follower(
            config,
            as_reactor(reactor),
            "follow",
            lambda *_: None,
            lambda: ended.append("finish"),
            lambda: ended.append("begin"),
        )
        with self.assertRaises(ConfigError) as caught:
            follower.startService()
        (problem,) = caught.exception.problems
        self.assertEqual((problem.file, problem.key), (str(path), "redis"))
        self.assertIn(str(authority), problem.problem)
        await follower.stopService()
        self.assertEqual(ended, ["begin", "finish"])

    def test_output_that_does_not_finish(self) -> None:
        """If the output does not finish in time, the stop ends, and says so."""
        path = Path(self.mktemp())
        path.write_text(
            "server_name: x.test\nworker_replication_host: 127.0.0.1\n"
            "worker_replication_port: 9092\n"
        )
        clock: Any = MemoryReactorClock()
        follower = Follower(
            load_config([str(path)], "follow"),
            clock,
            "follow",
            lambda *_: None,
            Deferred,
        )
        follower.startService()
        stopping = follower.stopService()
        clock.pump([DRAIN_TIMEOUT] * 2)
        self.successResultOf(stopping)
        self.assertIn("finishing the output", follower.unfinished)


class TappedParserTests(SynchronousTestCase):
    def test_chunk_that_looks_like_a_large_array(self) -> None:
        """
        All messages of a chunk are passed on, even if one begins like the header of a
        large array, before which the parser divides the chunk.
        """
        seen: list[bytes] = []
        reader = _TappedParser(ReplyParser(), lambda _, line: seen.append(line))
        lines = [b"RDATA one", b"\r\n*1234\r\n", b"RDATA two"]
        reader.feed(b"".join(encode(b"message", b"c", line) for line in lines))
        while reader.gets() is not False:
            pass
        self.assertEqual(seen, lines)
