"""Tests for :mod:`synapse_replication.dropin.background`."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.background import BackgroundProcessPool
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

        return ensureDeferred(self.wait(self.processes.start(description, work)))

    async def wait(self, waiting: Awaitable[None]) -> None:
        await waiting

    def test_reused(self) -> None:
        """All work of one kind runs in the log context of one background process."""
        for _ in range(3):
            self.successResultOf(self.start("a"))
        self.successResultOf(self.start("b"))
        self.assertEqual(self.started, ["a", "b"])
        self.assertEqual(self.ended, [])

    def test_at_the_same_time(self) -> None:
        """Work is not delayed by unfinished work of the same kind."""
        steps: list[Deferred[None]] = [Deferred() for _ in range(3)]
        ends = [self.start("a", step) for step in steps]
        for step, end in zip(reversed(steps), reversed(ends), strict=True):
            self.assertNoResult(end)
            step.callback(None)
            self.successResultOf(end)
        self.assertEqual((self.started, self.ended), (["a"], []))

    def test_several_steps(self) -> None:
        """Work may wait several times, even for a Deferred that fails."""
        results: list[object] = []
        first: Deferred[str] = Deferred()
        second: Deferred[str] = Deferred()

        async def work() -> None:
            results.append(await first)
            try:
                await second
            except KeyError as error:
                results.append(error.args)
            results.append(await succeed("third"))

        self.processes.start("a", work)
        first.callback("first")
        second.errback(KeyError("second"))
        self.assertEqual(results, ["first", ("second",), "third"])

    def test_context_variables(self) -> None:
        """
        All steps of a piece of work run in one context, which no other code uses, so
        that a span that is opened before a wait can be closed after it.
        """
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("span")
        step: Deferred[None] = Deferred()
        seen: list[str | None] = []

        async def work() -> None:
            token = variable.set("of the work")
            await step
            seen.append(variable.get(None))
            variable.reset(token)

        self.successResultOf(self.start("a"))
        self.processes.start("a", work)
        self.assertIsNone(variable.get(None))
        step.callback(None)
        self.assertEqual(seen, ["of the work"])
        self.assertIsNone(variable.get(None))
        self.assertEqual(self.failed, [])

    def test_log_context(self) -> None:
        """Work runs in the context of its process; the caller keeps its own context."""
        context = sys.modules["synapse.logging.context"]
        current: list[object] = ["the caller's"]

        def set_current_context(new: object) -> object:
            current.append(new)
            return current[-2]

        def resume(result: object) -> object:
            set_current_context("the process's")
            return result

        vars(context).update(
            SENTINEL_CONTEXT="none",
            current_context=lambda: "the process's",
            set_current_context=set_current_context,
        )
        seen: list[object] = []
        step: Deferred[None] = Deferred()

        async def work() -> None:
            seen.append(current[-1])

        async def wait() -> None:
            # As the host's functions do.
            set_current_context("none")
            await step.addBoth(resume)

        self.processes.start("a", work)
        self.processes.start("a", wait)
        self.processes.start("a", work)
        self.assertEqual(seen, ["the process's", "the process's"])
        self.assertEqual(current[-1], "the caller's")
        step.callback(None)
        self.assertEqual(current[-2:], ["the process's", "none"])

    def test_other_awaitables(self) -> None:
        """Work may be any awaitable, not only a coroutine."""
        step: Deferred[None] = Deferred()
        ended = ensureDeferred(self.wait(self.processes.start("a", lambda: step)))
        self.assertNoResult(ended)
        step.callback(None)
        self.successResultOf(ended)

    def test_failure(self) -> None:
        """A failure is raised in a process of the host; later work is unaffected."""
        self.successResultOf(self.start("a", fail(ValueError("broken"))))
        self.assertEqual((self.failed, self.ended), (["a"], ["a"]))
        step: Deferred[None] = Deferred()
        end = self.start("a", step)
        step.errback(ValueError("broken later"))
        self.successResultOf(end)
        self.assertEqual((self.failed, self.ended), (["a"] * 2, ["a"] * 2))
        self.assertEqual(self.started, ["a"] * 3)
        self.successResultOf(self.start("a"))
        self.assertEqual(self.started, ["a"] * 3)

    def test_function_that_raises(self) -> None:
        """Work ends if its function raises instead of returning an awaitable."""

        def work() -> Awaitable[None]:
            raise ValueError("broken")

        for stop in (lambda: None, self.processes.stop):
            stop()
            waiting = self.wait(self.processes.start("a", work))
            self.successResultOf(ensureDeferred(waiting))
        self.assertEqual(self.failed, ["a", "a"])

    def test_stop(self) -> None:
        """
        All processes end, waiting work continues, and later work has its own process.
        """
        step: Deferred[None] = Deferred()
        self.start("a")
        end = self.start("b", step)
        self.processes.stop()
        self.assertEqual(self.ended, ["a", "b"])
        self.assertNoResult(end)
        step.callback(None)
        self.successResultOf(end)
        self.successResultOf(self.start("a"))
        self.assertEqual(self.started, ["a", "b", "a"])
        self.assertEqual(self.ended, ["a", "b", "a"])
