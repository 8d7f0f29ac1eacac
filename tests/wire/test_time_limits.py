"""Tests of when timeouts and PINGs are due; test_connection.py tests their effects."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.wire.time_limits import (
    FIRST_PING_TIMEOUT,
    NAME_TIMEOUT,
    PING_INTERVAL,
    SERVER_TIMEOUT,
    TIMEOUT,
    TimeLimits,
)


class TimeLimitsTests(SynchronousTestCase):
    def test_handshake(self) -> None:
        """
        Only a connecting peer times out: a server waits longer for NAME than a client
        for SERVER.
        """
        for is_server, limit in ((True, NAME_TIMEOUT), (False, SERVER_TIMEOUT)):
            times = TimeLimits(is_server=is_server, now=100.0)
            before = times.expired(100.0 + limit - 0.1, is_connecting=True)
            self.assertIsNone(before)
            expired = times.expired(100.0 + limit, is_connecting=True)
            self.assertIn("no NAME" if is_server else "no SERVER", expired or "")
            self.assertIsNone(times.expired(100.0 + limit, is_connecting=False))

    def test_silence(self) -> None:
        """Only a client that sends PING times out when it is silent."""
        times = TimeLimits(is_server=True, now=0.0)
        self.assertIsNone(times.expired(1e6, is_connecting=False))
        times.peer_pings = True
        times.last_received = 10.0
        self.assertIsNone(times.expired(10.0 + TIMEOUT - 0.1, is_connecting=False))
        expired = times.expired(10.0 + TIMEOUT, is_connecting=False)
        self.assertIn("ping timeout", expired or "")

    def test_silence_before_the_first_ping(self) -> None:
        """A client gives up a server that is silent from SERVER on."""
        times = TimeLimits(is_server=False, now=0.0)
        times.last_received = 10.0
        for at, expected in ((10.0 + FIRST_PING_TIMEOUT, "ping timeout"), (39.9, None)):
            expired = times.expired(at, is_connecting=False)
            self.assertEqual(expired and expired.partition(":")[0], expected)
        delay = times.next_tick(39.0, is_open=True, is_connecting=False, is_paused=True)
        self.assertEqual(delay, 1.0)

    def test_ping(self) -> None:
        """A PING is due after an interval without sent lines, unless paused."""
        times = TimeLimits(is_server=True, now=0.0)
        times.last_sent = 10.0
        due = 10.0 + PING_INTERVAL
        self.assertFalse(times.is_ping_due(due - 0.1, is_paused=False))
        self.assertTrue(times.is_ping_due(due, is_paused=False))
        self.assertFalse(times.is_ping_due(due, is_paused=True))

    def test_late_tick(self) -> None:
        """A pause of this process does not count as silence of the peer."""
        times = TimeLimits(is_server=True, now=0.0)
        times.peer_pings = True
        delay = times.next_tick(0.0, is_open=True, is_connecting=False, is_paused=False)
        self.assertEqual(delay, PING_INTERVAL)
        now = 1000.0
        times.forgive_late_tick(now)
        self.assertIsNone(times.expired(now, is_connecting=False))
        self.assertTrue(times.expired(now + TIMEOUT, is_connecting=False))

    def test_closing(self) -> None:
        """
        A close that exceeds its limit counts as hanging, and a tick is due at that
        time.
        """
        times = TimeLimits(is_server=True, now=0.0)
        times.closing_since = 10.0
        self.assertFalse(times.close_hangs(10.0 + TIMEOUT - 0.1))
        self.assertTrue(times.close_hangs(10.0 + TIMEOUT))
        delay = times.next_tick(
            9.0 + TIMEOUT, is_open=False, is_connecting=False, is_paused=False
        )
        self.assertEqual(delay, 1.0)
