"""Carries out what the readers of one stream decide: fetches, deliveries and pauses.

Theory of operation: after each event, :meth:`CatchUps.proceed` takes the actions of the
writer's :class:`~synapse_replication.streams.reader.Reader` until there is none. A page
is fetched in the background, so that other writers of the stream are not delayed; it is
handled in the stream's queue. While a writer's page is being fetched, what arrives from
that writer is parked. When the page was delivered, and was the last one, the parked
rows are delivered; otherwise they only raise the target of the catch-up.

While a page is being delivered, the next one is fetched. If the source or the sink
fails, the catch-up pauses, for longer after each failure, and resumes from the last
token that was delivered.

See docs/failure-modes.rst: failure-paged-catch-up, failure-million-rows-behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from twisted.internet.defer import Deferred

from synapse_replication.errors import RowsLostError
from synapse_replication.handlers.events import (
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    CatchUpStepEnded,
    DiscardReason,
    PositionLowered,
    PositionRefuted,
    RemovedWriterDrained,
    Resync,
    Resynced,
    StreamConnected,
    StreamReset,
)
from synapse_replication.handlers.interfaces import EpochSink, LateRowSink, Link
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.writers import Announcement, Writer, size_of
from synapse_replication.streams.pages import Page, check_page
from synapse_replication.streams.reader import (
    Advance,
    Ask,
    BeginEpoch,
    Connected,
    Fetch,
    Finished,
    Pause,
    Refuted,
    Rewind,
)
from synapse_replication.streams.stream import StreamUpdateResult
from synapse_replication.wire.rdata import RdataGroup

#: Work of this process on a stream, which must be done after what arrived before: a
#: function, or a writer whose catch-up must be resumed.
QueuedWork: TypeAlias = Callable[[], Awaitable[None] | None] | Writer


class CatchUps:
    """The catch-ups of one stream.

    Use it in the reactor's thread only.

    :param ask: requests the positions of the writers on a link.
    :param connected: called when a writer became connected on a link.
    :param enqueue: adds work to the stream's queue.
    :param handle: handles an item that was parked.
    :param give_up: notes that an item that was parked is not delivered.
    """

    def __init__(
        self,
        context: StreamContext,
        decoder: RowDecoder,
        ask: Callable[[Link], None],
        connected: Callable[[], None],
        enqueue: Callable[[QueuedWork], None],
        handle: Callable[[Link, RdataGroup | Announcement], Awaitable[None] | None],
        give_up: Callable[[Link, RdataGroup | Announcement], None],
    ) -> None:
        self._context = context
        self._decoder = decoder
        self._connected = connected
        self._enqueue = enqueue
        self._handle = handle
        self._give_up = give_up
        # The source of a stream that is held in memory already queries the writer.
        held_in_memory = context.description.held_in_memory
        self._partial = None if held_in_memory else context.partial
        #: The fetches that are in progress; each Deferred fires when it has ended.
        self.fetches: dict[Fetch, Deferred[None]] = {}
        self._actions: dict[
            type[object], Callable[[Writer, Any], Awaitable[None] | None]
        ] = {
            Fetch: self._begin_fetch,
            Rewind: self._rewind,
            BeginEpoch: self._begin_epoch,
            Advance: self._advance,
            Pause: self._pause,
            Connected: self._report_connected,
            Ask: lambda _, action: ask(action.link),
            Refuted: self._report_refuted,
            Finished: self._report_finished,
        }

    async def proceed(self, writer: Writer) -> None:
        """Take a writer's actions until there is none left."""
        context, reader = self._context, writer.reader
        while True:
            reader.position = context.stream.current_token(writer.name)
            action = reader.next(context.clock.seconds())
            if action is None:
                return
            waiting = self._actions[type(action)](writer, action)
            if waiting is not None:
                try:
                    await waiting
                except Exception as error:  # noqa: BLE001 -- reported to the observer
                    self._fail(writer, error)

    async def _handle_page(
        self,
        writer: Writer,
        fetch: Fetch,
        result: StreamUpdateResult | Exception,
        is_partial: bool,
    ) -> None:
        """Deliver a fetched page, while the next one is being fetched.

        :param result: the page, or the error with which the fetch failed.
        :param is_partial: whether the page comes from the writer's backlog.
        """
        reader = writer.reader
        page = self._accept_page(writer, fetch, result)
        if page is not None:
            if not (is_partial or self._context.description.held_in_memory):
                writer.resync = Resync.FULL
            elif writer.resync is None:
                writer.resync = Resync.PARTIAL
            event = self._event(writer)
            await self.proceed(writer)
            if reader.page is page:
                await self._deliver(writer, page, event, is_partial)
        await self.resume(writer)

    def _accept_page(
        self, writer: Writer, fetch: Fetch, result: StreamUpdateResult | Exception
    ) -> Page | None:
        """Return the page to deliver, if there is one."""
        if writer.reader.request is not fetch:
            # The page is not wanted any more.
            return None
        if isinstance(result, Exception):
            self._fail(writer, result)
            return None
        try:
            return writer.reader.page_fetched(fetch, result)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            # The host's own source may have returned anything.
            self._fail(writer, error)
            return None

    async def _deliver(
        self, writer: Writer, page: Page, event: CatchUpEvent, is_partial: bool
    ) -> None:
        context, reader, name = self._context, writer.reader, writer.name
        stream_name, on_rdata = context.name, context.sink.on_rdata
        batches = self._decoder.decode_page(name, page, skips_invalid=not is_partial)
        # Record them before the position advances; what fails is fetched again.
        writer.record(page.tokens)
        for token, rows in batches:
            if rows is None:
                reader.unreadable(token)
                return
            try:
                waiting = rows and on_rdata(stream_name, name, token, rows)
                if waiting:
                    await waiting
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                if reader.page is page:
                    self._fail(writer, error)
                return
            reader.delivered(token)
            if reader.page is not page:
                # The queue overflowed meanwhile, and something in it made the page
                # obsolete.
                return
        reader.page_delivered()
        context.observer.observe(CatchUpPage(event, len(page.tokens), page.upto_token))
        context.report_position(name)
        context.yielder.count(len(page.tokens))
        if context.yielder.is_due():
            await context.yielder.take_break()

    async def deliver_late(self, instance_name: str, token: int) -> None:
        """Fetch the rows of one token that is below the position, and deliver them.

        The sink must accept late rows.
        """
        context, sink = self._context, self._context.sink
        assert isinstance(sink, LateRowSink)
        result = await context.stream.get_updates_since(instance_name, token - 1, token)
        page = check_page(result, token - 1, token, allow_encoded=True)
        batches = self._decoder.decode_page(instance_name, page, skips_invalid=True)
        for at, rows in batches:
            waiting = rows and sink.on_late_rdata(context.name, instance_name, at, rows)
            if waiting:
                await waiting

    def delivery_failed(
        self, writer: Writer, left: Sequence[tuple[int, list[Any]]], error: Exception
    ) -> None:
        """Fetch the batches that the sink failed to handle, after a pause.

        :param left: the failed batch and those after it.
        """
        lost = sum(len(rows) for _, rows in left)
        self._context.discard(writer.name, DiscardReason.HANDLER_FAILED, lost)
        reader = writer.reader
        reader.position = self._context.stream.current_token(writer.name)
        attempts = reader.delivery_failed([token for token, _ in left])
        self._retry_later(writer, attempts, error)

    # -- parked items -----------------------------------------------------------------

    def park(self, writer: Writer, link: Link, item: RdataGroup | Announcement) -> None:
        """Store an item until the page that is being fetched was handled."""
        writer.parked.append((link, item))
        writer.parked_size += size_of(item)
        if writer.parked_size > self._context.options.max_queue_size:
            self.give_up_parked(writer)
            self._enqueue(writer)

    async def resume(self, writer: Writer) -> None:
        """Handle what was parked, unless only it would be fetched again."""
        reader = writer.reader
        if reader.catch_up is not None and not reader.catch_up.is_fetched:
            # More pages follow: the parked items only raise the target.
            self.give_up_parked(writer)
        await self.proceed(writer)
        while writer.parked and reader.request is None:
            link, item = writer.parked.popleft()
            writer.parked_size -= size_of(item)
            waiting = self._handle(link, item)
            if waiting is not None:
                await waiting

    def give_up_parked(self, writer: Writer) -> None:
        """Give up what was parked: it is fetched."""
        while writer.parked:
            self._give_up(*writer.parked.popleft())
        writer.parked_size = 0

    # -- actions ----------------------------------------------------------------------

    def _begin_fetch(self, writer: Writer, fetch: Fetch) -> None:
        context = self._context
        event = CatchUpEvent(
            context.name, writer.name, fetch.from_token, fetch.upto_token
        )

        async def fetch_page() -> None:
            context.observer.observe(event)
            started = context.clock.seconds()
            result: StreamUpdateResult | Exception
            try:
                with context.observer.span(event):
                    result, is_partial = await self._fetch(writer, fetch)
            except Exception as error:  # noqa: BLE001 -- reported when it is handled
                result, is_partial = error, False
            seconds = context.clock.seconds() - started
            context.observer.observe(CatchUpStepEnded(event, seconds))
            self._enqueue(partial(self._handle_page, writer, fetch, result, is_partial))
            self.fetches.pop(fetch).callback(None)

        self.fetches[fetch] = Deferred()
        context.run_as_background_process(
            f"replication_catch_up_{context.name}", fetch_page
        )

    async def _fetch(
        self, writer: Writer, fetch: Fetch
    ) -> tuple[StreamUpdateResult, bool]:
        """Return a page, and whether it comes from the writer's backlog."""
        if self._partial is not None and not fetch.from_source:
            result = await self._partial.get_updates_since(
                self._context.name, writer.name, fetch.from_token, fetch.upto_token
            )
            if result is not None:
                return result, True
        from_token, upto_token = fetch.from_token, fetch.upto_token
        stream = self._context.stream
        try:
            result = await stream.get_updates_since(writer.name, from_token, upto_token)
        except RowsLostError as error:
            # Nothing brings these rows back: continue with those that remain.
            lost_upto = min(max(error.lost_upto, from_token), upto_token)
            if lost_upto == from_token:
                raise
            lost = lost_upto - from_token
            self._context.discard(writer.name, DiscardReason.LOST, lost)
            result = StreamUpdateResult([], lost_upto, lost_upto < upto_token)
        return result, False

    async def _rewind(self, writer: Writer, rewind: Rewind) -> None:
        context, name = self._context, writer.name
        current = context.stream.current_token(name)
        is_reset = rewind.token < writer.reader.floor
        await self._save_position(name, rewind.token)
        if rewind.epoch is not None:
            # Begin the epoch only after the rewind: a token of the old epoch must never
            # be persisted with the new epoch.
            await self._save_epoch(name, rewind.epoch)
        writer.reader.rewound(rewind.epoch)
        if writer.ledger is not None:
            writer.ledger.rewind(rewind.token)
        writer.resync = Resync.FULL
        kind = StreamReset if is_reset else PositionLowered
        context.observer.observe(kind(context.name, name, current, rewind.token))

    async def _begin_epoch(self, writer: Writer, begin: BeginEpoch) -> None:
        name = writer.name
        current = self._context.stream.current_token(name)
        await self._save_epoch(name, begin.epoch)
        if current > 0:
            # With the epoch, the sink has saved the position 0.
            await self._save_position(name, current)
        writer.reader.epoch_begun(begin.epoch)

    async def _save_epoch(self, name: str, epoch: str) -> None:
        sink = self._context.sink
        if isinstance(sink, EpochSink):
            waiting = sink.on_epoch(self._context.name, name, epoch)
            if waiting is not None:
                await waiting

    async def _save_position(self, name: str, token: int) -> None:
        waiting = self._context.sink.on_position(self._context.name, name, token)
        if waiting is not None:
            await waiting

    async def _advance(self, writer: Writer, advance: Advance) -> None:
        await self._save_position(writer.name, advance.token)
        writer.reader.advanced(advance.token, self._context.clock.seconds())

    def _pause(self, writer: Writer, pause: Pause) -> None:
        end = partial(self._end_pause, writer)
        writer.timer.start(pause.seconds, self._enqueue, end)

    def _end_pause(self, writer: Writer) -> Awaitable[None]:
        writer.reader.timer_due()
        return self.resume(writer)

    def _report_connected(self, writer: Writer, action: Connected) -> None:
        context = self._context
        context.observer.observe(
            StreamConnected(action.link.connection.name, context.name, writer.name)
        )
        self._connected()

    def _report_refuted(self, writer: Writer, action: Refuted) -> None:
        context = self._context
        context.observer.observe(
            PositionRefuted(context.name, writer.name, action.token, action.last_token)
        )
        context.discard(writer.name, DiscardReason.IMPLAUSIBLE, 1)

    def _report_finished(self, writer: Writer, action: Finished) -> None:
        context = self._context
        writer.timer.stop()
        if writer.resync is not None:
            context.observer.observe(Resynced(context.name, writer.name, writer.resync))
            writer.resync = None
        context.report_position(writer.name)
        if action.drained_upto is not None:
            writer.drained_upto = action.drained_upto
            context.observer.observe(
                RemovedWriterDrained(context.name, writer.name, action.drained_upto)
            )

    # -- failures ---------------------------------------------------------------------

    def _fail(self, writer: Writer, error: Exception) -> None:
        self._retry_later(writer, writer.reader.failed(), error)

    def _retry_later(self, writer: Writer, attempts: int, error: Exception) -> None:
        context = self._context
        delay = context.options.backoff.delay(attempts)
        context.observer.observe(
            CatchUpFailed(self._event(writer), error, attempts, delay)
        )
        context.observer.observe(Resynced(context.name, writer.name, Resync.FAILED))
        if writer.reader.links:
            self._pause(writer, Pause(delay))

    def _event(self, writer: Writer) -> CatchUpEvent:
        catch_up = writer.reader.catch_up
        assert catch_up is not None
        return CatchUpEvent(
            self._context.name, writer.name, catch_up.cursor, catch_up.requested_upto
        )
