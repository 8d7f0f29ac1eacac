"""A line connection without a socket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    ForbiddenCommandError,
    LineTooLongError,
    LocalProtocolError,
    UnknownCommandError,
    UnparsableLineError,
)
from synapse_replication.wire.commands.standard import (
    VALID_CLIENT_COMMANDS,
    VALID_SERVER_COMMANDS,
    Command,
    PositionCommand,
    RemoteServerUpCommand,
    UserSyncCommand,
)
from synapse_replication.wire.connection import (
    MAX_LINE_LENGTH,
    CloseReason,
    ConnectionState,
    LineConnection,
    Received,
    Role,
)
from synapse_replication.wire.pending import PendingLimit
from synapse_replication.wire.rdata import RdataRun
from tests.wire.commands.test_standard import LINES

TLS_CLIENT_HELLO = bytes.fromhex("160301020001000001fc0303")
TLS_ALERT = bytes.fromhex("15030300020246")


def server(now: float = 0.0) -> LineConnection:
    connection = LineConnection(Role.SERVER, "repl.test", now)
    connection.receive_data(b"NAME peer\n", now)
    return connection


def client() -> LineConnection:
    connection = LineConnection(Role.CLIENT, "repl.test", 0.0)
    connection.receive_data(b"SERVER repl.test\n", 0.0)
    return connection


def drain(connection: LineConnection) -> bytes:
    return b"".join(iter(connection.data_to_send, b""))


def run_ticks(
    connection: LineConnection,
    until: float,
    on_ping: Callable[[float], object] = lambda now: None,
) -> Iterator[float]:
    """Call ``tick``, and send a PING, when it is due; give the times."""
    now = 0.0
    while now <= until and not connection.close_hangs:
        if connection.is_ping_due(now):
            connection.send_lines("PING", [b"PING 1"], now)
            on_ping(now)
        delay = connection.tick(now)
        yield now
        now += delay


class ClockStepTests(SynchronousTestCase):
    """A clock that steps while nothing ran is no silence of the peer."""

    def test_established(self) -> None:
        """
        A link whose peer pings survives a step of an hour, and ends if nothing comes
        in the time-out that begins then.
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
        connection = LineConnection(Role.CLIENT, "repl.test", 0.0)
        connection.tick(1.0)
        connection.tick(3600.0)
        connection.receive_data(b"SERVER repl.test\n", 3600.0)
        self.assertIsNone(connection.close_reason)


class ReceiveTests(SynchronousTestCase):
    """What arrives."""

    def test_split_at_every_byte(self) -> None:
        """It does not matter where a chunk ends."""
        data = (
            b"SERVER repl.test\n\nPING 1\nRDATA events w batch [1]\n"
            b"RDATA events w 5 [2]\nPOSITION events w 5 6\nREMOTE_SERVER_UP a\n"
        )
        items = [
            RdataRun("events", "w", [None, 5], [b"[1]", b"[2]"]),
            PositionCommand("events", "w", 5, 6),
            RemoteServerUpCommand("a"),
        ]
        counts = {"SERVER": 1, "PING": 1, "RDATA": 2, "POSITION": 1}
        for at in range(len(data) + 1):
            connection = LineConnection(Role.CLIENT, "repl.test", 0.0)
            parts = [
                connection.receive_data(part, 0.0) for part in (data[:at], data[at:])
            ]
            got = self._join(parts)
            self.assertEqual(got.items, items, at)
            self.assertEqual(got.counts, {**counts, "REMOTE_SERVER_UP": 1})
            self.assertEqual(got.refused, [])

    def test_byte_by_byte(self) -> None:
        """Bytes may come one at a time."""
        connection = server()
        parts = [
            connection.receive_data(bytes([byte]), 0.0)
            for byte in b"NAME w1\nRDATA events w 5 [2]\n"
        ]
        self.assertEqual(
            self._join(parts).items, [RdataRun("events", "w", [5], [b"[2]"])]
        )
        self.assertEqual(connection.peer_name, "w1")

    def test_http(self) -> None:
        """A request of HTTP ends the connection, at its first line or at its words."""
        for data in (b"GET /x HTTP/1.1\r\n", b"POST /x\n", b"Host: 127.0.0.1\n"):
            connection = LineConnection(Role.SERVER, "repl.test", 0.0)
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
                if isinstance(item, RdataRun) and isinstance(last, RdataRun):
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
        A bad line gets one ERROR and a close; what came before it is delivered.
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
        """Once it closes, nothing is received and nothing sent."""
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
        """What may not be sent to this side gets ERROR and a close."""
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
        """PING, NAME, SERVER and ERROR are not for the handler."""
        got = server().receive_data(b"NAME w1\nPING 1\nERROR x\n", 0.0)
        self.assertEqual(got.items, [])
        self.assertEqual(got.counts, {"NAME": 1, "PING": 1, "ERROR": 1})

    def test_peer_error(self) -> None:
        """An ERROR closes, without an ERROR in answer."""
        connection = client()
        connection.receive_data(b"ERROR Failed to keep up\n", 0.0)
        self.assertIs(connection.close_reason, CloseReason.PEER_ERROR)
        self.assertEqual(connection.close_text, "Failed to keep up")
        self.assertEqual(drain(connection), b"")

    def test_names_are_bounded(self) -> None:
        """A NAME becomes a label: it is short and printable."""
        connection = server()
        connection.receive_data(b"NAME " + b"\xc3\xa9" * 5000 + b"\n", 0.0)
        assert connection.peer_name is not None
        self.assertEqual(len(connection.peer_name), 64)
        self.assertTrue(connection.peer_name.isascii())

    def test_longest_line(self) -> None:
        """A line of 16384 bytes is taken, whole or in pieces."""
        line = b'RDATA events w 1 "'.ljust(MAX_LINE_LENGTH - 1, b"x") + b'"'
        connection = server()
        got = connection.receive_data(line + b"\n" + line, 0.0)
        self.assertEqual(len(got.items), 1)
        self.assertEqual(len(connection.receive_data(b"\n", 0.0).items), 1)
        self.assertTrue(connection.is_open)

    def test_too_long_line(self) -> None:
        """A longer line closes; what came before it is delivered."""
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
        """A peer that never ends a line does not fill our memory."""
        connection = server()
        for _ in range(100):
            connection.receive_data(b"x" * 1000, 0.0)
        self.assertFalse(connection.is_open)
        assert connection._line_start is not None
        self.assertLessEqual(len(connection._line_start), MAX_LINE_LENGTH + 1000)

    @settings(derandomize=True, deadline=None)
    @given(st.lists(st.binary()), st.sampled_from(Role))
    def test_never_raises(self, chunks: list[bytes], role: Role) -> None:
        """No bytes of a peer raise."""
        connection = LineConnection(role, "repl.test", 0.0)
        for chunk in chunks:
            connection.receive_data(chunk, 0.0)
            connection.receive_data(chunk + b"\n", 0.0)


