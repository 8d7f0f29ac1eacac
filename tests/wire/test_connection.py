"""Tests of a line connection without a socket."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    ForbiddenCommandError,
    UnknownCommandError,
    UnparsableLineError,
)
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.commands import (
    VALID_CLIENT_COMMANDS,
    VALID_SERVER_COMMANDS,
    Command,
    PositionCommand,
    RemoteServerUpCommand,
    UserSyncCommand,
)
from synapse_replication.wire.connection import (
    MAX_LINE_LENGTH,
    ConnectionState,
    LineConnection,
    Received,
)
from synapse_replication.wire.rdata import RdataGroup
from tests.wire.connection_case import (
    TLS_ALERT,
    TLS_CLIENT_HELLO,
    client,
    drain,
    server,
)
from tests.wire.lines import LINES


class ClockStepTests(SynchronousTestCase):
    """A step of the clock does not count as silence of the peer."""

    def test_established(self) -> None:
        """
        A link survives a step of an hour; it is closed if nothing arrives within the
        timeout after the step.
        """
        connection = client()
        connection.receive_data(b"PING 1\n", 0.0)
        connection.tick(1.0)
        now = 3600.0
        while connection.close_reason is None:
            connection.send_lines("PING", [b"PING 1"], now)
            now += connection.tick(now)
        self.assertIs(connection.close_reason, CloseReason.TIMED_OUT)
        self.assertTrue(3620 < now < 3640, now)

    def test_handshake(self) -> None:
        """A step of the clock does not end a handshake."""
        connection = LineConnection("repl.test", 0.0, is_server=False)
        connection.tick(1.0)
        connection.tick(3600.0)
        connection.receive_data(b"SERVER repl.test\n", 3600.0)
        self.assertIsNone(connection.close_reason)


class ReceiveTests(SynchronousTestCase):
    """Received data."""

    def test_split_at_every_byte(self) -> None:
        """The position at which data is split into chunks does not matter."""
        data = (
            b"SERVER repl.test\n\nPING 1\nRDATA events w batch [1]\n"
            b"RDATA events w 5 [2]\nPOSITION events w 5 6\nREMOTE_SERVER_UP a\n"
        )
        items = [
            RdataGroup("events", "w", [None, 5], [b"[1]", b"[2]"]),
            PositionCommand("events", "w", 5, 6),
            RemoteServerUpCommand("a"),
        ]
        counts = {"SERVER": 1, "PING": 1, "RDATA": 2, "POSITION": 1}
        for at in range(len(data) + 1):
            connection = LineConnection("repl.test", 0.0, is_server=False)
            parts = [
                connection.receive_data(part, 0.0) for part in (data[:at], data[at:])
            ]
            got = self._join(parts)
            self.assertEqual(got.items, items, at)
            self.assertEqual(got.counts, {**counts, "REMOTE_SERVER_UP": 1})
            self.assertEqual(got.refused, [])

    def test_byte_by_byte(self) -> None:
        """Data may arrive one byte at a time."""
        connection = server()
        parts = [
            connection.receive_data(bytes([byte]), 0.0)
            for byte in b"NAME w1\nRDATA events w 5 [2]\n"
        ]
        self.assertEqual(
            self._join(parts).items, [RdataGroup("events", "w", [5], [b"[2]"])]
        )
        self.assertEqual(connection.peer_name, "w1")

    def test_http(self) -> None:
        """An HTTP request line or header closes the connection."""
        for data in (b"GET /x HTTP/1.1\r\n", b"POST /x\n", b"Host: 127.0.0.1\n"):
            connection = LineConnection("repl.test", 0.0, is_server=True)
            received = connection.receive_data(data + b"REMOTE_SERVER_UP a\n", 0.0)
            self.assertFalse(connection.is_open, data)
            self.assertEqual(received.items, [])
            self.assertIn(b"does not speak HTTP", drain(connection))

    @staticmethod
    def _join(parts: list[Received]) -> Received:
        whole = Received()
        for part in parts:
            whole.counts.update(part.counts)
            whole.refused.extend(part.refused)
            for item in part.items:
                last = whole.items[-1] if whole.items else None
                if isinstance(item, RdataGroup) and isinstance(last, RdataGroup):
                    last.tokens.extend(item.tokens)
                    last.rows.extend(item.rows)
                else:
                    whole.items.append(item)
        return whole

    def test_unknown_command(self) -> None:
        """An unknown command is counted and skipped; the link stays up."""
        connection = client()
        got = connection.receive_data(b"FROB x\nREMOTE_SERVER_UP a\n", 0.0)
        self.assertEqual(got.items, [RemoteServerUpCommand("a")])
        self.assertEqual([type(e) for e in got.refused], [UnknownCommandError])
        self.assertEqual(got.counts, {"REMOTE_SERVER_UP": 1})
        self.assertIs(connection.state, ConnectionState.ESTABLISHED)
        self.assertEqual(drain(connection), b"")

    def test_bad_line(self) -> None:
        """
        A malformed line causes one ERROR and a close; earlier lines are delivered.
        """
        connection = server()
        good = b"USER_SYNC i @u:x my phone start 5\n"
        got = connection.receive_data(good + b"USER_SYNC x\n" * 3 + good, 0.0)
        self.assertEqual(got.items, [UserSyncCommand("i", "@u:x", "my phone", True, 5)])
        self.assertEqual([type(e) for e in got.refused], [UnparsableLineError])
        self.assertIs(connection.state, ConnectionState.CLOSING)
        self.assertIs(connection.close_reason, CloseReason.PROTOCOL_ERROR)
        sent = drain(connection)
        self.assertTrue(sent.startswith(b"ERROR cannot parse USER_SYNC line"), sent)
        self.assertEqual(sent.count(b"\n"), 1)

    def test_closed_for_error_is_never_resumed(self) -> None:
        """After a close with an error, nothing is received or sent."""
        connection = server()
        connection.close_with_error("no", 0.0)
        self.assertEqual(drain(connection), b"ERROR no\n")
        got = connection.receive_data(b"REMOTE_SERVER_UP a\nFROB\n", 1.0)
        self.assertEqual(got, Received())
        self.assertFalse(connection.send_lines("PING", [b"PING 1"], 1.0))
        connection.close_with_error("again", 1.0)
        connection.close(1.0)
        self.assertEqual(drain(connection), b"")
        self.assertEqual(connection.close_text, "no")

    def test_directions(self) -> None:
        """A command that is not valid in this direction causes an ERROR and a close."""
        for make, allowed in (
            (server, VALID_CLIENT_COMMANDS),
            (client, VALID_SERVER_COMMANDS),
        ):
            for line, command in LINES.items():
                connection = make()
                got = connection.receive_data(line.encode() + b"\n", 0.0)
                is_refused = command.NAME not in allowed
                self.assertEqual(
                    [type(e) for e in got.refused],
                    [ForbiddenCommandError] if is_refused else [],
                    line,
                )
                if is_refused:
                    self.assertIs(connection.close_reason, CloseReason.PROTOCOL_ERROR)

    def test_own_commands_stay(self) -> None:
        """PING, NAME, SERVER and ERROR are not passed to the handler."""
        got = server().receive_data(b"NAME w1\nPING 1\nERROR x\n", 0.0)
        self.assertEqual(got.items, [])
        self.assertEqual(got.counts, {"NAME": 1, "PING": 1, "ERROR": 1})

    def test_peer_error(self) -> None:
        """A received ERROR closes the connection without an ERROR in reply."""
        connection = client()
        connection.receive_data(b"ERROR Failed to keep up\n", 0.0)
        self.assertIs(connection.close_reason, CloseReason.PEER_ERROR)
        self.assertEqual(connection.close_text, "Failed to keep up")
        self.assertEqual(drain(connection), b"")

    def test_names_are_bounded(self) -> None:
        """A peer's NAME is shortened and made printable, as it is used as a label."""
        connection = server()
        connection.receive_data(b"NAME " + b"\xc3\xa9" * 5000 + b"\n", 0.0)
        assert connection.peer_name is not None
        self.assertEqual(len(connection.peer_name), 64)
        self.assertTrue(connection.peer_name.isascii())

    def test_longest_line(self) -> None:
        """A line of 16384 bytes is accepted, whole or in pieces."""
        line = b'RDATA events w 1 "'.ljust(MAX_LINE_LENGTH - 1, b"x") + b'"'
        connection = server()
        got = connection.receive_data(line + b"\n" + line, 0.0)
        self.assertEqual(len(got.items), 1)
        self.assertEqual(len(connection.receive_data(b"\n", 0.0).items), 1)
        self.assertTrue(connection.is_open)

    def test_too_long_line(self) -> None:
        """A longer line closes the connection; earlier lines are delivered."""
        line = b"REMOTE_SERVER_UP ".ljust(MAX_LINE_LENGTH + 1, b"x")
        for data in (
            b"REMOTE_SERVER_UP a\n" + line + b"\n" + b"REMOTE_SERVER_UP b\n",
            b"REMOTE_SERVER_UP a\n" + line,
        ):
            connection = server()
            got = connection.receive_data(data, 0.0)
            self.assertEqual(got.items, [RemoteServerUpCommand("a")])
            self.assertEqual(len(got.refused), 1)
            self.assertIs(connection.close_reason, CloseReason.PROTOCOL_ERROR)
            self.assertEqual(
                drain(connection), b"ERROR line is longer than 16384 bytes\n"
            )

    def test_memory_without_line_ends(self) -> None:
        """A line that never ends uses a limited amount of memory."""
        connection = server()
        for _ in range(100):
            connection.receive_data(b"x" * 1000, 0.0)
        self.assertFalse(connection.is_open)
        assert connection._line_start is not None
        self.assertLessEqual(len(connection._line_start), MAX_LINE_LENGTH + 1000)

    @settings(derandomize=True, deadline=None)
    @given(st.lists(st.binary()), st.booleans())
    def test_never_raises(self, chunks: list[bytes], is_server: bool) -> None:
        """No received bytes cause an exception."""
        connection = LineConnection("repl.test", 0.0, is_server=is_server)
        for chunk in chunks:
            connection.receive_data(chunk, 0.0)
            connection.receive_data(chunk + b"\n", 0.0)


