"""Tests of sending to all connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.sending.command_sender import CommandSender
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.commands import (
    CancelTaskCommand,
    ClearUserSyncsCommand,
    FederationAckCommand,
    LockReleasedCommand,
    NewActiveTaskCommand,
    RemoteServerUpCommand,
    UserIpCommand,
    UserSyncCommand,
)
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost


class CommandSenderTests(SynchronousTestCase):
    """Tests that commands and rows are sent on every connection."""

    def setUp(self) -> None:
        self.stream = SourceStream("events", Row, instance_name="w")
        self.stream.local_token = 7
        self.host = RecordingHost(self.stream, written=["events"], instance_name="w")
        self.sender = CommandSender(self.host, self.host.observer, passive=False)
        self.connections = [MemoryConnection("a"), MemoryConnection("b")]
        for connection in self.connections:
            self.sender.add(connection)

    def test_commands(self) -> None:
        """Each command is sent on each connection."""
        self.sender.send(UserSyncCommand("id", "@a:b", "My Phone", False, 5))
        self.sender.send(ClearUserSyncsCommand("w-id"))
        self.sender.send(FederationAckCommand("w", 9))
        self.sender.send(UserIpCommand("@a:b", "secret", "1.2.3.4", "agent", None, 6))
        self.sender.send(RemoteServerUpCommand("a.example"))
        self.sender.send(LockReleasedCommand("w", "lock", "key"))
        self.sender.send(NewActiveTaskCommand("t1"))
        self.sender.send(CancelTaskCommand("t2"))
        for connection in self.connections:
            self.assertEqual(
                connection.take(),
                [
                    "USER_SYNC id @a:b My Phone end 5",
                    "CLEAR_USER_SYNC w-id",
                    "FEDERATION_ACK w 9",
                    'USER_IP @a:b ["secret","1.2.3.4","agent",null,6]',
                    "REMOTE_SERVER_UP a.example",
                    'LOCK_RELEASED ["w","lock","key"]',
                    "NEW_ACTIVE_TASK t1",
                    "CANCEL_TASK t2",
                ],
            )

    def test_what_a_server_may_not_send(self) -> None:
        """A client of a listener is sent only what a server may send."""
        self.connections[0].relays = True
        self.sender.send(ClearUserSyncsCommand("w-id"))
        self.sender.send(NewActiveTaskCommand("t1"))
        self.assertEqual(self.connections[0].take(), ["NEW_ACTIVE_TASK t1"])
        self.assertEqual(
            self.connections[1].take(), ["CLEAR_USER_SYNC w-id", "NEW_ACTIVE_TASK t1"]
        )

    def test_retained_for_a_server(self) -> None:
        """A command that no client may receive waits for a link to a server."""
        for connection in self.connections:
            connection.relays = True
        self.sender.send(ClearUserSyncsCommand("w-id"))
        server = MemoryConnection("server")
        self.sender.add(server)
        self.sender.send_unsent()
        self.assertEqual(server.take(), ["CLEAR_USER_SYNC w-id"])
        self.assertEqual([each.take() for each in self.connections], [[], []])

    def test_announcements_are_reported_to_the_listener(self) -> None:
        """An announcement to only one TCP peer is not reported to the listener."""
        sent: list[tuple[str, int, int]] = []
        listener = SimpleNamespace(position_sent=lambda *args: sent.append(args))
        self.sender.listen_to_sending(cast(Any, listener))
        self.sender.announce_positions()
        self.assertEqual(sent, [("events", 7, 7)])
        self.connections[0].relays = True
        self.sender.announce_positions(self.connections[0])
        self.assertEqual(sent, [("events", 7, 7)])

    def test_a_broken_connection(self) -> None:
        """A connection that fails is reported; the command is sent on the others."""
        self.connections[0].broken = RuntimeError("gone")
        self.sender.send(RemoteServerUpCommand("a.example"))
        self.assertEqual(self.connections[1].take(), ["REMOTE_SERVER_UP a.example"])
        self.assertEqual(len(self.host.observer.failures), 1)

    def test_rows(self) -> None:
        """Rows of several tokens are sent in one write on each connection."""
        self.sender.send_rows("events", [(8, [b'["a"]', b'["b"]']), (9, [b'["c"]'])])
        for connection in self.connections:
            self.assertEqual(
                connection.take(),
                [
                    'RDATA events w batch ["a"]',
                    'RDATA events w 8 ["b"]',
                    'RDATA events w 9 ["c"]',
                ],
            )
            self.assertEqual(connection.writes, [3])
        self.assertEqual(self.host.observer.sent["events"], 3)
        self.assertEqual(self.sender.last_sent_token(self.stream), 9)
        self.assertEqual(self.host.observer.processes, [])

    def test_no_rows(self) -> None:
        """An empty list of rows sends nothing."""
        self.sender.send_rows("events", [])
        self.assertEqual(self.connections[0].take(), [])

    def test_a_row_that_is_too_long(self) -> None:
        """A token with a row longer than the peer's limit is replaced by a POSITION."""
        self.connections[0].max_line_length = 40
        long = b'["' + b"x" * 100 + b'"]'
        self.sender.send_rows(
            "events", [(8, [b'["a"]']), (9, [b'["b"]', long]), (10, [b'["c"]'])]
        )
        self.assertEqual(
            self.connections[0].take(),
            [
                'RDATA events w 8 ["a"]',
                "POSITION events w 9 9",
                'RDATA events w 10 ["c"]',
            ],
        )
        self.assertEqual(len(self.connections[1].take()), 4)
        self.assertEqual(len(self.host.observer.sending_failures), 1)

    def test_rows_that_could_not_be_sent(self) -> None:
        """If sending rows fails, a POSITION is sent instead."""
        connection = self.connections[0]
        send = connection.send_lines

        def fail_once(command_name: str, lines: list[bytes]) -> None:
            connection.send_lines = send  # type: ignore[method-assign]
            raise RuntimeError("once")

        connection.send_lines = fail_once  # type: ignore[assignment,method-assign]
        self.sender.send_rows("events", [(8, [b'["a"]'])])
        self.assertEqual(connection.take(), ["POSITION events w 8 8"])
        self.assertEqual(len(self.host.observer.sending_failures), 1)

    def test_position_covers_only_sent_rows(self) -> None:
        """A POSITION does not cover rows that are committed but not sent."""
        self.sender.announce_positions()
        self.stream.persist("w", 9, ["a"])
        self.sender.announce_positions(self.connections[0])
        self.assertEqual(
            self.connections[0].take(),
            ["POSITION events w 7 7", "POSITION events w 7 7"],
        )
        self.assertEqual(self.connections[1].take(), ["POSITION events w 7 7"])

    def test_positions(self) -> None:
        """A POSITION names the range in which nothing was written."""
        self.sender.send_position("events", 7, 12)
        self.assertEqual(self.connections[0].take(), ["POSITION events w 7 12"])
        self.assertEqual(self.sender.last_sent_token(self.stream), 12)

    def test_a_row_past_the_streamer(self) -> None:
        """
        A row can be sent without the streamer; the token of this row counts as sent.
        """
        self.sender.stream_update("events", None, ["a"])
        self.sender.stream_update("events", 8, ["b"])
        self.assertEqual(
            self.connections[0].take(),
            ['RDATA events w batch ["a"]', 'RDATA events w 8 ["b"]'],
        )
        self.assertEqual(self.sender.last_sent_token(self.stream), 8)
