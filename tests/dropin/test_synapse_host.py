"""Tests for the adapter that makes a homeserver a replication host."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.synapse_host import HostClock, HostCommands, SynapseHost
from synapse_replication.handlers.interfaces import SyncingUser
from synapse_replication.wire.commands import (
    CancelTaskCommand,
    ClearUserSyncsCommand,
    Command,
    FederationAckCommand,
    InvalidateCacheCommand,
    LockReleasedCommand,
    NewActiveTaskCommand,
    RemoteServerUpCommand,
    RemovePusherCommand,
    UserIpCommand,
    UserSyncCommand,
)
from tests.dropin.host import FakeClock, FakeHomeserver, FakeStream, fake_modules
from tests.support.hooks import silent_hooks


def make_host(hs: Any) -> SynapseHost:
    """Return the replication host of a homeserver."""
    return SynapseHost(hs, silent_hooks(HostClock(hs.get_clock(), hs.get_reactor())))


class _DurationClock(FakeClock):
    """The host's clock in newer versions."""

    def call_later(self, delay: Duration, callback: Any, *args: object) -> Any:  # type: ignore[override]
        return super().call_later(delay.total_seconds(), callback, *args)


class Duration(timedelta):
    """The class of durations in newer versions of the host."""


class HostClockTests(SynchronousTestCase):
    """Tests for HostClock."""

    def test_later(self) -> None:
        """Calls are scheduled with the host's clock, and can be cancelled."""
        reactor = Clock()
        clock = HostClock(FakeClock(reactor), reactor)
        calls: list[int] = []
        clock.call_later(2, calls.append, 1)
        other = clock.call_later(2, calls.append, 2)
        self.assertTrue(other.active())
        other.cancel()
        self.assertFalse(other.active())
        reactor.advance(2)
        self.assertEqual(calls, [1])
        self.assertEqual((clock.seconds(), clock.time_msec()), (2, 2000))

    def test_cancelled_by_the_host(self) -> None:
        """The host may have cancelled a call, as it does when it shuts down."""
        reactor = Clock()
        call = HostClock(FakeClock(reactor), reactor).call_later(2, self.fail)
        (own,) = reactor.getDelayedCalls()
        own.cancel()
        call.cancel()
        self.assertFalse(call.active())

    def test_after_the_shutdown(self) -> None:
        """
        The clock of a host that was shut down refuses calls; the reactor makes them.
        """
        reactor = Clock()
        host_clock = FakeClock(reactor)

        def refuse(*arguments: object) -> None:
            raise Exception("Clock has been shutdown")

        self.patch(host_clock, "call_later", refuse)
        # It does not know the reactor's calls.
        self.patch(host_clock, "cancel_call_later", refuse)
        clock = HostClock(host_clock, reactor)
        calls: list[int] = []
        with capturedLogs() as events:
            clock.call_later(0, calls.append, 1)
            other = clock.call_later(1, calls.append, 2)
        other.cancel()
        self.assertFalse(other.active())
        reactor.pump([0, 1])
        self.assertEqual(calls, [1])
        self.assertEqual(events, [])

    def test_other_signature(self) -> None:
        """If the host's clock refuses calls for another reason, that is logged once."""
        reactor = Clock()
        host_clock = FakeClock(reactor)
        clock = HostClock(host_clock, reactor)
        self.patch(host_clock, "call_later", lambda *, delay: None)
        calls: list[int] = []
        with capturedLogs() as events:
            for number in (1, 2):
                clock.call_later(0, calls.append, number)
        reactor.advance(0)
        self.assertEqual(calls, [1, 2])
        (event,) = events
        self.assertIn("homeserver's clock refuses calls", str(formatEvent(event)))
        self.assertEqual(len(self.flushLoggedErrors(TypeError)), 1)

    def test_durations(self) -> None:
        """
        If the host has its own class of durations, its clock is called with that class.
        """
        fake_modules(self, modules={"synapse.util.duration": {"Duration": Duration}})
        reactor = Clock()
        calls: list[int] = []
        HostClock(_DurationClock(reactor), reactor).call_later(1.5, calls.append, 1)
        reactor.advance(1.5)
        self.assertEqual(calls, [1])


