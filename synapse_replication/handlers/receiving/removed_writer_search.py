"""The search for removed writers: nobody announces their rows, so they are looked for.

Theory of operation: a stream's source is asked for removed writers when a link comes up
and whenever a process has started, since a writer that starts is what removes another.
The answer goes through the stream's queue, see
:mod:`~synapse_replication.handlers.receiving.removed_writers`. The source may take its
time: rows that arrive are handled meanwhile.
"""

from __future__ import annotations

from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.items import FoundRemoved
from synapse_replication.handlers.receiving.stream_queue import StreamQueue
from synapse_replication.handlers.receiving.writer_state import Link
from synapse_replication.streams.stream import DrainableStream

__all__ = ["RemovedWriterSearch"]


class RemovedWriterSearch:
    """Looks for the removed writers of one stream.

    Used in the reactor's thread only.

    :param queue: what was found is put at its end.
    """

    def __init__(self, context: StreamContext, queue: StreamQueue) -> None:
        self._context = context
        self._name = context.name
        stream = context.stream
        self._source = stream if isinstance(stream, DrainableStream) else None
        self._queue = queue
        # The links on whose behalf the next look is, in order.
        self._waiting: dict[Link, None] = {}
        self._is_looking = False
        self._attempts = 0

    def look(self, link: Link) -> None:
        """Look for removed writers, on behalf of a link."""
        if self._source is None or link.is_lost:
            return
        self._waiting[link] = None
        if not self._is_looking:
            self._is_looking = True
            self._start()

    def _start(self) -> None:
        self._context.run_as_background_process(
            f"replication_removed_writers_{self._name}", self._look
        )

    async def _look(self) -> None:
        assert self._source is not None
        while self._waiting:
            # A link that asks from now on asks for another look.
            links, self._waiting = self._waiting, {}
            links = {link: None for link in links if not link.is_lost}
            if not links:
                continue
            try:
                found = await self._source.find_removed_writers()
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self._context.observer.failure(
                    f"looking for removed writers of {self._name}", error
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
        self._is_looking = False
