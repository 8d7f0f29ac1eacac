"""The queue of one stream's items, such as rows and catch-up steps, of all links."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.items import Item
from synapse_replication.handlers.receiving.overflow import ROW_OVERHEAD, coalesce
from synapse_replication.handlers.receiving.queue import DrainedQueue
from synapse_replication.handlers.receiving.writer_state import Link
from synapse_replication.wire.rdata import InterleavedRun, RdataRun

__all__ = ["StreamQueue"]


class StreamQueue(DrainedQueue[tuple[Link, Item]]):
    """A queue of one stream's items, each with the link to which it belongs.

    :param consume: handles an item; see
        :class:`~synapse_replication.handlers.receiving.queue.DrainedQueue`.
    """

    def __init__(
        self,
        context: StreamContext,
        consume: Callable[[tuple[Link, Item]], Awaitable[None] | None],
    ) -> None:
        resettable = context.description.resettable
        super().__init__(
            context.name,
            consume,
            lambda waiting: coalesce(
                waiting, resettable, context.discard, context.is_plausible
            ),
            context.run_as_background_process,
            context.observer,
            context.pacer,
            context.options.max_queue_size,
        )

    def add(self, link: Link, item: Item) -> None:
        """Append a single item."""
        self.put((link, item), 1, ROW_OVERHEAD)

    def add_rows(self, link: Link, run: RdataRun | InterleavedRun) -> None:
        """Append rows that were received together."""
        count = len(run.rows)
        self.put((link, run), count, sum(map(len, run.rows)) + count * ROW_OVERHEAD)
