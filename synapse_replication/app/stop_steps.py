"""The steps of a process's stop, and what they leave unfinished."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from synapse_replication.handlers.asyncio_tasks import run_in_task

#: The most time that each step of a stop may take by default, in s.
DRAIN_TIMEOUT = 10.0

#: The step without which written rows are not settled.
CLOSING = "closing the streams"
#: The step without which written rows are not sent.
SENDING = "sending written rows"


@attrs.define(eq=False, repr=False)
class StopSteps:
    """The functions to call when a process stops, in the reverse order of adding them.

    :param reactor: schedules the timeouts.
    :param timeout: the most time that each step may take, in s.
    """

    log = Logger()

    _reactor: IReactorTime
    _timeout: float = DRAIN_TIMEOUT
    _steps: list[tuple[str, Callable[[], Any]]] = attrs.field(factory=list, init=False)

    def add(self, what: str, stop: Callable[[], Any]) -> None:
        """Add a step.

        :param what: describes the step in the log if it fails or takes too long.
        :param stop: the function to call; if its result is awaitable, it is awaited.
        """
        self._steps.append((what, stop))

    async def run(self) -> list[str]:
        """Run all steps, even if some fail.

        :return: the steps that failed, or did not finish in time.
        """
        failed = []
        while self._steps:
            what, stop = self._steps.pop()
            ending = Deferred.fromCoroutine(_call(stop))
            ending.addTimeout(self._timeout, self._reactor)
            try:
                await ending
                continue
            except TimeoutError:
                why = f"it did not finish within {self._timeout:g} s"
            except Exception as error:  # noqa: BLE001 -- logged; the next steps run
                why = _reason(error)
            failed.append(what)
            self._warn(what, why)
        return failed

    def run_without_waiting(self) -> None:
        """Run all steps in a process whose reactor may not run any more.

        Coroutines, which have to wait, are left out, and nothing waits for the result
        of the other steps. If a step fails, that is logged, and the others still run.
        """
        while self._steps:
            what, stop = self._steps.pop()
            try:
                result = stop()
            except Exception as error:  # noqa: BLE001 -- logged; the next steps run
                self._warn(what, _reason(error))
                continue
            if inspect.iscoroutine(result):
                # It has not begun.
                result.close()
            elif isinstance(result, Deferred):
                result.addErrback(partial(self._warn_later, what))

    def _warn(self, what: str, why: str) -> None:
        text = "A step of the stop failed ({what}): {why}"
        self.log.warn(text, what=what, why=why)

    def _warn_later(self, what: str, failure: Failure) -> None:
        self._warn(what, _reason(failure.value))


def _reason(error: BaseException | None) -> str:
    return str(error) or type(error).__name__


async def _call(stop: Callable[[], Any]) -> None:
    result = stop()
    if isinstance(result, Awaitable):
        await run_in_task(result)


def describe_unfinished(failed: Sequence[str], undelivered: Sequence[str]) -> str:
    """Return what was not delivered and not sent because steps of the stop failed.

    :param failed: the steps.
    :param undelivered: the streams whose received rows were not delivered.
    """
    texts = []
    if undelivered:
        names = ", ".join(undelivered)
        texts.append(
            f"received rows of {names} were not delivered: they are fetched when "
            "this process starts again, if its sink saves positions"
        )
    if CLOSING in failed:
        texts.append(
            "rows of transactions that had not ended, if they were committed, are "
            "sent when this process starts again"
        )
    if SENDING in failed:
        texts.append(
            "written rows were not sent: readers fetch them from the database, or "
            "lose them if they were held in memory"
        )
    steps = ", ".join(failed)
    return "; ".join([*texts, f"not finished, see the warnings above: {steps}"])
