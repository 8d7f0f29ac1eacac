"""
Tests of receiving: the order on connecting, chunks, and the connection's interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import LineTooLongError
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import (
    ExtensionConnection,
    ReplicationConnection,
)
from synapse_replication.redis.flow_control import (
    HIGH_WATERMARK,
    LOW_WATERMARK,
    SHARED_WINDOW,
)
from synapse_replication.redis.options import RedisOptions
from synapse_replication.redis.resp import encode
from synapse_replication.redis.subscriber import MAX_LINE_LENGTH, RedisSubscriber
from synapse_replication.transport.buffers import DEFAULT_READ_SIZE
from synapse_replication.wire.commands import RemoteServerUpCommand, UserIpCommand
from synapse_replication.wire.rdata import RdataGroup, RefusedLine
from tests.redis.doubles import MemoryLink, position, rdata

if TYPE_CHECKING:
    _: type[ReplicationConnection] = RedisSubscriber

_OK = b"+OK\r\n"


def confirmation(channel: bytes) -> bytes:
    """Encode the confirmation of a subscription."""
    return encode(b"subscribe", channel)[:-2].replace(b"*2", b"*3") + b"\r\n:1\r\n"


def message(*lines: bytes) -> bytes:
    """Encode published lines as messages."""
    return b"".join(encode(b"message", b"hs", line) for line in lines)


class RedisSubscriberTests(SynchronousTestCase):
    """Tests for :class:`RedisSubscriber`."""

    def test_order_on_connect(self) -> None:
        """AUTH, SELECT and SUBSCRIBE are confirmed before REPLICATE is sent."""
        memory = MemoryLink(
            RedisOptions(username="bob", password="hush", dbid=3), ["USER_IP"]
        )
        transport = memory.transports[1]
        self.assertEqual(transport.take(), [encode(b"AUTH", b"bob", b"hush")])
        memory.deliver_data(1, _OK)
        self.assertEqual(transport.take(), [encode(b"SELECT", b"3")])
        memory.deliver_data(1, _OK)
        self.assertEqual(transport.take(), [encode(b"SUBSCRIBE", b"hs", b"hs/USER_IP")])
        memory.deliver_data(1, confirmation(b"hs"))
        memory.deliver_data(1, message(rdata(1)))
        self.assertEqual(memory.events.all, [])
        memory.deliver_data(1, confirmation(b"hs/USER_IP") + message(rdata(2)))
        self.assertEqual(
            memory.events.all, [("made", "redis"), "new_connection", "received"]
        )
        self.assertEqual(len(memory.handler.items), 1)
        for _ in range(2):
            memory.deliver_data(0, _OK)
        memory.transports[0].take()
        memory.greet()
        memory.reactor.advance(0)
        self.assertEqual(
            memory.transports[0].take()[0], encode(b"PUBLISH", b"hs", b"REPLICATE ")
        )

    def test_reads_more_at_once(self) -> None:
        """If messages arrive continuously, larger chunks are read."""
        memory = MemoryLink()
        memory.establish()
        message = encode(b"message", b"hs", b"REMOTE_SERVER_UP a")
        memory.deliver_data(1, message * 2000)
        self.assertEqual(
            vars(memory.transports[1])["bufferSize"], 2 * DEFAULT_READ_SIZE
        )

    def test_message_that_is_not_a_string(self) -> None:
        """A message that is not a string aborts the link with a one-line reason."""
        for channel in (b"hs", b"hs/replication_ext"):
            for message in (b":5\r\n", b"*0\r\n", b"$-1\r\n"):
                memory = MemoryLink()
                memory.establish()
                memory.deliver_data(
                    1,
                    b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n" % (len(channel), channel)
                    + message,
                )
                self.assertIn("not a string", memory.protocols[1]._why)

    def test_message_that_is_too_long(self) -> None:
        """
        A message over the senders' limit is refused undecoded; the stream of a row in
        it is known, and the messages around it are handled.
        """
        memory = MemoryLink()
        memory.establish()
        before = len(memory.handler.items)
        row = b"RDATA events writer 2 [%b]" % (b"[]," * MAX_LINE_LENGTH)
        data = message(rdata(1), row, rdata(3))
        for start in range(0, len(data), 65536):
            memory.deliver_data(1, data[start : start + 65536])
        first, refused, last = memory.handler.items[before:]
        self.assertIsInstance(first, RdataGroup)
        assert isinstance(refused, RefusedLine)
        self.assertEqual(
            (refused.stream_name, refused.instance_name), ("events", "writer")
        )
        self.assertIn(f"more than {MAX_LINE_LENGTH} bytes", str(refused.error))
        self.assertLess(len(str(refused.error)), 200)
        self.assertIsInstance(last, RdataGroup)

    def test_behind(self) -> None:
        """
        The link is behind while too many publishes are unanswered or the sender is
        paused, and reports once when it is ready.
        """
        memory = MemoryLink()
        memory.establish()
        subscriber = memory.protocols[1]
        memory.reactor.advance(SHARED_WINDOW)
        events = memory.events.all
        del events[:]
        self.assertFalse(subscriber.is_behind)
        subscriber.send_lines("RDATA", [rdata(n) for n in range(HIGH_WATERMARK)])
        memory.reactor.advance(0)
        self.assertTrue(subscriber.is_behind)
        many = HIGH_WATERMARK - LOW_WATERMARK - 1
        memory.deliver_data(0, b":1\r\n" * many)
        self.assertEqual(events, [])
        memory.deliver_data(0, b":1\r\n")
        self.assertFalse(subscriber.is_behind)
        self.assertEqual(events, ["ready_again"])
        memory.deliver_data(0, b":1\r\n" * LOW_WATERMARK)
        memory.link.sender.pauseProducing()
        self.assertTrue(subscriber.is_behind)
        memory.link.sender.resumeProducing()
        self.assertFalse(subscriber.is_behind)
        self.assertEqual(events, ["ready_again"] * 2)

    def test_chunks(self) -> None:
        """Messages that arrive together are delivered together."""
        memory = MemoryLink()
        memory.establish()
        data = message(rdata(1), rdata(2), b"POSITION events writer 2 2", rdata(3))
        memory.deliver_data(1, data[:-9])
        memory.deliver_data(1, data[-9:])
        first, second = memory.handler.chunks
        self.assertEqual(
            first,
            [
                RdataGroup("events", "writer", [1, 2], [b"[1]", b"[2]"]),
                position(2),
            ],
        )
        self.assertEqual(second, [RdataGroup("events", "writer", [3], [b"[3]"])])
        self.assertEqual(
            memory.observer.received_commands,
            {("redis", "RDATA"): 3, ("redis", "POSITION"): 1},
        )

    def test_bad_line(self) -> None:
        """
        A malformed line is reported, other lines are delivered, and the link stays up.
        """
        memory = MemoryLink()
        memory.establish()
        memory.deliver_data(
            1, message(rdata(1), b"\xff\xfe", b"NEW_FANGLED 1", rdata(2))
        )
        self.assertEqual(memory.handler.seen, 2)
        self.assertEqual(
            [e[0] for e in memory.events.all if isinstance(e, tuple)][-2:],
            ["refused", "refused"],
        )
        self.assertFalse(memory.transports[1].aborted)

    def test_close_with_error(self) -> None:
        """``close_with_error`` does nothing: the link is shared by all peers."""
        memory = MemoryLink()
        memory.establish()
        memory.protocols[1].close_with_error("bad line")
        memory.reactor.advance(0)
        self.assertEqual([t.take() for t in memory.transports], [[], []])
        self.assertFalse(memory.transports[1].disconnecting)

    def test_never_relayed(self) -> None:
        """A command that this instance receives from Redis is not published again."""
        memory = MemoryLink()
        memory.establish()
        self.assertFalse(memory.protocols[1].relays)
        memory.protocols[1].send_command(RemoteServerUpCommand("x.example"))
        memory.reactor.advance(0)
        self.assertEqual(len(memory.transports[0].take()), 1)
        memory.deliver_data(1, message(b"REMOTE_SERVER_UP x.example"))
        memory.reactor.advance(0)
        self.assertEqual(memory.handler.items, [RemoteServerUpCommand("x.example")])
        self.assertEqual(memory.transports[0].take(), [])

    def test_user_ip_channel(self) -> None:
        """USER_IP is published on its own channel."""
        memory = MemoryLink()
        memory.establish()
        command = UserIpCommand("@a:hs", "token", "::1", "agent", None, 5)
        memory.protocols[1].send_command(command)
        memory.reactor.advance(0)
        self.assertIn(b"\r\nhs/USER_IP\r\n", memory.transports[0].take()[0])

    def test_too_long(self) -> None:
        """If one line is too long, none of the call's lines is published."""
        memory = MemoryLink()
        memory.establish()
        with self.assertRaises(LineTooLongError):
            memory.protocols[1].send_lines(
                "RDATA", [rdata(1), b"x" * (MAX_LINE_LENGTH + 1)]
            )
        memory.reactor.advance(0)
        self.assertEqual(memory.transports[0].take(), [])

    def test_lost(self) -> None:
        """
        The handler is notified of a loss only if the connection was passed to it
        before.
        """
        memory = MemoryLink()
        memory.lose(1)
        self.assertNotIn("lost_connection", memory.events.all)
        memory.connect(1)
        memory.establish()
        memory.lose(1)
        self.assertIn("lost_connection", memory.events.all)

    def test_subscribe_refused(self) -> None:
        """If an ACL forbids the channel, the report names SUBSCRIBE."""
        memory = MemoryLink()
        memory.deliver_data(1, b"-NOPERM this user has no permissions\r\n")
        self.assertTrue(memory.transports[1].aborted)
        memory.lose(1)
        self.assertIn("SUBSCRIBE: NOPERM", str(memory.events.all))


