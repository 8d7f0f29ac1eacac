"""Tests for synapse_replication.app.service_runner."""

from __future__ import annotations

import gc
import io
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger, globalLogBeginner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.service_runner import Runnable, run_service, start_logging
from synapse_replication.errors import StorageError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class FakeReactor:
    """A reactor that runs until its queue is empty."""

    def __init__(self) -> None:
        self.running = False
        self.queue: list[Callable[[], object]] = []
        self.before_shutdown: list[Callable[[], Deferred[None] | None]] = []

    def callWhenRunning(self, func: Callable[[], object]) -> None:
        self.queue.append(func)

    def callFromThread(self, func: Callable[[], object]) -> None:
        self.queue.append(func)

    def addSystemEventTrigger(
        self, phase: str, event: str, func: Callable[[], Deferred[None] | None]
    ) -> None:
        assert (phase, event) == ("before", "shutdown")
        self.before_shutdown.append(func)

    def run(self) -> None:
        self.running = True
        while self.queue:
            self.queue.pop(0)()

    def stop(self) -> None:
        self.running = False
        for func in self.before_shutdown:
            func()


class FakeService:
    """A service whose start and stop a test controls."""

    def __init__(self) -> None:
        self.started: Deferred[None] = Deferred()
        self.stopped: Deferred[None] = succeed(None)
        self.calls: list[str] = []

    def startService(self) -> None:
        self.calls.append("start")

    def stopService(self) -> Deferred[None]:
        self.calls.append("stop")
        return self.stopped


class ReloadingService(FakeService):
    """A service that can reload its configuration."""

    def reload(self) -> None:
        self.calls.append("reload")


if TYPE_CHECKING:
    _service: type[Runnable] = FakeService


class RunServiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        for number in (*_SIGNALS, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))
        self.reactor: Any = FakeReactor()
        self.service = FakeService()
        self.stderr = io.StringIO()

    def run_service_under_test(self) -> int:
        return run_service(self.reactor, lambda: self.service, self.stderr)

    def signal_after_start(self, number: signal.Signals) -> None:
        start = self.service.startService

        def start_and_signal() -> None:
            start()
            self.reactor.callWhenRunning(lambda: signal.raise_signal(number))

        self.service.startService = start_and_signal  # type: ignore[method-assign]

    def test_signal(self) -> None:
        """
        The first signal stops the service and restores the default signal handlers.
        """
        self.service.started.callback(None)
        self.signal_after_start(signal.SIGTERM)
        self.assertEqual(self.run_service_under_test(), 0)
        self.assertEqual(self.service.calls, ["start", "stop"])
        for number in _SIGNALS:
            self.assertEqual(signal.getsignal(number), signal.SIG_DFL)

    def test_startup_objects_are_frozen(self) -> None:
        """Objects that exist after the start are excluded from garbage collection."""
        self.addCleanup(gc.unfreeze)
        gc.unfreeze()
        service = FakeService()
        service.started.callback(None)
        run_service(self.reactor, lambda: service)
        self.assertGreater(gc.get_freeze_count(), 1000)

    def test_threads_do_not_wait_long(self) -> None:
        """The switch interval of threads is below a millisecond."""
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        service = FakeService()
        service.started.callback(None)
        run_service(self.reactor, lambda: service)
        self.assertLess(sys.getswitchinterval(), 0.001)

    def test_does_not_start(self) -> None:
        """If a service cannot start, the error is printed, and the exit status is 1."""
        self.service.started.errback(StorageError("no such thing"))
        self.assertEqual(self.run_service_under_test(), 1)
        self.assertEqual(self.stderr.getvalue(), "synapse-replication: no such thing\n")
        self.assertEqual(self.service.calls, ["start", "stop"])

    def test_cannot_be_made(self) -> None:
        """
        If a service cannot be created, the error is printed, and the exit status is 1.
        """

        def make() -> Runnable:
            raise StorageError("no such thing")

        self.assertEqual(run_service(self.reactor, make, self.stderr), 1)
        self.assertIn("no such thing", self.stderr.getvalue())

    def test_unexpected_failure(self) -> None:
        """An unexpected exception at startup is logged with its traceback."""
        self.service.started.errback(RuntimeError("oops"))
        self.assertEqual(self.run_service_under_test(), 1)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_stopped_before_it_was_up(self) -> None:
        """If a signal stops a service before it is up, the exit status is 0."""
        self.signal_after_start(signal.SIGINT)

        def stop() -> Deferred[None]:
            self.service.started.errback(RuntimeError("cancelled"))
            return succeed(None)

        self.service.stopService = stop  # type: ignore[method-assign]
        self.assertEqual(self.run_service_under_test(), 0)

    def test_does_not_stop(self) -> None:
        """If a service fails to stop, the exit status is 1."""
        self.service.started.errback(StorageError("no such thing"))
        self.service.stopped = Deferred()
        self.service.stopped.errback(RuntimeError("stuck"))
        self.assertEqual(self.run_service_under_test(), 1)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_any_awaitable_ends_the_stop(self) -> None:
        """A stop that returns another awaitable than a Deferred is awaited."""
        awaited: list[str] = []

        class Stopping:
            def __await__(self) -> Generator[Any, Any, None]:
                awaited.append("stop")
                return (yield from succeed(None).__await__())

        self.service.started.callback(None)
        self.service.stopService = Stopping  # type: ignore[method-assign, assignment]
        self.signal_after_start(signal.SIGTERM)
        self.assertEqual(self.run_service_under_test(), 0)
        self.assertEqual(awaited, ["stop"])

    def test_reload(self) -> None:
        """SIGHUP makes a reloadable service reload its configuration."""
        self.service = ReloadingService()
        self.service.started.callback(None)
        self.signal_after_start(signal.SIGHUP)
        self.assertEqual(self.run_service_under_test(), 0)
        self.assertEqual(self.service.calls, ["start", "reload"])

    def test_cannot_reload(self) -> None:
        """If a service is not reloadable, the handler of SIGHUP is left unchanged."""
        before = signal.getsignal(signal.SIGHUP)
        self.service.started.callback(None)
        self.assertEqual(self.run_service_under_test(), 0)
        self.assertIs(signal.getsignal(signal.SIGHUP), before)


