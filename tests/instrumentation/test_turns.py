"""Tests for :mod:`synapse_replication.instrumentation.turns`."""

from __future__ import annotations

import threading
import time
from typing import Any

from twisted.internet.epollreactor import EPollReactor
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.instrumentation.turns import STALL, ReactorTurns, Stall


def block_the_reactor() -> None:
    """Work until a thread has had the time to see it."""
    end = time.monotonic() + STALL + 0.6
    while time.monotonic() < end:
        pass


class ReactorTurnsTests(SynchronousTestCase):
    """Tests for ReactorTurns, with a reactor of its own."""

    def test_a_stall(self) -> None:
        """A long turn is counted, and its function is named."""
        turns = ReactorTurns()
        reactor: Any = EPollReactor()
        self.addCleanup(turns.stop)
        self.assertTrue(turns.start(reactor))
        reactor.callLater(0.01, lambda: None)
        reactor.iterate(0)
        self.assertIsNone(turns.take_stall())
        reactor.callLater(0, block_the_reactor)
        reactor.iterate(0)
        reactor.iterate(0)
        stall = turns.take_stall()
        assert stall is not None
        self.assertEqual(stall.count, 1)
        self.assertGreaterEqual(stall.longest, STALL)
        self.assertRegex(stall.what, r"^block_the_reactor at .*/test_turns\.py:\d+, ")
        self.assertIsNone(turns.take_stall())
        buckets, total = turns.buckets()
        self.assertGreaterEqual(total, STALL)
        self.assertEqual(buckets[-1][1] - dict(buckets)[str(STALL)], 1)

    def test_the_longest(self) -> None:
        """Of several stalls, the longest is returned."""
        turns = ReactorTurns()
        for seconds in (0.3, 2.0, 0.5, 0.2):
            turns.add(seconds)
        self.assertEqual(turns.take_stall(), Stall(3, 2.0, ""))

    def test_other_reactors(self) -> None:
        """A reactor without a poller is not measured, and no thread is started."""
        threads = threading.active_count()
        self.assertFalse(ReactorTurns().start(object()))
        self.assertEqual(threading.active_count(), threads)
