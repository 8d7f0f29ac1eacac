"""A bounded queue that one background process drains.

Theory of operation: when an item is added to an idle :class:`DrainedQueue`, a
background process starts; it ends when the queue is empty. An idle stream therefore
costs nothing, and a busy stream needs a single process for all items that arrive while
the process runs.

The total size of the items is bounded, except that a single item may be larger. When
the queue has several items whose total exceeds the bound, each of them is given up: it
decides what remains to be done. No other queue is delayed. Back-pressure on the
connection was considered and rejected: it would delay the connection's other streams,
and Redis disconnects subscribers that do not read.

The items of one queue are handled in order. There is no order across queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol

import attrs

from synapse_replication.handlers.events import BackgroundTask
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.waiters import Waiters

#: The approximate memory for a queued item or row in addition to its text, in bytes.
ROW_OVERHEAD: Final = 80


class QueueItem(Protocol):
    """An item of a :class:`DrainedQueue`."""

    @property
    def length(self) -> int:
        """The number of rows in the item; 1 if it contains no rows."""

    @property
    def size(self) -> int:
        """The item's approximate size in memory, in bytes."""

    def run(self) -> Awaitable[None] | None:
        """Handle the item; return an awaitable if that is not complete yet.

        The queue reports failures, which affect only this item.
        """

    def give_up(self) -> Iterable[QueueItem]:
        """Handle the item at once, as far as that is possible without delivering rows.

        The queue reports a failure, and discards this item.

        :return: what remains to be done, which must be small: perhaps the item itself.
        """


@attrs.frozen(eq=False)
class Call:
    """A call, as an item of a queue that is never given up."""

    run: Callable[[], Awaitable[None] | None]
    length: int = attrs.field(default=1, init=False)
    size: int = attrs.field(default=ROW_OVERHEAD, init=False)

    def give_up(self) -> Iterable[QueueItem]:
        """Return the call itself."""
        return (self,)


class DrainedQueue:
    """A bounded FIFO queue that handles one item at a time.

    The context's yielder decides before each item whether to take a break. The queue
    counts each item as one row. An item counts the rows that it contains, and may take
    breaks itself.

    :ivar overflow_count: how often the items were given up.
    """

    def __init__(self, context: StreamContext) -> None:
        self._name = context.name
        self._task = BackgroundTask(f"replication_stream_{context.name}")
        self._run_as_background_process = context.run_as_background_process
        self._observer = context.observer
        self._yielder = context.yielder
        self._max_size = context.options.max_queue_size
        self._items: deque[QueueItem] = deque()
        self._length = 0
        self._size = 0
        self._draining = False
        # Whether a length other than 0 was reported to the observer.
        self._is_reported = False
        self._waiters = Waiters()
        self.overflow_count = 0

    def put(self, item: QueueItem) -> None:
        """Append an item, and start the background process if it is not running."""
        self._items.append(item)
        self._length += item.length
        self._size += item.size
        if self._size > self._max_size and len(self._items) > 1:
            self._give_up()
        if self._draining:
            self._observer.queue_changed(self._name, self._length)
            self._is_reported = True
        else:
            self._draining = True
            self._run_as_background_process(self._task.description, self._drain)

    def call(self, run: Callable[[], Awaitable[None] | None]) -> None:
        """Append a call."""
        self.put(Call(run))

    def _give_up(self) -> None:
        self.overflow_count += 1
        given_up, self._items = self._items, deque()
        # What remains of several items is done once.
        remaining: dict[QueueItem, None] = {}
        for item in given_up:
            try:
                remaining.update(dict.fromkeys(item.give_up()))
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self._observer.failure(self._task.description, error)
        # More items may have been added meanwhile.
        self._items.extend(remaining)
        self._length = sum(item.length for item in self._items)
        self._size = sum(item.size for item in self._items)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being handled."""
        return not self._draining

    async def wait_until_empty(self) -> None:
        """Wait until the queue is empty and no item is being handled.

        Cancelling the wait does not cancel what it waits for.
        """
        while self._draining:
            await self._waiters.add()

    async def _drain(self) -> None:
        try:
            with self._observer.span(self._task):
                while self._items:
                    if self._yielder.is_due():
                        await self._yielder.take_break()
                    item = self._items.popleft()
                    self._length -= item.length
                    self._size -= item.size
                    try:
                        waiting = item.run()
                        if waiting is not None:
                            await waiting
                    except Exception as error:  # noqa: BLE001 -- reported to the observer
                        self._observer.failure(self._task.description, error)
                    self._yielder.count(1)
        finally:
            self._draining = False
            if self._is_reported:
                self._is_reported = False
                self._observer.queue_changed(self._name, self._length)
            self._waiters.fire()
