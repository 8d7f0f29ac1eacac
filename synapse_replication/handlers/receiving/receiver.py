"""The receiver of one stream, from its queue to the host's row sink.

Theory of operation: all rows and announcements of a stream, from all links, pass
through one queue and are handled one item at a time. Queued rows are still JSON text;
rows that arrived together are decoded together when they are handled. What an item
means for a writer is decided by the writer's
:class:`~synapse_replication.streams.reader.Reader`, whatever the link. Rows are handled
by :class:`~synapse_replication.handlers.receiving.row_handler.RowHandler`, and what a
reader wants done by :class:`~synapse_replication.handlers.receiving.catch_up.CatchUps`.

If the queue is full, its items are handled at once, except that no row is delivered:
readers record that the rows are missing, and the queue is empty.

Invariant: a writer's position advances to a token only if all of the writer's rows up
to that token were delivered, or if an announcement that was not refuted says that the
writer has no rows in the skipped range. The only exception is a row that the stream's
own source returns and that cannot be decoded; it is reported and skipped.

See docs/failure-modes.rst: failure-rows-during-catch-up, failure-position-during-batch,
failure-invalidation-flood.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from synapse_replication.handlers.events import (
    AheadOfWriter,
    AnnouncedBy,
    DiscardReason,
    GapFound,
    LateRows,
    RemovedWriterDrained,
    RemovedWriterFound,
    RowsUnannounced,
    UnannouncedFound,
)
from synapse_replication.handlers.interfaces import LateRowSink, Link
from synapse_replication.handlers.receiving.catch_up import CatchUps, QueuedWork
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.queue import DrainedQueue, Queued
from synapse_replication.handlers.receiving.removed_writers import RemovedWriterSearch
from synapse_replication.handlers.receiving.row_handler import RowHandler
from synapse_replication.handlers.receiving.writers import (
    Announcement,
    LostRow,
    Received,
    ReportedEpoch,
    ReportedPosition,
    Writer,
    Writers,
    size_of,
)
from synapse_replication.streams.reader import Finding, Reader, Verdict
from synapse_replication.streams.stream import RemovedWriter
from synapse_replication.streams.token_ledger import TokenLedger
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import InterleavedGroup, RdataGroup

#: The most rows of a writer that are delivered late at once, and the delay before a
#: failed attempt is repeated, in s.
MAX_LATE = 100
LATE_RETRY = 10.0

#: What a queue contains: what arrived on a link, or work of this process.
_Item: TypeAlias = tuple[Link, Received] | QueuedWork


class StreamReceiver:
    """Receiver of the rows and announcements of all writers of one stream.

    Use it in the reactor's thread only.

    :param ask: requests the positions of the writers on a link.
    """

    def __init__(self, context: StreamContext, ask: Callable[[Link], None]) -> None:
        self._context = context
        self._queue: DrainedQueue[_Item] = DrainedQueue(
            context, self._consume, self._give_up
        )
        self._writers = Writers(context)
        self._search = RemovedWriterSearch(
            context, self._enqueue_removed, self._writers.has_links
        )
        decoder = RowDecoder(context)
        self._catch_ups = CatchUps(
            context,
            decoder,
            ask,
            self._search.request,
            self._queue.put,
            self._handle,
            self._give_up_item,
        )
        self._rows = RowHandler(
            context, self._writers, decoder, self._catch_ups, self._give_up_behind
        )

    # -- links ------------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        """Add a link, and search for removed writers in the background."""
        self._writers.link_up(link)
        for writer in self._writers.all():
            if writer.reader.catch_up is not None:
                self._queue.put(writer)
            if writer.late:
                self._queue.put(partial(self._deliver_late, writer))
        self._search.request()

    def link_lost(self, link: Link) -> None:
        """Remove a link, after what it carried has been handled."""
        if self._queue.is_idle:
            # Start no background process: the host may be shutting down.
            self._remove_link(link)
        else:
            self._queue.put(partial(self._remove_link, link))

    def readers(self) -> Mapping[str, Reader]:
        """Return the reader of each writer, by name. Thread-safe."""
        return self._writers.readers()

    def claimed_position(self, instance_name: str) -> int:
        """Return the token up to which rows were delivered or are being fetched."""
        reader = self._writers.refreshed(instance_name).reader
        catch_up = reader.catch_up
        return reader.reached if catch_up is None else catch_up.requested_upto

    def forget_writer(self, instance_name: str) -> None:
        """Remove the state of a writer, unless rows of it are missing."""
        self._writers.forget(instance_name)

    # -- received items ---------------------------------------------------------------

    def enqueue_rows(self, link: Link, group: RdataGroup) -> None:
        """Enqueue rows of one writer that were received together, in order."""
        name, observer = self._context.name, self._context.observer
        observer.rows_received(name, len(group.rows))
        if (token := group.tokens[-1]) is not None:
            observer.position_announced(
                name, group.instance_name, token, link.connection.name, AnnouncedBy.ROW
            )
        self._put_rows(link, group)

    def enqueue_interleaved(self, link: Link, group: InterleavedGroup) -> None:
        """Enqueue rows of several writers that were received together, in order."""
        name, observer = self._context.name, self._context.observer
        observer.rows_received(name, len(group.rows))
        newest = dict(zip(group.instance_names, group.tokens, strict=True))
        for instance_name, token in newest.items():
            if token is not None:
                observer.position_announced(
                    name, instance_name, token, link.connection.name, AnnouncedBy.ROW
                )
        self._put_rows(link, group)

    def enqueue_lost_row(self, link: Link, instance_name: str) -> None:
        """Enqueue a marker in place of a row that could not be parsed."""
        self._context.discard(instance_name, DiscardReason.UNPARSABLE, 1)
        self._queue.put((link, LostRow(instance_name)))

    def enqueue_position(self, link: Link, position: PositionCommand) -> None:
        """Enqueue a writer's POSITION, unless it is redundant."""
        context = self._context
        instance_name, token = position.instance_name, position.new_token
        context.observer.position_announced(
            context.name,
            instance_name,
            token,
            link.connection.name,
            AnnouncedBy.POSITION,
        )
        if position.prev_token == token:
            # The instance may have just started, in place of a removed writer.
            self._search.request()
        if self._follows(link, instance_name, token):
            context.discard(instance_name, DiscardReason.REDUNDANT_POSITION, 1)
        else:
            self._queue.put((link, position))

    def enqueue_report(
        self,
        link: Link,
        instance_name: str,
        token: int,
        *,
        prev_token: int,
        is_first: bool,
        epoch: str | None,
        has_restarted: bool,
    ) -> None:
        """Enqueue a writer's position, and its epoch, unless they are redundant.

        The rows that the writer held in memory in earlier epochs are lost.

        :param prev_token: the token after which the writer has no rows up to ``token``.
        :param is_first: whether the writer has just started, so that this is its
            initial position. Missing rows up to it are fetched, but are not reported as
            a gap.
        :param epoch: the epoch; ``None`` if it need not be compared with that of the
            handled rows.
        :param has_restarted: whether this may be the first message of a process.
        """
        if (
            epoch is not None
            and self._context.description.held_in_memory
            and not self._follows_epoch(link, instance_name, epoch)
        ):
            self._queue.put(
                (link, ReportedEpoch(instance_name, token, epoch, has_restarted))
            )
        if not self._follows(link, instance_name, token):
            report = ReportedPosition(instance_name, prev_token, token, is_first)
            self._queue.put((link, report))

    def enqueue_stored_position(self, instance_name: str, token: int) -> None:
        """Enqueue a stored position that is ahead of what its writer announced."""
        self._queue.put(partial(self._handle_stored, instance_name, token))

    def range_to_verify(
        self, instance_name: str, stored: int, *, is_wanted: bool
    ) -> tuple[int, int] | None:
        """Return the range of a writer's delivered tokens to compare with the database.

        :param stored: the writer's stored position.
        :param is_wanted: whether to verify what this writer announces.
        :return: the range's exclusive lower and inclusive upper bound; ``None`` if
            nothing is to be verified now.
        """
        writer = self._writers.refreshed(instance_name)
        if not is_wanted:
            writer.ledger = None
        elif writer.ledger is None:
            # Begin when no row is being delivered: its token is recorded before.
            self._queue.put(partial(self._begin_verification, writer))
        ledger = writer.ledger
        if ledger is None or writer.reader.catch_up is not None:
            return None
        upto = min(stored, writer.reader.position)
        return (ledger.verified, upto) if ledger.verified < upto else None

    def verify(self, instance_name: str, committed: Sequence[int], upto: int) -> None:
        """Compare delivered tokens with committed ones; deliver the missing rows late.

        :param committed: all committed tokens from the lower bound that
            :meth:`range_to_verify` returned up to ``upto``.
        """
        writer = self._writers.refreshed(instance_name)
        if writer.ledger is None:
            return
        if missing := writer.ledger.verify(committed, upto, MAX_LATE):
            context = self._context
            context.observer.observe(
                RowsUnannounced(context.name, writer.name, tuple(missing))
            )
            if isinstance(context.sink, LateRowSink):
                writer.late += missing
                self._queue.put(partial(self._deliver_late, writer))

    async def wait_until_empty(self) -> None:
        """Wait until everything received was handled, and no rows are being fetched."""
        await self._queue.wait_until_empty()
        while self._catch_ups.fetches:
            await next(iter(self._catch_ups.fetches.values()))
            await self._queue.wait_until_empty()

    def _follows(self, link: Link, instance_name: str, token: int) -> bool:
        """Return whether a position changes nothing, with nothing queued before it."""
        return self._queue.is_idle and self._writers.refreshed(
            instance_name
        ).reader.follows(link, token)

    def _follows_epoch(self, link: Link, instance_name: str, epoch: str) -> bool:
        """Return whether an epoch changes nothing, with nothing queued before it."""
        reader = self._writers.get(instance_name).reader
        return self._queue.is_idle and reader.follows_epoch(link, epoch)

    def _put_rows(self, link: Link, group: RdataGroup | InterleavedGroup) -> None:
        self._queue.put((link, group), len(group.rows), size_of(group))

    def _enqueue_removed(self, instance_name: str, removed: RemovedWriter) -> None:
        self._queue.put(partial(self._handle_removed, instance_name, removed))

    # -- the queue --------------------------------------------------------------------

    def _consume(self, item: _Item) -> Awaitable[None] | None:
        if isinstance(item, tuple):
            return self._handle(*item)
        if isinstance(item, Writer):
            return self._catch_ups.resume(item)
        return item()

    def _handle(self, link: Link, received: Received) -> Awaitable[None] | None:
        if isinstance(received, RdataGroup):
            waiting = self._rows.handle(link, received)
            return waiting and self._finish(link, [received], waiting)
        if isinstance(received, InterleavedGroup):
            waiting = self._rows.handle_interleaved(link, received)
            return self._finish(link, received.groups(), waiting)
        writer = self._writers.refreshed(received.instance_name)
        if writer.reader.request is not None:
            self._catch_ups.park(writer, link, received)
            return None
        self._handle_announcement(writer, link, received)
        return self._catch_ups.proceed(writer)

    async def _finish(
        self, link: Link, groups: Iterable[RdataGroup], waiting: Awaitable[None]
    ) -> None:
        """Wait until rows were handled.

        If later items were given up meanwhile, the end of an unfinished batch was among
        them, so the batch is dropped.
        """
        overflows = self._rows.overflow_count
        await waiting
        if self._rows.overflow_count != overflows:
            for group in groups:
                reader = self._writers.get(group.instance_name).reader
                if link in reader.links:
                    reader.drop_unfinished(link)

    def _begin_verification(self, writer: Writer) -> None:
        if writer.ledger is None:
            writer.ledger = TokenLedger(self._context.stream.current_token(writer.name))

    def _remove_link(self, link: Link) -> None:
        for writer in self._writers.link_lost(link):
            self._catch_ups.give_up_parked(writer)
            writer.reader.link_lost(link)
            if not writer.reader.links:
                writer.timer.stop()
                writer.late_timer.stop()
        if not self._writers.has_links():
            self._search.links_lost()

    async def _handle_removed(self, instance_name: str, removed: RemovedWriter) -> None:
        """Fetch the rows of a removed writer."""
        context = self._context
        writer = self._writers.refreshed(instance_name)
        reader, upto = writer.reader, removed.upto_token
        catch_up = reader.catch_up
        was_draining = catch_up is not None and catch_up.drain_upto is not None
        finding = reader.removed(upto, is_deleted=removed.is_deleted)
        if finding is Finding.GAP:
            if not was_draining and upto > reader.position:
                context.observer.observe(
                    RemovedWriterFound(context.name, writer.name, reader.position, upto)
                )
            await self._catch_ups.resume(writer)
        elif finding is Finding.EXPECTED and writer.drained_upto is None:
            writer.drained_upto = reader.position
            context.observer.observe(
                RemovedWriterDrained(context.name, writer.name, reader.position)
            )

    async def _handle_stored(self, instance_name: str, token: int) -> None:
        context = self._context
        writer = self._writers.refreshed(instance_name)
        position = writer.reader.position
        if writer.reader.stored(token) is Finding.GAP:
            context.observer.observe(
                UnannouncedFound(context.name, writer.name, position, token)
            )
            await self._catch_ups.proceed(writer)

    async def _deliver_late(self, writer: Writer) -> None:
        """Fetch and deliver a writer's late rows; if that fails, repeat it later."""
        context, delivered = self._context, 0
        # Until they were delivered, they are a reason not to forget the writer.
        tokens = tuple(writer.late)
        try:
            for token in tokens:
                await self._catch_ups.deliver_late(writer.name, token)
                delivered += 1
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            context.observer.failure(f"delivering late rows of {context.name}", error)
            # The sink may always fail to handle this row: try the others before it.
            writer.late.append(writer.late.pop(delivered))
            if writer.reader.links:
                again = partial(self._deliver_late, writer)
                writer.late_timer.start(LATE_RETRY, self._queue.put, again)
        del writer.late[:delivered]
        if delivered:
            context.observer.observe(
                LateRows(context.name, writer.name, tokens[:delivered])
            )

    def _handle_announcement(
        self, writer: Writer, link: Link, item: Announcement
    ) -> None:
        """Notify the reader, and the observer of what it finds."""
        context, reader, name = self._context, writer.reader, writer.name
        observer, position = context.observer, reader.position
        now = context.clock.seconds()
        if isinstance(item, PositionCommand):
            superseded = reader.drop_unfinished(link)
            context.discard(name, DiscardReason.SUPERSEDED_BY_POSITION, superseded)
            finding = reader.announced(link, item.prev_token, item.new_token, now)
            if finding in (Finding.NOTHING, Finding.AHEAD):
                context.discard(name, DiscardReason.REDUNDANT_POSITION, 1)
                context.report_position(name)
            if finding is Finding.AHEAD:
                observer.observe(
                    AheadOfWriter(context.name, name, position, item.new_token)
                )
        elif isinstance(item, ReportedPosition):
            finding = reader.reported(link, item.prev_token, item.token, now)
            if finding is Finding.AHEAD:
                observer.observe(
                    AheadOfWriter(context.name, name, position, item.token)
                )
            elif finding is Finding.GAP and not item.is_first:
                observer.observe(GapFound(context.name, name, position, item.token))
        elif isinstance(item, ReportedEpoch):
            reader.epoch_reported(
                link, item.token, item.epoch, has_restarted=item.has_restarted
            )
        else:
            lost = reader.lost_rows(link)
            context.discard(name, DiscardReason.CATCHING_UP, lost)

    # -- a full queue -----------------------------------------------------------------

    def _give_up(self, queued_items: Iterable[Queued[_Item]]) -> list[Queued[_Item]]:
        """Handle a full queue's items without delivering their rows.

        :return: the items that remain in the queue.
        """
        self._rows.overflow_count += 1
        kept = []
        given_up: dict[str, None] = {}
        for queued in queued_items:
            if isinstance(queued.item, Writer):
                given_up[queued.item.name] = None
                continue
            if not isinstance(queued.item, tuple):
                kept.append(queued)
                continue
            link, item = queued.item
            for each in (
                item.groups() if isinstance(item, InterleavedGroup) else (item,)
            ):
                given_up[each.instance_name] = None
                self._give_up_behind(link, each)
        return kept + [Queued(self._writers.get(name)) for name in given_up]

    def _give_up_behind(self, link: Link, item: RdataGroup | Announcement) -> None:
        """Give up an item, and before it what of its writer is parked."""
        self._catch_ups.give_up_parked(self._writers.get(item.instance_name))
        self._give_up_item(link, item)

    def _give_up_item(self, link: Link, item: RdataGroup | Announcement) -> None:
        writer = self._writers.refreshed(item.instance_name)
        reader = writer.reader
        reader.overflow()
        if not isinstance(item, RdataGroup):
            self._handle_announcement(writer, link, item)
            return
        reason = DiscardReason.CATCHING_UP
        complete = reader.gather(link, item.tokens, item.rows)
        if complete is None:
            reason = DiscardReason.NOT_CONNECTED
        else:
            for token, texts in complete:
                if reader.batch(link, token, len(texts)) is Verdict.DELIVER:
                    reader.overflow(token)
            reader.drop_unfinished(link)
        self._context.discard(writer.name, reason, len(item.rows))
