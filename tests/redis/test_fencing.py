"""Tests of the fencing commands; test_sender_reconnect.py tests when they are sent."""

from __future__ import annotations

from typing import Any

import txredisapi
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import NameLostError
from synapse_replication.redis.fencing import (
    MAX_HANG_UPS,
    ConnectionFence,
    LostConnections,
    NameFence,
    PublisherName,
)
from tests.redis.doubles import Events, OrderedObserver

_INFO = b"id=7 addr=203.0.113.7:4711 name="


class FencingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.events = Events()
        self.state = LostConnections(OrderedObserver(self.events))
        self.commands: list[tuple[tuple[str, ...], Deferred[Any]]] = []

    def fence(self, *, is_possible: bool = True) -> ConnectionFence:
        """Make the fence of a connection."""

        def execute(*args: str) -> Deferred[Any]:
            answer: Deferred[Any] = Deferred()
            self.commands.append((args, answer))
            return answer

        return ConnectionFence(self.state, execute, is_possible=is_possible)

    def test_earlier_connection_is_killed(self) -> None:
        """
        A new connection kills the newest of the earlier connections whose addresses are
        known.
        """
        first = self.fence()
        first.kill_previous()
        self.assertEqual(self.commands, [])
        self.assertFalse(first.identity_requested)
        first.request_identity()
        self.assertTrue(first.identity_requested)
        ((args, answer),) = self.commands
        self.assertEqual(args, ("CLIENT", "INFO"))
        answer.callback(_INFO)
        self.fence().kill_previous()
        self.assertEqual(
            self.commands[1][0],
            ("CLIENT", "KILL", "ID", "7", "ADDR", "203.0.113.7:4711"),
        )

    def test_no_name(self) -> None:
        """
        If CLIENT INFO returns no IP address, as for a Unix socket, nothing is killed.
        """
        for info in ("id=7 addr=/run/redis.sock:0 name=", b"what?", None):
            self.fence().request_identity()
            self.commands.pop()[1].callback(info)
            self.assertIsNone(self.state.previous)

    def test_nothing_to_fence(self) -> None:
        """A connection that needs no fencing sends no command."""
        self.state.previous = "7", "203.0.113.7:4711"
        fence = self.fence(is_possible=False)
        fence.kill_previous()
        fence.request_identity()
        self.assertEqual(self.commands, [])

    def test_errors(self) -> None:
        """
        A permanent error disables fencing; some of the temporary errors are reported.
        """
        for error, is_unavailable, is_reported in (
            (ConnectionLost(), False, False),
            (txredisapi.ResponseError("NOAUTH first"), False, False),
            (txredisapi.ResponseError("ERR busy"), False, True),
            (txredisapi.ResponseError("NOPERM no client"), True, True),
            (txredisapi.ResponseError("ERR Unknown command"), True, True),
        ):
            self.setUp()
            fence = self.fence()
            fence.request_identity()
            self.commands.pop()[1].errback(error)
            self.assertEqual(self.state.is_unavailable, is_unavailable, error)
            reported = [event for event in self.events.all if event[0] == "unavailable"]
            self.assertEqual(bool(reported), is_reported, error)

    def test_hang_ups(self) -> None:
        """Fencing is disabled if the server always closes instead of answering."""
        for number in range(MAX_HANG_UPS):
            self.assertFalse(self.state.is_unavailable, number)
            fence = self.fence()
            fence.request_identity()
            fence.connection_lost(is_explained=False)
        self.assertTrue(self.state.is_unavailable)
        del self.commands[:]
        self.fence().request_identity()
        self.assertEqual(self.commands, [])

    def test_no_hang_ups(self) -> None:
        """
        A close does not count if it is explained, if no answer was pending, or if the
        server has answered before.
        """
        for _ in range(2 * MAX_HANG_UPS):
            self.fence().connection_lost(is_explained=False)
            fence = self.fence()
            fence.request_identity()
            fence.connection_lost(is_explained=True)
        self.fence().request_identity()
        self.commands[-1][1].callback(_INFO)
        for _ in range(2 * MAX_HANG_UPS):
            fence = self.fence()
            fence.request_identity()
            fence.connection_lost(is_explained=False)
        self.assertFalse(self.state.is_unavailable)