class HostCommandsTests(SynchronousTestCase):
    """Tests for HostCommands."""

    def _call(self, hs: FakeHomeserver, command: Command) -> list[Any]:
        waiting = HostCommands(hs).on_command(command)
        if waiting is not None:
            self.successResultOf(_deferred(waiting))
        return hs.calls

    def test_presence(self) -> None:
        """Syncing users are reported to the writer of presence only."""
        args = ("abc", "@u:test", "D", True, 5)
        row = ("update_external_syncs_row", *args)
        self.assertEqual(self._call(FakeHomeserver(), UserSyncCommand(*args)), [row])
        self.assertEqual(self._call(FakeHomeserver("w"), UserSyncCommand(*args)), [])
        self.assertEqual(
            self._call(FakeHomeserver(), ClearUserSyncsCommand("abc")),
            [("update_external_syncs_clear", "abc")],
        )
        self.assertEqual(
            self._call(FakeHomeserver("w"), ClearUserSyncsCommand("a")), []
        )

    def test_user_ip(self) -> None:
        """
        Client IPs are stored where background tasks run; the main process also notifies
        the server notices.
        """
        args = ("@u:test", "token", "::1", "agent", "D", 5)
        store, notice = ("insert_client_ip", *args), ("on_user_ip", "@u:test")
        for hs, calls in (
            (FakeHomeserver(), [store, notice]),
            (FakeHomeserver("w", run_background_tasks=True), [store]),
            (FakeHomeserver(run_background_tasks=False), [notice]),
        ):
            self.assertTrue(HostCommands(hs).stores_user_ips)
            self.assertEqual(self._call(hs, UserIpCommand(*args)), calls)
        self.assertFalse(HostCommands(FakeHomeserver("w")).stores_user_ips)

    def test_federation_ack(self) -> None:
        """
        An acknowledgement is handled by the main process, unless it sends federation
        itself.
        """
        ack = ("federation_ack", "sender", 5)
        for hs, calls in (
            (FakeHomeserver(), [ack]),
            (FakeHomeserver(send_federation=True), []),
            (FakeHomeserver("w"), []),
        ):
            self.assertEqual(self._call(hs, FederationAckCommand("sender", 5)), calls)

    def test_other_commands(self) -> None:
        """Other commands reach the corresponding part of the host."""
        commands: list[tuple[Command, tuple[str, ...]]] = [
            (RemoteServerUpCommand("a"), ("notify_remote_server_up", "a")),
            (
                LockReleasedCommand("w", "n", "k"),
                ("notify_lock_released", "w", "n", "k"),
            ),
            (NewActiveTaskCommand("t"), ("on_new_task", "t")),
        ]
        for command, call in commands:
            self.assertEqual(self._call(FakeHomeserver(), command), [call])
        self.assertEqual(self._call(FakeHomeserver("w"), NewActiveTaskCommand("t")), [])
        # This host has no on_cancel_task.
        self.assertEqual(self._call(FakeHomeserver(), CancelTaskCommand("t")), [])

    def test_cancelled_task(self) -> None:
        """A task is cancelled only where background tasks run."""
        for name, calls in (("master", [("on_cancel_task", "t")]), ("w", [])):
            hs: Any = FakeHomeserver(name)
            hs.get_task_scheduler = partial(hs._part, "on_cancel_task")
            self.assertEqual(self._call(hs, CancelTaskCommand("t")), calls)

    def test_commands_of_older_peers(self) -> None:
        """Main removes a pusher, and invalidates a cache in all processes."""
        for name in ("master", "w"):
            for command, call in (
                (
                    RemovePusherCommand("app", "key", "@u:x"),
                    ("remove_pusher", "app", "key", "@u:x"),
                ),
                (
                    InvalidateCacheCommand("get_user", ["@u:x"]),
                    ("invalidate_cache_and_stream", "get_user", ("@u:x",)),
                ),
                (InvalidateCacheCommand("get_user", None), ("invalidate_all",)),
                (InvalidateCacheCommand("unknown", None), None),
            ):
                hs: Any = FakeHomeserver(name)
                hs.get_pusherpool = partial(hs._part, "remove_pusher")
                store = hs._part("invalidate_cache_and_stream")
                store.get_user = hs._part("invalidate_all")
                hs.get_datastores = lambda store=store: SimpleNamespace(main=store)
                expected = [call] if call is not None and name == "master" else []
                self.assertEqual(self._call(hs, command), expected)

    def test_syncing_users(self) -> None:
        """Users who sync with this instance are reported with the current time."""
        hs = FakeHomeserver()
        hs.reactor.advance(3)
        users = list(HostCommands(hs).get_currently_syncing_users())
        self.assertEqual(users, [SyncingUser("@u:test", "D", 3000)])


class _Pages(FakeStream):
    """A stream with rows of the writer ``w`` only, in small pages."""

    page_rows = 100

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> tuple[list[tuple[int, Any]], int, bool]:
        """Return a page of rows."""
        if instance_name != "w":
            return [], upto_token, False
        found = [pair for pair in self.updates if from_token < pair[0] <= upto_token]
        if len(found) <= self.page_rows:
            return found, upto_token, False
        return found[: self.page_rows], found[self.page_rows - 1][0], True


