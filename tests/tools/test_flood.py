"""A flood of rows into a slow handler, on a real Redis and from a real process."""

from __future__ import annotations

from twisted.internet import reactor  # noqa: TID251 -- a real Redis
from twisted.trial.unittest import TestCase

from scripts.tools.flood import run_flood


class FloodTests(TestCase):
    """A smaller one than by hand."""

    timeout = 120

    async def test_slow_handler(self) -> None:
        """
        50,000 rows come while a handler could take some hundred: what waits is bounded,
        every row is delivered in the end, once and in order, and the other stream does
        not wait for what waits.
        """
        report = await run_flood(reactor, 50_000, 50_000)
        self.assertTrue(report.in_order)
        self.assertLess(report.handled_meanwhile, 5_000)
        # 8 MiB of rows of 200 bytes and some.
        self.assertGreater(report.longest_queue, 10_000)
        self.assertLess(report.longest_queue, 32_000)
        self.assertLess(report.memory_peak - report.memory_before, 40)
        # Behind the slow one they would wait for 5 ms for each of its rows.
        would_wait = report.longest_queue * 5
        self.assertLess(report.steady_during[0], would_wait / 100)
