"""A bounded queue that one background process drains.

Theory of operation: :class:`DrainedQueue` starts a background process when
something is put into it while it is idle; the process ends when the queue is
empty. So an idle stream costs nothing, and a busy one costs one process for
all that came while it worked.

Items have a size, and the queue a bound. When a new item would pass it, the
owner's ``collapse`` makes few small items of all that wait: nothing grows, no
other queue is held up, and nobody has to stop reading. Stopping to read
(back-pressure on the connection) was rejected: it would hold up the other
streams of the connection, and Redis cuts off subscribers that do not read.

Order is kept within one queue; across queues there is none.
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


#: After so long without work the reactor has had its turn, s.
_IDLE = 0.0005


class Pacer:
    """Lets the reactor do other work after a while of handling rows.

    Shared by all streams of a process: what one read of a socket brings is for many
    of them, and each has work for less than that while.

    :param max_rows: rows between two breaks.
    :param max_seconds: s between two breaks, if that is earlier.
    """

    def __init__(self, clock: Clock, max_rows: int, max_seconds: float) -> None:
        self._clock = clock
        self._max_rows = max_rows
        self._max_seconds = max_seconds
        self._breaks = 0
        self._begin()

    def _begin(self) -> None:
        self._rows = 0
        self._started = self._last_work = self._clock.seconds()

    def count(self, rows: int) -> None:
        """Record ``rows`` that were handled until now."""
        self._rows += rows
        self._last_work = self._clock.seconds()

    def is_due(self) -> bool:
        """Tell, before the next work, whether a break is due."""
        now = self._clock.seconds()
        if now - self._last_work > _IDLE:
            self._begin()
        return self._rows >= self._max_rows or now - self._started >= self._max_seconds

    async def take_break(self) -> None:
        """Let the reactor do what else is ready, and begin to count again."""
        breaks = self._breaks
        await self._clock.sleep(0)
        # Of those who took the same break, the first begins.
        if self._breaks == breaks:
            self._breaks += 1
            self._begin()


@attrs.define
class Queued(Generic[ItemT]):
    """An item with its measures.

    :ivar length: the rows and positions in it.
    :ivar size: the bytes that it holds, about.
    """

    item: ItemT
    length: int
    size: int


class DrainedQueue(Generic[ItemT]):
    """First in, first out, one item in flight, bounded.

    :param name: of the stream, for the observer.
    :param consume: handles one item; gives ``None`` if that is done, or what to wait
        for. Its failures are reported, and cost only that item.
    :param coalesce: makes of all that waits as few items as it can.
    :param pacer: asked for a break before each item. ``consume`` counts the rows that
        it handles, and may take breaks, too.
    :param max_size: bytes that wait, at most.
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
        self._collapse = coalesce
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
        """Something waits."""
        return bool(self._items)

    @property
    def length(self) -> int:
        """The rows and positions that wait."""
        return self._length

    def put(self, item: ItemT, length: int, size: int) -> None:
        """Put an item at the end; start to drain if idle."""
        self._items.append(Queued(item, length, size))
        self._length += length
        self._size += size
        if self._size > self._max_size and len(self._items) > 1:
            self._items = deque(self._collapse(self._items))
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
        """Wait until nothing waits and nothing is in flight."""
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
