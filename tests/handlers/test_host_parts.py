"""Tests for synapse_replication.handlers.host_parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.handlers import interfaces
from synapse_replication.handlers.host_parts import (
    BackgroundProcesses,
    ReactorClock,
    StreamTable,
    SyncingUsers,
    WriteNotifier,
)
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.doubles import EventRecorder
from synapse_replication.wire.commands import ClearUserSyncsCommand, UserSyncCommand

if TYPE_CHECKING:
    _clock: type[interfaces.Clock] = ReactorClock
    _runner: type[interfaces.BackgroundRunner] = BackgroundProcesses
    _commands: type[interfaces.CommandSink] = SyncingUsers
    _notifier: type[interfaces.Notifier] = WriteNotifier
    _streams: type[interfaces.StreamDirectory] = StreamTable


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


class BackgroundProcessesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.observer = EventRecorder()
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
        self.assertEqual(self.observer.failures, [("one", error)])
        self.assertEqual(self.processes.count, 0)

    def test_failure_at_once(self) -> None:
        """A process that fails before it waits for anything is reported as well."""
        self.gate.errback(RuntimeError("no"))
        self.successResultOf(self.processes("one", self.wait_for_gate))
        self.assertEqual(len(self.observer.failures), 1)
        self.assertEqual(self.processes.count, 0)


def typing_stream() -> MemoryStream:
    return MemoryStream(STANDARD_STREAMS["typing"].description, instance_name="me")


class StreamTableTests(SynchronousTestCase):
    def test_streams(self) -> None:
        """
        A stream is found by its name; only streams that are written here are
        replicated.
        """
        table = StreamTable()
        stream = typing_stream()
        table.add(stream, is_written_here=False)
        self.assertEqual(table.get_streams(), {"typing": stream})
        self.assertEqual(table.get_streams_to_replicate(), [])
        self.assertEqual(table.writers, {})

    def test_writers(self) -> None:
        """The declared writers of a stream, one or several, are found by its name."""
        for writers, expected in (("w1", ("w1",)), (["w1", "w2"], ("w1", "w2"))):
            table = StreamTable()
            table.add(typing_stream(), is_written_here=False, writers=writers)
            self.assertEqual(table.writers, {"typing": expected})

    def test_twice(self) -> None:
        """A second stream of the same name is refused."""
        table = StreamTable()
        table.add(typing_stream(), is_written_here=True)
        with self.assertRaises(StreamConfigurationError) as caught:
            table.add(typing_stream(), is_written_here=True)
        self.assertIn("typing is declared twice", str(caught.exception))
        self.assertEqual(len(table.get_streams_to_replicate()), 1)


class WriteNotifierTests(SynchronousTestCase):
    def test_notify(self) -> None:
        """Every registered callback is called for each write."""
        notifier = WriteNotifier()
        called: list[str] = []
        notifier.add_replication_callback(lambda: called.append("a"))
        notifier.add_replication_callback(lambda: called.append("b"))
        notifier.notify()
        self.assertEqual(called, ["a", "b"])


class SyncingUsersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.users = SyncingUsers(max_users=3, monotonic=self.clock.seconds)

    def sync(self, instance: str, user: str, is_syncing: bool = True) -> None:
        self.users.on_command(UserSyncCommand(instance, user, "D", is_syncing, 7))

    def seen(self) -> list[str]:
        return [
            f"{instance} {user}" for instance, user, _ in self.users.syncing_users()
        ]

    def test_killed_instance(self) -> None:
        """The users of an instance that is silent for five minutes are removed."""
        self.sync("a", "u")
        self.clock.advance(200)
        self.sync("b", "v")
        self.clock.advance(99)
        self.assertEqual(self.seen(), ["a u", "b v"])
        self.clock.advance(1)
        self.assertEqual(self.seen(), ["b v"])
        self.clock.advance(100)
        self.sync("b", "w")
        self.clock.advance(299)
        self.assertEqual(self.seen(), ["b v", "b w"])

    def test_start_and_end(self) -> None:
        """A user is listed from start to end, separately for each instance."""
        self.sync("a", "u")
        self.sync("b", "u")
        self.sync("a", "u", False)
        self.assertEqual(self.seen(), ["b u"])

    def test_clear(self) -> None:
        """Clearing an instance removes all its users."""
        self.sync("a", "u")
        self.sync("a", "v")
        self.sync("b", "w")
        self.users.on_command(ClearUserSyncsCommand("a"))
        self.assertEqual(self.seen(), ["b w"])

    def test_bound(self) -> None:
        """Beyond the limit, the least recently seen user is evicted."""
        for user in ("u", "v", "w", "u", "x"):
            self.sync("a", user)
        self.assertEqual(self.seen(), ["a w", "a u", "a x"])
