"""Tests of the queue that one background process drains."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.receiving.context import (
    ReactorYielder,
    ReceiverOptions,
    StreamContext,
)
from synapse_replication.handlers.receiving.queue import Call, DrainedQueue, QueueItem
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost


@attrs.frozen
class Item:
    """An item of the queue of a test, of which the same rest remains."""

    test: DrainedQueueTests
    text: str
    length: int
    size: int

    def run(self) -> Awaitable[None]:
        return self.test.consume(self.text)

    def give_up(self) -> Iterable[QueueItem]:
        self.test.given_up.append(self.text)
        if self.text == "bad":
            raise ValueError(self.text)
        return (self.test.rest,)


class DrainedQueueTests(SynchronousTestCase):
    """Items are handled one at a time."""

    def setUp(self) -> None:
        self.stream = SourceStream("events", Row)
        self.host = RecordingHost(self.stream)
        self.observer = self.host.observer
        self.reactor = self.host.reactor
        self.consumed: list[str] = []
        self.busy: list[Deferred[None]] = []
        self.is_held = False
        self.queue = DrainedQueue(self.context())
        self.given_up: list[str] = []
        self.rest = Call(lambda: self.consumed.append("rest"))

    def context(self) -> StreamContext:
        return StreamContext(
            self.stream,
            self.host,
            self.observer,
            ReceiverOptions(max_queue_size=100),
            ReactorYielder(self.host.clock, 10, 0.01),
        )

    def put(self, text: str, length: int = 1, size: int = 10) -> None:
        self.queue.put(Item(self, text, length, size))

    async def consume(self, text: str) -> None:
        if self.is_held:
            self.busy.append(Deferred())
            await self.busy[-1]
        if text == "bad":
            raise ValueError(text)
        self.consumed.append(text)

    def test_drains_immediately(self) -> None:
        """An idle queue handles an item within the call of ``put``."""
        self.put("a", 1, 10)
        self.assertEqual(self.consumed, ["a"])
        self.assertEqual(self.observer.queue_lengths, {})

    def test_lengths_are_reported(self) -> None:
        """
        The queue's length is reported when items wait, and when the queue is empty
        again.
        """
        self.is_held = True
        for item in "abc":
            self.put(item, 1, 10)
        self.assertEqual(self.observer.queue_lengths["events"], [1, 2])
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.observer.queue_lengths["events"], [1, 2, 0])
        self.put("d", 1, 10)
        self.assertEqual(self.observer.queue_lengths["events"], [1, 2, 0])

    def test_synchronous_consumer(self) -> None:
        """A synchronous consumer works, too."""
        self.queue.call(lambda: self.consumed.append("a"))
        self.assertEqual(self.consumed, ["a"])

    def test_one_process_for_all_waiting_items(self) -> None:
        """
        Items that arrive while an item is handled are handled by the same background
        process.
        """
        self.is_held = True
        for item in "abc":
            self.put(item, 1, 10)
        self.assertEqual(self.queue._length, 2)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a", "b", "c"])
        self.assertEqual(self.observer.processes, ["replication_stream_events"])
        self.assertEqual(self.observer.open_processes, 0)

    def test_a_failure_costs_one_item(self) -> None:
        """An item that fails is reported, and the next one is handled."""
        self.is_held = True
        for item in ("bad", "a"):
            self.put(item, 1, 10)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a"])
        self.assertEqual(str(self.observer.failures[0][1]), "bad")

    def test_gives_up_when_full(self) -> None:
        """When the queue exceeds its limit, the waiting items are given up."""
        self.is_held = True
        for item in "abcd":
            self.put(item, 5, 45)
        self.assertEqual(self.queue._length, 1)
        self.assertEqual(self.queue.overflow_count, 1)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a", "rest"])
        self.assertEqual(self.given_up, ["b", "c", "d"])

    def test_a_failure_to_give_up_costs_one_item(self) -> None:
        """An item that cannot be given up is reported; the others remain."""
        self.is_held = True
        self.put("a", 5, 60)
        self.queue.call(lambda: self.consumed.append("call"))
        for item in ("bad", "b"):
            self.put(item, 5, 60)
        self.assertEqual(self.given_up, ["bad", "b"])
        self.assertEqual([str(e) for _, e in self.observer.failures], ["bad"])
        self.assertEqual(self.queue._length, 2)
        self.assertEqual(self.queue._size, 2 * self.rest.size)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a", "call", "rest"])

    def test_calls_are_not_given_up(self) -> None:
        """A call remains in a full queue, once and in its place."""
        self.is_held = True
        self.put("a", 5, 60)
        call = Call(lambda: self.consumed.append("call"))
        self.queue.put(call)
        for _ in range(2):
            self.put("b", 5, 60)
        self.assertEqual(self.queue._length, 2)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a", "call", "rest"])

    def test_exactly_full(self) -> None:
        """Items that reach the limit exactly are not given up."""
        self.is_held = True
        for item in "abc":
            self.put(item, 1, 50)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a", "b", "c"])

    def test_an_item_larger_than_the_bound(self) -> None:
        """A single item is accepted whatever its size."""
        self.put("large", 1, 1000)
        self.assertEqual(self.consumed, ["large"])
        self.is_held = True
        self.put("a", 1, 1)
        self.put("large", 7, 1000)
        self.assertEqual(self.queue._length, 7)

    def test_yields_after_number_of_items(self) -> None:
        """The queue yields to the reactor after a number of items."""
        self.is_held = True
        for _ in range(15):
            self.put("a", 1, 1)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(len(self.consumed), 10)
        self.reactor.advance(0)
        self.assertEqual(len(self.consumed), 15)

    def test_yields_after_slow_item(self) -> None:
        """The queue yields to the reactor after a slow item."""
        self.is_held = True
        for _ in range(3):
            self.put("a", 1, 1)
        self.is_held = False
        self.reactor.advance(0.02)
        self.busy[0].callback(None)
        self.assertEqual(len(self.consumed), 1)
        self.reactor.advance(0)
        self.assertEqual(len(self.consumed), 3)

    def test_waiting_until_empty(self) -> None:
        """``wait_until_empty`` fires once all items are handled."""
        self.successResultOf(Deferred.fromCoroutine(self.queue.wait_until_empty()))
        self.is_held = True
        self.put("a", 1, 10)
        done = Deferred.fromCoroutine(self.queue.wait_until_empty())
        self.assertNoResult(done)
        self.busy[0].callback(None)
        self.successResultOf(done)

    def test_waiting_within_the_first_item(self) -> None:
        """An item that is handled at once can wait, for instance for the last row."""
        waits: list[Deferred[None]] = []

        def wait() -> None:
            waits.append(Deferred.fromCoroutine(self.queue.wait_until_empty()))

        self.queue.call(wait)
        self.successResultOf(waits[0])

    def test_cancelled_wait(self) -> None:
        """If a wait is cancelled, the item that it waits for is still handled."""
        self.is_held = True
        self.put("a", 1, 10)
        first = Deferred.fromCoroutine(self.queue.wait_until_empty())
        second = Deferred.fromCoroutine(self.queue.wait_until_empty())
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertFalse(self.busy[0].called)
        self.busy[0].callback(None)
        self.successResultOf(second)


class ReactorYielderTests(SynchronousTestCase):
    """Tests for the conditions under which work yields to the reactor."""

    def setUp(self) -> None:
        self.reactor = Clock()
        self.yielder = ReactorYielder(ReactorClock(self.reactor), 10, 0.01)

    def work(self, rows: int, seconds: float) -> None:
        self.reactor.advance(seconds)
        self.yielder.count(rows)

    def test_rows(self) -> None:
        """A break is due after a number of rows."""
        self.work(9, 0)
        self.assertFalse(self.yielder.is_due())
        self.work(1, 0)
        self.assertTrue(self.yielder.is_due())

    def test_time(self) -> None:
        """A break is due after a certain time of work."""
        for _ in range(3):
            self.assertFalse(self.yielder.is_due())
            self.work(1, 0.004)
        self.assertTrue(self.yielder.is_due())

    def test_idle(self) -> None:
        """No break is due if time passed without work: the reactor has run since."""
        self.work(10, 0.02)
        self.assertTrue(self.yielder.is_due())
        self.reactor.advance(0.001)
        self.assertFalse(self.yielder.is_due())

    def test_after_a_break(self) -> None:
        """After a break, no further one is due until more work has been done."""
        self.work(10, 0)
        taken = Deferred.fromCoroutine(self.yielder.take_break())
        self.reactor.advance(0)
        self.successResultOf(taken)
        self.assertFalse(self.yielder.is_due())

    def test_break(self) -> None:
        """
        Work that the first waiter does when a break ends counts for the other waiters.
        """
        self.work(10, 0)
        breaks = [Deferred.fromCoroutine(self.yielder.take_break()) for _ in range(2)]
        breaks[0].addCallback(lambda _: self.yielder.count(10))
        self.assertNoResult(breaks[0])
        self.reactor.advance(0)
        self.successResultOf(breaks[1])
        self.assertTrue(self.yielder.is_due())
