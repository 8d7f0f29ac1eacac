"""The steps by which a process stops, in the reverse order of its start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger

__all__ = ["StopSteps"]


class StopSteps:
    """What is to be called when a process stops, the last one first.

    :param reactor: for the time-outs.
    :param timeout: how long each step may take, in s.
    """

    log = Logger()

    def __init__(self, reactor: Any, timeout: float) -> None:
        self._reactor = reactor
        self._timeout = timeout
        self._steps: list[tuple[str, Callable[[], Any]]] = []

    def add(self, what: str, stop: Callable[[], Any]) -> None:
        """Have ``stop`` called at the stop; what it returns may be waited for.

        :param what: for the log, if it fails or takes too long.
        """
        self._steps.append((what, stop))

    async def run(self) -> bool:
        """Call all steps, whatever becomes of each.

        :return: whether all ended well and in time.
        """
        all_done = True
        while self._steps:
            what, stop = self._steps.pop()
            ending = maybeDeferred(_begin, stop)
            ending.addTimeout(self._timeout, self._reactor)
            try:
                await ending
            except Exception as error:  # noqa: BLE001 -- said, and the rest goes on
                self.log.warn(
                    "{what} did not end well: {error}",
                    what=what,
                    error=str(error) or type(error).__name__,
                )
                all_done = False
        return all_done


def _begin(stop: Callable[[], Any]) -> Any:
    result = stop()
    if isinstance(result, Awaitable) and not isinstance(result, Deferred):
        return Deferred.fromCoroutine(_wait(result))
    return result


async def _wait(awaitable: Awaitable[Any]) -> None:
    await awaitable
