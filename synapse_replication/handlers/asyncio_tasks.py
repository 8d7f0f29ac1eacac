"""Coroutines of a host that is written with asyncio.

Theory of operation: if the reactor is asyncio's, a coroutine of the host runs as a
task, so that it may await what asyncio awaits, within timeouts and task groups. The
task also waits for the Deferreds that the coroutine awaits, which asyncio rejects.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Generator
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")


def run_in_task(waiting: Awaitable[T]) -> Awaitable[T]:
    """Return an awaitable for code that Twisted runs.

    Call it in the reactor's thread.

    :param waiting: an awaitable of the host. A Deferred is returned unchanged, and so
        is every awaitable if the reactor is not asyncio's.
    """
    if isinstance(waiting, Deferred):
        return waiting
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return waiting
    if asyncio.isfuture(waiting):
        return Deferred.fromFuture(waiting)
    return Deferred.fromFuture(asyncio.ensure_future(_with_deferreds(waiting)))


@types.coroutine
def _with_deferreds(waiting: Awaitable[T]) -> Generator[Any, Any, T]:
    """Await ``waiting``; replace each Deferred that it awaits by a future."""
    steps = waiting.__await__()
    resume = partial(steps.send, None)
    while True:
        try:
            awaited = resume()
        except StopIteration as finished:
            value: T = finished.value
            return value
        try:
            if isinstance(awaited, Deferred):
                yield from _wait_until_fired(awaited)
            else:
                yield awaited
        except BaseException as error:  # noqa: BLE001 -- the coroutine handles it
            resume = partial(steps.throw, error)
        else:
            resume = partial(steps.send, None)


def _wait_until_fired(deferred: Deferred[Any]) -> Generator[Any, Any, None]:
    """Wait until a Deferred has fired, and leave its result to its awaiter."""
    fired = asyncio.get_running_loop().create_future()

    def set_fired(result: T) -> T:
        if not fired.done():
            fired.set_result(None)
        return result

    deferred.addBoth(set_fired)
    try:
        yield from fired
    except asyncio.CancelledError:
        deferred.cancel()
        # Nothing awaits it any more.
        deferred.addErrback(lambda _: None)
        raise
