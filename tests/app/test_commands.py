"""Tests for synapse_replication.app.commands."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.commands import CommandsOut
from synapse_replication.errors import LocalProtocolError
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.host_parts import SyncingUsers
from synapse_replication.testing.doubles import (
    EPOCH_MS,
    MemoryConnection,
    MemoryHost,
    SourceStream,
)
from tests.handlers.fixtures import Row


class CommandsOutTests(SynchronousTestCase):
    """Tests for commands and channel subscriptions of plugged-in code."""

    def setUp(self) -> None:
        self.host = MemoryHost(SourceStream("events", Row), instance_name="w")
        self.send = CommandsOut(self.host.identity, self.host.clock)
        self.handler = ReplicationCommandHandler(self.host, self.host.observer)

    def test_commands(self) -> None:
        """
        Each command names this instance, and has the current time unless a time is
        passed.
        """
        self.send.connect(self.handler)
        connection = MemoryConnection()
        self.handler.new_connection(connection)
        connection.take()
        self.send.send_user_sync("@a:b", "D", True)
        self.send.send_user_ip("@a:b", "secret", "1.2.3.4", "agent", None, 6)
        self.send.send_user_ip("@a:b", "secret", "1.2.3.4", "agent", "D")
        self.send.send_federation_ack(9)
        self.send.send_remote_server_up("a.example")
        self.send.send_lock_released("lock", "key")
        self.send.send_new_active_task("t1")
        self.send.send_cancel_task("t2")
        self.assertEqual(
            connection.take(),
            [
                f"USER_SYNC w-id @a:b D start {EPOCH_MS}",
                'USER_IP @a:b ["secret","1.2.3.4","agent",null,6]',
                f'USER_IP @a:b ["secret","1.2.3.4","agent","D",{EPOCH_MS}]',
                "FEDERATION_ACK w 9",
                "REMOTE_SERVER_UP a.example",
                'LOCK_RELEASED ["w","lock","key"]',
                "NEW_ACTIVE_TASK t1",
                "CANCEL_TASK t2",
            ],
        )

    def test_syncing_users(self) -> None:
        """Users who are still syncing are announced on each new link."""
        self.host.commands = SyncingUsers(own=self.send.syncing_users)  # type: ignore[assignment]
        handler = ReplicationCommandHandler(self.host, self.host.observer)
        self.send.connect(handler)
        handler.new_connection(MemoryConnection("first"))
        self.send.send_user_sync("@a:b", "D", True, 1)
        self.send.send_user_sync("@c:b", None, True, 2)
        self.send.send_user_sync("@a:b", "D", False, 3)
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
            self.send.send_federation_ack(1)
        self.assertIn("startService", str(caught.exception))
        with self.assertRaises(LocalProtocolError):
            self.send.send_user_sync("@a:b", None, True)
        self.assertEqual(self.send.syncing_users(), [])

    def test_channels(self) -> None:
        """Each channel is subscribed to once, and only before replication starts."""
        self.send.subscribe_to_channel("USER_IP")
        self.send.subscribe_to_channel("USER_IP")
        self.assertEqual(self.send.channels, ("USER_IP",))
        self.send.connect(self.handler)
        self.send.subscribe_to_channel("OTHER")
        self.assertEqual(self.send.channels, ("USER_IP", "OTHER"))
        self.assertEqual(self.handler.start_replication(), ("USER_IP", "OTHER"))
        with self.assertRaises(LocalProtocolError):
            self.send.subscribe_to_channel("LATE")
