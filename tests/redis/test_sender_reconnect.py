"""Tests for publishing again after a connection was lost."""

from __future__ import annotations

from twisted.internet.address import UNIXAddress
from twisted.internet.interfaces import (
    ISystemHandle,
    ITCPTransport,
)
from zope.interface import alsoProvides, noLongerProvides

from synapse_replication.redis import publish_ledger, sender
from synapse_replication.redis.fencing import MAX_HANG_UPS
from synapse_replication.redis.flow_control import (
    HIGH_WATERMARK,
    SHARED_HIGH_WATERMARK,
    SHARED_LOW_WATERMARK,
    SHARED_WINDOW,
)
from synapse_replication.redis.resp import encode_publishes
from synapse_replication.wire.extension import COUNTED_AS
from tests.redis.doubles import MemoryLink, RecordingTransport, rdata
from tests.redis.sender_case import (
    _FENCING,
    _INFO,
    _PING,
    _POSITION,
    RedisSenderTestCase,
    published,
)


class ReconnectTests(RedisSenderTestCase):
    """Publishes that were not acknowledged when a connection was lost."""

    def test_a_lost_connection_is_ended_at_redis(self) -> None:
        """
        The next connection kills the lost one, so that Redis executes none of its
        remaining commands. CLIENT INFO is sent with the first publish.
        """
        self.assertEqual(self.written, [_PING])
        self.memory.greet()
        self.assertEqual(self.written, [])
        for token in (1, 2):
            self.publish_rows(token)
            self.end_turn()
        self.assertEqual(
            self.written,
            [
                *encode_publishes(b"hs", [rdata(1)]),
                _INFO,
                *encode_publishes(b"hs", [rdata(2)]),
            ],
        )
        self.memory.acknowledge()
        self.memory.lose(0)
        self.memory.connect(0)
        self.assertEqual(self.written[:1], _FENCING)
        # CLIENT INFO was not answered, so the next connection kills the same one.
        self.memory.lose(0)
        self.memory.connect(0)
        self.assertEqual(self.written[:1], _FENCING)

    def test_redis_allows_no_fencing(self) -> None:
        """Missing permission for CLIENT is reported once, and publishing works."""
        self.publish_and_refuse(
            b"-NOPERM no permissions to run the 'client|info' command\r\n"
        )
        ((_, feature, why),) = self.unavailable
        self.assertIn("client|info and client|kill", feature)
        self.assertIn("NOPERM", why)
        self.assertIsNotNone(self.sender._protocol)
        self.assertEqual(self.publish_again(), [_PING])
        self.assertEqual(len(self.unavailable), 1)
        self.assertEqual(self.failures, [])

    def test_fencing_fails_temporarily(self) -> None:
        """After a temporary error, fencing is tried again on the next connection."""
        self.publish_and_refuse(b"-BUSY Redis is busy running a script\r\n")
        self.assertEqual(len(self.unavailable), 1)
        self.assertEqual(self.publish_again(), [_PING, _INFO])

    def test_redis_is_too_old_to_fence(self) -> None:
        """After an unknown-command error, fencing is not tried again."""
        self.publish_and_refuse(
            b"-ERR Unknown subcommand or wrong number of arguments for 'INFO'.\r\n"
        )
        self.assertEqual(len(self.unavailable), 1)
        self.assertEqual(self.publish_again(), [_PING])

    def test_server_hangs_up(self) -> None:
        """A server that closes the connection on CLIENT INFO can still be used."""
        self.memory.greet()
        self.publish_rows(1)
        self.end_turn()
        for _ in range(MAX_HANG_UPS - 1):
            self.memory.deliver_data(0, b":1\r\n")
            self.assertEqual(self.publish_again(), [_PING, _INFO])
            self.assertEqual(self.unavailable, [])
        self.assertEqual(self.publish_again(), [_PING])
        self.assertEqual(len(self.unavailable), 1)

    def test_hang_ups_after_an_answer(self) -> None:
        """If CLIENT INFO was ever answered, later closes do not disable fencing."""
        self.memory.establish()
        for _ in range(2 * MAX_HANG_UPS):
            self.assertEqual(self.publish_again(), [*_FENCING, _PING, _INFO])
        self.assertEqual(self.unavailable, [])

    def test_no_answer_in_time(self) -> None:
        """Connections that this end aborted do not disable fencing."""
        self.memory.greet()
        self.publish_rows(1)
        self.end_turn()
        for _ in range(2 * MAX_HANG_UPS):
            self.memory.protocols[0].abort("no answer in time")
            self.assertEqual(self.publish_again(), [_PING, _INFO])

    def test_nothing_to_fence(self) -> None:
        """Without a socket, and on a Unix socket, CLIENT INFO is not sent."""
        self.memory.lose(0)
        transport = RecordingTransport()
        noLongerProvides(transport, ISystemHandle)
        # Other projects' test doubles have no socket, either.
        alsoProvides(transport, ITCPTransport)
        self.memory.connect(0, transport)
        self.memory.greet()
        self.publish_rows(1)
        self.assertNotIn(_INFO, self.written)
        self.memory.lose(0)
        transport = RecordingTransport()
        transport.peerAddr = UNIXAddress("/run/redis.sock")
        self.memory.connect(0, transport)
        self.memory.greet()
        self.publish_rows(2)
        self.end_turn()
        self.assertNotIn(_INFO, self.written)

    def test_published_again(self) -> None:
        """Retained commands are published again until they are acknowledged."""
        self.memory.establish()
        self.sender.publish("REPLICATE", "hs", [b"REPLICATE"])
        self.publish_rows(1)
        self.sender.publish("USER_SYNC", "hs", [b"USER_SYNC 1", b"USER_SYNC 2"])
        self.end_turn()
        self.sender.publish("EXTENSION", "hs/replication_ext", [b"{}"])
        self.sender.publish("USER_IP", "hs/USER_IP", [b"USER_IP x"])
        self.end_turn()
        # REPLICATE, the row and the first of the users.
        self.memory.deliver_data(0, b":2\r\n" * 3)
        again = encode_publishes(b"hs", [_POSITION, b"USER_SYNC 2"])
        again += encode_publishes(b"hs/USER_IP", [b"USER_IP x"])
        self.assertEqual(self.lose_and_connect(), b"".join(again))
        # The commands were not acknowledged this time, either.
        self.assertEqual(self.lose_and_connect(), b"".join(again))
        self.memory.acknowledge()
        self.assertEqual(self.lose_and_connect(), b"")

    def test_order_of_commands(self) -> None:
        """
        Commands that Redis has not acknowledged are published again before those that
        were not written.
        """
        self.memory.establish()
        producer = self.memory.transports[0].producer
        assert producer is not None
        self.sender.publish("USER_SYNC", "hs", [b"USER_SYNC 1"])
        self.end_turn()
        producer.pauseProducing()
        self.sender.publish("USER_SYNC", "hs", [b"USER_SYNC 2"])
        self.end_turn()
        again = [_POSITION, b"USER_SYNC 1", b"USER_SYNC 2"]
        self.assertEqual(
            self.lose_and_connect(), b"".join(encode_publishes(b"hs", again))
        )

    def test_paused_by_a_lost_connection(self) -> None:
        """A transport that pauses the sender after its end pauses no later one."""
        self.memory.establish()
        producer = self.memory.transports[0].producer
        assert producer is not None
        self.memory.lose(0)
        producer.pauseProducing()
        transport = self.memory.connect(0)
        self.memory.greet()
        transport.take()
        self.publish_rows(1)
        self.end_turn()
        self.assertEqual(
            published(transport.take()), b"".join(encode_publishes(b"hs", [rdata(1)]))
        )

    def test_not_published_again(self) -> None:
        """REPLICATE and rows are not published again."""
        self.memory.establish()
        self.sender.publish("REPLICATE", "hs", [b"REPLICATE"])
        self.publish_rows(1)
        self.end_turn()
        self.memory.deliver_data(0, b":2\r\n")
        self.assertEqual(
            self.lose_and_connect(), b"".join(encode_publishes(b"hs", [_POSITION]))
        )

    def test_unanswered_is_bounded(self) -> None:
        """Without acknowledgements, a limited number of commands is retained."""
        self.patch(publish_ledger, "MAX_RETAINED", 3)
        self.memory.establish()
        for number in range(6):
            self.sender.publish("PING", "hs", [b"PING %d" % number])
            self.end_turn()
        again = [_POSITION, b"PING 3", b"PING 4", b"PING 5"]
        self.assertEqual(
            self.lose_and_connect(), b"".join(encode_publishes(b"hs", again))
        )
        self.assertEqual(
            self.lose_and_connect(), b"".join(encode_publishes(b"hs", again))
        )
        # Nothing was evicted on the second connection.
        self.assertEqual(self.failures, ["retaining commands until Redis answers"])

    def test_evicted_and_acknowledged(self) -> None:
        """An evicted command is not reported if it was acknowledged later."""
        self.patch(publish_ledger, "MAX_RETAINED", 3)
        self.memory.establish()
        for number in range(6):
            self.sender.publish("PING", "hs", [b"PING %d" % number])
            self.end_turn()
        self.memory.deliver_data(0, b":1\r\n" * 3)
        again = [_POSITION, b"PING 3", b"PING 4", b"PING 5"]
        self.assertEqual(
            self.lose_and_connect(), b"".join(encode_publishes(b"hs", again))
        )
        self.assertEqual(self.failures, [])

    def test_refused_is_not_published_again(self) -> None:
        """A command that Redis refuses is not published again; those after it are."""
        self.memory.establish()
        self.sender.publish("USER_IP", "hs/USER_IP", [b"USER_IP x"])
        self.sender.publish("USER_SYNC", "hs", [b"USER_SYNC 1"])
        self.end_turn()
        self.memory.deliver_data(0, b"-NOPERM no channel\r\n")
        self.assertEqual(
            self.lose_and_connect(),
            b"".join(encode_publishes(b"hs", [_POSITION, b"USER_SYNC 1"])),
        )

    def test_lost_while_behind(self) -> None:
        """
        A link that is behind and loses its sending connection reports that it is ready.
        """
        for is_paused in (True, False):
            self.memory = MemoryLink()
            self.sender = self.memory.link.sender
            self.memory.establish()
            subscriber = self.memory.protocols[1]
            if is_paused:
                producer = self.memory.transports[0].producer
                assert producer is not None
                producer.pauseProducing()
            else:
                self.publish_rows(*range(HIGH_WATERMARK))
                self.end_turn()
            self.assertTrue(subscriber.is_behind)
            self.assertNotIn("ready_again", self.memory.events.all)
            self.memory.lose(0)
            self.assertFalse(subscriber.is_behind)
            self.assertEqual(self.memory.events.all.count("ready_again"), 1)

    def test_other_traffic(self) -> None:
        """
        While a bulk stream and others publish, the lower watermarks apply; messages of
        the extension do not count as other traffic.
        """
        self.memory.establish()
        reactor, events = self.memory.reactor, self.memory.events.all
        reactor.advance(SHARED_WINDOW)
        del events[:]
        page = range(SHARED_HIGH_WATERMARK)
        self.sender.publish(COUNTED_AS, "hs/ext", [b"x"])
        self.publish_rows(*page)
        self.end_turn()
        self.assertFalse(self.sender.is_behind)
        self.publish_rows(7)
        self.end_turn()
        self.assertTrue(self.sender.is_behind)
        few = SHARED_LOW_WATERMARK
        self.memory.deliver_data(0, b":1\r\n" * (len(page) + 2 - few - 1))
        self.assertEqual(events, [])
        self.memory.deliver_data(0, b":1\r\n")
        self.assertEqual(events, ["ready_again"])
        reactor.advance(SHARED_WINDOW)
        self.publish_rows(*page)
        self.end_turn()
        self.assertFalse(self.sender.is_behind)
        # Reading ``is_behind`` is sufficient to be notified when the link is ready.
        del events[:]
        self.publish_rows(7)
        self.assertTrue(self.sender.is_behind)
        self.memory.deliver_data(0, b":1\r\n" * self.sender.unacknowledged)
        self.assertEqual(events, ["ready_again"])

    def test_aborted_while_behind(self) -> None:
        """
        When the connection to a Redis that does not read is aborted, the link reports
        that it is ready.
        """
        self.memory.establish()
        self.sender.pauseProducing()
        self.patch(sender, "MAX_PENDING_BYTES", 1000)
        self.sender.publish("RDATA", "hs", [b"x" * 1001])
        self.assertIn("ready_again", self.memory.events.all)
        self.assertFalse(self.sender.is_behind)

    def test_announcing_fails(self) -> None:
        """
        If announcing positions fails, the connection is aborted and nothing is sent.
        """
        self.memory.establish()
        self.memory.lose(0)
        self.publish_rows(1)

        def fail(count: int) -> None:
            raise RuntimeError("bug")

        self.sender._on_lost = fail
        self.memory.connect(0)
        self.memory.greet()
        self.assertTrue(self.memory.transports[0].aborted)
        self.assertIn(
            ("failure", "announcing positions again", "bug"), self.memory.events.all
        )
        self.assertIsNone(self.sender._protocol)
        self.assertEqual(self.sender._ledger.lost, 1)

    def test_retained_commands_are_bounded(self) -> None:
        """
        Without a connection, a limited number of commands is retained, and no rows.
        """
        lines = [b"REMOTE_SERVER_UP x"] * (publish_ledger.MAX_RETAINED + 5)
        self.sender.publish("REMOTE_SERVER_UP", "hs", lines)
        self.publish_rows(1, 2)
        self.assertEqual(self.sender._ledger.lost, 7)
        self.assertIn(
            ("commands_dropped", "REMOTE_SERVER_UP", "queue_full", 5),
            self.memory.events.all,
        )
        self.memory.transports[0].take()
        self.memory.greet()
        self.end_turn()
        data = published(self.written)
        self.assertEqual(data.count(b"REMOTE_SERVER_UP"), publish_ledger.MAX_RETAINED)
