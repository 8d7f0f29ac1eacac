"""The receiver of one stream, from its queue to the host's row sink.

Theory of operation: all rows and positions of a stream, from all connections, pass
through one queue and are handled one item at a time. Queued rows are still JSON text;
rows that arrived together are decoded together when they are handled.

The rows of a writer that is *live* on a link are delivered as they arrive. A *catch-up*
with the writer begins if rows may be missing, for instance because of a gap before a
POSITION or a reported position, a row that cannot be decoded, an implausible token, a
batch with a lost row, a failure of the host, or a full queue. During a catch-up, rows
that arrive above its cursor are not delivered; they can only raise the target. The
catch-up fetches one page at a time and yields to other work in the queue, so that it
does not delay other writers of the stream. When the rows up to the target have been
delivered, the writer is live again. A failed attempt is retried, after a delay, from
the last delivered token. A catch-up is abandoned when its connection is lost, because
the next POSITION on another connection reveals the gap.

A position beyond the plausible distance of the stream is verified: the range before it
is fetched even if the writer announces that range as empty, so that the source confirms
or refutes the position. If a row arrives soon afterwards in a range that a position
skipped, the position was false, and the range is fetched again. In an idempotent
stream, such a row is delivered instead; in any other resettable stream, it is
discarded.

Invariant: a writer's position advances to a token only if all of the writer's rows up
to that token were delivered, or if a POSITION announced that the writer has no rows in
the skipped range. The only exception is a fetched row that cannot be decoded; it is
reported and skipped.

See docs/failure-modes.rst: failure-rows-during-catch-up, failure-position-during-batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.announcements import AnnouncementHandler
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.delivery import Delivery
from synapse_replication.handlers.receiving.interleaved import InterleavedRowHandler
from synapse_replication.handlers.receiving.items import (
    CatchUpStep,
    DroppedRange,
    FoundRemoved,
    Item,
    LostRow,
    NewEpoch,
    ReportedPosition,
)
from synapse_replication.handlers.receiving.removed_writer_search import (
    RemovedWriterSearch,
)
from synapse_replication.handlers.receiving.removed_writers import RemovedWriterDrains
from synapse_replication.handlers.receiving.rows import RowHandler
from synapse_replication.handlers.receiving.stream_queue import StreamQueue
from synapse_replication.handlers.receiving.writer_state import Link
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import InterleavedRun, RdataRun

__all__ = ["StreamReceiver"]


class StreamReceiver:
    """Receiver of the rows and positions of all writers of one stream, on all links.

    Use it in the reactor's thread only.
    """

    #: The classes of two handlers; a subclass may replace them.
    row_handler_type: type[RowHandler] = RowHandler
    announcement_handler_type: type[AnnouncementHandler] = AnnouncementHandler

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self._queue = StreamQueue(context, self._consume)
        self._search = RemovedWriterSearch(context, self._queue)
        decoder = RowDecoder(context)
        self._catch_ups = CatchUpRunner(context, self._queue, decoder, self._search)
        delivery = Delivery(context, self._catch_ups)
        rows = self.row_handler_type(context, decoder, self._catch_ups, delivery)
        interleaved = InterleavedRowHandler(context, decoder, delivery, rows)
        announcements = self.announcement_handler_type(context, self._catch_ups)
        drains = RemovedWriterDrains(context, self._catch_ups)
        self._handlers: dict[
            type[Item], Callable[[Link, Any], Awaitable[None] | None]
        ] = {
            RdataRun: rows.handle,
            InterleavedRun: interleaved.handle,
            PositionCommand: announcements.handle_position,
            ReportedPosition: announcements.handle_reported_position,
            NewEpoch: announcements.handle_epoch,
            LostRow: announcements.handle_lost_row,
            DroppedRange: announcements.handle_dropped_range,
            CatchUpStep: self._catch_ups.handle_step,
            FoundRemoved: drains.run,
        }

    @property
    def stream_name(self) -> str:
        """The name of the stream."""
        return self._context.name

    def enqueue_rows(self, link: Link, run: RdataRun) -> None:
        """Enqueue rows of one writer that were received together, in order."""
        name, observer = self._context.name, self._context.observer
        observer.rows_received(name, len(run.rows))
        if (token := run.tokens[-1]) is not None:
            observer.position_announced(name, run.instance_name, token)
        self._queue.add_rows(link, run)

    def enqueue_interleaved(self, link: Link, run: InterleavedRun) -> None:
        """Enqueue rows of several writers that were received together, in order."""
        name, observer = self._context.name, self._context.observer
        observer.rows_received(name, len(run.rows))
        newest = dict(zip(run.instance_names, run.tokens, strict=True))
        for instance_name, token in newest.items():
            if token is not None:
                observer.position_announced(name, instance_name, token)
        self._queue.add_rows(link, run)

    def enqueue_lost_row(self, link: Link, instance_name: str) -> None:
        """Enqueue a marker in place of a row that could not be parsed."""
        self._queue.add(link, LostRow(instance_name))

    def search_for_removed_writers(self, link: Link) -> None:
        """Search for removed writers and fetch their rows, in the background."""
        self._search.request(link)

    def enqueue_position(self, link: Link, position: PositionCommand) -> None:
        """Enqueue a writer's POSITION, or discard it if it is redundant.

        In a stream that is not resettable, a POSITION below the reader's position is
        also enqueued as a reported position.
        """
        context = self._context
        instance_name, token = position.instance_name, position.new_token
        context.observer.position_announced(context.name, instance_name, token)
        if position.prev_token == token:
            # The instance may have just started, in place of a removed writer.
            self._search.request(link)
        if context.description.resettable:
            self._queue.add(link, position)
            return
        writer = link.writers.get((context.name, instance_name))
        current = context.stream.current_token(instance_name)
        is_below = token < current
        # If both tokens of a POSITION equal the reader's position, and the reader
        # reached that position without a row, the POSITION is not redundant: the source
        # is queried about the position.
        is_redundant = is_below or (
            token == current
            and (
                position.prev_token < current
                or self._catch_ups.undelivered_from(instance_name) == current
            )
        )
        if writer is not None and writer.is_live and is_redundant:
            context.discard(instance_name, DiscardReason.REDUNDANT_POSITION, 1)
        else:
            self._queue.add(link, position)
        if is_below:
            reported = ReportedPosition(instance_name, token, is_below=True)
            self._queue.add(link, reported)

    def enqueue_reported_position(
        self, link: Link, instance_name: str, token: int, *, is_first: bool = False
    ) -> None:
        """Enqueue a position that a writer reported through the extension.

        If the writer is live, a report that equals the reader's position is ignored.

        The report is handled after the rows and positions that arrived before it. If
        the reader is still behind the reported position when the report is handled, the
        missing rows are fetched.

        :param is_first: whether the writer has just started, so that this is its
            initial position. Missing rows up to it are fetched, but are not reported as
            a gap.
        """
        writer = link.writers.get((self._context.name, instance_name))
        current = self._context.stream.current_token(instance_name)
        if writer is None or not writer.is_live or token != current:
            reported = ReportedPosition(instance_name, token, is_first, token < current)
            self._queue.add(link, reported)

    def enqueue_epoch(
        self, link: Link, instance_name: str, token: int, epoch: str
    ) -> None:
        """Enqueue a writer's epoch if it is new and the stream is held in memory.

        The rows that the writer held in memory in earlier epochs are lost.
        """
        is_held = self._context.description.held_in_memory
        if is_held and not self._catch_ups.epochs.is_present(instance_name, epoch):
            self._queue.add(link, NewEpoch(instance_name, token, epoch))

    async def wait_until_empty(self) -> None:
        """Wait until all enqueued items have been handled."""
        await self._queue.wait_until_empty()

    def _consume(self, queued: tuple[Link, Item]) -> Awaitable[None] | None:
        link, item = queued
        return self._handlers[type(item)](link, item)