class FirstLineTests(SynchronousTestCase):
    """A client finds out whom it talks to."""

    def setUp(self) -> None:
        self.connection = LineConnection(Role.CLIENT, "repl.test", 0.0)

    def test_server(self) -> None:
        """The right SERVER establishes the link."""
        self.assertIs(self.connection.state, ConnectionState.CONNECTING)
        self.connection.receive_data(b"\nSERVER repl.test\n", 0.0)
        self.assertIs(self.connection.state, ConnectionState.ESTABLISHED)

    def test_wrong_server(self) -> None:
        """Another homeserver's process gets ERROR, which has both names."""
        self.connection.receive_data(b"SERVER other.test\nREMOTE_SERVER_UP a\n", 0.0)
        self.assertIs(self.connection.close_reason, CloseReason.PROTOCOL_ERROR)
        self.assertEqual(
            drain(self.connection),
            b"ERROR wrong server: this is 'other.test', but 'repl.test' was expected\n",
        )

    def test_other_protocol(self) -> None:
        """What speaks another protocol is named by its first line."""
        got = self.connection.receive_data(b"HTTP/1.1 400 Bad Request\r\n\r\n", 0.0)
        self.assertEqual(len(got.refused), 1)
        self.assertIn("'HTTP/1.1'", self.connection.close_text)
        self.assertFalse(self.connection.is_open)

    def test_tls(self) -> None:
        """A port that speaks TLS is told as such, at both ends."""
        for connection, data in (
            (self.connection, TLS_ALERT),
            (LineConnection(Role.SERVER, "repl.test", 0.0), TLS_CLIENT_HELLO),
        ):
            got = connection.receive_data(data, 0.0)
            self.assertEqual(len(got.refused), 1)
            self.assertIn("TLS", connection.close_text)
            self.assertFalse(connection.is_open)

    def test_silence(self) -> None:
        """A port that says nothing is given up after 10 s, with a hint."""
        self.connection.tick(9.9)
        self.assertTrue(self.connection.is_open)
        self.connection.tick(10.0)
        self.assertIs(self.connection.close_reason, CloseReason.TIMED_OUT)
        self.assertIn("TLS", self.connection.close_text)


