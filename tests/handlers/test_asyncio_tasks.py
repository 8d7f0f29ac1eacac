"""Tests of coroutines that run as asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.asyncio_tasks import run_in_task


def run(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of ``call`` in an event loop, as Twisted code receives it."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()

        async def wait() -> Any:
            return await run_in_task(call())

        return await Deferred.fromCoroutine(wait()).asFuture(loop)

    return asyncio.run(main())


class RunInTaskTests(SynchronousTestCase):
    def test_asyncio_awaitables(self) -> None:
        """A coroutine awaits futures, in a task, within timeouts."""

        async def call() -> bool:
            await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.sleep(0), timeout=60)
            return asyncio.current_task() is not None

        self.assertIs(run(call), True)

    def test_deferreds(self) -> None:
        """A coroutine awaits Deferreds that have fired, or fire later."""

        async def call() -> list[object]:
            later: Deferred[str] = Deferred()
            failing: Deferred[str] = Deferred()
            loop = asyncio.get_running_loop()
            loop.call_soon(later.callback, "later")
            loop.call_soon(failing.errback, ValueError("failed"))
            results: list[object] = [await succeed("at once"), await later]
            for each in (failing, fail(KeyError("failed at once"))):
                try:
                    await each
                except (ValueError, KeyError) as error:
                    results.append(error.args[0])
            return results

        self.assertEqual(run(call), ["at once", "later", "failed", "failed at once"])

    def test_failure(self) -> None:
        """The awaitable fails with the exception of the coroutine."""

        async def call() -> None:
            await asyncio.sleep(0)
            raise ValueError("the sink failed")

        with self.assertRaisesRegex(ValueError, "the sink failed"):
            run(call)

    def test_cancellation(self) -> None:
        """If the awaitable is cancelled, so is the Deferred that the task awaits."""
        cancelled: list[Deferred[None]] = []

        async def call() -> None:
            asyncio.get_running_loop().call_soon(waiting[0].cancel)
            await Deferred(cancelled.append)

        waiting: list[Deferred[None]] = []

        def start() -> Awaitable[None]:
            deferred = run_in_task(call())
            assert isinstance(deferred, Deferred)
            waiting.append(deferred)
            return deferred

        with self.assertRaises(asyncio.CancelledError):
            run(start)
        self.assertEqual(len(cancelled), 1)

    def test_future(self) -> None:
        """A future is awaited as it is."""
        self.assertEqual(
            run(lambda: asyncio.ensure_future(asyncio.sleep(0, "slept"))), "slept"
        )

    def test_other_reactors(self) -> None:
        """Without a running event loop, and for Deferreds, nothing changes."""

        async def call() -> None:
            """Do nothing."""

        coroutine = call()
        self.assertIs(run_in_task(coroutine), coroutine)
        coroutine.close()
        deferred = succeed(None)
        self.assertIs(run_in_task(deferred), deferred)
