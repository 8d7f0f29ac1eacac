"""Doubles for the tests of the demonstration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater

from synapse_replication.streams.rows import RawRowCodec


class MemoryHost:
    """A host with only what the writer uses."""

    def __init__(self, write: Callable[[list[Any]], Any]) -> None:
        self.reactor = Clock()
        self.failures: list[str] = []
        self.clock = SimpleNamespace(
            seconds=self.reactor.seconds,
            sleep=lambda delay: deferLater(self.reactor, delay),
        )
        stream = SimpleNamespace(
            description=SimpleNamespace(codec=RawRowCodec("typing")), write=write
        )
        self.streams = SimpleNamespace(get_streams=lambda: {"typing": stream})

    def run_as_background_process(
        self, description: str, func: Callable[[], Awaitable[Any]]
    ) -> Deferred[Any]:
        async def run() -> None:
            await func()

        def failed(failure: Any) -> None:
            self.failures.append(failure.getErrorMessage())

        return Deferred.fromCoroutine(run()).addErrback(failed)
