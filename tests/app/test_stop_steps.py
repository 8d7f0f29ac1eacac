"""Tests for synapse_replication.app.stop_steps."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Awaitable, Generator
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.stop_steps import DRAIN_TIMEOUT, StopSteps


class StopStepsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.steps = StopSteps(self.clock)
        self.calls: list[str] = []

    def test_order(self) -> None:
        """Steps run in reverse order, each after the previous one has finished."""
        waiting: Deferred[None] = Deferred()

        async def wait() -> None:
            await waiting
            self.calls.append("second")

        self.steps.add("first", lambda: self.calls.append("first"))
        self.steps.add("second", wait)
        stopped = Deferred.fromCoroutine(self.steps.run())
        self.assertEqual(self.calls, [])
        waiting.callback(None)
        self.assertEqual(self.successResultOf(stopped), [])
        self.assertEqual(self.calls, ["second", "first"])

    def test_any_awaitable(self) -> None:
        """A step may return an awaitable that is no Deferred and no coroutine."""
        waiting: Deferred[None] = Deferred()

        class Ending:
            def __await__(self) -> Generator[Any, None, None]:
                return waiting.__await__()

        self.steps.add("ending", Ending)
        stopped = Deferred.fromCoroutine(self.steps.run())
        self.assertNoResult(stopped)
        waiting.callback(None)
        self.assertEqual(self.successResultOf(stopped), [])

    def test_failures(self) -> None:
        """
        A step that fails or hangs is logged by name, and the other steps still run.
        """
        self.steps.add("last", lambda: self.calls.append("last"))
        self.steps.add("hanging", Deferred)
        self.steps.add("failing", lambda: 1 // 0)
        with capturedLogs() as logs:
            stopped = Deferred.fromCoroutine(self.steps.run())
            self.clock.advance(DRAIN_TIMEOUT)
        self.assertEqual(self.successResultOf(stopped), ["failing", "hanging"])
        self.assertEqual(self.calls, ["last"])
        texts = [formatEvent(event) for event in logs]
        self.assertIn("A step of the stop failed (failing): ", texts[0])
        self.assertEqual(
            texts[1],
            "A step of the stop failed (hanging): it did not finish within 10 s",
        )

    def test_without_waiting(self) -> None:
        """
        Without waiting, coroutines are left out, whichever kind of function returns
        them, and no other step waits for the one before it.
        """

        async def wait() -> None:
            self.calls.append("coroutine")

        def wait_later() -> Awaitable[None]:
            return wait()

        self.steps.add("last", lambda: self.calls.append("last"))
        self.steps.add("waiting", wait)
        self.steps.add("returning a coroutine", wait_later)

        def hang() -> Deferred[None]:
            self.calls.append("hanging")
            return Deferred()

        self.steps.add("hanging", hang)
        with warnings.catch_warnings(record=True) as warned:
            # A coroutine that is never awaited causes a warning.
            warnings.simplefilter("always")
            self.steps.run_without_waiting()
            gc.collect()
        self.assertEqual(self.calls, ["hanging", "last"])
        self.assertEqual([str(each.message) for each in warned], [])

    def test_failures_without_waiting(self) -> None:
        """
        A step that fails, at once or later, is logged by name, and the others still
        run.
        """
        later: Deferred[None] = Deferred()
        self.steps.add("last", lambda: self.calls.append("last"))
        self.steps.add("failing later", lambda: later)
        self.steps.add("failing", lambda: int("x"))
        with capturedLogs() as logs:
            self.steps.run_without_waiting()
            self.assertEqual(self.calls, ["last"])
            later.errback(OSError("closed"))
        self.assertEqual(
            [formatEvent(event) for event in logs],
            [
                "A step of the stop failed (failing): "
                "invalid literal for int() with base 10: 'x'",
                "A step of the stop failed (failing later): closed",
            ],
        )
