"""The parts that receive one stream, which the receivers of its writers share."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from synapse_replication.errors import RowsLostError
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.interfaces import Link
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.queue import DrainedQueue
from synapse_replication.handlers.receiving.removed_writers import RemovedWriterSearch
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.streams.reader import ReaderPolicy
from synapse_replication.streams.reader_decisions import Fetch
from synapse_replication.streams.stream import StreamUpdateResult


class PageSource:
    """The sources of one stream's pages: writers' backlogs, and the stream's own."""

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        # The source of a stream that is held in memory already queries the writer.
        held_in_memory = context.description.held_in_memory
        self._partial = None if held_in_memory else context.partial

    async def fetch(
        self, instance_name: str, fetch: Fetch
    ) -> tuple[StreamUpdateResult, bool]:
        """Return a page, and whether it comes from the writer's backlog."""
        context = self._context
        from_token, upto_token = fetch.from_token, fetch.upto_token
        if self._partial is not None and not fetch.from_source:
            result = await self._partial.get_updates_since(
                context.name, instance_name, from_token, upto_token
            )
            if result is not None:
                return result, True
        try:
            result = await context.stream.get_updates_since(
                instance_name, from_token, upto_token
            )
        except RowsLostError as error:
            # Nothing brings these rows back: continue with those that remain.
            lost_upto = min(max(error.lost_upto, from_token), upto_token)
            if lost_upto == from_token:
                raise
            context.discard(instance_name, DiscardReason.LOST, lost_upto - from_token)
            result = StreamUpdateResult([], lost_upto, lost_upto < upto_token)
        return result, False


@attrs.frozen(eq=False)
class StreamParts:
    """The parts that receive one stream, which the receivers of its writers share.

    Most of them are created with the stream's :class:`.StreamContext`.

    :ivar search: requested when a writer became connected on a link.
    :ivar ask: requests the positions of the writers on a link.
    :ivar fetches: the fetches in progress, and what waits until one has ended, and its
        page is in the queue.
    """

    context: StreamContext
    policy: ReaderPolicy
    queue: DrainedQueue
    decoder: RowDecoder
    source: PageSource
    search: RemovedWriterSearch
    ask: Callable[[Link], None]
    fetches: dict[Fetch, Waiters] = attrs.field(factory=dict, init=False)
