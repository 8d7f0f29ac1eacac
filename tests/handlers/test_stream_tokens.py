"""Tests of waiting for all writers of a stream, and of the callbacks that report it."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.host import PositionsOnlySink
from synapse_replication.errors import StreamConfigurationError, WaitTimeoutError
from synapse_replication.handlers.data_handler import ReplicationDataHandler
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.streams.memory import MemoryStream
from synapse_replication.streams.rows import AttrsRowCodec
from synapse_replication.streams.stream import (
    RowsBetween,
    StreamDescription,
    TokenStream,
)
from synapse_replication.streams.tokens import MultiWriterStreamToken
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row


class TwoWriters(SourceStream):
    """A stream in the database with the writers ``a`` and ``b``."""

    writers = ("a", "b")

    def current_stream_token(self) -> MultiWriterStreamToken:
        positions = {writer: self.current_token(writer) for writer in "ab"}
        return MultiWriterStreamToken(min(positions.values()), positions)

    def row_delivered(self, token: int) -> None:
        """Do nothing: the combined token does not depend on single rows."""

    async def get_rows_between(self, *bounds: Any, **more: Any) -> RowsBetween:
        raise NotImplementedError


class StreamTokenTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.stream = TwoWriters("events", Row)
        self.reactor = Clock()
        self.data = ReplicationDataHandler(
            {"events": self.stream, "plain": SourceStream("plain", Row)},
            PositionsOnlySink(),
            ReactorClock(self.reactor),
        )
        self.assertIsInstance(self.stream, TokenStream)

    def wait(self, stream: int, timeout: float = 10.0, **positions: int) -> Any:
        return Deferred.fromCoroutine(
            self.data.wait_for_stream_token(
                "events", MultiWriterStreamToken(stream, positions), timeout
            )
        )

    def deliver_position(self, writer: str, token: int) -> None:
        self.data.on_rdata("events", writer, token, [])
        self.reactor.advance(0)

    def test_every_writer(self) -> None:
        """A wait finishes only when every writer has reached the token."""
        waiting = self.wait(5)
        self.deliver_position("a", 9)
        self.assertNoResult(waiting)
        self.deliver_position("b", 5)
        self.successResultOf(waiting)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_two_waiters(self) -> None:
        """Both waiters for one token wake; a waiter for a lower token wakes earlier."""
        self.deliver_position("b", 5)
        waiting = [self.wait(3), self.wait(3), self.wait(1, a=2)]
        self.deliver_position("a", 2)
        self.successResultOf(waiting[2])
        self.assertNoResult(waiting[0])
        self.deliver_position("a", 3)
        self.successResultOf(waiting[0])
        self.successResultOf(waiting[1])

    def test_already_reached(self) -> None:
        """A wait for a token that was reached returns immediately."""
        self.deliver_position("a", 3)
        self.deliver_position("b", 4)
        self.successResultOf(self.wait(3, b=4))

    def test_timeout(self) -> None:
        """
        After its timeout, a wait fails with an error that names the slowest writer.
        """
        self.deliver_position("a", 3)
        self.deliver_position("b", 4)
        slow, for_b = self.wait(4, timeout=2), self.wait(3, timeout=3, b=9)
        self.reactor.advance(2)
        error = self.failureResultOf(slow, WaitTimeoutError).value
        self.assertIn("events of a is at 3 and did not reach 4", str(error))
        self.reactor.advance(1)
        error = self.failureResultOf(for_b, WaitTimeoutError).value
        self.assertIn("events of b is at 4 and did not reach 9", str(error))
        self.assertEqual(self.data._checks, {})
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_cancelled(self) -> None:
        """A wait that is cancelled leaves no state behind."""
        waiting = self.wait(4)
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(self.data._checks, {})
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_a_waiter_that_cancels_another(self) -> None:
        """A waiter that wakes may cancel another one whose token was reached, too."""
        first, second, third = self.wait(1), self.wait(1), self.wait(1)
        first.addCallback(lambda _: second.cancel())
        self.deliver_position("a", 1)
        self.deliver_position("b", 1)
        self.reactor.advance(0)
        self.successResultOf(first)
        self.failureResultOf(second, CancelledError)
        self.successResultOf(third)

    def test_capped(self) -> None:
        """A wait for an unallocated token ends at the largest allocated one."""

        async def largest(stream_name: str) -> int:
            return 3

        self.data._largest_token = largest
        self.deliver_position("a", 3)
        self.deliver_position("b", 3)
        self.successResultOf(self.wait(100))

    def test_callback(self) -> None:
        """The callback gets the newest token that every writer has reached."""
        called: list[int] = []
        stop = self.data.call_when_persisted("events", called.append)
        self.data.on_rdata("events", "a", 3, [])
        self.data.on_position("events", "b", 2)
        self.data.on_position("events", "b", 9)
        self.assertEqual(called, [])
        self.reactor.pump([0, 0])
        self.assertEqual(called, [3])
        self.deliver_position("b", 10)
        self.reactor.pump([0, 0])
        self.assertEqual(called, [3])
        stop()
        self.deliver_position("a", 10)
        self.reactor.pump([0, 0])
        self.assertEqual(called, [3])
        self.assertEqual(self.data._checks, {})

    def test_own_rows(self) -> None:
        """Rows that this instance wrote advance the token, too."""
        called: list[int] = []
        self.data.call_when_persisted("events", called.append)
        self.stream.advance("a", 7)
        self.stream.advance("b", 7)
        self.data.own_rows_written()
        self.reactor.pump([0, 0])
        self.assertEqual(called, [7])

    def test_stream_without_combined_token(self) -> None:
        """A stream without a combined token is refused with a hint."""
        with self.assertRaises(StreamConfigurationError) as caught:
            self.data.call_when_persisted("plain", print)
        self.assertIn("plain has no combined token", str(caught.exception))
        description = StreamDescription(
            "typing", AttrsRowCodec("typing", Row), held_in_memory=True
        )
        memory = MemoryStream(description, instance_name="w")
        data = ReplicationDataHandler(
            {"typing": memory}, PositionsOnlySink(), ReactorClock(self.reactor)
        )
        with self.assertRaises(StreamConfigurationError) as caught:
            data.call_when_persisted("typing", print)
        self.assertIn("it is held in memory", str(caught.exception))