class HeldPositionTests(SynchronousTestCase):
    """Positions of ``v`` that are ids of undelivered rows of ``w``."""

    def setUp(self) -> None:
        """Set the tokens of both writers to 5."""
        self.stream = _Pages("events", {"w": 5, "v": 5}, shared_token=5)
        fake_modules(self, {"events": lambda hs: self.stream})
        self.hs = FakeHomeserver(
            writers=SimpleNamespace(presence=["master"], events=["v", "w"])
        )
        self.rows = make_host(self.hs).rows

    def _commit(self, *tokens: int) -> None:
        self.stream.updates += [(token, [f"row {token}"]) for token in tokens]

    def _position(self, writer: str, token: int) -> None:
        self.successResultOf(_deferred(self.rows.on_position("events", writer, token)))

    def _row(self, writer: str, token: int) -> None:
        self.successResultOf(
            _deferred(self.rows.on_rdata("events", writer, token, ["row"]))
        )

    def _delivered(self) -> list[tuple[Any, ...]]:
        return [(name[3:], *rest[1:3]) for name, *rest in self.hs.calls]

    def test_the_position_is_a_row(self) -> None:
        """
        A position that equals another writer's row is held until that row is delivered;
        otherwise the row that closes the gap would reveal it.
        """
        self._commit(7, 8)
        self._position("v", 8)
        for token in (6, 7):
            self._row("w", token)
        self.assertEqual(self._delivered(), [("rdata", "w", 6), ("rdata", "w", 7)])
        self._row("w", 8)
        self.assertEqual(
            self._delivered()[2:], [("rdata", "w", 8), ("position", "v", 8)]
        )
        self._row("w", 9)
        self.assertEqual(self._delivered()[4:], [("rdata", "w", 9)])

    def test_a_position_that_the_host_knows(self) -> None:
        """
        A position is not delivered if rows of other writers have advanced the host's
        token of the writer that far, but a later one is.
        """
        self.stream.shared_token = 8
        self._position("v", 8)
        self.assertEqual(self._delivered(), [])
        self.assertEqual(self.rows._streams["events"].current_token("v"), 8)
        self._position("v", 9)
        self.assertEqual(self._delivered(), [("position", "v", 9)])

    def test_a_later_position_replaces_a_held_one(self) -> None:
        """
        A held position is dropped if a later position of the same writer supersedes it.
        """
        self._commit(8)
        self._position("v", 8)
        self._row("v", 9)
        self._row("w", 8)
        self.assertEqual(self._delivered(), [("rdata", "v", 9), ("rdata", "w", 8)])


class SynapseHostTests(SynchronousTestCase):
    """Tests for SynapseHost."""

    def test_rows(self) -> None:
        """
        Rows and positions reach the host's data handler, and then advance the stream's
        token.
        """
        fake_modules(self, {"caches": lambda hs: FakeStream("caches")})
        hs = FakeHomeserver()
        host = make_host(hs)
        self.successResultOf(_deferred(host.rows.on_rdata("caches", "w", 4, ["A"])))
        self.successResultOf(_deferred(host.rows.on_position("caches", "v", 6)))
        self.assertEqual(
            hs.calls,
            [("on_rdata", "caches", "w", 4, ["A"]), ("on_position", "caches", "v", 6)],
        )
        stream = host.streams.get_streams()["caches"]
        self.assertEqual((stream.current_token("w"), stream.current_token("v")), (4, 6))

    def test_rows_above_an_id_in_flight(self) -> None:
        """
        Rows are not fetched because of another writer's position: a lower id may be in
        flight.
        """
        letters = FakeStream("events", {"w": 5, "v": 5}, shared_token=5)
        letters.updates = [(7, ["b"]), (8, ["c"])]
        fake_modules(self, {"events": lambda hs: letters})
        hs = FakeHomeserver(
            writers=SimpleNamespace(presence=["master"], events=["v", "w"])
        )
        host = make_host(hs)
        self.successResultOf(_deferred(host.rows.on_position("events", "v", 8)))
        self.assertEqual(hs.calls, [])
        self.assertEqual(host.streams.get_streams()["events"].current_token("w"), 5)
        self.successResultOf(_deferred(host.rows.on_rdata("events", "w", 6, ["A"])))
        self.assertEqual(hs.calls, [("on_rdata", "events", "w", 6, ["A"])])

    def test_reset_of_a_writer(self) -> None:
        """If a stream was reset, its source is queried even for an empty range."""
        queries: list[tuple[str, int, int]] = []

        class _QueriedStream(FakeStream):
            async def get_updates_since(self, *args: Any) -> Any:
                queries.append(args)
                return await super().get_updates_since(*args)

        typing = _QueriedStream("typing")
        typing.tokens["w"] = 649
        fake_modules(self, {"typing": lambda hs: typing})
        host = make_host(FakeHomeserver())
        self.successResultOf(_deferred(host.rows.on_position("typing", "w", 650)))
        self.assertEqual(queries, [])
        self.successResultOf(_deferred(host.rows.on_position("typing", "w", 0)))
        self.assertEqual(queries, [("w", 649, 0)])

    def test_background_processes(self) -> None:
        """A background process is run by the host."""
        fake_modules(self)
        hs = FakeHomeserver()

        done = []

        async def work() -> None:
            done.append(1)

        host = make_host(hs)
        waiting = host.run_as_background_process("some work", work)
        self.successResultOf(_deferred(waiting))
        self.assertEqual(done, [1])
        self.assertEqual(hs.calls, [("process", "some work")])
        self.assertEqual(host.identity.server_name, "test")


def _deferred(awaitable: Awaitable[Any]) -> Deferred[Any]:
    async def wait() -> Any:
        return await awaitable

    return Deferred.fromCoroutine(wait())
