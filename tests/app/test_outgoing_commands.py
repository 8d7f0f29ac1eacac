"""Tests for the commands that the code of a stand-alone process sends."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.host import CommandsOut
from synapse_replication.errors import LocalProtocolError
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.host_parts import SyncingUsers
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.commands import (
    FederationAckCommand,
    PingCommand,
    RemoteServerUpCommand,
    UserIpCommand,
    UserSyncCommand,
)
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost


class CommandsOutTests(SynchronousTestCase):
    """Tests for commands and channel subscriptions of plugged-in code."""

    def setUp(self) -> None:
        self.host = RecordingHost(SourceStream("events", Row), instance_name="w")
        self.out = CommandsOut()
        self.handler = ReplicationCommandHandler(self.host, self.host.observer)

    def test_commands(self) -> None:
        """Commands are sent on each link."""
        self.out.connect(self.handler)
        connection = MemoryConnection()
        self.handler.new_connection(connection)
        connection.take()
        self.out.send(RemoteServerUpCommand("a.example"))
        self.out.send(UserIpCommand("@a:b", "secret", "1.2.3.4", "agent", None, 6))
        self.assertEqual(
            connection.take(),
            [
                "REMOTE_SERVER_UP a.example",
                'USER_IP @a:b ["secret","1.2.3.4","agent",null,6]',
            ],
        )

    def test_own_commands_only(self) -> None:
        """A command that this package itself sends is refused, with the others."""
        self.out.connect(self.handler)
        with self.assertRaises(LocalProtocolError) as caught:
            self.out.send(PingCommand("1"))
        self.assertIn("PING cannot be sent", str(caught.exception))
        self.assertIn("REMOTE_SERVER_UP", str(caught.exception))

    def test_syncing_users(self) -> None:
        """Users who are still syncing are announced on each new link."""
        self.host.commands = SyncingUsers(own=self.out.syncing_users)  # type: ignore[assignment]
        handler = ReplicationCommandHandler(self.host, self.host.observer)
        self.out.connect(handler)
        handler.new_connection(MemoryConnection("first"))
        self.out.send(UserSyncCommand("w-id", "@a:b", "D", True, 1))
        self.out.send(UserSyncCommand("w-id", "@c:b", None, True, 2))
        self.out.send(UserSyncCommand("w-id", "@a:b", "D", False, 3))
        second = MemoryConnection("second")
        handler.new_connection(second)
        self.assertEqual(
            [line for line in second.take() if line.startswith("USER_SYNC")],
            ["USER_SYNC w-id @c:b None start 2"],
        )

    def test_too_early(self) -> None:
        """
        Before replication starts, sending a command raises an error that says what to
        do.
        """
        with self.assertRaises(LocalProtocolError) as caught:
            self.out.send(FederationAckCommand("w", 1))
        self.assertIn("startService", str(caught.exception))
        with self.assertRaises(LocalProtocolError):
            self.out.send(UserSyncCommand("w-id", "@a:b", None, True, 1))
        self.assertEqual(self.out.syncing_users(), [])

    def test_channels(self) -> None:
        """Each channel is subscribed to once, and only before replication starts."""
        self.out.subscribe_to_channel("USER_IP")
        self.out.subscribe_to_channel("USER_IP")
        self.assertEqual(self.out.channels, ("USER_IP",))
        self.out.connect(self.handler)
        self.out.subscribe_to_channel("OTHER")
        self.assertEqual(self.out.channels, ("USER_IP", "OTHER"))
        self.assertEqual(self.handler.start_replication(), ("USER_IP", "OTHER"))
        with self.assertRaises(LocalProtocolError):
            self.out.subscribe_to_channel("LATE")
