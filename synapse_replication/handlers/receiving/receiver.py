"""The receiver of one stream, from its queue to the host's row sink.

Theory of operation: all rows and announcements of a stream, from all links, pass
through one queue and are handled one item at a time. Queued rows are still JSON text;
rows that arrived together are decoded together when they are handled. An item is
handled by the
:class:`~synapse_replication.handlers.receiving.writer_receiver.WriterReceiver` of its
writer, whose :class:`~synapse_replication.streams.reader.Reader` decides what it means,
whatever the link. Only rows of several writers that arrived together are decoded here,
and delivered in the order of their arrival.

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

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, cast

from msgspec import Struct

from synapse_replication.handlers.events import AnnouncedBy, DiscardReason
from synapse_replication.handlers.interfaces import Link
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.items import (
    LostRow,
    OfWriter,
    ReportedEpoch,
    ReportedPosition,
    size_of,
)
from synapse_replication.handlers.receiving.queue import (
    ROW_OVERHEAD,
    DrainedQueue,
    QueueItem,
)
from synapse_replication.handlers.receiving.removed_writers import RemovedWriterSearch
from synapse_replication.handlers.receiving.stream_parts import (
    PageSource,
    StreamParts,
)
from synapse_replication.handlers.receiving.writer_receiver import SLICE, WriterReceiver
from synapse_replication.streams.reader import Reader, ReaderPolicy
from synapse_replication.streams.stream import RemovedWriter
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import InterleavedGroup, RdataGroup


class _Arrival(Struct, eq=False):
    """An item that arrived on a link from one writer.

    A Struct: one is created for each chunk of rows.
    """

    receiver: StreamReceiver
    link: Link
    item: OfWriter
    length: int = 1
    size: int = ROW_OVERHEAD

    def run(self) -> Awaitable[None] | None:
        return self.receiver.writer(self.item.instance_name).handle(
            self.link, self.item
        )

    def give_up(self) -> Iterable[QueueItem]:
        writer = self.receiver.writer(self.item.instance_name)
        writer.give_up(self.link, self.item)
        return (writer.resumption,)


class _InterleavedArrival(Struct, eq=False):
    """Rows of several writers that arrived on a link. A Struct, as above."""

    receiver: StreamReceiver
    link: Link
    group: InterleavedGroup
    length: int
    size: int

    def run(self) -> Awaitable[None]:
        return self.receiver.handle_interleaved(self.link, self.group)

    def give_up(self) -> Iterable[QueueItem]:
        remaining = []
        for of_writer in self.group.groups():
            writer = self.receiver.writer(of_writer.instance_name)
            writer.give_up(self.link, of_writer)
            remaining.append(writer.resumption)
        return remaining


class StreamReceiver:
    """Receiver of the rows and announcements of all writers of one stream.

    Use it in the reactor's thread only.

    :param ask: requests the positions of the writers on a link.
    """

    def __init__(self, context: StreamContext, ask: Callable[[Link], None]) -> None:
        description, options = context.description, context.options
        self._context = context
        self._queue = DrainedQueue(context)
        self._decoder = RowDecoder(context)
        self._search = RemovedWriterSearch(context, self._enqueue_removed)
        self._stream = StreamParts(
            context,
            ReaderPolicy(
                resettable=description.resettable,
                idempotent=description.idempotent,
                held_in_memory=description.held_in_memory,
                reverts_positions=options.reverts_positions,
                tolerance=options.plausible_distance,
            ),
            self._queue,
            self._decoder,
            PageSource(context),
            self._search,
            ask,
        )
        self._links: list[Link] = []
        self._writers: dict[str, WriterReceiver] = {}
        self._saved_epochs = context.saved_epochs()
        # The writers whose delivered tokens are recorded, to be verified.
        self._recorded: Set[str] = frozenset()

    # -- writers ----------------------------------------------------------------------

    def writer(self, instance_name: str) -> WriterReceiver:
        """Return the receiver of a writer; add it if it is new."""
        return self._writers.get(instance_name) or self._add(instance_name)

    def _add(self, instance_name: str) -> WriterReceiver:
        writer = WriterReceiver(
            instance_name,
            self._stream,
            self._saved_epochs.get(instance_name),
            self._links,
        )
        self._writers[instance_name] = writer
        if instance_name in self._recorded:
            writer.late.begin()
        return writer

    def readers(self) -> Mapping[str, Reader]:
        """Return the reader of each writer, by name. Thread-safe."""
        # dict.copy() is atomic.
        return {name: each.reader for name, each in self._writers.copy().items()}

    def claimed_position(self, instance_name: str) -> int:
        """Return the token up to which rows were delivered or are being fetched."""
        return self.writer(instance_name).reader.claimed_upto

    def forget_writer(self, instance_name: str) -> None:
        """Remove the state of a writer, unless rows of it are missing."""
        writer = self._writers.get(instance_name)
        if writer is not None and writer.is_dispensable:
            del self._writers[instance_name]

    # -- links ------------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        """Add a link, and search for removed writers in the background."""
        self._links.append(link)
        for writer in list(self._writers.values()):
            writer.link_up(link)
        self._search.link_up()

    def link_lost(self, link: Link) -> None:
        """Remove a link, after what it carried has been handled."""
        if self._queue.is_idle:
            # Start no background process: the host may be shutting down.
            self._remove_link(link)
        else:
            self._queue.call(partial(self._remove_link, link))

    def _remove_link(self, link: Link) -> None:
        self._links.remove(link)
        for writer in list(self._writers.values()):
            writer.link_lost(link)
        if not self._links:
            self._search.links_lost()

    # -- received items ---------------------------------------------------------------

    def enqueue_rows(self, link: Link, group: RdataGroup) -> None:
        """Enqueue rows of one writer that were received together, in order."""
        name, observer = self._context.name, self._context.observer
        observer.rows_received(name, len(group.rows))
        if (token := group.tokens[-1]) is not None:
            observer.position_announced(
                name, group.instance_name, token, link.connection.name, AnnouncedBy.ROW
            )
        self._queue.put(_Arrival(self, link, group, len(group.rows), size_of(group)))

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
        self._queue.put(
            _InterleavedArrival(self, link, group, len(group.rows), size_of(group))
        )

    def enqueue_lost_row(self, link: Link, instance_name: str) -> None:
        """Enqueue a marker in place of a row that could not be parsed."""
        self._context.discard(instance_name, DiscardReason.UNPARSABLE, 1)
        self._queue.put(_Arrival(self, link, LostRow(instance_name)))

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
            self._queue.put(_Arrival(self, link, position))

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
            reported = ReportedEpoch(instance_name, token, epoch, has_restarted)
            self._queue.put(_Arrival(self, link, reported))
        if not self._follows(link, instance_name, token):
            report = ReportedPosition(instance_name, prev_token, token, is_first)
            self._queue.put(_Arrival(self, link, report))

    def enqueue_stored_position(self, instance_name: str, token: int) -> None:
        """Enqueue a stored position that is ahead of what its writer announced."""
        self._queue.call(lambda: self.writer(instance_name).found_stored(token))

    def record_tokens(self, instance_names: Set[str]) -> None:
        """Record the delivered tokens of these writers, to be verified; of no others.

        A writer may be named before anything arrived from it.
        """
        self._recorded = instance_names
        for instance_name, writer in self._writers.items():
            if instance_name not in instance_names:
                writer.late.end()
            elif not writer.late.is_recording:
                # Begin when no row is being delivered: its token is recorded before.
                self._queue.call(writer.late.begin)

    def range_to_verify(
        self, instance_name: str, stored: int
    ) -> tuple[int, int] | None:
        """Return the range of a writer's delivered tokens to compare with the database.

        :param stored: the writer's stored position.
        :return: the range's exclusive lower and inclusive upper bound; ``None`` if
            nothing is to be verified now.
        """
        return self.writer(instance_name).range_to_verify(stored)

    def verify(self, instance_name: str, committed: Sequence[int], upto: int) -> None:
        """Compare delivered tokens with committed ones; deliver the missing rows late.

        :param committed: all committed tokens from the lower bound that
            :meth:`range_to_verify` returned up to ``upto``.
        """
        self.writer(instance_name).verify(committed, upto)

    @property
    def is_idle(self) -> bool:
        """Whether everything received was handled, and no rows are being fetched."""
        return self._queue.is_idle and not self._stream.fetches

    async def wait_until_empty(self) -> None:
        """Wait until everything received was handled, and no rows are being fetched."""
        await self._queue.wait_until_empty()
        while fetches := self._stream.fetches:
            await next(iter(fetches.values())).add()
            await self._queue.wait_until_empty()

    def _follows(self, link: Link, instance_name: str, token: int) -> bool:
        """Return whether a position changes nothing, with nothing queued before it."""
        reader = self.writer(instance_name).reader
        return self._queue.is_idle and reader.follows(link, token)

    def _follows_epoch(self, link: Link, instance_name: str, epoch: str) -> bool:
        """Return whether an epoch changes nothing, with nothing queued before it."""
        reader = self.writer(instance_name).reader
        return self._queue.is_idle and reader.follows_epoch(link, epoch)

    def _enqueue_removed(self, instance_name: str, removed: RemovedWriter) -> None:
        self._queue.call(lambda: self.writer(instance_name).found_removed(removed))

    # -- rows of several writers ------------------------------------------------------

    async def handle_interleaved(self, link: Link, group: InterleavedGroup) -> None:
        """Handle rows of several writers; decode each slice as a whole if possible."""
        # The positions to report later, not once per row: at the next break, before a
        # slice that is not decoded as a whole, or at the end.
        advanced: dict[str, int] = {}
        yielder, queue = self._context.yielder, self._queue
        overflows = queue.overflow_count
        for start in range(0, len(group.rows), SLICE):
            if start and yielder.is_due():
                self._report_positions(advanced)
                await yielder.take_break()
            part = group.part(start, start + SLICE)
            decoded = None
            if (
                queue.overflow_count == overflows
                and None not in part.tokens
                and self._are_plausible(part)
            ):
                decoded = self._decoder.decode_quietly(part.rows)
            if decoded is None:
                self._report_positions(advanced)
                for of_writer in part.groups():
                    writer = self.writer(of_writer.instance_name)
                    waiting = writer.handle_rest(link, of_writer, overflows)
                    if waiting is not None:
                        await waiting
            else:
                await self._deliver_decoded(link, part, decoded, advanced, overflows)
            yielder.count(len(part.rows))
        self._report_positions(advanced)

    def _report_positions(self, advanced: dict[str, int]) -> None:
        for instance_name in advanced:
            self._context.report_position(instance_name)
        advanced.clear()

    def _are_plausible(self, part: InterleavedGroup) -> bool:
        tokens = cast(list[int], part.tokens)
        greatest = max(tokens)
        return self._context.is_plausible(
            part.instance_names[tokens.index(greatest)], greatest
        )

    async def _deliver_decoded(
        self,
        link: Link,
        part: InterleavedGroup,
        decoded: list[Any],
        advanced: dict[str, int],
        overflows: int,
    ) -> None:
        """Deliver the rows of live writers; handle other rows one at a time.

        Live rows are delivered here, not by a method of :class:`WriterReceiver`: a call
        for each row, in which the writer is asked whether it is live, makes receiving
        25 % slower.

        :param part: the rows; each is a batch of its own.
        :param advanced: updated with the positions of live writers, to report later.
        :param overflows: see :meth:`WriterReceiver.handle_rest`.
        """
        name, on_rdata = self._context.name, self._context.sink.on_rdata
        current_token = self._context.stream.current_token
        recording = {
            each: writer.late.record
            for each in set(part.instance_names)
            if (writer := self.writer(each)).late.is_recording
        }
        for index, (instance_name, token, row) in enumerate(
            # The caller has excluded rows without a token.
            zip(part.instance_names, cast(list[int], part.tokens), decoded, strict=True)
        ):
            position = advanced.get(instance_name)
            if position is None and self.writer(instance_name).reader.is_live_on(link):
                position = current_token(instance_name)
            if position is None or token <= position:
                advanced.pop(instance_name, None)
                single = RdataGroup(name, instance_name, [token], [part.rows[index]])
                writer = self.writer(instance_name)
                waiting = writer.handle_rest(link, single, overflows)
                if waiting is not None:
                    await waiting
                continue
            if instance_name in recording:
                recording[instance_name]([token])
            try:
                waiting = on_rdata(name, instance_name, token, [row])
                if waiting is not None:
                    await waiting
                advanced[instance_name] = token
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                if advanced.pop(instance_name, None) is not None:
                    self._context.report_position(instance_name)
                failed = self.writer(instance_name)
                failed.delivery_failed([(token, [row])], error)
        for instance_name, token in advanced.items():
            self.writer(instance_name).reader.passed_live(link, token)