class RecordingExtension(ReplicationExtension):
    """An extension that adds its calls to the link's events."""

    instance_name = "w1"

    def __init__(self) -> None:
        self.memory: MemoryLink | None = None

    def _add(self, *event: object) -> None:
        if self.memory is not None:
            self.memory.events.add(event)

    def extension_up(self, connection: ExtensionConnection) -> None:
        self._add("extension_up")
        connection.send_extension([b"hello"])

    def extension_down(self, connection: ExtensionConnection) -> None:
        self._add("extension_down")

    def sending_resumed(self) -> None:
        self._add("sending_resumed")

    def extension_received(
        self, connection: ExtensionConnection, payload: bytes
    ) -> None:
        self._add("extension", payload)


_EXTENSION = b"hs/replication_ext"
_OWN = _EXTENSION + b"/w1"


_CONFIRMED = confirmation(_EXTENSION) + confirmation(_OWN) + confirmation(b"hs")


class ExtensionChannelTests(SynchronousTestCase):
    """The extension's channel on the same connection."""

    def setUp(self) -> None:
        extension = RecordingExtension()
        self.memory = MemoryLink(extension=extension)
        extension.memory = self.memory

    def test_order_on_connect(self) -> None:
        """
        The channel is subscribed to separately, and hello is sent before REPLICATE.
        """
        memory = self.memory
        self.assertEqual(
            memory.transports[1].take(),
            [
                encode(b"SUBSCRIBE", _EXTENSION),
                encode(b"SUBSCRIBE", _OWN),
                encode(b"SUBSCRIBE", b"hs"),
            ],
        )
        memory.greet()
        memory.deliver_data(1, _CONFIRMED)
        self.assertEqual(
            memory.events.all,
            [
                ("made", "redis_out"),
                ("sending_resumed",),
                ("made", "redis"),
                ("extension_up",),
                "new_connection",
            ],
        )
        memory.transports[0].take()
        memory.reactor.advance(0)
        self.assertEqual(
            memory.transports[0].take()[0],
            encode(b"PUBLISH", _EXTENSION, b"hello")
            + encode(b"PUBLISH", b"hs", b"REPLICATE "),
        )
        memory.lose(1)
        self.assertIn(("extension_down",), memory.events.all)

    def test_order_of_messages(self) -> None:
        """Messages of the extension keep their order among rows and commands."""
        extension = RecordingExtension()
        memory = MemoryLink(extension=extension)
        memory.deliver_data(1, _CONFIRMED)
        extension.memory = memory
        memory.deliver_data(
            1,
            message(rdata(1), rdata(2))
            + encode(b"message", _EXTENSION, b"{}")
            + message(rdata(3)),
        )
        self.assertEqual(
            memory.events.all[-3:], ["received", ("extension", b"{}"), "received"]
        )
        groups = [i for i in memory.handler.items if isinstance(i, RdataGroup)]
        self.assertEqual([group.tokens for group in groups], [[1, 2], [3]])

    def test_message_before_the_link_is_established(self) -> None:
        """A message of the extension before the link is established is discarded."""
        memory = self.memory
        memory.deliver_data(
            1,
            confirmation(_EXTENSION)
            + confirmation(_OWN)
            + encode(b"message", _EXTENSION, b"{}"),
        )
        self.assertNotIn(("extension", b"{}"), memory.events.all)
        memory.deliver_data(
            1, confirmation(b"hs") + encode(b"message", _EXTENSION, b"[]")
        )
        self.assertEqual(memory.events.all[-1], ("extension", b"[]"))

    def test_forbidden_by_an_acl(self) -> None:
        """If an ACL forbids the channel, the link works without the extension."""
        memory = self.memory
        memory.deliver_data(
            1, 2 * b"-NOPERM this user has no permissions\r\n" + confirmation(b"hs")
        )
        self.assertIn("new_connection", memory.events.all)
        self.assertNotIn(("extension_up",), memory.events.all)
        self.assertIn("hs/replication_ext", str(memory.events.all[0]))
        self.assertFalse(memory.transports[1].aborted)
        memory.lose(1)
        self.assertNotIn(("extension_down",), memory.events.all)

    def test_own_channel(self) -> None:
        """Messages for this instance alone arrive and are sent on a channel of it."""
        memory = self.memory
        memory.greet()
        memory.deliver_data(1, _CONFIRMED + encode(b"message", _OWN, b"{}"))
        memory.reactor.advance(0)
        self.assertEqual(memory.events.all[-1], ("extension", b"{}"))
        connection = memory.handler.connection
        assert isinstance(connection, RedisSubscriber)
        self.assertTrue(connection.has_own_channel)
        memory.transports[0].take()
        connection.send_extension([b"hi"], to="w2")
        memory.reactor.advance(0)
        self.assertIn(
            encode(b"PUBLISH", _EXTENSION + b"/w2", b"hi"),
            memory.transports[0].take()[0],
        )

    def test_own_channel_is_forbidden(self) -> None:
        """If an ACL forbids only that channel, the extension works without it."""
        memory = self.memory
        denied = b"-NOPERM this user has no permissions\r\n"
        memory.deliver_data(1, confirmation(_EXTENSION) + denied + confirmation(b"hs"))
        self.assertIn(("extension_up",), memory.events.all)
        connection = memory.handler.connection
        assert isinstance(connection, RedisSubscriber)
        self.assertFalse(connection.has_own_channel)

    def test_unsendable_message_is_discarded(self) -> None:
        """
        A message that cannot be sent immediately is discarded and not counted as lost.
        """
        memory = self.memory
        memory.deliver_data(1, _CONFIRMED)
        self.assertEqual(memory.link.sender._ledger.lost, 0)
        memory.transports[0].take()
        memory.greet()
        memory.reactor.advance(0)
        self.assertEqual(
            memory.transports[0].take()[0], encode(b"PUBLISH", b"hs", b"REPLICATE ")
        )