class SendTests(SynchronousTestCase):
    """What goes out."""

    def test_lines(self) -> None:
        """Lines go out in order, each with its end."""
        connection = server()
        self.assertTrue(connection.send_lines("RDATA", [b"RDATA 1", b"RDATA 2"], 0.0))
        self.assertTrue(connection.send_lines("PING", [b"PING 1"], 0.0))
        self.assertEqual(connection.pending_lines, 3)
        self.assertEqual(drain(connection), b"RDATA 1\nRDATA 2\nPING 1\n")
        self.assertEqual(connection.pending_lines, 0)

    def test_pieces(self) -> None:
        """What waited is not given to the transport all at once."""
        connection = server()
        for _ in range(100):
            connection.send_lines("PING", [b"x" * 10_000], 0.0)
        self.assertLess(len(connection.data_to_send()), 80_000)
        self.assertGreater(connection.pending_lines, 90)

    def test_too_long(self) -> None:
        """A line that is too long is refused, and none of its call is sent."""
        connection = server()
        error = self.assertRaises(
            LineTooLongError,
            connection.send_lines,
            "RDATA",
            [b"x", b"x" * (MAX_LINE_LENGTH + 1)],
            0.0,
        )
        self.assertEqual((error.command_name, error.length), ("RDATA", 16385))
        self.assertTrue(connection.send_lines("RDATA", [b"x" * 16384], 0.0))
        self.assertEqual(len(drain(connection)), 16385)

    def test_line_end(self) -> None:
        """The end of a line inside one is refused."""
        connection = server()
        self.assertRaises(
            LocalProtocolError, connection.send_lines, "PING", [b"a\nb"], 0.0
        )
        self.assertEqual(drain(connection), b"")

    def test_congestion(self) -> None:
        """
        While the transport is paused 10,000 lines wait; one more closes, and
        frees them.
        """
        connection = server()
        connection.pause_writing()
        for _ in range(PendingLimit().lines // 10):
            self.assertTrue(connection.send_lines("PING", [b"PING 1"] * 10, 0.0))
        self.assertEqual(drain(connection), b"")
        self.assertFalse(connection.send_lines("PING", [b"PING 1"], 1.0))
        self.assertIs(connection.close_reason, CloseReason.CONGESTED)
        self.assertEqual(drain(connection), b"ERROR Failed to keep up\n")
        self.assertEqual(connection.pending_lines, 0)

    def test_congestion_in_bytes(self) -> None:
        """
        Long lines are bounded by their bytes, long before there are many of them.
        """
        limit = PendingLimit(bytes=100_000)
        connection = LineConnection(Role.SERVER, "repl.test", 0.0, limit)
        line = b"RDATA events w 1 " + b"x" * 9_982
        self.assertTrue(connection.send_lines("RDATA", [line] * 10, 0.0))
        self.assertTrue(connection.send_lines("RDATA", [line] * 10, 0.0))
        drain(connection)
        connection.pause_writing()
        for _ in range(10):
            self.assertTrue(connection.send_lines("RDATA", [line], 0.0))
        self.assertEqual(connection.pending_bytes, 100_000)
        self.assertFalse(connection.send_lines("RDATA", [line], 1.0))
        self.assertIs(connection.close_reason, CloseReason.CONGESTED)
        self.assertEqual(drain(connection), b"ERROR Failed to keep up\n")
        self.assertEqual(connection.pending_bytes, 0)

    def test_bytes_that_were_sent_do_not_count(self) -> None:
        """What the transport took makes room for as many bytes again."""
        limit = PendingLimit(bytes=1000)
        connection = LineConnection(Role.SERVER, "repl.test", 0.0, limit)
        for _ in range(20):
            connection.pause_writing()
            for _ in range(10):
                self.assertTrue(connection.send_lines("PING", [b"x" * 99], 0.0))
            connection.resume_writing()
            self.assertEqual(len(drain(connection)), 1000)
            self.assertEqual(connection.pending_bytes, 0)

    def test_resume(self) -> None:
        """What waited goes out, in order, once the transport takes more."""
        connection = server()
        connection.pause_writing()
        for number in range(PendingLimit().lines):
            connection.send_lines("PING", [b"%d" % number], 0.0)
        connection.resume_writing()
        self.assertEqual(
            drain(connection).splitlines(),
            [b"%d" % number for number in range(PendingLimit().lines)],
        )
        self.assertTrue(connection.is_open)

    def test_close_sends_what_waits(self) -> None:
        """A close in good order still sends what waits, paused or not."""
        connection = server()
        connection.pause_writing()
        connection.send_lines("CLEAR_USER_SYNC", [b"CLEAR_USER_SYNC i"], 0.0)
        connection.close(0.0)
        self.assertEqual(drain(connection), b"CLEAR_USER_SYNC i\n")
        self.assertIs(connection.close_reason, CloseReason.SHUTDOWN)

    def test_error_text(self) -> None:
        """An ERROR is one line of bounded length, whatever its text."""
        connection = server()
        connection.close_with_error("a\nb\rc\u2028\ud800" + "x" * 100_000, 0.0)
        sent = drain(connection)
        self.assertTrue(sent.startswith(b"ERROR a b c"), sent[:50])
        self.assertEqual(sent.count(b"\n"), 1)
        self.assertLess(len(sent), MAX_LINE_LENGTH)


class TimeTests(SynchronousTestCase):
    """Keep-alive and time-outs."""

    def test_ping_is_due(self) -> None:
        """At least one line goes out every 5 s."""
        connection = server()
        pings: list[float] = []
        sends = iter([2.0, 4.9, 13.0])
        next_send = next(sends)

        last = 0.0
        for now in run_ticks(connection, 30.0, pings.append):
            while next_send <= now:
                connection.send_lines("X", [b"X"], next_send)
                next_send = next(sends, 99.0)
            last = now
        self.assertGreaterEqual(last, 25.0)
        times = sorted([0.0, 2.0, 4.9, 13.0, *pings])
        gaps = [b - a for a, b in itertools.pairwise(times)]
        self.assertLessEqual(max(gaps), 5.01)

    def test_no_ping_while_paused(self) -> None:
        """A paused transport still has older lines: no PING is put behind them."""
        connection = server()
        connection.pause_writing()
        self.assertFalse(connection.is_ping_due(100.0))
        connection.resume_writing()
        self.assertTrue(connection.is_ping_due(100.0))

    def test_silence(self) -> None:
        """After a PING of the peer, 25 s of silence end the connection."""
        for make in (server, client):
            connection = make()
            connection.receive_data(b"PING 1\n", 1.0)
            connection.tick(25.9)
            self.assertTrue(connection.is_open)
            connection.tick(26.0)
            self.assertIs(connection.close_reason, CloseReason.TIMED_OUT)
            self.assertTrue(drain(connection).startswith(b"ERROR ping timeout"))

    def test_any_bytes_end_silence(self) -> None:
        """Anything that arrives counts, also a part of a line."""
        connection = server()
        connection.receive_data(b"PING 1\n", 0.0)
        for now in (20.0, 40.0, 60.0):
            connection.receive_data(b"x", now)
            connection.tick(now + 4.0)
        self.assertTrue(connection.is_open)

    def test_person(self) -> None:
        """A person with netcat, who sends no PING, is never timed out."""
        connection = server()
        connection.receive_data(b"REPLICATE\n", 0.0)
        for _ in run_ticks(connection, 10_000.0):
            pass
        self.assertTrue(connection.is_open)

    def test_close_that_hangs(self) -> None:
        """A close that lasts 25 s is to be aborted."""
        for close in (
            lambda connection: connection.close(3.0),
            lambda connection: connection.close_with_error("x", 3.0),
        ):
            connection = server()
            close(connection)
            connection.tick(27.9)
            self.assertFalse(connection.close_hangs)
            connection.tick(28.0)
            self.assertTrue(connection.close_hangs)

    def test_ticks_are_in_time(self) -> None:
        """Whoever ticks when it is due notices a time-out at once, and seldom ticks."""
        connection = server()
        connection.receive_data(b"PING 1\n", 1.3)
        times = list(run_ticks(connection, 60.0))
        self.assertFalse(connection.is_open)
        self.assertTrue(connection.close_hangs)
        self.assertIn(26.3, [round(now, 3) for now in times])
        self.assertIn(51.3, [round(now, 3) for now in times])
        self.assertLess(len(times), 30)


class EndTests(SynchronousTestCase):
    """The transport is gone."""

    def test_reasons(self) -> None:
        """The peer's close and a broken link are told apart."""
        for clean, reason in ((True, CloseReason.CLEAN), (False, CloseReason.LOST)):
            connection = server()
            connection.send_lines("PING", [b"PING 1"], 0.0)
            connection.connection_lost(clean, "gone")
            self.assertIs(connection.state, ConnectionState.CLOSED)
            self.assertIs(connection.close_reason, reason)
            self.assertEqual(connection.close_text, "gone")
            self.assertEqual(connection.pending_lines, 0)
            self.assertEqual(drain(connection), b"")

    def test_first_reason_stays(self) -> None:
        """Why this end closed is not forgotten when the transport goes."""
        connection = server()
        connection.close(0.0)
        connection.connection_lost(True, "gone")
        self.assertIs(connection.close_reason, CloseReason.SHUTDOWN)


class PairTests(SynchronousTestCase):
    """Two ends back to back."""

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(st.sampled_from(sorted(LINES)), max_size=20),
        st.lists(st.integers(1, 40), min_size=1),
    )
    def test_commands_arrive(self, lines: list[str], cuts: list[int]) -> None:
        """What one end sends arrives at the other in order, wherever it is cut."""
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
