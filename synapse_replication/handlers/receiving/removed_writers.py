"""The search for removed writers, whose rows no instance announces.

Theory of operation: a stream's source is queried for removed writers when a link comes
up, when a POSITION suggests that its instance has just started, and when the first
POSITION of a writer on a link has been handled. An instance that has just started may
replace a removed writer. When many instances connect at once, one query serves all
POSITIONs that arrive within a short time. A failed query is retried after a delay. Rows
that arrive during a query are handled without delay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.timer import Timer
from synapse_replication.streams.stream import DrainableStream, RemovedWriter

#: The time between two searches of one stream, in s.
SEARCH_PAUSE: Final = 2.0


class RemovedWriterSearch:
    """The search for the removed writers of one stream.

    Use it in the reactor's thread only.

    :param found: called with each removed writer that was found.
    """

    def __init__(
        self,
        context: StreamContext,
        found: Callable[[str, RemovedWriter], None],
    ) -> None:
        self._context = context
        stream = context.stream
        self._source = stream if isinstance(stream, DrainableStream) else None
        self._found = found
        self._has_links = False
        self._is_requested = False
        self._is_running = False
        self._pause = Timer(context.clock)
        self._attempts = 0

    def request(self) -> None:
        """Request a search, which begins after the pause that follows the last one."""
        if self._source is None:
            return
        self._is_requested = True
        if not (self._is_running or self._pause.is_running):
            self._start()

    def link_up(self) -> None:
        """Request a search, since a link came up."""
        self._has_links = True
        self.request()

    def links_lost(self) -> None:
        """Begin no search without a link: the process may have stopped.

        The next link requests a search.
        """
        self._has_links = False
        self._pause.stop()

    def _start(self) -> None:
        if self._is_requested:
            self._is_running = True
            self._context.run_as_background_process(
                f"replication_removed_writers_{self._context.name}", self._search
            )

    async def _search(self) -> None:
        assert self._source is not None
        self._is_requested = False
        delay = SEARCH_PAUSE
        try:
            found = await self._source.find_removed_writers()
            for instance_name, removed in found.items():
                self._found(instance_name, removed)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._context.observer.failure(
                f"looking for removed writers of {self._context.name}", error
            )
            self._is_requested = True
            self._attempts += 1
            delay = self._context.options.backoff.delay(self._attempts)
        else:
            self._attempts = 0
        self._is_running = False
        if self._has_links:
            self._pause.start(delay, self._start)