class LoggingTests(SynchronousTestCase):
    def test_level(self) -> None:
        """Events below the level are not logged, and the level can be changed."""
        observers: list[Any] = []
        self.patch(
            globalLogBeginner,
            "beginLoggingTo",
            lambda begun, **more: observers.extend(begun),
        )
        stream = io.StringIO()
        set_level = start_logging(stream, "warn")
        log = Logger(observer=observers[0])
        log.info("one")
        set_level("debug")
        log.debug("two")
        set_level("error")
        log.warn("three")
        self.assertNotIn("one", stream.getvalue())
        self.assertIn("two", stream.getvalue())
        self.assertNotIn("three", stream.getvalue())

    def test_twisted_is_quiet(self) -> None:
        """Twisted's messages about factories are logged only at level debug."""
        stream = io.StringIO()
        observers: list[Any] = []
        self.patch(
            globalLogBeginner,
            "beginLoggingTo",
            lambda begun, **more: observers.extend(begun),
        )
        set_level = start_logging(stream, "info")
        log = Logger("twisted.internet.protocol", observer=observers[0])
        log.info("Starting factory")
        log.warn("worth a line")
        set_level("debug")
        log.info("Stopping factory")
        text = stream.getvalue()
        self.assertNotIn("Starting", text)
        self.assertIn("worth a line", text)
        self.assertIn("Stopping", text)


#: A service whose reactor sees the system's clock go back by three hours.
_CLOCK_GOES_BACK = """
import time
from twisted.internet.defer import Deferred
from twisted.internet.epollreactor import EPollReactor
from synapse_replication.app.service_runner import run_service

class Reactor(EPollReactor):
    back = 0
    def seconds(self):
        return time.time() - self.back

class Service:
    started = Deferred()
    def startService(self):
        reactor.callLater(0.1, reactor.stop)
        Reactor.back = 3 * 3600
    async def stopService(self):
        print("stopped")

reactor = Reactor()
run_service(reactor, Service)
"""


class ClockTests(SynchronousTestCase):
    """Tests for a system clock that is set back."""

    def test_timers(self) -> None:
        """A timer that was set before fires in time."""
        done = subprocess.run(
            [sys.executable, "-c", _CLOCK_GOES_BACK],
            capture_output=True,
            timeout=30,
            check=False,
        )
        self.assertEqual(done.stdout, b"stopped\n", done.stderr)
