"""A bounded queue that one background process drains.

Theory of operation: when an item is added to an idle :class:`DrainedQueue`, a
background process starts; it ends when the queue is empty. An idle stream therefore
costs nothing, and a busy stream needs a single process for all items that arrive while
the process runs.

The total size of the items is bounded, except that a single item may be larger. When
the queue has several items whose total exceeds the bound, the owner's ``coalesce``
replaces them with a few small ones. No other queue is delayed. Back-pressure on the
connection was considered and rejected: it would delay the connection's other streams,
and Redis disconnects subscribers that do not read.

The items of one queue are handled in order, except that ``coalesce`` may reorder them.
There is no order across queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

import attrs

from synapse_replication.handlers.interfaces import BackgroundRunner, Clock
from synapse_replication.handlers.observer import ReplicationObserver

__all__ = ["DrainedQueue", "Pacer", "Queued"]

ItemT = TypeVar("ItemT")


#: If no work was counted for this time, in s, the reactor has probably run in the
#: meantime, so no break is due.
_IDLE = 0.0005


class Pacer:
    """Limiter of the work that is done on rows before yielding to the reactor.

    All streams of a process share this object: the data of one socket read often
    belongs to many streams, none of which would exceed the limits by itself.

    :param max_rows: the number of rows after which a break is due.
    :param max_seconds: the time of continuous work after which a break is due, in s.
    """

    def __init__(self, clock: Clock, max_rows: int, max_seconds: float) -> None:
        self._clock = clock
        self._max_rows = max_rows
        self._max_seconds = max_seconds
        self._breaks = 0
        self._reset()

    def _reset(self) -> None:
        self._rows = 0
        self._started = self._last_work = self._clock.seconds()

    def count(self, rows: int) -> None:
        """Count rows, or other items, that were handled since the last break."""
        self._rows += rows
        self._last_work = self._clock.seconds()

    def is_due(self) -> bool:
        """Return whether a break is due. Call it before each piece of work."""
        now = self._clock.seconds()
        if now - self._last_work > _IDLE:
            self._reset()
        return self._rows >= self._max_rows or now - self._started >= self._max_seconds

    async def take_break(self) -> None:
        """Yield to the reactor once, and reset the counts."""
        breaks = self._breaks
        await self._clock.sleep(0)
        # Several queues may wait in the same break; only the first one that resumes
        # resets the counts.
        if self._breaks == breaks:
            self._breaks += 1
            self._reset()


@attrs.define
class Queued(Generic[ItemT]):
    """An item of a queue.

    :ivar length: the number of rows in the item; 1 if it contains no rows.
    :ivar size: its approximate size in memory, in bytes.
    """

    item: ItemT
    length: int
    size: int


class DrainedQueue(Generic[ItemT]):
    """A bounded FIFO queue that handles one item at a time.

    :param name: the name of the stream, for the observer.
    :param consume: handles one item. It returns ``None`` if it has finished, and an
        awaitable otherwise. Its failures are reported, and affect only that item.
    :param coalesce: returns a few small items that replace the queued items.
    :param pacer: decides before each item whether to take a break. The queue counts
        each item as one row. ``consume`` counts the rows that it handles, and may take
        breaks itself.
    :param max_size: the largest total size of the items, in bytes.
    """

    def __init__(
        self,
        name: str,
        consume: Callable[[ItemT], Awaitable[None] | None],
        coalesce: Callable[[Iterable[Queued[ItemT]]], list[Queued[ItemT]]],
        run_as_background_process: BackgroundRunner,
        observer: ReplicationObserver,
        pacer: Pacer,
        max_size: int,
    ) -> None:
        self._name = name
        self._description = f"replication_stream_{name}"
        self._consume = consume
        self._coalesce = coalesce
        self._run_as_background_process = run_as_background_process
        self._observer = observer
        self._pacer = pacer
        self._max_size = max_size
        self._items: deque[Queued[ItemT]] = deque()
        self._length = 0
        self._size = 0
        self._draining = False
        # Whether a length other than 0 was reported to the observer.
        self._is_reported = False
        self._process: Awaitable[object] | None = None

    def __bool__(self) -> bool:
        """Return whether the queue has items."""
        return bool(self._items)

    @property
    def length(self) -> int:
        """The number of queued rows and of other queued items."""
        return self._length

    def put(self, item: ItemT, length: int, size: int) -> None:
        """Append an item, and start the background process if it is not running."""
        self._items.append(Queued(item, length, size))
        self._length += length
        self._size += size
        if self._size > self._max_size and len(self._items) > 1:
            self._items = deque(self._coalesce(self._items))
            self._length = sum(queued.length for queued in self._items)
            self._size = sum(queued.size for queued in self._items)
        if self._draining:
            self._observer.queue_changed(self._name, self._length)
            self._is_reported = True
        else:
            self._draining = True
            self._process = self._run_as_background_process(
                self._description, self._drain
            )

    async def wait_until_empty(self) -> None:
        """Wait until the queue is empty and no item is being handled."""
        while self._draining:
            assert self._process is not None
            await self._process

    async def _drain(self) -> None:
        try:
            with self._observer.background_process(self._description):
                while self._items:
                    if self._pacer.is_due():
                        await self._pacer.take_break()
                    queued = self._items.popleft()
                    self._length -= queued.length
                    self._size -= queued.size
                    try:
                        waiting = self._consume(queued.item)
                        if waiting is not None:
                            await waiting
                    except Exception as error:  # noqa: BLE001 -- reported to the observer
                        self._observer.failure(self._description, error)
                    self._pacer.count(1)
        finally:
            self._draining = False
            if self._is_reported:
                self._is_reported = False
                self._observer.queue_changed(self._name, self._length)
