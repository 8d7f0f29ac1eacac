"""Tests for sending, time limits and closing."""

from __future__ import annotations

import itertools

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    LineTooLongError,
    LocalProtocolError,
)
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.connection import (
    MAX_LINE_LENGTH,
    ConnectionState,
    LineConnection,
)
from synapse_replication.wire.pending_lines import PendingLimit
from tests.wire.connection_case import (
    client,
    drain,
    run_ticks,
    server,
)


class SendTests(SynchronousTestCase):
    """Sent lines."""

    def test_lines(self) -> None:
        """Lines are sent in order, each with its line end."""
        connection = server()
        self.assertTrue(connection.send_lines("RDATA", [b"RDATA 1", b"RDATA 2"], 0.0))
        self.assertTrue(connection.send_lines("PING", [b"PING 1"], 0.0))
        self.assertEqual(connection.pending.lines, 3)
        self.assertEqual(drain(connection), b"RDATA 1\nRDATA 2\nPING 1\n")
        self.assertEqual(connection.pending.lines, 0)

    def test_pieces(self) -> None:
        """Pending lines are written to the transport in limited pieces."""
        connection = server()
        for _ in range(100):
            connection.send_lines("PING", [b"x" * 10_000], 0.0)
        self.assertLess(len(connection.data_to_send()), 80_000)
        self.assertGreater(connection.pending.lines, 90)

    def test_too_long(self) -> None:
        """A line that is too long is refused together with all lines of the call."""
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
        """A line end within a line is refused."""
        connection = server()
        self.assertRaises(
            LocalProtocolError, connection.send_lines, "PING", [b"a\nb"], 0.0
        )
        self.assertEqual(drain(connection), b"")

    def test_congestion(self) -> None:
        """
        While the transport is paused, 10,000 lines may wait; one more closes the
        connection and discards them.
        """
        connection = server()
        connection.pause_writing()
        for _ in range(PendingLimit().lines // 10):
            self.assertTrue(connection.send_lines("PING", [b"PING 1"] * 10, 0.0))
        self.assertEqual(drain(connection), b"")
        self.assertFalse(connection.send_lines("PING", [b"PING 1"], 1.0))
        self.assertIs(connection.close_reason, CloseReason.CONGESTED)
        self.assertEqual(drain(connection), b"ERROR Failed to keep up\n")
        self.assertEqual(connection.pending.lines, 0)

    def test_congestion_in_bytes(self) -> None:
        """The bytes of the waiting lines are limited, too."""
        limit = PendingLimit(bytes=100_000)
        connection = LineConnection("repl.test", 0.0, limit, is_server=True)
        line = b"RDATA events w 1 " + b"x" * 9_982
        self.assertTrue(connection.send_lines("RDATA", [line] * 10, 0.0))
        self.assertTrue(connection.send_lines("RDATA", [line] * 10, 0.0))
        drain(connection)
        connection.pause_writing()
        for _ in range(10):
            self.assertTrue(connection.send_lines("RDATA", [line], 0.0))
        self.assertEqual(connection.pending.bytes, 100_000)
        self.assertFalse(connection.send_lines("RDATA", [line], 1.0))
        self.assertIs(connection.close_reason, CloseReason.CONGESTED)
        self.assertEqual(drain(connection), b"ERROR Failed to keep up\n")
        self.assertEqual(connection.pending.bytes, 0)

    def test_bytes_that_were_sent_do_not_count(self) -> None:
        """Bytes that were written no longer count for the limit."""
        limit = PendingLimit(bytes=1000)
        connection = LineConnection("repl.test", 0.0, limit, is_server=True)
        for _ in range(20):
            connection.pause_writing()
            for _ in range(10):
                self.assertTrue(connection.send_lines("PING", [b"x" * 99], 0.0))
            connection.resume_writing()
            self.assertEqual(len(drain(connection)), 1000)
            self.assertEqual(connection.pending.bytes, 0)

    def test_resume(self) -> None:
        """When the transport resumes, waiting lines are sent in order."""
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

    def test_close_sends_waiting_lines(self) -> None:
        """A clean close sends the waiting lines, even while paused."""
        connection = server()
        connection.pause_writing()
        connection.send_lines("CLEAR_USER_SYNC", [b"CLEAR_USER_SYNC i"], 0.0)
        connection.close(0.0)
        self.assertEqual(drain(connection), b"CLEAR_USER_SYNC i\n")
        self.assertIs(connection.close_reason, CloseReason.SHUTDOWN)

    def test_error_text(self) -> None:
        """An ERROR is one line of limited length, whatever its text."""
        connection = server()
        connection.close_with_error("a\nb\rc\u2028\ud800" + "x" * 100_000, 0.0)
        sent = drain(connection)
        self.assertTrue(sent.startswith(b"ERROR a b c"), sent[:50])
        self.assertEqual(sent.count(b"\n"), 1)
        self.assertLess(len(sent), MAX_LINE_LENGTH)


class TimeTests(SynchronousTestCase):
    """Keep-alive and timeouts."""

    def test_ping_is_due(self) -> None:
        """At least one line is sent every 5 s."""
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
        """No PING is due while the transport is paused: older lines still wait."""
        connection = server()
        connection.pause_writing()
        self.assertFalse(connection.is_ping_due(100.0))
        connection.resume_writing()
        self.assertTrue(connection.is_ping_due(100.0))

    def test_silence(self) -> None:
        """Once the peer has sent a PING, 25 s of silence close the connection."""
        for make in (server, client):
            connection = make()
            connection.receive_data(b"PING 1\n", 1.0)
            connection.tick(25.9)
            self.assertTrue(connection.is_open)
            connection.tick(26.0)
            self.assertIs(connection.close_reason, CloseReason.TIMED_OUT)
            self.assertTrue(drain(connection).startswith(b"ERROR ping timeout"))

    def test_any_bytes_end_silence(self) -> None:
        """Any received bytes, even part of a line, count as a sign of life."""
        connection = server()
        connection.receive_data(b"PING 1\n", 0.0)
        for now in (20.0, 40.0, 60.0):
            connection.receive_data(b"x", now)
            connection.tick(now + 4.0)
        self.assertTrue(connection.is_open)

    def test_peer_without_ping(self) -> None:
        """A peer that never sends PING, such as netcat, is not timed out."""
        connection = server()
        connection.receive_data(b"REPLICATE\n", 0.0)
        for _ in run_ticks(connection, 10_000.0):
            pass
        self.assertTrue(connection.is_open)

    def test_close_that_hangs(self) -> None:
        """A close that takes 25 s counts as hanging."""
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
        """
        With ticks at the requested times, timeouts are noticed immediately with few
        ticks.
        """
        connection = server()
        connection.receive_data(b"PING 1\n", 1.3)
        times = list(run_ticks(connection, 60.0))
        self.assertFalse(connection.is_open)
        self.assertTrue(connection.close_hangs)
        self.assertIn(26.3, [round(now, 3) for now in times])
        self.assertIn(51.3, [round(now, 3) for now in times])
        self.assertLess(len(times), 30)


class EndTests(SynchronousTestCase):
    """A transport that was closed."""

    def test_reasons(self) -> None:
        """A close by the peer and a broken link have different reasons."""
        for clean, reason in ((True, CloseReason.CLEAN), (False, CloseReason.LOST)):
            connection = server()
            connection.send_lines("PING", [b"PING 1"], 0.0)
            connection.connection_lost(clean, "gone")
            self.assertIs(connection.state, ConnectionState.CLOSED)
            self.assertIs(connection.close_reason, reason)
            self.assertEqual(connection.close_text, "gone")
            self.assertEqual(connection.pending.lines, 0)
            self.assertEqual(drain(connection), b"")

    def test_first_reason_stays(self) -> None:
        """The reason of this end's close is retained when the transport closes."""
        connection = server()
        connection.close(0.0)
        connection.connection_lost(True, "gone")
        self.assertIs(connection.close_reason, CloseReason.SHUTDOWN)
