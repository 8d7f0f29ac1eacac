"""Running one service as this process: start, signals, stop, exit status.

The first SIGTERM or SIGINT stops the service cleanly and restores the default action
of both signals, so that a second signal ends the process immediately. On SIGHUP, a
service with a method ``reload`` reloads its configuration. If a service has a Deferred
``lost``, the process stops when it fails.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

import attrs
from twisted import logger
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorCore
from twisted.python.failure import Failure

from synapse_replication.errors import ReplicationError
from synapse_replication.instrumentation.log_file import LogFile, clean_lines, json_line
from synapse_replication.text import printable_lines
from synapse_replication.transport.reactor import IReactor, as_reactor

#: The interpreter's thread switch interval, in s.
SWITCH_INTERVAL = 0.0005


class Runnable(Protocol):
    """A Twisted service that can be run as a process.

    :ivar started: fires when the service is up; fails if the service cannot start. If
        it has not fired, it may also fail later, when the service cannot continue.
    """

    started: Deferred[None]

    def startService(self) -> object:
        """Start the service."""

    def stopService(self) -> Any:
        """Stop the service; return an awaitable that fires when it has stopped."""


def start_logging(
    stream: LogFile | TextIO, level: str = "info", *, as_json: bool = False
) -> Callable[[str], None]:
    """Write log events of at least ``level`` to a stream.

    :param stream: the text stream to write to.
    :param level: the name of a ``twisted.logger.LogLevel``.
    :param as_json: whether to write each event as a line with a JSON object, for
        programs; otherwise as text, which may have several lines.
    :return: a function that sets another level, by its name.
    """
    predicate = logger.LogLevelFilterPredicate()
    file: Any = stream
    write = logger.FileLogObserver(file, json_line if as_json else _to_text)
    observer = logger.FilteringLogObserver(write, [predicate])
    logger.globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)

    def set_level(name: str) -> None:
        wanted = logger.LogLevel.levelWithName(name)
        predicate.setLogLevelForNamespace("", wanted)
        # Twisted reports the start and the end of each factory at the level info.
        quiet = wanted
        if wanted is not logger.LogLevel.debug:
            quiet = max(wanted, logger.LogLevel.warn)
        predicate.setLogLevelForNamespace("twisted", quiet)

    set_level(level)
    return set_level


def _to_text(event: logger.LogEvent) -> str | None:
    return clean_lines(logger.formatEventAsClassicLogText(event))


def run_service(
    reactor: IReactorCore, make: Callable[[], Runnable], stderr: TextIO | None = None
) -> int:
    """Run a service until a signal arrives.

    The reactor's clock becomes monotonic: setting the system's clock does not affect
    its timers.

    :param reactor: a reactor that has not run yet.
    :param make: creates the service; called in the running reactor.
    :param stderr: the stream for the message of a :exc:`ReplicationError` that prevents
        the start or ends the run.
    :return: the exit status: 1 if the service could not be created or started, its
        ``started`` or ``lost`` failed before the shutdown began, the service failed to
        stop, or it has an attribute ``unfinished`` that is not empty; otherwise 0.
    """
    # By default, a reactor's clock is the system's. If that is set back by hours, no
    # timer that was set before fires for hours: heartbeats and reconnections stop.
    reactor.seconds = time.monotonic  # type: ignore[attr-defined]
    process = _Process(as_reactor(reactor), make, stderr or sys.stderr)
    reactor.callWhenRunning(process.start)
    reactor.run()
    return process.status


@attrs.define(eq=False, repr=False)
class _Process:
    log = logger.Logger()

    _reactor: IReactor
    _make: Callable[[], Runnable]
    _stderr: TextIO
    _service: Runnable | None = attrs.field(default=None, init=False)
    _stopping: bool = attrs.field(default=False, init=False)
    _reload: Callable[[], None] = attrs.field(init=False)
    status: int = attrs.field(default=0, init=False)

    def start(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._stop)
        try:
            service = self._service = self._make()
            if (reload := getattr(service, "reload", None)) is not None:
                self._reload = reload
                signal.signal(signal.SIGHUP, self._hung_up)
            if (lost := getattr(service, "lost", None)) is not None:
                lost.addErrback(self._failed)
            service.startService()
        except Exception:  # noqa: BLE001 -- _failed() reports it
            self._failed(Failure())  # type: ignore[no-untyped-call]
        else:
            service.started.addCallbacks(self._up, self._failed)

    def _up(self, _: None) -> None:
        # While the reactor's thread is busy, a database thread that has received rows
        # waits this long before it requests the interpreter lock. By default, it waits
        # 5 ms; in that time, the reactor may deliver a whole page of a catch-up.
        sys.setswitchinterval(SWITCH_INTERVAL)
        # Objects created during the start live as long as the process: exclude them
        # from full garbage collections, which would pause the process. The caller may
        # have excluded those of the modules already; searching them takes 20 ms and
        # finds nearly nothing.
        gc.collect()
        gc.freeze()

    def _failed(self, failure: Failure) -> None:
        if self._stopping:
            # A signal arrived before the service was up.
            return
        self.status = 1
        if isinstance(failure.value, ReplicationError):
            text = printable_lines(f"synapse-replication: {failure.value}")
            print(text, file=self._stderr)
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

    def _stop(self) -> Deferred[Any] | None:
        self._stopping = True
        if self._service is None:
            return None

        def failed(failure: Failure) -> None:
            self.status = 1
            self.log.failure("synapse-replication did not stop cleanly", failure)

        async def stop(service: Runnable) -> None:
            await service.stopService()
            if getattr(service, "unfinished", ""):
                # The service has logged what was not delivered or sent.
                self.status = 1

        return Deferred.fromCoroutine(stop(self._service)).addErrback(failed)
