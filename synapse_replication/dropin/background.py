"""Background processes of the host that are used for many pieces of short work.

Theory of operation: the host spends 25 to 50 µs on starting a background process: a log
context, metrics, a span. Handling a row takes less time. Therefore, one background
process of each kind is started once and runs until the host shuts down. It only holds
its log context open. All work of its kind runs in that log context. Most work never
waits; such work runs in a plain call, without a Deferred.
"""

from __future__ import annotations

import contextvars
import importlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import coroutine
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from synapse_replication.dropin.host_code import make_yieldable
from synapse_replication.handlers.waiters import Waiters

_Function = Callable[[], Awaitable[object]]


@attrs.define(eq=False)
class _Work:
    """A piece of work; awaiting it follows the host's rules for log contexts.

    :ivar waiters: fire when the work is done.
    """

    is_done: bool = False
    waiters: Waiters = attrs.Factory(Waiters)

    def __await__(self) -> Generator[Any, Any, None]:
        if not self.is_done:
            waiter = self.waiters.add()
            # Call make_yieldable() only if the caller has to wait: it suspends the
            # caller's log context until the work has ended.
            yield from make_yieldable(waiter).__await__()


class BackgroundProcessPool:
    """Runs work in log contexts of background processes of the host.

    Use it in the reactor's thread only.

    :param start_process: starts a background process from a description and a
        function. The host logs an exception that ends the background process.
    """

    def __init__(self, start_process: Callable[[str, _Function], object]) -> None:
        self._start_process = start_process
        self._log_context_module = importlib.import_module("synapse.logging.context")
        #: The log context of each kind of work, by description.
        self._log_contexts: dict[str, Any] = {}
        self._held_until_stop = Waiters()
        self._is_stopped = False

    def start(self, description: str, func: _Function) -> Awaitable[None]:
        """Start ``func``, and run it synchronously until it first has to wait.

        Until :meth:`stop`, it runs in the log context that all work with the same
        description shares.

        :param description: the kind of work; the host derives the name of the log
            context from it.
        :return: an awaitable that resolves when ``func`` has ended, and never raises.
        """
        work = _Work()
        log_contexts = self._log_contexts
        if description not in log_contexts and not self._is_stopped:
            self._start_process(description, lambda: self._hold(description))
        if description not in log_contexts:
            self._start_process(
                description, lambda: self._run_in_own_process(work, func)
            )
            return work
        set_context = self._log_context_module.set_current_context
        previous = set_context(log_contexts[description])
        # All steps of the work must run in one contextvars context, which no other code
        # uses: a span that the work opens is the current span of that context.
        context = contextvars.copy_context()
        try:
            running = _call(func)
            waiting = context.run(running.send, None)
        except StopIteration:
            self._end(work)
        except Exception as error:  # noqa: BLE001 -- raised by _fail()
            self._end(work)
            self._fail(description, error)
        else:
            self._continue(description, work, _resume(running, waiting, context))
        finally:
            set_context(previous)
        return work

    def stop(self) -> None:
        """End the background processes.

        Each piece of work that is started later has a background process of its own.
        """
        self._is_stopped = True
        self._log_contexts.clear()
        with self._log_context_module.PreserveLoggingContext():
            self._held_until_stop.fire()

    async def _hold(self, description: str) -> None:
        self._log_contexts[description] = self._log_context_module.current_context()
        await make_yieldable(self._held_until_stop.add())

    def _continue(self, description: str, work: _Work, rest: Awaitable[None]) -> None:
        """Run the rest of suspended work.

        The work restores its own log context whenever it resumes.
        """

        async def finish() -> None:
            error = None
            try:
                await rest
            except Exception as raised:  # noqa: BLE001 -- raised by _fail()
                error = raised
            # Reset the log context: the reactor's next call must not inherit it.
            self._log_context_module.set_current_context(
                self._log_context_module.SENTINEL_CONTEXT
            )
            self._end(work)
            if error is not None:
                self._fail(description, error)

        Deferred.fromCoroutine(finish())

    def _fail(self, description: str, error: BaseException) -> None:
        """Raise an error in a background process, so that the host logs it."""
        self._start_process(description, lambda: _raise(error))

    async def _run_in_own_process(self, work: _Work, func: _Function) -> None:
        try:
            await func()
        finally:
            self._end(work)

    def _end(self, work: _Work) -> None:
        work.is_done = True
        if work.waiters:
            with self._log_context_module.PreserveLoggingContext():
                work.waiters.fire()


async def _call(func: _Function) -> None:
    await func()


@coroutine
def _resume(
    running: Coroutine[Any, Any, Any], waiting: Any, context: contextvars.Context
) -> Generator[Any, Any, None]:
    """Drive a coroutine that was started with ``send()`` and is suspended.

    :param context: the context in which it was started.
    """
    try:
        while True:
            try:
                value = yield waiting
            except BaseException as error:  # noqa: BLE001 -- passed on
                waiting = context.run(running.throw, error)
            else:
                waiting = context.run(running.send, value)
    except StopIteration:
        return


async def _raise(error: BaseException) -> None:
    raise error
