"""Tests for the calls by which the code of a host uses a command handler."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.sending.answers import POSITIONS_INTERVAL
from synapse_replication.testing.doubles import MemoryConnection
from synapse_replication.wire.commands import COMMANDS, ReplicateCommand
from tests.handlers.fixtures import Receiving, Row, receiving


class SendingTests(SynchronousTestCase):
    """Tests for the methods that send."""

    def setUp(self) -> None:
        fixture = receiving()
        self.handler: Any = fixture.handler
        self.connection = fixture.connection
        self.connection.take()

    def test_commands(self) -> None:
        """Each method sends its command on every link."""
        for name, arguments, line in (
            ("federation_ack", (7,), "FEDERATION_ACK reader 7"),
            ("user_sync", ("id", "@u:x", "D", True, 5), "USER_SYNC id @u:x D start 5"),
            (
                "user_ip",
                ("@u:x", "t", "1.2.3.4", "agent", None, 9),
                'USER_IP ["@u:x","t","1.2.3.4","agent",null,9]',
            ),
            ("remote_server_up", ("a.example",), "REMOTE_SERVER_UP a.example"),
            ("remove_pusher", ("app", "a key", "@u:x"), "REMOVE_PUSHER app a key @u:x"),
            ("invalidate_cache", ("f", ("a", 1)), 'INVALIDATE_CACHE f ["a",1]'),
            ("invalidate_cache", ("f", None), "INVALIDATE_CACHE f null"),
            ("new_active_task", ("t1",), "NEW_ACTIVE_TASK t1"),
            ("cancel_task", ("t1",), "CANCEL_TASK t1"),
            ("command", (ReplicateCommand(),), "REPLICATE"),
        ):
            getattr(self.handler, f"send_{name}")(*arguments)
            (sent,) = self.connection.take()
            if name != "user_ip":
                self.assertEqual(sent, line)
            self.assertTrue(sent.startswith(line.split()[0]))

    def test_lock(self) -> None:
        """The release of a lock is sent if this process held it."""
        self.handler.on_lock_released("other", "name", "key")
        self.assertEqual(self.connection.take(), [])
        self.handler.on_lock_released("reader", "name", "key")
        self.assertEqual(
            self.connection.take(), ['LOCK_RELEASED ["reader","name","key"]']
        )

    def test_stream_update(self) -> None:
        """A row is sent immediately."""
        self.assertTrue(self.handler.connected())
        self.handler.stream_update("events", 3, ["!r", []])
        self.assertEqual(self.connection.take(), ['RDATA events reader 3 ["!r",[]]'])


class ReceivingTests(SynchronousTestCase):
    """Tests for the methods that receive, and for the streams."""

    def setUp(self) -> None:
        self.fixture: Receiving = receiving()
        self.handler: ReplicationCommandHandler = self.fixture.handler

    def test_every_command(self) -> None:
        """There is a method for each command that is not about a connection itself."""
        names = set(COMMANDS) - {"ERROR", "NAME", "PING", "SERVER"}
        found = {name[3:] for name in dir(self.handler) if name[3:].isupper()}
        self.assertEqual({name for name in found if name in COMMANDS}, names)

    def test_stream_connected(self) -> None:
        """A stream is connected on a link when a writer of it is live."""
        handler, connection = self.handler, self.fixture.connection
        self.assertFalse(handler.is_stream_connected(connection, "events"))
        position = COMMANDS["POSITION"].from_line("events writer 0 0")
        handler.on_POSITION(connection, position)
        self.assertTrue(handler.is_stream_connected(connection, "events"))
        self.assertFalse(handler.is_stream_connected(connection, "unknown"))
        self.assertFalse(handler.is_stream_connected(MemoryConnection(), "events"))

    def test_announcements(self) -> None:
        """
        A second request shortly after the first is answered in a moment, unless the
        positions are announced before.
        """
        handler, connection = self.handler, self.fixture.connection
        handler.on_REPLICATE(connection, ReplicateCommand())
        self.assertFalse(handler.should_announce_positions())
        handler.on_REPLICATE(connection, ReplicateCommand())
        self.assertTrue(handler.should_announce_positions())
        handler.will_announce_positions()
        self.assertFalse(handler.should_announce_positions())
        connection.take()
        self.fixture.host.reactor.advance(POSITIONS_INTERVAL)
        self.assertEqual(connection.take(), [])

    def test_streams(self) -> None:
        """The streams are those of the host."""
        streams = self.fixture.host.streams
        self.assertEqual(self.handler.get_streams(), streams.get_streams())
        self.assertEqual(
            list(self.handler.get_streams_to_replicate()),
            list(streams.get_streams_to_replicate()),
        )

    def test_rows(self) -> None:
        """Rows are delivered to the host's data handler."""
        waiting = self.handler.on_rdata("events", "writer", 3, [Row("a")])
        self.successResultOf(Deferred.fromCoroutine(waiting))
        self.assertEqual(self.fixture.texts(), [("writer", 3, ["a"])])
