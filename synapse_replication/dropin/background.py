"""Long-lived background processes of the host, each for one kind of short work.

Theory of operation: the host spends 25 to 50 µs on a background process: on a log
context, metrics and a span. Handling a row takes less time. A background process that
has finished its work therefore waits for further work of the same kind, which then runs
in the same log context. It waits without a timeout, until the host shuts down.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from synapse_replication.dropin.bridges import make_yieldable

__all__ = ["MAX_IDLE", "BackgroundProcessPool"]

#: The maximum number of waiting background processes of one kind; further ones end.
MAX_IDLE = 2

_Function = Callable[[], Awaitable[Any]]


class _Work:
    """A piece of work; awaiting it follows the host's rules for log contexts."""

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
            # Call make_yieldable() only if the caller has to wait: it suspends the
            # caller's log context until the work has ended.
            yield from make_yieldable(waiter).__await__()

    def finish(self) -> list[Deferred[None]]:
        """Mark the work as done, and return the Deferreds to fire."""
        self._is_done = True
        return self._waiters


class BackgroundProcessPool:
    """Runs work in background processes of the host, and reuses them.

    Use it in the reactor's thread only.

    :param run: starts a background process: ``run(description, func)``. The host logs
        an exception that ends the process.
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
        :return: an awaitable that resolves when ``func`` has ended, and never raises.
        """
        work = _Work(description, func)
        idle = self._idle.get(description)
        if not idle:
            # Remove the work from the list, or the process would keep it alive.
            first = [work]
            self._run(description, lambda: self._repeat(first.pop()))
            return work
        process = idle.pop()
        context = self._context
        if context.current_context() is context.SENTINEL_CONTEXT:
            process.callback(work)
        else:
            # The process sets its own log context, and clears it when it waits or ends.
            with context.PreserveLoggingContext():
                process.callback(work)
        return work

    def stop(self) -> None:
        """End the waiting processes; a busy process ends when its work is done."""
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
