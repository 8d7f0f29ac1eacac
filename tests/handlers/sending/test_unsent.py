"""Tests of commands that wait for a link."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.events import CommandDropReason
from synapse_replication.handlers.interfaces import SyncingUser
from synapse_replication.handlers.sending import unsent as unsent_module
from synapse_replication.handlers.sending.unsent import UnsentCommands
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.commands import (
    ClearUserSyncsCommand,
    Command,
    FederationAckCommand,
    LockReleasedCommand,
    PositionCommand,
    RemoteServerUpCommand,
    ReplicateCommand,
    UserSyncCommand,
)
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost, RecordingObserver


class UnsentCommandsTests(SynchronousTestCase):
    """The newest command about each subject is retained, within limits."""

    def setUp(self) -> None:
        self.observer = RecordingObserver()
        self.drops = self.observer.drops

    def make(self, max_commands: int = 100, max_bytes: int = 10_000) -> UnsentCommands:
        self.patch(unsent_module, "MAX_COMMANDS", max_commands)
        self.patch(unsent_module, "MAX_BYTES", max_bytes)
        return UnsentCommands(self.observer)

    def lines(self, unsent: UnsentCommands) -> list[str]:
        return [f"{command.NAME} {command.to_line()}" for command in unsent.take()]

    def test_order(self) -> None:
        """Commands of several names are returned once, in the order of sending."""
        unsent = self.make()
        commands: list[Command] = [
            RemoteServerUpCommand("a.example"),
            LockReleasedCommand("w", "lock", "key"),
            RemoteServerUpCommand("b.example"),
        ]
        for command in commands:
            unsent.put(command)
        self.assertEqual(len(unsent), 3)
        self.assertEqual(unsent.take(), commands)
        self.assertEqual(unsent.take(), [])

    def test_newest_acknowledgement(self) -> None:
        """Only the newest FEDERATION_ACK of each instance is retained."""
        unsent = self.make()
        for token in range(1, 500):
            unsent.put(FederationAckCommand("sender1", token))
        unsent.put(FederationAckCommand("sender2", 7))
        self.assertEqual(
            self.lines(unsent),
            ["FEDERATION_ACK sender1 499", "FEDERATION_ACK sender2 7"],
        )
        self.assertEqual(self.drops, {})

    def test_user_syncs(self) -> None:
        """Only the newest USER_SYNC of each user and device is retained."""
        unsent = self.make()
        unsent.put(UserSyncCommand("id", "@a:b", "D1", True, 1))
        unsent.put(UserSyncCommand("id", "@a:b", "D2", True, 2))
        unsent.put(UserSyncCommand("id", "@a:b", "D1", False, 3))
        self.assertEqual(
            self.lines(unsent),
            ["USER_SYNC id @a:b D2 start 2", "USER_SYNC id @a:b D1 end 3"],
        )

    def test_cleared_user_syncs(self) -> None:
        """CLEAR_USER_SYNC replaces the earlier USER_SYNC of its instance."""
        unsent = self.make()
        unsent.put(UserSyncCommand("id", "@a:b", None, True, 1))
        unsent.put(UserSyncCommand("other", "@a:b", None, True, 1))
        unsent.put(ClearUserSyncsCommand("id"))
        unsent.put(UserSyncCommand("id", "@c:b", None, True, 2))
        self.assertEqual(
            self.lines(unsent),
            [
                "USER_SYNC other @a:b None start 1",
                "CLEAR_USER_SYNC id",
                "USER_SYNC id @c:b None start 2",
            ],
        )

    def test_rows_and_positions(self) -> None:
        """POSITION and REPLICATE are not retained: the next link sends them anyway."""
        unsent = self.make()
        unsent.put(PositionCommand("events", "w", 1, 2))
        unsent.put(ReplicateCommand())
        self.assertEqual(unsent.take(), [])
        self.assertEqual(self.drops, {})

    def test_bound_of_commands(self) -> None:
        """
        Beyond the limit, the oldest command of the same name is dropped and counted.
        """
        unsent = self.make(max_commands=3)
        unsent.put(LockReleasedCommand("w", "lock", "key"))
        for number in range(5):
            unsent.put(RemoteServerUpCommand(f"{number}.example"))
        self.assertEqual(
            self.lines(unsent),
            [
                'LOCK_RELEASED ["w","lock","key"]',
                "REMOTE_SERVER_UP 2.example",
                "REMOTE_SERVER_UP 3.example",
                "REMOTE_SERVER_UP 4.example",
            ],
        )
        full = CommandDropReason.QUEUE_FULL
        self.assertEqual(self.drops, {("REMOTE_SERVER_UP", full): 2})

    def test_bound_of_bytes(self) -> None:
        """The bytes are limited, too, and replacing a command frees its bytes."""
        unsent = self.make(max_bytes=100)
        for _ in range(5):
            unsent.put(RemoteServerUpCommand("x" * 60))
        self.assertEqual((len(unsent), self.drops), (1, {}))
        unsent.put(RemoteServerUpCommand("y" * 60))
        self.assertEqual(self.lines(unsent), ["REMOTE_SERVER_UP " + "y" * 60])
        full = CommandDropReason.QUEUE_FULL
        self.assertEqual(self.drops, {("REMOTE_SERVER_UP", full): 1})

    def test_stop(self) -> None:
        """
        Commands that were never sent are counted as dropped when the process stops.
        """
        unsent = self.make()
        unsent.put(RemoteServerUpCommand("a.example"))
        unsent.put(FederationAckCommand("sender1", 1))
        unsent.drop()
        stopped = CommandDropReason.STOPPED
        self.assertEqual(
            self.drops,
            {("REMOTE_SERVER_UP", stopped): 1, ("FEDERATION_ACK", stopped): 1},
        )
        self.assertEqual(unsent.take(), [])


class HandlerWithoutLinkTests(SynchronousTestCase):
    """A handler without a link sends its commands on the next one."""

    def setUp(self) -> None:
        self.stream = SourceStream("events", Row, instance_name="w")
        self.stream.local_token = 7
        self.host = RecordingHost(self.stream, written=["events"], instance_name="w")

    def make(self, options: HandlerOptions | None = None) -> ReplicationCommandHandler:
        return ReplicationCommandHandler(self.host, self.host.observer, options=options)

    def send_all(self, handler: ReplicationCommandHandler) -> None:
        handler.sender.send(RemoteServerUpCommand("a.example"))
        handler.sender.send(FederationAckCommand("w", 8))
        handler.sender.send(FederationAckCommand("w", 9))
        handler.sender.send(LockReleasedCommand("w", "lock", "key"))
        handler.sender.send(UserSyncCommand("w-id", "@a:b", "D", False, 5))

    def test_next_link(self) -> None:
        """The commands are sent after the positions and before the syncing users."""
        handler = self.make()
        first = MemoryConnection("first")
        handler.new_connection(first)
        handler.lost_connection(first)
        self.send_all(handler)
        self.host.commands.syncing = [SyncingUser("@c:d", None, 6)]
        second = MemoryConnection("second")
        handler.new_connection(second)
        self.assertEqual(
            second.take(),
            [
                "REPLICATE",
                "POSITION events w 7 7",
                "REMOTE_SERVER_UP a.example",
                "FEDERATION_ACK w 9",
                'LOCK_RELEASED ["w","lock","key"]',
                "USER_SYNC w-id @a:b D end 5",
                "USER_SYNC w-id @c:d None start 6",
            ],
        )
        self.assertEqual(self.host.observer.drops, {})

    def test_once(self) -> None:
        """Commands that were sent on one link are not sent on the next."""
        handler = self.make()
        self.send_all(handler)
        self.host.commands.syncing = []
        handler.new_connection(MemoryConnection("first"))
        second = MemoryConnection("second")
        handler.new_connection(second)
        self.assertEqual(second.take(), ["REPLICATE", "POSITION events w 7 7"])

    def test_stand_alone_or_passive(self) -> None:
        """A stand-alone or passive instance retains no command and counts none."""
        for options in (
            HandlerOptions(expects_links=False),
            HandlerOptions(passive=True),
        ):
            handler = self.make(options)
            self.send_all(handler)
            handler.sender.drop_unsent()
            self.assertEqual(self.host.observer.drops, {})

    def test_stop(self) -> None:
        """Commands that never had a link are counted as dropped at the stop."""
        handler = self.make()
        self.send_all(handler)
        handler.sender.drop_unsent()
        self.assertEqual(
            self.host.observer.drops["FEDERATION_ACK", CommandDropReason.STOPPED], 1
        )

    def test_a_link_that_fails(self) -> None:
        """A command that a link fails to send is counted as dropped."""
        handler = self.make()
        connection = MemoryConnection("broken")
        handler.new_connection(connection)
        connection.broken = RuntimeError("gone")
        handler.sender.send(RemoteServerUpCommand("a.example"))
        self.assertEqual(
            self.host.observer.drops,
            {("REMOTE_SERVER_UP", CommandDropReason.FAILED): 1},
        )
