"""Tests of the data handler: the host's sink, positions and waiters."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import StreamConfigurationError, WaitTimeoutError
from synapse_replication.handlers.data_handler import ReplicationDataHandler
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.streams.tokens import MultiWriterStreamToken
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row


class Sink:
    """Records the stream's position at each call."""

    def __init__(self, stream: SourceStream) -> None:
        self.stream = stream
        self.calls: list[tuple[str, int, int]] = []
        self.answer: Awaitable[None] | None = None

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        self.calls.append(("rows", token, self.stream.current_token(instance_name)))
        return self.answer

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Awaitable[None] | None:
        self.calls.append(("position", token, self.stream.current_token(instance_name)))
        return self.answer


class EpochSavingSink(Sink):
    """A sink that also saves epochs."""

    def saved_epochs(self) -> dict[tuple[str, str], str]:
        return {("events", "w"): "a"}

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Awaitable[None] | None:
        self.calls.append((epoch, 0, self.stream.current_token(instance_name)))
        return self.answer


class ReplicationDataHandlerTests(SynchronousTestCase):
    """
    Tests that the sink gets rows first, then the position advances, then waiters wake.
    """

    def setUp(self) -> None:
        self.stream = SourceStream("events", Row)
        self.sink = Sink(self.stream)
        self.reactor = Clock()
        self.data = ReplicationDataHandler(
            {"events": self.stream}, self.sink, ReactorClock(self.reactor)
        )

    def test_epochs(self) -> None:
        """Epochs are passed to a sink that saves them; the position does not change."""
        self.assertEqual(self.data.saved_epochs(), {})
        self.assertIsNone(self.data.on_epoch("events", "w", "b"))
        self.stream.advance("w", 3)
        sink = EpochSavingSink(self.stream)
        sink.answer = succeed(None)
        data = ReplicationDataHandler(
            {"events": self.stream}, sink, ReactorClock(self.reactor)
        )
        self.assertEqual(data.saved_epochs(), {("events", "w"): "a"})
        self.assertIs(data.on_epoch("events", "w", "b"), sink.answer)
        self.assertEqual(sink.calls, [("b", 0, 3)])
        self.assertEqual(self.stream.current_token("w"), 3)

    def wait(self, position: int, writer: str = "w") -> Deferred[None]:
        return Deferred.fromCoroutine(
            self.data.wait_for_stream_position(writer, "events", position, 10)
        )

    def record_wakeup(self, _: None, woken: list[int], number: int) -> None:
        woken.append(number)

    def await_in_process(self, waiting: Awaitable[None] | None) -> Deferred[None]:
        async def run() -> None:
            assert waiting is not None
            await waiting

        return Deferred.fromCoroutine(run())

    def rows(self, token: int, writer: str = "w") -> None:
        self.assertIsNone(self.data.on_rdata("events", writer, token, [Row("a")]))
        self.reactor.advance(0)

    def assertNothingLeft(self) -> None:
        self.assertEqual(self.data._checks, {})
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_others_that_wait_cost_nothing(self) -> None:
        """An advance compares the positions only of those that wait for its writer."""
        waiting = [self.wait(5, "stuck") for _ in range(3)]
        asked: list[str] = []

        def current_token(writer: str) -> int:
            asked.append(writer)
            return 0

        self.patch(self.stream, "current_token", current_token)
        self.wait(3, "w").addErrback(lambda failure: failure.trap(WaitTimeoutError))
        asked.clear()
        self.data.on_rdata("events", "w", 1, [Row("a")])
        asked.clear()
        self.reactor.advance(0)
        # Once to see that the position has changed, and once by the wait.
        self.assertEqual(asked, ["w", "w"])
        self.reactor.advance(10)
        for each in waiting:
            self.failureResultOf(each, WaitTimeoutError)
        self.assertNothingLeft()

    def test_own_rows_cost_others_little(self) -> None:
        """
        A row of this process compares the positions of those that wait for a writer
        only if that writer's position has changed.
        """
        waiting = [self.wait(5, "stuck") for _ in range(3)]
        self.data.own_rows_written()
        self.reactor.advance(0)
        asked: list[str] = []
        current_token = self.stream.current_token

        def ask(writer: str) -> int:
            asked.append(writer)
            return current_token(writer)

        self.patch(self.stream, "current_token", ask)
        self.data.own_rows_written()
        self.reactor.advance(0)
        self.assertEqual(asked, ["stuck"])
        self.stream.advance("stuck", 5)
        self.data.own_rows_written()
        self.reactor.advance(0)
        for each in waiting:
            self.successResultOf(each)
        self.assertNothingLeft()

    def test_wait_while_another_is_due(self) -> None:
        """
        A wait that begins after a row was written, and before that is reported, does
        not keep an earlier one from waking.
        """
        first = self.wait(3)
        self.data.own_rows_written()
        self.reactor.advance(0)
        self.stream.advance("w", 3)
        second = self.wait(4)
        self.data.own_rows_written()
        self.reactor.advance(0)
        self.successResultOf(first)
        self.assertNoResult(second)
        self.rows(4)
        self.successResultOf(second)
        self.assertNothingLeft()

    def test_stream_that_raises(self) -> None:
        """A stream that raises when it is asked keeps only its own waits waiting."""
        current_token = self.stream.current_token

        def fail_for_broken(writer: str) -> int:
            if writer == "broken":
                raise ZeroDivisionError
            return current_token(writer)

        broken, waiting = self.wait(1, "broken"), self.wait(1, "w")
        self.data.own_rows_written()
        self.stream.advance("w", 1)
        self.patch(self.stream, "current_token", fail_for_broken)
        with self.assertRaises(ZeroDivisionError):
            self.reactor.advance(0)
        self.reactor.advance(0)
        self.successResultOf(waiting)
        self.patch(self.stream, "current_token", current_token)
        self.rows(1, "broken")
        self.successResultOf(broken)
        self.assertNothingLeft()

    def test_position_that_returns(self) -> None:
        """A wait wakes although the position is that of the last comparison."""
        last = self.wait(9)
        self.rows(5)
        self.data.on_position("events", "w", 3)
        waiting = self.wait(5)
        self.rows(5)
        self.successResultOf(waiting)
        self.assertNoResult(last)
        self.rows(9)
        self.successResultOf(last)
        self.assertNothingLeft()

    def test_rows_before_position(self) -> None:
        """The sink gets the rows before the position advances."""
        self.rows(3)
        self.assertEqual(self.sink.calls, [("rows", 3, 0)])
        self.assertEqual(self.stream.current_token("w"), 3)

    def test_waits_for_the_host(self) -> None:
        """The position advances only when the sink's awaitable has fired."""
        held: Deferred[None] = Deferred()
        self.sink.answer = held
        finished = self.await_in_process(self.data.on_rdata("events", "w", 3, []))
        self.assertEqual(self.stream.current_token("w"), 0)
        held.callback(None)
        self.successResultOf(finished)
        self.assertEqual(self.stream.current_token("w"), 3)
        self.sink.answer = succeed(None)
        self.successResultOf(
            self.await_in_process(self.data.on_position("events", "w", 5))
        )
        self.assertEqual(self.stream.current_token("w"), 5)

    def test_late_rows_do_not_rewind(self) -> None:
        """A late row does not decrease the position, but a reported position may."""
        self.rows(5)
        self.rows(3)
        self.assertEqual(self.stream.current_token("w"), 5)
        self.data.on_position("events", "w", 1)
        self.assertEqual(self.stream.current_token("w"), 1)

    def test_already_reached(self) -> None:
        """Waiting for a position that was reached returns immediately."""
        self.rows(5)
        self.successResultOf(self.wait(5))
        self.assertNothingLeft()

    def test_own_rows(self) -> None:
        """Rows that this process has written wake those that wait for them."""
        waiting = self.wait(5, "me")
        self.stream.advance("me", 4)
        self.data.own_rows_written()
        self.reactor.advance(0)
        self.assertNoResult(waiting)
        self.stream.advance("me", 5)
        self.data.own_rows_written()
        self.reactor.advance(0)
        self.successResultOf(waiting)
        self.assertNothingLeft()

    def test_unknown_stream(self) -> None:
        """Waiting for a stream that does not exist names those that do."""
        waiting = self.data.wait_for_stream_position("w", "evnts", 5)
        error = self.failureResultOf(
            Deferred.fromCoroutine(waiting), StreamConfigurationError
        )
        text = "this process has no stream evnts; it has events"
        self.assertEqual(error.getErrorMessage(), text)
        token = MultiWriterStreamToken(5)
        waiting = self.data.wait_for_stream_token("evnts", token)
        self.failureResultOf(Deferred.fromCoroutine(waiting), StreamConfigurationError)

    def test_several_waiters(self) -> None:
        """All waiters of a position wake, in order, when it is reached."""
        woken: list[int] = []
        for number, position in enumerate((5, 3, 5, 9)):
            self.wait(position).addCallback(self.record_wakeup, woken, number)
        self.rows(4)
        self.assertEqual(woken, [1])
        self.rows(6)
        self.assertEqual(woken, [1, 0, 2])
        self.data.on_position("events", "w", 9)
        self.reactor.advance(0)
        self.assertEqual(woken, [1, 0, 2, 3])
        self.assertNothingLeft()

    def test_other_writers_wake_no_waiter(self) -> None:
        """Positions of other writers wake no waiter."""
        waiting = self.wait(5)
        self.rows(100, "other")
        self.assertNoResult(waiting)
        self.rows(5)
        self.successResultOf(waiting)

    def test_time_out(self) -> None:
        """
        After its timeout, a wait fails with an error that states the current position.
        """
        waiting = self.wait(5)
        self.wait(6).addErrback(lambda _: None)
        self.rows(4)
        self.reactor.advance(10)
        error = self.failureResultOf(waiting, WaitTimeoutError).value
        self.assertEqual((error.position, error.current), (5, 4))
        self.assertNothingLeft()

    def test_cancelled(self) -> None:
        """A wait that is cancelled leaves no state behind."""
        waiting = self.wait(5)
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertNothingLeft()

    def test_a_waiter_that_cancels_another(self) -> None:
        """
        A waiter that wakes may cancel others, whether their positions were reached by
        the same row or not.
        """
        later, waiting, same = self.wait(9), self.wait(5), self.wait(6)
        also = self.wait(6)

        def cancel_others(_: object) -> None:
            same.cancel()
            later.cancel()

        waiting.addCallback(cancel_others)
        self.rows(7)
        self.successResultOf(waiting)
        self.failureResultOf(same, CancelledError)
        self.failureResultOf(later, CancelledError)
        self.successResultOf(also)
        self.assertNothingLeft()

    def test_a_waiter_that_waits_again(self) -> None:
        """If a waiter starts another wait when it wakes, it wakes a second time."""
        again: list[Deferred[None]] = []
        self.wait(5).addCallback(lambda _: again.append(self.wait(6)))
        self.rows(5)
        self.assertNoResult(again[0])
        self.rows(6)
        self.successResultOf(again[0])

    def test_more_than_was_allocated(self) -> None:
        """A wait for an unallocated token ends at the largest allocated one."""
        answers: dict[str, int | None] = {"events": 7}

        async def largest_token(stream_name: str) -> int | None:
            return answers[stream_name]

        self.data = ReplicationDataHandler(
            {"events": self.stream},
            self.sink,
            ReactorClock(self.reactor),
            largest_token=largest_token,
        )
        waiting = self.wait(1_000_000)
        self.rows(7)
        self.successResultOf(waiting)
        self.successResultOf(self.wait(1_000_000))
        answers["events"] = None
        waiting = self.wait(1_000_000)
        self.reactor.advance(10)
        self.failureResultOf(waiting, WaitTimeoutError)
        self.assertNothingLeft()
