"""The search for removed writers, whose rows no instance announces.

Theory of operation: a stream's source is queried for removed writers when a link comes
up, when a POSITION suggests that its instance has just started, and when the first
POSITION of a writer on a link has been handled. An instance that has just started may
replace a removed writer. The result is added to the stream's queue; see
:mod:`~synapse_replication.handlers.receiving.removed_writers`. A failed query is
retried after a delay. Rows that arrive during a query are handled without delay.
"""

from __future__ import annotations

from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.items import FoundRemoved
from synapse_replication.handlers.receiving.stream_queue import StreamQueue
from synapse_replication.handlers.receiving.writer_state import Link
from synapse_replication.streams.stream import DrainableStream

__all__ = ["RemovedWriterSearch"]


class RemovedWriterSearch:
    """The search for the removed writers of one stream.

    Use it in the reactor's thread only.

    :param queue: the stream's queue, to which the found writers are added.
    """

    def __init__(self, context: StreamContext, queue: StreamQueue) -> None:
        self._context = context
        stream = context.stream
        self._source = stream if isinstance(stream, DrainableStream) else None
        self._queue = queue
        # The links on whose behalf the next search is made, in order.
        self._waiting: dict[Link, None] = {}
        self._is_running = False
        self._attempts = 0

    def request(self, link: Link) -> None:
        """Request a search on behalf of a link."""
        if self._source is None or link.is_lost:
            return
        self._waiting[link] = None
        if not self._is_running:
            self._is_running = True
            self._start()

    def _start(self) -> None:
        self._context.run_as_background_process(
            f"replication_removed_writers_{self._context.name}", self._run
        )

    async def _run(self) -> None:
        assert self._source is not None
        while self._waiting:
            # A link that is added during this search requires another search.
            links, self._waiting = self._waiting, {}
            links = {link: None for link in links if not link.is_lost}
            if not links:
                continue
            try:
                found = await self._source.find_removed_writers()
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self._context.observer.failure(
                    f"looking for removed writers of {self._context.name}", error
                )
                self._waiting = links | self._waiting
                self._attempts += 1
                delay = self._context.options.backoff.delay(self._attempts)
                self._context.clock.call_later(delay, self._start)
                return
            self._attempts = 0
            if found:
                for link in links:
                    self._queue.add(link, FoundRemoved(found))
        self._is_running = False