_CLIENTS = b"""\
id=3 addr=203.0.113.7:4711 fd=8 name=synapse_replication/hs/w%C3%A9 age=9 lib-name=x
id=4 addr=203.0.113.7:4712 fd=9 name=synapse_replication/hs/w%C3%A92 age=9 lib-name=
id=5 addr=203.0.113.7:4713 fd=7 name= age=9 lib-name=synapse_replication/hs/w%C3%A9
id=6 addr=/run/redis.sock:0 fd=6 name=synapse_replication/hs/w%C3%A9 age=0
"""


class NameFenceTests(SynchronousTestCase):
    """Predecessors of a process that has acquired its name."""

    def setUp(self) -> None:
        self.events = Events()
        self.confirmations: list[Deferred[None]] = []
        self.commands: list[tuple[tuple[str, ...], Deferred[Any]]] = []
        self.name = PublisherName(
            OrderedObserver(self.events), "hs", "wé", lambda: self.confirm
        )

    def confirm(self) -> Deferred[None]:
        self.confirmations.append(Deferred())
        return self.confirmations[-1]

    def execute(self, *args: str) -> Deferred[Any]:
        self.commands.append((args, Deferred()))
        return self.commands[-1][1]

    def enter(self) -> Deferred[None]:
        """Let a connection enter."""
        entering = NameFence(self.name, self.execute).enter()
        assert entering is not None
        return entering

    @property
    def sent(self) -> list[tuple[str, ...]]:
        """The commands that were sent."""
        return [args for args, _ in self.commands]

    def test_order(self) -> None:
        """The name is set, then confirmed; then those of the same name are killed."""
        entering = self.enter()
        set_name = ("CLIENT", "SETNAME", "synapse_replication/hs/w%C3%A9")
        self.assertEqual(self.sent, [set_name])
        self.assertEqual(self.confirmations, [])
        self.commands[0][1].callback(b"OK")
        self.assertEqual(self.sent, [set_name])
        self.confirmations[0].callback(None)
        self.assertEqual(self.sent, [set_name, ("CLIENT", "LIST")])
        self.assertNoResult(entering)
        self.commands[1][1].callback(_CLIENTS)
        self.successResultOf(entering)
        self.assertEqual(
            self.sent[2:],
            [("CLIENT", "KILL", "ID", "3"), ("CLIENT", "KILL", "ID", "6")],
        )

    def test_not_confirmed(self) -> None:
        """Nothing is killed, and it may not publish."""
        entering = self.enter()
        self.commands[0][1].callback(b"OK")
        self.confirmations[0].errback(NameLostError("wé", "another"))
        self.failureResultOf(entering, NameLostError)
        self.assertEqual(len(self.commands), 1)

    def test_without_name(self) -> None:
        """A process that has not acquired its name sends nothing."""
        self.name.find_check = lambda: None
        self.assertIsNone(NameFence(self.name, self.execute).enter())
        self.assertEqual(self.commands, [])

    def test_commands_are_refused(self) -> None:
        """If Redis refuses the commands, the name is confirmed nevertheless."""
        for number in (1, 2):
            entering = self.enter()
            for _, answer in self.commands:
                answer.errback(txredisapi.ResponseError("NOPERM client|setname"))
            self.commands.clear()
            self.confirmations.pop().callback(None)
            self.successResultOf(entering)
            self.assertEqual(self.commands, [], number)
        ((kind, feature, why),) = self.events.all
        self.assertEqual((kind, why), ("unavailable", "NOPERM client|setname"))
        self.assertIn("client|setname, client|list and client|kill", feature)
