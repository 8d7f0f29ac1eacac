"""Run one service as this process: start, signals, stop, exit status.

The first SIGTERM or SIGINT stops the service cleanly. From then on both have their
default meaning: a second one ends the process at once. SIGHUP has a service that can do
so read its configuration again.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol, TextIO, runtime_checkable

from twisted.internet.defer import Deferred
from twisted.logger import (
    FileLogObserver,
    FilteringLogObserver,
    Logger,
    LogLevel,
    LogLevelFilterPredicate,
    formatEventAsClassicLogText,
    globalLogBeginner,
)
from twisted.python.failure import Failure

from synapse_replication.errors import ReplicationError
from synapse_replication.instrumentation.json_logs import JsonLogObserver
from synapse_replication.instrumentation.log_lines import cut_lines

__all__ = ["Reloadable", "Runnable", "run_service", "start_logging"]

#: How long a thread may keep others waiting for the interpreter, in s.
SWITCH_INTERVAL = 0.0005


class Runnable(Protocol):
    """What can be run as a process: a Twisted service that tells how it went.

    :ivar started: fires when the service does its work; fails if it cannot.
    """

    started: Deferred[None]

    def startService(self) -> object:
        """Begin to start."""
        ...

    def stopService(self) -> Any:
        """End all work; what is returned fires when that is done."""
        ...


@runtime_checkable
class Reloadable(Protocol):
    """A service that can read its configuration again while it runs."""

    def reload(self) -> None:
        """Read it, and say what came of it."""
        ...


def start_logging(
    stream: TextIO, level: str = "info", *, as_json: bool = False
) -> Callable[[str], None]:
    """Write what is logged, from ``level`` on, to a stream; a line each.

    :param level: the name of one of ``twisted.logger.LogLevel``.
    :param as_json: lines are JSON objects, for programs.
    :return: sets another level.
    """
    predicate = LogLevelFilterPredicate()
    write: Any = (
        JsonLogObserver(stream)
        if as_json
        else FileLogObserver(
            stream, lambda event: cut_lines(formatEventAsClassicLogText(event))
        )
    )
    observer = FilteringLogObserver(write, [predicate])
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)

    def set_level(name: str) -> None:
        wanted = LogLevel.levelWithName(name)
        predicate.setLogLevelForNamespace("", wanted)
        # Twisted reports the start and the end of each factory at the level info.
        quiet = wanted if wanted is LogLevel.debug else max(wanted, LogLevel.warn)
        predicate.setLogLevelForNamespace("twisted", quiet)

    set_level(level)
    return set_level


def run_service(
    reactor: Any, make: Callable[[], Runnable], stderr: TextIO | None = None
) -> int:
    """Run a service until a signal comes.

    :param reactor: one that was not run yet.
    :param make: makes the service; called in the running reactor.
    :param stderr: where the last words go.
    :return: the exit status: 1 if the service could not be made or started, or
        failed to stop.
    """
    process = _Process(reactor, make, stderr or sys.stderr)
    reactor.callWhenRunning(process.start)
    reactor.run()
    return process.status


class _Process:
    log = Logger()

    def __init__(
        self, reactor: Any, make: Callable[[], Runnable], stderr: TextIO
    ) -> None:
        self._reactor = reactor
        self._make = make
        self._stderr = stderr
        self._service: Runnable | None = None
        self._stopping = False
        self._reload: Callable[[], None]
        self.status = 0

    def start(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._stop)
        try:
            service = self._service = self._make()
            if isinstance(service, Reloadable):
                self._reload = service.reload
                signal.signal(signal.SIGHUP, self._hung_up)
            service.startService()
        except Exception:  # noqa: BLE001 -- said on stderr, whatever it is
            self._failed(Failure())  # type: ignore[no-untyped-call]
        else:
            service.started.addCallbacks(self._up, self._failed)

    def _up(self, _: None) -> None:
        # A thread that has its rows from the database waits no longer than this for a
        # busy reactor; by default 5 ms, in which a page of catch-up is delivered.
        sys.setswitchinterval(SWITCH_INTERVAL)
        # What the start made stays as long as the process: looking at it again in
        # every full collection would stop the process for no gain.
        gc.collect()
        gc.freeze()

    def _failed(self, failure: Failure) -> None:
        if self._stopping:
            # A signal came before it was up.
            return
        self.status = 1
        if isinstance(failure.value, ReplicationError):
            print(f"synapse-replication: {failure.value}", file=self._stderr)
        else:
            self.log.failure("synapse-replication could not start", failure)
        self._shut_down()

    def _signalled(self, number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        self._reactor.callFromThread(self._shut_down)

    def _hung_up(self, number: int, frame: object) -> None:
        if not self._stopping:
            self._reactor.callFromThread(self._reload)

    def _shut_down(self) -> None:
        if self._reactor.running:
            self._reactor.stop()

    def _stop(self) -> Deferred[None] | None:
        self._stopping = True
        if self._service is None:
            return None

        async def stop(service: Runnable) -> None:
            await service.stopService()

        def failed(failure: Failure) -> None:
            self.status = 1
            self.log.failure("synapse-replication did not stop cleanly", failure)

        return Deferred.fromCoroutine(stop(self._service)).addErrback(failed)
