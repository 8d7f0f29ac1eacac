"""Tests of the queue that one background process drains."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.receiving.context import (
    ReactorYielder,
    ReceiverOptions,
    StreamContext,
)
from synapse_replication.handlers.receiving.queue import DrainedQueue, Queued
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost


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
        self.queue: DrainedQueue[str] = DrainedQueue(
            self.context(), self.consume, self.give_up
        )

    def context(self) -> StreamContext:
        return StreamContext(
            self.stream,
            self.host,
            self.observer,
            ReceiverOptions(max_queue_size=100),
            ReactorYielder(self.host.clock, 10, 0.01),
        )

    async def consume(self, item: str) -> None:
        if self.is_held:
            self.busy.append(Deferred())
            await self.busy[-1]
        if item == "bad":
            raise ValueError(item)
        self.consumed.append(item)

    def give_up(self, waiting: Iterable[Queued[str]]) -> list[Queued[str]]:
        return [Queued("+".join(queued.item for queued in waiting), 1, 1)]

    def test_drains_immediately(self) -> None:
        """An idle queue handles an item within the call of ``put``."""
        self.queue.put("a", 1, 10)
        self.assertEqual(self.consumed, ["a"])
        self.assertEqual(self.observer.queue_lengths, {})

    def test_lengths_are_reported(self) -> None:
        """
        The queue's length is reported when items wait, and when the queue is empty
        again.
        """
        self.is_held = True
        for item in "abc":
            self.queue.put(item, 1, 10)
        self.assertEqual(self.observer.queue_lengths["events"], [1, 2])
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.observer.queue_lengths["events"], [1, 2, 0])
        self.queue.put("d", 1, 10)
        self.assertEqual(self.observer.queue_lengths["events"], [1, 2, 0])

    def test_synchronous_consumer(self) -> None:
        """A synchronous consumer works, too."""
        queue: DrainedQueue[str] = DrainedQueue(
            self.context(), self.consumed.append, self.give_up
        )
        queue.put("a", 1, 10)
        self.assertEqual(self.consumed, ["a"])

    def test_one_process_for_all_waiting_items(self) -> None:
        """
        Items that arrive while an item is handled are handled by the same background
        process.
        """
        self.is_held = True
        for item in "abc":
            self.queue.put(item, 1, 10)
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
            self.queue.put(item, 1, 10)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a"])
        self.assertEqual(str(self.observer.failures[0][1]), "bad")

    def test_gives_up_when_full(self) -> None:
        """When the queue exceeds its limit, the waiting items are given up."""
        self.is_held = True
        for item in "abcd":
            self.queue.put(item, 5, 45)
        self.assertEqual(self.queue._length, 1)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a", "b+c+d"])

    def test_exactly_full(self) -> None:
        """Items that reach the limit exactly are not given up."""
        self.is_held = True
        for item in "abc":
            self.queue.put(item, 1, 50)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(self.consumed, ["a", "b", "c"])

    def test_an_item_larger_than_the_bound(self) -> None:
        """A single item is accepted whatever its size."""
        self.queue.put("large", 1, 1000)
        self.assertEqual(self.consumed, ["large"])
        self.is_held = True
        self.queue.put("a", 1, 1)
        self.queue.put("large", 7, 1000)
        self.assertEqual(self.queue._length, 7)

    def test_yields_after_number_of_items(self) -> None:
        """The queue yields to the reactor after a number of items."""
        self.is_held = True
        for _ in range(15):
            self.queue.put("a", 1, 1)
        self.is_held = False
        self.busy[0].callback(None)
        self.assertEqual(len(self.consumed), 10)
        self.reactor.advance(0)
        self.assertEqual(len(self.consumed), 15)

    def test_yields_after_slow_item(self) -> None:
        """The queue yields to the reactor after a slow item."""
        self.is_held = True
        for _ in range(3):
            self.queue.put("a", 1, 1)
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
        self.queue.put("a", 1, 10)
        done = Deferred.fromCoroutine(self.queue.wait_until_empty())
        self.assertNoResult(done)
        self.busy[0].callback(None)
        self.successResultOf(done)

    def test_waiting_within_the_first_item(self) -> None:
        """An item that is handled at once can wait, for instance for the last row."""
        waits: list[Deferred[None]] = []

        def wait(item: str) -> None:
            waits.append(Deferred.fromCoroutine(self.queue.wait_until_empty()))

        self.queue = DrainedQueue(self.context(), wait, self.give_up)
        self.queue.put("a", 1, 10)
        self.assertNoResult(waits[0])
        self.reactor.advance(0)
        self.successResultOf(waits[0])


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
