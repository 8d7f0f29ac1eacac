"""Tests for :mod:`synapse_replication.instrumentation.hooks`."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import HooksOverflowError
from synapse_replication.handlers.events import (
    CatchUpEvent,
    CatchUpPage,
    LateRows,
    LinkDown,
    LinkUp,
    PeerHeartbeat,
    PositionPersistBegun,
    PositionPersisted,
    PositionPersistFailed,
    Resync,
    Resynced,
    StreamReset,
)
from synapse_replication.handlers.observer import CompositeObserver
from synapse_replication.instrumentation.hooks import (
    MAX_INSTANCES,
    MAX_WAITING,
    STATUS_CHECK_INTERVAL,
    CatchUpProgress,
    CaughtUp,
    ConfigurationReloaded,
    HookEvent,
    ModuleLoaded,
    ModuleUnloaded,
    PeerOffline,
    PeerOnline,
    ReplicationHooks,
    Stalled,
    Stopping,
    WriterRoleChanged,
    name_function,
)
from synapse_replication.instrumentation.status.model import StallReason
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.testing.doubles import SourceStream
from synapse_replication.wire.close_reason import CloseReason
from tests.handlers.fixtures import Row
from tests.support.known_readers import KnownReaders
from tests.support.recording_observer import RecordingHost

EVENT = CatchUpEvent("events", "w1", 100, 150)
KINDS: tuple[type[HookEvent], ...] = (
    LinkUp,
    LinkDown,
    PeerOnline,
    PeerOffline,
    CaughtUp,
    CatchUpProgress,
    Stalled,
    Resynced,
    LateRows,
    WriterRoleChanged,
    StreamReset,
    PositionPersistBegun,
    PositionPersisted,
    PositionPersistFailed,
    ConfigurationReloaded,
    ModuleLoaded,
    ModuleUnloaded,
    Stopping,
)


def heartbeat_of(name: str, *streams: str, is_leaving: bool = False) -> PeerHeartbeat:
    positions = dict.fromkeys(streams, (1, 0.0))
    return PeerHeartbeat(name, "e", "", "host:1", is_leaving, positions)


class ReplicationHooksTests(SynchronousTestCase):
    def setUp(self) -> None:
        host = RecordingHost(SourceStream("events", Row))
        self.reactor = host.reactor
        self.failures: list[tuple[str, BaseException]] = []
        self.events: list[HookEvent] = []
        self.status = StatusObserver(
            "x.test", "me", [("events", "w1")], monotonic=host.clock.seconds
        )
        self.hooks = ReplicationHooks(
            host.clock,
            self.status.snapshot,
            lambda what, error: self.failures.append((what, error)),
        )
        self.observer = CompositeObserver([self.status, self.hooks])
        self.known = KnownReaders(self.status, self.observer)

    def subscribe_all(self) -> None:
        for kind in KINDS:
            self.hooks.subscribe(kind, self.events.append)

    def take(self, seconds: float = 0) -> list[HookEvent]:
        self.reactor.pump(
            [STATUS_CHECK_INTERVAL] * int(seconds / STATUS_CHECK_INTERVAL) or [0]
        )
        self.reactor.advance(0)
        taken, self.events[:] = self.events[:], []
        return taken

    def test_links_and_resyncs(self) -> None:
        """
        Links and resyncs are reported in order, and not before the next reactor turn.
        """
        self.subscribe_all()
        self.known.link_up()
        self.observer.observe(Resynced("events", "w1", Resync.PARTIAL))
        self.known.link_lost(why="gone")
        self.assertEqual(self.events, [])
        self.assertEqual(
            self.take(),
            [
                LinkUp("redis"),
                Resynced("events", "w1", Resync.PARTIAL),
                LinkDown("redis", CloseReason.LOST, "gone"),
            ],
        )

    def test_reset(self) -> None:
        """A reset stream is reported with its old and its new position."""
        self.subscribe_all()
        self.observer.observe(StreamReset("typing", "w1", 9, 2))
        self.assertEqual(self.take(), [StreamReset("typing", "w1", 9, 2)])

    def test_persisted_positions(self) -> None:
        """
        The beginning and the end of persisting a position are reported, but only the
        newest ones, and the failure.
        """
        self.subscribe_all()
        for token in (3, 4):
            self.observer.observe(PositionPersistBegun("events", "me", token))
            self.observer.observe(PositionPersisted("events", "me", token))
        error = ValueError("no connection")
        self.observer.observe(PositionPersistFailed("events", "me", 5, error))
        self.assertEqual(
            self.take(),
            [
                PositionPersistBegun("events", "me", 4),
                PositionPersisted("events", "me", 4),
                PositionPersistFailed("events", "me", 5, error),
            ],
        )

    def test_configuration(self) -> None:
        """
        A reload is reported with its errors, or with the sections whose changes need a
        restart.
        """
        self.subscribe_all()
        self.hooks.configuration_reloaded("h.yaml:1: redis: wrong", ())
        self.hooks.configuration_reloaded("", ["redis"])
        self.assertEqual(
            self.take(),
            [
                ConfigurationReloaded("h.yaml:1: redis: wrong", ()),
                ConfigurationReloaded("", ("redis",)),
            ],
        )

    def test_stopping(self) -> None:
        """Stopping is reported synchronously, after all earlier events."""
        self.subscribe_all()
        self.known.link_up()
        self.hooks.stopping()
        self.assertEqual(self.events, [LinkUp("redis"), Stopping()])
        self.assertEqual(len(self.take()), 2)

    def test_stopping_with_full_queue(self) -> None:
        """Stopping is reported even if as many events as possible wait."""
        self.subscribe_all()
        for number in range(MAX_WAITING):
            self.observer.observe(LinkUp(f"link{number}"))
        self.hooks.stopping()
        self.assertEqual(len(self.events), MAX_WAITING + 1)
        self.assertEqual(self.events[-1], Stopping())

    def test_modules(self) -> None:
        """
        Loaded modules are reported; all are unloaded synchronously, the last one first.
        """
        self.subscribe_all()
        self.hooks.module_loaded(heartbeat_of)
        self.hooks.module_loaded(RecordingHost)
        first, second = name_function(heartbeat_of), name_function(RecordingHost)
        self.assertEqual(self.take(), [ModuleLoaded(first), ModuleLoaded(second)])
        for number in range(MAX_WAITING):
            self.observer.observe(LinkUp(f"link{number}"))
        self.hooks.unload_modules()
        self.assertEqual(
            self.events[MAX_WAITING:], [ModuleUnloaded(second), ModuleUnloaded(first)]
        )
        self.take()
        self.hooks.unload_modules()
        self.assertEqual(self.take(), [])

    def test_progress(self) -> None:
        """Only the newest page of a catch-up is reported."""
        self.subscribe_all()
        self.observer.observe(EVENT)
        with self.observer.span(EVENT):
            self.observer.observe(CatchUpPage(EVENT, 5, 110))
            self.observer.observe(CatchUpPage(EVENT, 5, 120))
        expected = CatchUpProgress("events", "w1", 100, 120, 150)
        self.assertEqual(self.take(), [expected])

    def test_peers(self) -> None:
        """
        An instance is online from its first heartbeat until it leaves or becomes
        silent.
        """
        self.subscribe_all()
        self.hooks.start()
        self.known.link_up()
        self.observer.observe(heartbeat_of("w1"))
        self.observer.observe(heartbeat_of("w2"))
        self.assertEqual(
            [e for e in self.take(1) if isinstance(e, PeerOnline)],
            [PeerOnline("w1", "host:1"), PeerOnline("w2", "host:1")],
        )
        self.observer.observe(heartbeat_of("w2", is_leaving=True))
        self.assertIn(PeerOffline("w2"), self.take(1))
        self.assertIn(PeerOffline("w1"), self.take(20))

    def test_no_subscription(self) -> None:
        """
        Without a subscription no status snapshot is taken; a later subscriber is only
        notified of later changes.
        """
        snapshot = Mock(side_effect=self.status.snapshot)
        self.patch(self.hooks, "_snapshot", snapshot)
        self.hooks.start()
        self.known.link_up()
        self.observer.observe(heartbeat_of("w1"))
        self.reactor.pump([1] * 5)
        snapshot.assert_not_called()
        self.subscribe_all()
        self.assertEqual(self.take(1), [])
        self.observer.observe(heartbeat_of("w2"))
        self.assertEqual(self.take(1), [PeerOnline("w2", "host:1")])

    def test_timer(self) -> None:
        """There is a timer only while there are callbacks and until the stop."""
        self.hooks.start()
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        unsubscribe = self.hooks.subscribe(CaughtUp, self.events.append)
        self.hooks.subscribe(Stalled, self.events.append)()
        self.take(3)
        self.assertEqual(len(self.reactor.getDelayedCalls()), 1)
        unsubscribe()
        self.take(2)
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        self.hooks.subscribe(CaughtUp, self.events.append)
        self.assertEqual(len(self.reactor.getDelayedCalls()), 1)
        self.hooks.stop()
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_stalled_and_caught_up(self) -> None:
        """A stalled writer is reported once, and again when it is live."""
        self.subscribe_all()
        self.hooks.start()
        self.known.link_up()
        self.take(15)
        self.assertEqual(self.take(30), [])
        self.known.go_live("events", "w1", 7)
        self.assertEqual(self.take(1), [CaughtUp("events", "w1")])
        self.known.announce("events", "w1", 9)
        (stalled,) = self.take(30)
        assert isinstance(stalled, Stalled)
        self.assertEqual(stalled.reason, StallReason.NO_PROGRESS)
        self.observer.position_changed("events", "w1", 9)
        self.assertEqual(self.take(5), [CaughtUp("events", "w1")])

    def test_roles(self) -> None:
        """A stream that moves between instances is reported for both instances."""
        self.subscribe_all()
        self.observer.observe(heartbeat_of("w1", "events", "typing"))
        self.observer.observe(heartbeat_of("w2", "receipts"))
        self.assertEqual(self.take(), [])
        self.observer.observe(heartbeat_of("w1", "events"))
        self.observer.observe(heartbeat_of("w2", "receipts", "typing"))
        self.observer.observe(heartbeat_of("w2", is_leaving=True))
        self.assertEqual(
            self.take(),
            [
                WriterRoleChanged("typing", "w1", False),
                WriterRoleChanged("typing", "w2", True),
            ],
        )

    def test_failing_callback_is_isolated(self) -> None:
        """A callback that fails is reported, and the others are still called."""
        self.hooks.subscribe(LinkUp, lambda event: 1 / 0)
        self.subscribe_all()
        self.known.link_up()
        self.observer.observe(LinkUp("tcp"))
        self.assertEqual(self.take(), [LinkUp("redis"), LinkUp("tcp")])
        self.assertEqual(
            [(what, type(error)) for what, error in self.failures],
            [("a hook for LinkUp", ZeroDivisionError)] * 2,
        )

    def test_coroutines(self) -> None:
        """
        A callback may be a coroutine function, whose failure is reported whenever it
        occurs.
        """
        waiting: Deferred[None] = Deferred()

        async def record_and_wait(event: LinkUp) -> None:
            self.events.append(event)
            await waiting

        self.hooks.subscribe(LinkUp, record_and_wait)
        self.known.link_up()
        self.assertEqual(self.take(), [LinkUp("redis")])
        self.assertEqual(self.failures, [])
        waiting.errback(ZeroDivisionError())
        self.assertEqual(
            [(what, type(error)) for what, error in self.failures],
            [("a hook for LinkUp", ZeroDivisionError)],
        )

    def test_unsubscribe(self) -> None:
        """An unsubscribed callback is not called; unsubscribing again has no effect."""
        ends: list[Callable[[], None]] = []
        ends.append(self.hooks.subscribe(LinkUp, self.events.append))
        ends.append(self.hooks.subscribe(LinkUp, lambda event: ends[0]()))
        self.known.link_up()
        self.assertEqual(self.take(), [LinkUp("redis")])
        self.known.link_up()
        self.assertEqual(self.take(), [])
        ends[0]()

    def test_pending_events_are_bounded(self) -> None:
        """Events beyond the bound are discarded and their number is reported."""
        self.subscribe_all()
        self.observer.observe(EVENT)
        with self.observer.span(EVENT):
            pass
        for number in range(MAX_WAITING + 6):
            self.observer.observe(LinkUp(f"link{number}"))
        self.observer.observe(CatchUpPage(EVENT, 5, 120))
        taken = self.take()
        self.assertEqual(len(taken), MAX_WAITING)
        # An event that is already queued is updated, even if the queue is full.
        progress = CatchUpProgress("events", "w1", 100, 120, 150)
        self.assertEqual(taken[-1], progress)
        ((_, error),) = self.failures
        self.assertIsInstance(error, HooksOverflowError)
        self.assertIn("7 events", str(error))
        for number in range(MAX_INSTANCES + 7):
            self.observer.observe(heartbeat_of(f"w{number}"))
        self.assertEqual(len(self.hooks._roles), MAX_INSTANCES)

    def test_many_instances(self) -> None:
        """However many instances there were, a new one's streams are followed."""
        self.hooks.subscribe(WriterRoleChanged, self.events.append)
        for number in range(MAX_INSTANCES + 1):
            self.observer.observe(heartbeat_of(f"w{number}"))
        self.observer.observe(heartbeat_of(f"w{MAX_INSTANCES}", "typing"))
        changed = WriterRoleChanged("typing", f"w{MAX_INSTANCES}", True)
        self.assertEqual(self.take(), [changed])

    def test_stop(self) -> None:
        """After stop(), no delayed call remains."""
        self.hooks.start()
        self.take(3)
        self.hooks.stop()
        self.assertEqual(self.reactor.getDelayedCalls(), [])


class _Callable:
    def __call__(self) -> None:
        """Do nothing."""


class NameFunctionTests(SynchronousTestCase):
    def test_names(self) -> None:
        """Functions and classes have a dotted name; other objects, that of a class."""
        self.assertEqual(name_function(heartbeat_of), f"{__name__}.heartbeat_of")
        for each in (_Callable, _Callable()):
            self.assertEqual(name_function(each), f"{__name__}._Callable")
