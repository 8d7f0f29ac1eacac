"""Tests for synapse_replication.clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.clock import BackgroundProcesses, ReactorClock
from synapse_replication.handlers import interfaces
from synapse_replication.handlers.events import OperationFailed
from synapse_replication.handlers.observer import ReplicationObserver, handles

if TYPE_CHECKING:
    _clock: type[interfaces.Clock] = ReactorClock
    _runner: type[interfaces.BackgroundRunner] = BackgroundProcesses


class ReactorClockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = Clock()
        self.clock = ReactorClock(self.reactor, lambda: 12.5)

    def test_times(self) -> None:
        """Monotonic time is the reactor's, in s; wall-clock time is in ms."""
        self.reactor.advance(3)
        self.assertEqual(self.clock.seconds(), 3.0)
        self.assertEqual(self.clock.time_msec(), 12500)

    def test_call_later(self) -> None:
        """A call is made after its delay unless it is cancelled."""
        calls: list[str] = []
        self.clock.call_later(2, calls.append, "made")
        self.clock.call_later(2, calls.append, "taken back").cancel()
        self.reactor.advance(2)
        self.assertEqual(calls, ["made"])

    def test_sleep(self) -> None:
        """``sleep`` fires after its delay."""
        sleeping = self.clock.sleep(2)
        self.assertNoResult(sleeping)
        self.reactor.advance(2)
        self.successResultOf(sleeping)


class Failures(ReplicationObserver):
    """Records failures."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, BaseException]] = []

    @handles(OperationFailed)
    def _failure(self, event: OperationFailed) -> None:
        self.seen.append((event.what, event.error))


class BackgroundProcessesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.observer = Failures()
        self.processes = BackgroundProcesses(self.observer)
        self.gate: Deferred[None] = Deferred()

    async def wait_for_gate(self) -> None:
        await self.gate

    def test_waits_for_all(self) -> None:
        """``wait`` fires when the last process has ended."""
        self.processes("one", self.wait_for_gate)
        waiting = self.processes.wait()
        self.assertEqual(self.processes.count, 1)
        self.assertNoResult(waiting)
        self.gate.callback(None)
        self.successResultOf(waiting)
        self.assertEqual(self.processes.count, 0)

    def test_failure_is_reported(self) -> None:
        """
        A process that fails is reported by its description, and its Deferred succeeds.
        """
        error = RuntimeError("no")
        process = self.processes("one", self.wait_for_gate)
        self.gate.errback(error)
        self.successResultOf(process)
        self.assertEqual(self.observer.seen, [("one", error)])
        self.assertEqual(self.processes.count, 0)

    def test_failure_at_once(self) -> None:
        """A process that fails before it waits for anything is reported as well."""
        self.gate.errback(RuntimeError("no"))
        self.successResultOf(self.processes("one", self.wait_for_gate))
        self.assertEqual(len(self.observer.seen), 1)
        self.assertEqual(self.processes.count, 0)
