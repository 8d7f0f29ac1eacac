"""Tests of publishing: the times of writes, and the detection of lost publishes."""

from __future__ import annotations

from twisted.internet.interfaces import (
    ISystemHandle,
    IWriteDescriptor,
)
from zope.interface import directlyProvides, noLongerProvides

from synapse_replication.handlers.events import ConnectionBuffers
from synapse_replication.redis import factory, sender
from synapse_replication.redis.resp import encode_publishes
from synapse_replication.redis.sender import COALESCE_WINDOW
from synapse_replication.wire.extension import COUNTED_AS
from tests.redis.doubles import RecordingTransport, rdata
from tests.redis.sender_case import (
    _FENCING,
    _PING,
    _POSITION,
    RedisSenderTestCase,
    SocketTransport,
    published,
)


class RedisSenderTests(RedisSenderTestCase):
    """Tests for :class:`RedisSender` and its protocol."""

    def test_after_silence(self) -> None:
        """The first publish after a pause is written immediately."""
        self.memory.establish()
        self.memory.reactor.advance(2 * COALESCE_WINDOW)
        self.publish_rows(1)
        first = b"".join(encode_publishes(b"hs", [rdata(1)]))
        self.assertEqual(self.written, [first])
        self.publish_rows(2)
        self.publish_rows(3)
        self.assertEqual(self.written, [])
        self.end_turn()
        others = b"".join(encode_publishes(b"hs", [rdata(2), rdata(3)]))
        self.assertEqual(self.written, [others])

    def test_extension_is_written_with_rows(self) -> None:
        """
        A message of the extension is written together with the rows that follow it.
        """
        self.memory.establish()
        self.memory.reactor.advance(2 * COALESCE_WINDOW)
        self.sender.publish(COUNTED_AS, "hs/x", [b"rows"])
        self.assertEqual(self.written, [])
        self.publish_rows(1)
        both = encode_publishes(b"hs/x", [b"rows"]) + encode_publishes(
            b"hs", [rdata(1)]
        )
        self.assertEqual(self.written, [b"".join(both)])
        reactor = self.memory.reactor
        due = [call.getTime() for call in reactor.getDelayedCalls()]
        self.assertGreater(min(due), reactor.seconds(), "no flush is scheduled")
        self.memory.reactor.advance(2 * COALESCE_WINDOW)
        self.sender.publish(COUNTED_AS, "hs/x", [b"heartbeat"])
        self.end_turn()
        self.assertEqual(len(self.written), 1)

    def test_one_write_a_turn(self) -> None:
        """
        All publishes that follow a write closely become one write at the end of the
        turn.
        """
        self.memory.establish()
        self.publish_rows(1, 2)
        self.sender.publish("USER_IP", "hs/USER_IP", [b"USER_IP x"])
        self.publish_rows(3)
        self.assertEqual(self.written, [])
        self.end_turn()
        self.assertEqual(
            self.written,
            [
                b"".join(
                    encode_publishes(b"hs", [rdata(1), rdata(2)])
                    + encode_publishes(b"hs/USER_IP", [b"USER_IP x"])
                    + encode_publishes(b"hs", [rdata(3)])
                )
            ],
        )
        self.assertEqual(self.memory.observer.sent_commands["redis_out", "RDATA"], 3)
        self.end_turn()
        self.assertEqual(self.written, [])

    def test_without_a_socket(self) -> None:
        """Without a socket, each publish is written immediately."""
        self.memory.lose(0)
        transport = RecordingTransport()
        noLongerProvides(transport, ISystemHandle)
        self.memory.connect(0, transport)
        self.memory.establish()
        for token in (1, 2):
            self.publish_rows(token)
            self.assertEqual(self.written, encode_publishes(b"hs", [rdata(token)]))

    def test_nothing(self) -> None:
        """Publishing no lines writes nothing."""
        self.memory.establish()
        self.publish_rows()
        self.end_turn()
        self.assertEqual(self.written, [])

    def test_acknowledgements(self) -> None:
        """Answers are counted however they are split."""
        self.memory.establish()
        self.publish_rows(1, 2, 3)
        self.end_turn()
        self.assertEqual(self.sender.unacknowledged, 3)
        self.memory.deliver_data(0, b":2\r\n:")
        self.assertEqual(self.sender.unacknowledged, 2)
        self.memory.deliver_data(0, b"4\r\n:5\r\n")
        self.assertEqual(self.sender.unacknowledged, 0)

    def test_many_short_replies(self) -> None:
        """The connection stays open, however many replies arrive in total."""
        self.patch(factory, "MAX_REPLY_LENGTH", 100)
        self.memory.establish()
        for token in range(1, 101):
            self.publish_rows(token)
            self.end_turn()
            self.memory.deliver_data(0, b":1\r\n")
        self.assertFalse(self.memory.transports[0].aborted)

    def test_drained(self) -> None:
        """``drained`` fires once everything is acknowledged."""
        self.memory.establish()
        self.publish_rows(1)
        drained = self.sender.drained()
        self.assertNoResult(drained)
        self.memory.deliver_data(0, b":1\r\n")
        self.successResultOf(drained)
        self.successResultOf(self.sender.drained())

    def test_drained_while_paused(self) -> None:
        """``drained`` does not fire while publishes wait to be written."""
        self.memory.establish()
        producer = self.memory.transports[0].producer
        assert producer is not None
        producer.pauseProducing()
        self.publish_rows(1)
        drained = self.sender.drained()
        self.end_turn()
        self.assertNoResult(drained)
        producer.resumeProducing()
        self.assertNoResult(drained)
        self.memory.deliver_data(0, b":1\r\n")
        self.successResultOf(drained)

    def test_other_commands_between(self) -> None:
        """Replies to other commands are matched among the acknowledgements."""
        self.memory.establish()
        protocol = self.memory.protocols[0]
        self.publish_rows(1)
        self.end_turn()
        first = protocol.get("a")
        self.publish_rows(2, 3)
        self.end_turn()
        second = protocol.get("b")
        self.memory.deliver_data(0, b":1\r\n$2\r\n12\r\n:1\r\n:1\r\n$-1\r\n")
        self.assertEqual(self.successResultOf(first), b"12")
        self.assertIsNone(self.successResultOf(second))
        self.assertEqual(self.sender.unacknowledged, 0)

    def test_written_immediately(self) -> None:
        """Data is passed to the kernel immediately, unless the transport is closing."""
        self.memory.lose(0)
        transport = SocketTransport()
        directlyProvides(transport, IWriteDescriptor, ISystemHandle)
        self.memory.connect(0, transport)
        self.memory.greet()
        self.publish_rows(1)
        self.end_turn()
        self.assertEqual(transport.sent, 1)
        transport.disconnecting = True
        self.publish_rows(2)
        self.end_turn()
        self.assertEqual(transport.sent, 1)

    def test_announced_first(self) -> None:
        """After a loss, the position is published first on the next connection."""
        self.memory.establish()
        self.publish_rows(1, 2, 3)
        self.end_turn()
        self.memory.deliver_data(0, b":1\r\n")
        self.publish_rows(4)
        self.sender.publish("REMOTE_SERVER_UP", "hs", [b"REMOTE_SERVER_UP x"])
        self.memory.lose(0)
        self.assertEqual(self.sender.unacknowledged, 0)
        # Rows 2 and 3 were not acknowledged, row 4 was not written.
        self.assertEqual(self.sender._ledger.lost, 3)
        self.publish_rows(5)
        self.end_turn()
        self.memory.connect(0)
        self.assertNotIn(("on_lost", 4), self.memory.events.all)
        self.memory.transports[0].take()
        self.memory.greet()
        self.assertIn(("on_lost", 4), self.memory.events.all)
        self.publish_rows(6)
        self.end_turn()
        self.assertEqual(
            published(self.written),
            b"".join(
                encode_publishes(b"hs", [_POSITION, b"REMOTE_SERVER_UP x", rdata(6)])
            ),
        )
        self.assertEqual(self.sender._ledger.lost, 0)

    def test_nothing_lost(self) -> None:
        """If everything was acknowledged, nothing is announced after a reconnection."""
        self.memory.establish()
        self.publish_rows(1)
        self.end_turn()
        self.memory.deliver_data(0, b":1\r\n")
        self.memory.lose(0)
        self.memory.connect(0)
        self.memory.greet()
        self.end_turn()
        self.assertEqual(self.written, [*_FENCING, _PING])

    def test_redis_does_not_read(self) -> None:
        """While the transport is paused, publishes wait, up to a limit."""
        self.memory.establish()
        producer = self.memory.transports[0].producer
        assert producer is not None
        producer.pauseProducing()
        self.publish_rows(1)
        self.publish_rows(2)
        self.end_turn()
        self.assertEqual(self.written, [])
        producer.resumeProducing()
        self.assertEqual(
            self.written, [b"".join(encode_publishes(b"hs", [rdata(1), rdata(2)]))]
        )
        producer.pauseProducing()
        self.patch(sender, "MAX_PENDING_BYTES", 1000)
        self.sender.publish("RDATA", "hs", [b"x" * 1001])
        self.assertTrue(self.memory.transports[0].aborted)
        self.assertEqual(self.sender._ledger.lost, 3)
        self.memory.lose(0)
        self.assertEqual(self.sender._ledger.lost, 3)
        self.assertIn("does not read", str(self.memory.events.all))

    def test_refused(self) -> None:
        """A PUBLISH that Redis refuses, and all PUBLISHes after it, count as lost."""
        self.memory.establish()
        self.publish_rows(1, 2, 3)
        self.end_turn()
        self.memory.deliver_data(0, b":1\r\n-NOPERM no channel\r\n:1\r\n")
        self.assertTrue(self.memory.transports[0].aborted)
        self.memory.lose(0)
        self.assertEqual(self.sender._ledger.lost, 2)
        self.assertIn("NOPERM no channel", str(self.memory.events.all))

    def test_failed_command(self) -> None:
        """A command that fails to be written does not shift later replies."""
        self.memory.establish()
        protocol = self.memory.protocols[0]
        protocol.charset = "ascii"
        with self.assertRaises(Exception):  # noqa: B017 -- txredisapi's
            protocol.get("ä")
        self.publish_rows(1)
        self.end_turn()
        self.memory.deliver_data(0, b":1\r\n")
        self.assertEqual(self.sender.unacknowledged, 0)

    def test_buffers(self) -> None:
        """``buffers`` returns the sizes of each connection's buffers, by name."""
        self.memory.establish()
        self.assertEqual(
            self.memory.link.buffers(),
            [
                ConnectionBuffers("redis_out", 0, 0, 0, 0),
                ConnectionBuffers("redis", 0, 0, 0, 0),
            ],
        )
        producer = self.memory.transports[0].producer
        assert producer is not None
        producer.pauseProducing()
        self.publish_rows(1, 2)
        self.end_turn()
        size = len(rdata(1)) + len(rdata(2))
        self.assertEqual(
            self.memory.link.buffers()[0],
            ConnectionBuffers("redis_out", 2, size, 0, 0),
        )
        self.memory.lose(1)
        self.assertEqual(len(self.memory.link.buffers()), 1)
