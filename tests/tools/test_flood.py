"""Tests for a flood of rows into a slow handler, with a real Redis and process."""

from __future__ import annotations

from twisted.internet import reactor  # noqa: TID251 -- a real Redis
from twisted.trial.unittest import TestCase

from scripts.tools.flood import run_flood


class FloodTests(TestCase):
    """Tests for a smaller flood than :mod:`scripts.tools.flood` makes by default."""

    timeout = 120

    async def test_slow_handler(self) -> None:
        """
        If rows arrive faster than the handler delivers them, the queue is bounded,
        every row is delivered once and in order, and a second stream is not delayed.
        """
        report = await run_flood(reactor, 50_000, 50_000)
        self.assertTrue(report.in_order)
        self.assertLess(report.delivered_when_sent, 5_000)
        # 8 MiB of rows of slightly more than 200 bytes.
        self.assertGreater(report.longest_queue, 10_000)
        self.assertLess(report.longest_queue, 32_000)
        self.assertLess(report.memory_peak - report.memory_before, 40)
        # Behind the slow stream, these rows would wait 5 ms for each of its rows.
        would_wait = report.longest_queue * 5
        self.assertLess(report.steady_during[0], would_wait / 100)