class FirstLineTests(SynchronousTestCase):
    """A client checks the server's first line."""

    def setUp(self) -> None:
        self.connection = LineConnection("repl.test", 0.0, is_server=False)

    def test_server(self) -> None:
        """A SERVER with the expected name establishes the link."""
        self.assertIs(self.connection.state, ConnectionState.CONNECTING)
        self.connection.receive_data(b"\nSERVER repl.test\n", 0.0)
        self.assertIs(self.connection.state, ConnectionState.ESTABLISHED)

    def test_wrong_server(self) -> None:
        """A SERVER of another homeserver is answered with an ERROR that names both."""
        self.connection.receive_data(b"SERVER other.test\nREMOTE_SERVER_UP a\n", 0.0)
        self.assertIs(self.connection.close_reason, CloseReason.PROTOCOL_ERROR)
        self.assertEqual(
            drain(self.connection),
            b"ERROR wrong server: this is 'other.test', but 'repl.test' was expected\n",
        )

    def test_other_protocol(self) -> None:
        """Another protocol is reported with the beginning of its first line."""
        got = self.connection.receive_data(b"HTTP/1.1 400 Bad Request\r\n\r\n", 0.0)
        self.assertEqual(len(got.refused), 1)
        self.assertIn("'HTTP/1.1'", self.connection.close_text)
        self.assertFalse(self.connection.is_open)

    def test_tls(self) -> None:
        """TLS on a port without TLS is reported as such, by client and server."""
        for connection, data in (
            (self.connection, TLS_ALERT),
            (LineConnection("repl.test", 0.0, is_server=True), TLS_CLIENT_HELLO),
        ):
            got = connection.receive_data(data, 0.0)
            self.assertEqual(len(got.refused), 1)
            self.assertIn("TLS", connection.close_text)
            self.assertFalse(connection.is_open)

    def test_silence(self) -> None:
        """
        After 10 s without data from a server, the connection is closed, with a hint at
        TLS.
        """
        self.connection.tick(9.9)
        self.assertTrue(self.connection.is_open)
        self.connection.tick(10.0)
        self.assertIs(self.connection.close_reason, CloseReason.TIMED_OUT)
        self.assertIn("TLS", self.connection.close_text)


class PairTests(SynchronousTestCase):
    """Two connected ends."""

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(st.sampled_from(sorted(LINES)), max_size=20),
        st.lists(st.integers(1, 40), min_size=1),
    )
    def test_commands_arrive(self, lines: list[str], cuts: list[int]) -> None:
        """Commands arrive in order, however the data is split."""
        sender, receiver = client(), server()
        lines = [
            line
            for line in lines
            if line.split(" ")[0] in VALID_CLIENT_COMMANDS - {"ERROR", "RDATA"}
        ]
        for line in lines:
            sender.send_lines("X", [line.encode()], 0.0)
        data = drain(sender)
        arrived: list[Command] = []
        while data:
            cut = cuts[len(data) % len(cuts)]
            for item in receiver.receive_data(data[:cut], 0.0).items:
                assert isinstance(item, Command)
                arrived.append(item)
            data = data[cut:]
        self.assertEqual(
            arrived,
            [LINES[line] for line in lines if line[:4] not in ("NAME", "PING")],
        )
