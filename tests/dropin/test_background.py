"""Tests for :mod:`synapse_replication.dropin.background`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred, fail
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.background import MAX_IDLE, BackgroundProcessPool
from tests.dropin.host import fake_modules


class BackgroundProcessPoolTests(SynchronousTestCase):
    def setUp(self) -> None:
        fake_modules(self)
        self.started: list[str] = []
        self.ended: list[str] = []
        self.failed: list[str] = []
        self.processes = BackgroundProcessPool(self.run_process)

    def run_process(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Deferred[None]:
        self.started.append(description)

        async def process() -> None:
            try:
                await func()
            except ValueError:
                self.failed.append(description)
            self.ended.append(description)

        return ensureDeferred(process())

    def start(self, description: str, *steps: Deferred[None]) -> Deferred[None]:
        async def work() -> None:
            for step in steps:
                await step

        async def wait() -> None:
            await waiting

        waiting = self.processes.start(description, work)
        return ensureDeferred(wait())

    def test_reused(self) -> None:
        """A process that has finished its work is reused for work of the same kind."""
        for _ in range(3):
            self.successResultOf(self.start("a"))
        self.successResultOf(self.start("b"))
        self.assertEqual(self.started, ["a", "b"])
        self.assertEqual(self.ended, [])

    def test_at_the_same_time(self) -> None:
        """Work does not wait for other work; idle processes beyond the limit end."""
        steps: list[Deferred[None]] = [Deferred() for _ in range(MAX_IDLE + 1)]
        ends = [self.start("a", step) for step in steps]
        self.assertEqual(len(self.started), MAX_IDLE + 1)
        for step, end in zip(steps, ends, strict=True):
            self.assertNoResult(end)
            step.callback(None)
            self.successResultOf(end)
        self.assertEqual(self.ended, ["a"])

    def test_failure(self) -> None:
        """
        A failure is reported to the host and ends the process; the next work starts a
        new process.
        """
        self.successResultOf(self.start("a", fail(ValueError("broken"))))
        self.assertEqual((self.failed, self.ended), (["a"], ["a"]))
        self.successResultOf(self.start("a"))
        self.assertEqual(self.started, ["a", "a"])

    def test_stop(self) -> None:
        """Idle processes end immediately, and busy ones after their work."""
        step: Deferred[None] = Deferred()
        self.start("a")
        self.start("b", step)
        self.processes.stop()
        self.assertEqual(self.ended, ["a"])
        step.callback(None)
        self.assertEqual(self.ended, ["a", "b"])
        self.successResultOf(self.start("a"))
        self.assertEqual(self.ended, ["a", "b", "a"])
