"""Tests for stopping :mod:`synapse_replication.handlers.sending.streamer`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError

from synapse_replication.errors import CatchUpError, ReplicationError
from tests.handlers.sending.streamer_case import StreamerTestCase


class StopTests(StreamerTestCase):
    """A streamer that stops sends its remaining rows."""

    def test_stop(self) -> None:
        """
        ``stop`` sends all written rows, finishes when they are sent, and leaves no
        timer.
        """
        self.events.is_held = True
        self.events.persist("w", 1, ["a"])
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        self.assertNoResult(stopped)
        self.events.answer()
        self.host.reactor.advance(0)
        self.successResultOf(stopped)
        self.assertEqual(self.connection.take(), ['RDATA events w 1 ["a"]'])
        self.assertEqual(self.host.reactor.getDelayedCalls(), [])
        self.successResultOf(Deferred.fromCoroutine(self.streamer.stop()))

    def stop_with_a_failing_source(self) -> Deferred[None]:
        self.events.is_held = True
        self.write(1, "a")
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        # The notification before causes two attempts.
        for _ in range(2):
            self.events.fail(CatchUpError("failing"))
        self.host.reactor.advance(0)
        return stopped

    def test_rows_that_cannot_be_fetched(self) -> None:
        """``stop`` fails, and names the streams whose rows were not sent."""
        self.caches.local_token = 1
        stopped = self.stop_with_a_failing_source()
        error = self.failureResultOf(stopped, ReplicationError).value
        self.assertEqual(
            str(error), "rows of events were not sent, see the errors reported before"
        )
        self.assertEqual(self.host.reactor.getDelayedCalls(), [])
        # The next attempt succeeds.
        self.events.is_held = False
        self.connection.take()
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        self.host.reactor.advance(0)
        self.successResultOf(stopped)
        self.assertEqual(self.connection.take(), ['RDATA events w 1 ["a"]'])

    def test_rows_that_were_sent_otherwise(self) -> None:
        """A failed send of rows that were sent since does not fail ``stop``."""
        self.failureResultOf(self.stop_with_a_failing_source(), ReplicationError)
        self.handler.sender.stream_update("events", 1, ["a"])
        self.successResultOf(Deferred.fromCoroutine(self.streamer.stop()))

    def test_rows_without_consumers(self) -> None:
        """Rows that could not be sent do not fail ``stop`` if nobody needs them."""
        self.events.is_held = True
        self.write(1, "a")
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        self.handler.lost_connection(self.connection)
        self.events.fail(CatchUpError("failing"))
        self.host.reactor.advance(0)
        self.successResultOf(stopped)

    def test_token_that_advances_at_the_end(self) -> None:
        """A token that other writers advance after the last send is no failure."""
        self.events.is_held = True
        self.write(1, "a")
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        self.events.answer()
        self.events.local_token = 7
        self.host.reactor.advance(0)
        self.successResultOf(stopped)

    def test_stop_after_waiting_rows_were_sent(self) -> None:
        """Waiting rows that are sent without the streamer do not block ``stop``."""
        self.block_link()
        self.handler.sender.stream_update("events", 7, ["7"])
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        self.make_link_writable()
        self.host.reactor.advance(0)
        self.successResultOf(stopped)

    def test_stop_is_cancelled(self) -> None:
        """A caller that cancels ``stop`` does not cancel the sending."""
        self.events.is_held = True
        self.events.persist("w", 1, ["a"])
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        stopped.addTimeout(5, self.host.reactor)
        self.host.reactor.advance(5)
        self.failureResultOf(stopped, TimeoutError)
        self.events.answer()
        self.assertEqual(self.connection.take(), ['RDATA events w 1 ["a"]'])
        self.host.reactor.advance(0)
        self.assertEqual(self.host.observer.failures, [])

    def test_write_during_stop(self) -> None:
        """Rows that are written before ``stop`` finishes are sent first."""
        self.events.is_held = True
        self.events.persist("w", 1, ["a"])
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        self.events.answer()
        self.write(2, "b")
        self.host.reactor.advance(0)
        self.assertNoResult(stopped)
        self.events.answer()
        self.host.reactor.advance(0)
        self.successResultOf(stopped)

    def test_ready_during_send(self) -> None:
        """
        A link may report that it is writable during the send that such a report caused.
        """
        self.block_link()
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        send_lines = self.connection.send_lines

        def send_and_resume(name: str, lines: Sequence[bytes]) -> None:
            send_lines(name, lines)
            self.handler.ready_again(self.connection)

        self.patch(self.connection, "send_lines", send_and_resume)
        self.make_link_writable()
        self.assertNoResult(stopped)
        self.host.reactor.pump([0] * 4)
        self.successResultOf(stopped)

    def test_stop_finishes_outside_background_process(self) -> None:
        """``stop`` finishes outside the streamer's background process."""
        self.block_link()
        running: list[str] = []
        run = self.host.run_as_background_process

        def run_as_background_process(
            description: str, func: Callable[[], Awaitable[Any]]
        ) -> Awaitable[Any]:
            async def work() -> None:
                running.append(description)
                await func()
                running.remove(description)

            return run(description, work)

        self.patch(self.host, "run_as_background_process", run_as_background_process)
        self.caches.is_held = True
        self.caches.persist("w", 1, ["c"])
        stopped = Deferred.fromCoroutine(self.streamer.stop())
        during = stopped.addCallback(lambda _: list(running))
        self.assertEqual(len(running), 1)
        self.caches.answer()
        self.make_link_writable()
        self.host.reactor.pump([0] * 4)
        self.assertEqual(self.successResultOf(during), [])

    def test_stop_while_a_link_is_behind(self) -> None:
        """
        ``stop`` waits until the rows for the link that is behind are sent, or the link
        is lost.
        """
        waiting = self.block_link()
        stopped = [Deferred.fromCoroutine(self.streamer.stop()) for _ in range(2)]
        self.make_link_writable()
        self.assertNoResult(stopped[0])
        self.host.reactor.pump([0] * 2)
        self.assertEqual(self.connection.take(), waiting)
        for each in stopped:
            self.successResultOf(each)
        self.block_link()
        stopping = Deferred.fromCoroutine(self.streamer.stop())
        self.assertNoResult(stopping)
        self.handler.lost_connection(self.connection)
        self.host.reactor.advance(0)
        self.successResultOf(stopping)
        self.assertEqual(self.host.reactor.getDelayedCalls(), [])
