"""A bounded queue that one background process drains.

Theory of operation: when an item is added to an idle :class:`DrainedQueue`, a
background process starts; it ends when the queue is empty. An idle stream therefore
costs nothing, and a busy stream needs a single process for all items that arrive while
the process runs.

The total size of the items is bounded, except that a single item may be larger. When
the queue has several items whose total exceeds the bound, the owner's ``give_up``
empties it. No other queue is delayed. Back-pressure on the
connection was considered and rejected: it would delay the connection's other streams,
and Redis disconnects subscribers that do not read.

The items of one queue are handled in order. There is no order across queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Generic, TypeVar

from msgspec import Struct

from synapse_replication.handlers.events import BackgroundTask
from synapse_replication.handlers.receiving.context import StreamContext

ItemT = TypeVar("ItemT")

#: The approximate memory for a queued item or row in addition to its text, in bytes.
ROW_OVERHEAD: Final = 80


class Queued(Struct, Generic[ItemT]):
    """An item of a queue.

    :ivar length: the number of rows in the item; 1 if it contains no rows.
    :ivar size: its approximate size in memory, in bytes.
    """

    item: ItemT
    length: int = 1
    size: int = ROW_OVERHEAD


class DrainedQueue(Generic[ItemT]):
    """A bounded FIFO queue that handles one item at a time.

    :param consume: handles one item. It returns ``None`` if it has finished, and an
        awaitable otherwise. Its failures are reported, and affect only that item.
    :param give_up: handles the items of a full queue at once; returns a few small items
        that remain.

    The context's yielder decides before each item whether to take a break. The queue
    counts each item as one row. ``consume`` counts the rows that it handles, and may
    take breaks itself.
    """

    def __init__(
        self,
        context: StreamContext,
        consume: Callable[[ItemT], Awaitable[None] | None],
        give_up: Callable[[Iterable[Queued[ItemT]]], list[Queued[ItemT]]],
    ) -> None:
        self._name = context.name
        self._task = BackgroundTask(f"replication_stream_{context.name}")
        self._consume = consume
        self._give_up = give_up
        self._run_as_background_process = context.run_as_background_process
        self._clock = context.clock
        self._observer = context.observer
        self._yielder = context.yielder
        self._max_size = context.options.max_queue_size
        self._items: deque[Queued[ItemT]] = deque()
        self._length = 0
        self._size = 0
        self._draining = False
        # Whether a length other than 0 was reported to the observer.
        self._is_reported = False
        self._process: Awaitable[object] | None = None

    def put(self, item: ItemT, length: int = 1, size: int = ROW_OVERHEAD) -> None:
        """Append an item, and start the background process if it is not running.

        See :class:`Queued`; by default, the item contains no rows.
        """
        self._items.append(Queued(item, length, size))
        self._length += length
        self._size += size
        if self._size > self._max_size and len(self._items) > 1:
            given_up, self._items = self._items, deque()
            # More items may be added meanwhile.
            self._items.extend(self._give_up(given_up))
            self._length = sum(queued.length for queued in self._items)
            self._size = sum(queued.size for queued in self._items)
        if self._draining:
            self._observer.queue_changed(self._name, self._length)
            self._is_reported = True
        else:
            self._draining = True
            self._process = None
            self._process = self._run_as_background_process(
                self._task.description, self._drain
            )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being handled."""
        return not self._draining

    async def wait_until_empty(self) -> None:
        """Wait until the queue is empty and no item is being handled."""
        while self._draining:
            # It is None while the process runs for the first time, before it waits.
            await (self._process or self._clock.sleep(0))

    async def _drain(self) -> None:
        try:
            with self._observer.span(self._task):
                while self._items:
                    if self._yielder.is_due():
                        await self._yielder.take_break()
                    queued = self._items.popleft()
                    self._length -= queued.length
                    self._size -= queued.size
                    try:
                        waiting = self._consume(queued.item)
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
