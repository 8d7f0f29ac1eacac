"""Tests of connections that stall, fail and reconnect, on a test clock."""

from __future__ import annotations

from twisted.internet.error import ConnectionRefusedError
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.factory import REPLY_TIMEOUT, SynapseRedisFactory
from synapse_replication.redis.options import RedisOptions
from synapse_replication.redis.resp import MAX_REPLY_LENGTH, encode
from tests.redis.doubles import MemoryLink

_PING = encode(b"PING")


def retries(memory: MemoryLink, name: str) -> list[tuple[str, float]]:
    """Return the reason and delay of each retry of a connection."""
    return [
        (event[2], event[3])
        for event in memory.events.all
        if event[:2] == ("again", name)
    ]


class KeepAliveTests(SynchronousTestCase):
    """
    Tests that a connection that is half-open in either direction is closed within 60 s.
    """

    def test_half_open(self) -> None:
        """
        A PING is sent after 30 s; without an answer, the link is aborted 30 s later.
        """
        for index, name in enumerate(("redis_out", "redis")):
            memory = MemoryLink()
            memory.establish()
            transport = memory.transports[index]
            memory.reactor.advance(30)
            self.assertEqual(transport.take(), [_PING])
            memory.reactor.pump([5] * 5)
            self.assertFalse(transport.aborted)
            memory.reactor.advance(5)
            self.assertTrue(transport.aborted)
            memory.lose(index)
            self.assertEqual(len(retries(memory, name)), 1)
            memory.reactor.advance(1)
            self.assertEqual(memory.reconnections, [index])

    def test_clock_steps(self) -> None:
        """
        After a clock step beyond all timeouts, a PING is sent and its answer awaited:
        Redis had no chance to answer before.
        """
        memory = MemoryLink()
        memory.establish()
        for _ in range(3):
            memory.reactor.advance(3600)
            for index, pong in enumerate(
                (b"+PONG\r\n", b"*2\r\n$4\r\npong\r\n$0\r\n\r\n")
            ):
                self.assertEqual(memory.transports[index].take(), [_PING])
                self.assertFalse(memory.transports[index].aborted)
                memory.deliver_data(index, pong)

    def test_clock_steps_in_the_handshake(self) -> None:
        """A clock step does not abort a handshake."""
        memory = MemoryLink(RedisOptions(password="hush"))
        memory.reactor.advance(3600)
        self.assertFalse(any(t.aborted for t in memory.transports))

    def test_alive(self) -> None:
        """
        A connection with answers stays open. A subscriber's answer is a list, and from
        other servers than Redis also a string.
        """
        memory = MemoryLink()
        memory.establish()
        for pong in (
            b"*2\r\n$4\r\npong\r\n$0\r\n\r\n",
            b"+PONG\r\n",
            b"$4\r\nPONG\r\n",
        ) * 3:
            memory.reactor.advance(30)
            memory.deliver_data(0, b"+PONG\r\n")
            memory.deliver_data(1, pong)
            self.assertEqual([t.take() for t in memory.transports], [[_PING]] * 2)
        self.assertFalse(any(t.aborted for t in memory.transports))

    def test_busy(self) -> None:
        """
        Only answers, not published messages, count as proof that sent data arrives.
        """
        memory = MemoryLink()
        memory.establish()
        for _ in range(59):
            memory.reactor.advance(1)
            memory.deliver_data(1, encode(b"message", b"hs", b"PING 1"))
        self.assertFalse(memory.transports[1].aborted)
        memory.reactor.advance(1)
        self.assertTrue(memory.transports[1].aborted)


