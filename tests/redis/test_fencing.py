"""Tests of the fencing commands; test_sender_reconnect.py tests when they are sent."""

from __future__ import annotations

from typing import Any

import txredisapi
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.fencing import (
    MAX_HANG_UPS,
    ConnectionFence,
    FencingState,
)
from tests.redis.doubles import Events, RecordingObserver

_INFO = b"id=7 addr=203.0.113.7:4711 name="


class FencingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.events = Events()
        self.state = FencingState(RecordingObserver(self.events))
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
