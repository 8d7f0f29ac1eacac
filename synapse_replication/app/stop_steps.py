"""The steps by which a process stops, in the reverse order of its start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from twisted.internet.defer import Deferred, TimeoutError
from twisted.logger import Logger


@attrs.define(eq=False, repr=False)
class StopSteps:
    """The functions to call when a process stops, in the reverse order of adding them.

    :param reactor: schedules the timeouts.
    :param timeout: the most time that each step may take, in s.
    """

    log = Logger()

    _reactor: Any
    _timeout: float
    _steps: list[tuple[str, Callable[[], Any]]] = attrs.field(factory=list, init=False)

    def add(self, what: str, stop: Callable[[], Any]) -> None:
        """Add a step.

        :param what: describes the step in the log if it fails or takes too long.
        :param stop: the function to call; if its result is awaitable, it is awaited.
        """
        self._steps.append((what, stop))

    async def run(self) -> bool:
        """Run all steps, even if some fail.

        :return: whether all steps succeeded in time.
        """
        all_done = True
        while self._steps:
            what, stop = self._steps.pop()
            ending = Deferred.fromCoroutine(_call(stop))
            ending.addTimeout(self._timeout, self._reactor)
            try:
                await ending
            except TimeoutError:
                self._warn(what, f"it did not finish within {self._timeout:g} s")
                all_done = False
            except Exception as error:  # noqa: BLE001 -- logged; the next steps run
                self._warn(what, str(error) or type(error).__name__)
                all_done = False
        return all_done

    def _warn(self, what: str, why: str) -> None:
        self.log.warn("A step of the stop failed ({what}): {why}", what=what, why=why)


async def _call(stop: Callable[[], Any]) -> None:
    result = stop()
    if isinstance(result, Awaitable):
        await result