class HandshakeTests(SynchronousTestCase):
    """Failures before a connection is established."""

    def test_auth_stalls(self) -> None:
        """If Redis does not answer AUTH, the connection is aborted and retried."""
        memory = MemoryLink(RedisOptions(password="hush"))
        memory.reactor.pump([10 / 6] * 5)
        self.assertFalse(any(t.aborted for t in memory.transports))
        memory.reactor.advance(10 / 6)
        for index, name in enumerate(("redis_out", "redis")):
            self.assertTrue(memory.transports[index].aborted)
            memory.lose(index)
            ((why, _),) = retries(memory, name)
            self.assertIn("no answer within 10 s", why)
            memory.connect(index)
            memory.deliver_data(index, b"+OK\r\n")
        memory.establish()
        self.assertIn("new_connection", memory.events.all)

    def test_auth_fails(self) -> None:
        """A refused password is reported without its value, and retried forever."""
        memory = MemoryLink(RedisOptions(password="hush"))
        for attempt in range(1, 6):
            memory.deliver_data(1, b"-WRONGPASS invalid username-password pair\r\n")
            self.assertTrue(memory.transports[1].disconnecting)
            memory.lose(1)
            self.assertEqual(len(retries(memory, "redis")), attempt)
            memory.reactor.advance(8)
            memory.connect(1)
        self.assertIn("WRONGPASS", retries(memory, "redis")[0][0])
        self.assertNotIn("hush", str(memory.events.all))
        memory.deliver_data(1, b"+OK\r\n")
        memory.establish()
        self.assertIn("new_connection", memory.events.all)

    def test_dropped_during_auth(self) -> None:
        """A connection that is lost during AUTH is retried."""
        memory = MemoryLink(RedisOptions(password="hush"))
        memory.lose(1)
        memory.lose(0)
        self.assertEqual(len(retries(memory, "redis")), 1)
        self.assertEqual(len(retries(memory, "redis_out")), 1)

    def test_password_missing(self) -> None:
        """
        If Redis requires a password and none is configured, the report states this.
        """
        memory = MemoryLink()
        for index in (0, 1):
            # The errors answer CLIENT INFO and PING, or SUBSCRIBE.
            memory.deliver_data(
                index, b"-NOAUTH Authentication required.\r\n" * (2 - index)
            )
            self.assertTrue(memory.transports[index].aborted)
            memory.lose(index)
        self.assertNotIn("failure", [event[0] for event in memory.events.all])
        self.assertIn("NOAUTH", retries(memory, "redis")[0][0])
        self.assertIn("NOAUTH", retries(memory, "redis_out")[0][0])

    def test_not_redis(self) -> None:
        """Another kind of server is recognised by its first answer."""
        memory = MemoryLink()
        memory.deliver_data(1, b"HTTP/1.1 400 Bad Request\r\n\r\n")
        self.assertTrue(memory.transports[1].aborted)
        memory.lose(1)
        self.assertIn(
            "does not speak the Redis protocol", retries(memory, "redis")[0][0]
        )

    def test_closed_immediately(self) -> None:
        """If the port closes without an answer, the report mentions TLS."""
        memory = MemoryLink()
        memory.lose(1)
        self.assertIn("TLS", retries(memory, "redis")[0][0])

    def test_refused(self) -> None:
        """A refused connection is reported and retried."""
        memory = MemoryLink()
        memory.lose(1)
        connector = memory.reactor.connectors[1]
        memory.factory(1).clientConnectionFailed(
            connector, Failure(ConnectionRefusedError())
        )
        self.assertIn("refused", retries(memory, "redis")[-1][0])

    def test_endless_reply(self) -> None:
        """A reply that is too long aborts the connection."""
        memory = MemoryLink()
        memory.establish()
        memory.deliver_data(1, b"$%d\r\n" % (2 * MAX_REPLY_LENGTH))
        for _ in range(MAX_REPLY_LENGTH // 2**20 + 1):
            memory.deliver_data(1, b"x" * 2**20)
        self.assertTrue(memory.transports[1].aborted)


class BackOffTests(SynchronousTestCase):
    """The delays between attempts."""

    def test_delays(self) -> None:
        """Delays grow to 5 s, and are reset by a confirmed subscription."""
        memory = MemoryLink()
        for attempt in range(30):
            memory.lose(1)
            # The reported delay is the actual one.
            _, delay = retries(memory, "redis")[-1]
            memory.reactor.advance(delay - 0.001)
            self.assertEqual(memory.reconnections.count(1), attempt)
            memory.reactor.advance(0.002)
            self.assertEqual(memory.reconnections.count(1), attempt + 1)
            memory.connect(1)
        delays = [delay for _, delay in retries(memory, "redis")]
        self.assertLessEqual(delays[0], 0.1)
        self.assertGreaterEqual(min(delays[6:]), 2.5)
        self.assertLessEqual(max(delays), 5)
        # With jitter, instances that lost Redis together do not reconnect together.
        self.assertGreater(len({round(delay, 3) for delay in delays[6:]}), 15)
        memory.establish()
        memory.lose(1)
        self.assertLessEqual(retries(memory, "redis")[-1][1], 0.1)

    def test_sending(self) -> None:
        """On the sending connection, delays are reset once a publish was answered."""
        memory = MemoryLink()
        for _ in range(10):
            memory.lose(0)
            memory.reactor.advance(5)
            memory.connect(0)
            memory.greet()
        self.assertGreater(retries(memory, "redis_out")[-1][1], 2)
        memory.link.sender.publish("REPLICATE", "hs", [b"REPLICATE "])
        memory.reactor.advance(0)
        memory.deliver_data(0, b":1\r\n")
        memory.lose(0)
        self.assertLess(retries(memory, "redis_out")[-1][1], 1)

    def test_stopped(self) -> None:
        """After a stop, nothing is retried and no timer remains."""
        memory = MemoryLink()
        memory.establish()
        closing = [memory.factory(index).close(3.0) for index in (0, 1)]
        self.assertTrue(all(t.disconnecting for t in memory.transports))
        for index in (0, 1):
            memory.lose(index)
        for closed in closing:
            self.successResultOf(closed)
        self.assertEqual(retries(memory, "redis"), [])
        self.assertEqual(memory.reactor.getDelayedCalls(), [])

    def test_stopped_while_waiting(self) -> None:
        """A stop cancels a retry that is scheduled."""
        memory = MemoryLink()
        memory.lose(1)
        memory.lose(0)
        for index in (0, 1):
            self.successResultOf(memory.factory(index).close(3.0))
        memory.reactor.advance(10)
        self.assertEqual(memory.reconnections, [])
        self.assertEqual(memory.reactor.getDelayedCalls(), [])

    def test_close_hangs(self) -> None:
        """A connection that does not close in time is aborted."""
        memory = MemoryLink()
        memory.establish()
        closed = memory.factory(1).close(3.0)
        memory.reactor.advance(3)
        self.assertTrue(memory.transports[1].aborted)
        memory.lose(1)
        self.successResultOf(closed)


class PoolTests(SynchronousTestCase):
    """:class:`SynapseRedisFactory`, used like txredisapi's own factories."""

    def test_no_reply_timeout(self) -> None:
        """A factory without a reply timeout has the default."""
        for without in (None, 0):
            factory = SynapseRedisFactory(
                "redis", None, 1, replyTimeout=without, clock=MemoryReactorClock()
            )
            self.assertEqual(factory.replyTimeout, REPLY_TIMEOUT)

    def test_handler(self) -> None:
        """
        The factory's handler has txredisapi's commands, which return decoded text.
        """
        clock = MemoryReactorClock()
        factory = SynapseRedisFactory("redis", None, 1, clock=clock)
        clock.connectTCP("redis", 6379, factory)
        protocol = factory.buildProtocol(None)
        protocol.makeConnection(StringTransport())
        protocol.dataReceived(b"+PONG\r\n")
        answer = factory.handler.get("key")
        protocol.dataReceived(b"$5\r\nvalue\r\n")
        self.assertEqual(self.successResultOf(answer), "value")
        protocol.transport.clear()
        clock.advance(30)
        self.assertEqual(protocol.transport.value(), _PING)
        protocol.dataReceived(b"+PONG\r\n")
        self.assertTrue(factory.continueTrying)
        factory.handler.disconnect()
        self.assertFalse(factory.continueTrying)
