"""Long-lived background processes of the host, each for one kind of short work.

Theory of operation: the host spends 25 to 50 µs on a background process: a log context,
metrics, a span. Handling a row takes less. So a background process that has finished
its work waits for more of the same kind, which then uses the same log context. It waits
without a timer, until the host shuts down.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from synapse_replication.dropin.bridges import make_yieldable

__all__ = ["MAX_IDLE", "BackgroundProcessPool"]

#: The most background processes of one kind that wait. Further ones end.
MAX_IDLE = 2

_Function = Callable[[], Awaitable[Any]]


class _Work:
    """A piece of work, which can be awaited by the host's rule of log contexts."""

    __slots__ = ("_is_done", "_waiters", "description", "func")

    def __init__(self, description: str, func: _Function) -> None:
        self.description = description
        self.func = func
        self._is_done = False
        self._waiters: list[Deferred[None]] = []

    def __await__(self) -> Generator[Any, Any, None]:
        if not self._is_done:
            waiter: Deferred[None] = Deferred()
            self._waiters.append(waiter)
            # Not earlier: this suspends the log context until the work has ended.
            yield from make_yieldable(waiter).__await__()

    def finish(self) -> list[Deferred[None]]:
        """Mark the work as done, and return what must be fired."""
        self._is_done = True
        return self._waiters


class BackgroundProcessPool:
    """Runs work in background processes of the host, which are used again.

    Use it in the reactor's thread only.

    :param run: starts a background process: ``run(description, func)``. The host logs
        the exception that ends one.
    """

    def __init__(self, run: Callable[[str, _Function], Deferred[Any]]) -> None:
        self._run = run
        self._context = importlib.import_module("synapse.logging.context")
        #: The waiting processes, by description; each Deferred is fired with work.
        self._idle: dict[str, list[Deferred[_Work]]] = {}
        self._is_stopped = False

    def start(self, description: str, func: _Function) -> Awaitable[None]:
        """Start ``func``, synchronously up to its first await, in its own log context.

        :param description: the name of the log context.
        :return: to be awaited for the end of ``func``, which never raises here.
        """
        work = _Work(description, func)
        idle = self._idle.get(description)
        if not idle:
            # The process must not keep its first work alive.
            first = [work]
            self._run(description, lambda: self._repeat(first.pop()))
            return work
        process = idle.pop()
        context = self._context
        if context.current_context() is context.SENTINEL_CONTEXT:
            process.callback(work)
        else:
            # The process sets its own log context, and leaves none.
            with context.PreserveLoggingContext():
                process.callback(work)
        return work

    def stop(self) -> None:
        """End the waiting processes, and let no other wait."""
        self._is_stopped = True
        for idle in self._idle.values():
            while idle:
                idle.pop().cancel()

    async def _repeat(self, work: _Work) -> None:
        idle = self._idle.setdefault(work.description, [])
        while True:
            try:
                await work.func()
            finally:
                waiters = work.finish()
                if waiters:
                    with self._context.PreserveLoggingContext():
                        for waiter in waiters:
                            waiter.callback(None)
            del work, waiters
            if self._is_stopped or len(idle) >= MAX_IDLE:
                return
            more: Deferred[_Work] = Deferred()
            idle.append(more)
            try:
                work = await make_yieldable(more)
            except CancelledError:
                # The host shuts down.
                if more in idle:
                    idle.remove(more)
                return
