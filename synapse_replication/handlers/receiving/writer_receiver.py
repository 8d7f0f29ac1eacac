"""The receiver of one writer's rows: its reader, and the effects of its reader.

Theory of operation: what arrives from the writer, in the order of the stream's queue,
is reported to the writer's :class:`~synapse_replication.streams.reader.Reader`. Then
the actions that the reader returns are taken, and their results are reported to it,
until there is none left (:meth:`WriterReceiver.proceed`). Nothing else decides.

Rows are handled in slices. On the fast path, the rows of a slice are decoded together
and delivered; no coroutine is created unless the host returns an awaitable, and the
reader is not asked about the rows. A slice takes the fast path if the writer is live on
the link, each row is a batch of its own, the tokens are plausible, ascending and above
the reader's position, and every row can be decoded. About each batch of any other
slice, the reader decides.

A page is fetched in the background, so that other writers of the stream are not
delayed; it is handled in the stream's queue. While a page is being fetched, what
arrives from the writer is parked. When the page was delivered, and was the last one,
the parked rows are delivered; otherwise they only raise the target of the catch-up.
While a page is being delivered, the next one is fetched. If the source or the sink
fails, the catch-up pauses, for longer after each failure, and resumes from the last
token that was delivered.

While the sink handles rows, the queue may overflow, and later rows are given up. The
rest of the rows in progress is then given up, too: the beginning of its batch may have
been dropped with the later rows.

See docs/failure-modes.rst: failure-paged-catch-up, failure-million-rows-behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from operator import lt
from typing import Any, Final

from synapse_replication.errors import DatabaseBehindError
from synapse_replication.handlers.events import (
    AheadOfWriter,
    CatchUpEvent,
    CatchUpFailed,
    CatchUpPage,
    CatchUpStepEnded,
    DiscardReason,
    GapFound,
    PositionLowered,
    PositionRefuted,
    RemovedWriterDrained,
    RemovedWriterFound,
    Resync,
    Resynced,
    StreamConnected,
    StreamReset,
    UnannouncedFound,
)
from synapse_replication.handlers.interfaces import Link
from synapse_replication.handlers.receiving.items import (
    Announcement,
    OfWriter,
    ReportedEpoch,
    ReportedPosition,
    size_of,
)
from synapse_replication.handlers.receiving.late_rows import LATE_RETRY, LateRowDelivery
from synapse_replication.handlers.receiving.queue import Call
from synapse_replication.handlers.receiving.stream_parts import StreamParts
from synapse_replication.handlers.timer import Timer
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.streams.pages import Page
from synapse_replication.streams.reader import Reader, UnexpectedEventError
from synapse_replication.streams.reader_decisions import (
    Action,
    Advance,
    Ask,
    BeginEpoch,
    Connected,
    Fetch,
    Finding,
    Finished,
    Pause,
    Refuted,
    Rewind,
    Verdict,
)
from synapse_replication.streams.stream import RemovedWriter, StreamUpdateResult
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import RdataGroup

#: The longest delay, in s, before a standby is queried again for rows that it lacks.
STANDBY_RETRY_DELAY = 1.0

#: The maximum number of rows in a slice. Before each further slice of the same rows,
#: the yielder decides whether a break is due.
SLICE: Final = 100


class WriterReceiver:
    """Receiver of the rows and announcements of one writer of one stream.

    Use it in the reactor's thread only.

    :param epoch: the epoch of the writer's rows that the sink has saved, if any.
    :param links: the links that are up.
    :ivar reader: what this process knows about the writer; for others, to read only.
    :ivar late: the writer's rows that did not arrive.
    """

    def __init__(
        self,
        name: str,
        stream: StreamParts,
        epoch: str | None,
        links: Iterable[Link],
    ) -> None:
        context = stream.context
        self.name = name
        self._stream = stream
        self._context = context
        self._queue = stream.queue
        self._decode = stream.decoder.decode
        self._decode_valid = stream.decoder.decode_valid
        self.reader = Reader(
            stream.policy,
            partial(context.is_plausible, name),
            partial(context.stream.current_token, name),
            epoch,
            self._report_unexpected,
        )
        for link in links:
            self.reader.link_up(link)
        self._timer = Timer(context.clock)
        # What arrived from the writer, in order, while a page was fetched; its size.
        self._parked: deque[tuple[Link, OfWriter]] = deque()
        self._parked_size = 0
        # Where the pages of the catch-up came from; None before the first.
        self._resync: Resync | None = None
        # The last token of a removed writer that was reported as drained.
        self._drained_upto: int | None = None
        self._late_timer = Timer(context.clock)
        self.late = LateRowDelivery(name, context, stream.decoder)
        #: Work that resumes the catch-up.
        self.resumption = Call(self.resume)

    def _report_unexpected(self, error: UnexpectedEventError) -> None:
        context = self._context
        context.observer.failure(f"reading {context.name} of {self.name}", error)

    @property
    def is_dispensable(self) -> bool:
        """Whether nothing of the writer is missing, waits, or is to be delivered."""
        return not (self.reader.is_catching_up or self._parked or self.late.has_rows)

    # -- links ------------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        """Add a link."""
        self.reader.link_up(link)
        if self.reader.is_catching_up:
            self._queue.put(self.resumption)
        if self.late.has_rows:
            self._queue.call(self._deliver_late)

    def link_lost(self, link: Link) -> None:
        """Remove a link, after what it carried has been handled."""
        self._give_up_parked()
        self.reader.link_lost(link)
        if not self.reader.link_count:
            self._timer.stop()
            self._late_timer.stop()

    # -- what arrives -----------------------------------------------------------------

    def handle(self, link: Link, item: OfWriter) -> Awaitable[None] | None:
        """Handle rows or an announcement.

        :return: an awaitable if they are not handled completely yet; usually ``None``,
            so that no coroutine is created.
        """
        if isinstance(item, RdataGroup):
            return self._handle_rows(link, item)
        if self.reader.request is not None:
            self._park(link, item)
            return None
        self._announce(link, item)
        return self.proceed()

    def handle_rest(
        self, link: Link, rest: RdataGroup, overflows: int
    ) -> Awaitable[None] | None:
        """Handle rows after others that arrived with them, or give them up.

        :param overflows: the queue's ``overflow_count`` before the others were handled.
        """
        if self._queue.overflow_count == overflows:
            return self._handle_rows(link, rest)
        self._parked.append((link, rest))
        return self._give_up_rest(link)

    def _give_up_rest(self, link: Link) -> Awaitable[None]:
        """Give up what is parked, of which the rest of a link's rows is a part."""
        has_lost_later = self.reader.has_lost_rows(link)
        self._give_up_parked()
        if has_lost_later:
            self.reader.lost_rows(link)
        return self.proceed()

    def give_up(self, link: Link, item: OfWriter) -> None:
        """Have what an item contains fetched, and before it what is parked."""
        self._give_up_parked()
        self._give_up(link, item)

    def _give_up(self, link: Link, item: OfWriter) -> None:
        reader = self.reader
        reader.overflow()
        if not isinstance(item, RdataGroup):
            self._announce(link, item)
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
        self._context.discard(self.name, reason, len(item.rows))

    def _park(self, link: Link, item: OfWriter) -> None:
        """Store an item until the page that is being fetched was handled."""
        self._parked.append((link, item))
        self._count_parked(item)

    def _count_parked(self, item: OfWriter) -> None:
        """Give up what is parked if it is too much with an item that was added."""
        self._parked_size += size_of(item)
        if self._parked_size > self._context.options.max_queue_size:
            self._give_up_parked()
            self._queue.put(self.resumption)

    def _give_up_parked(self) -> None:
        while self._parked:
            self._give_up(*self._parked.popleft())
        self._parked_size = 0

    # -- rows -------------------------------------------------------------------------

    def _handle_rows(self, link: Link, group: RdataGroup) -> Awaitable[None] | None:
        if self.reader.request is not None:
            self._park(link, group)
            return None
        if len(group.rows) > SLICE:
            return self._handle_slices(link, group)
        waiting = self._handle_slice(link, group.tokens, group.rows)
        self._context.yielder.count(len(group.rows))
        return waiting

    async def _handle_slices(self, link: Link, group: RdataGroup) -> None:
        yielder, queue = self._context.yielder, self._queue
        overflows = queue.overflow_count
        for start in range(0, len(group.rows), SLICE):
            if start and yielder.is_due():
                await yielder.take_break()
            tokens = group.tokens[start : start + SLICE]
            rows = group.rows[start : start + SLICE]
            if queue.overflow_count != overflows or self.reader.request is not None:
                rest = RdataGroup(
                    group.stream_name,
                    group.instance_name,
                    group.tokens[start:],
                    group.rows[start:],
                )
                # What is parked already arrived later than these rows.
                self._parked.appendleft((link, rest))
                if queue.overflow_count == overflows:
                    self._count_parked(rest)
                else:
                    await self._give_up_rest(link)
                return
            waiting = self._handle_slice(link, tokens, rows)
            if waiting is not None:
                await waiting
            yielder.count(len(rows))

    def _handle_slice(
        self, link: Link, tokens: list[Any], rows: list[bytes]
    ) -> Awaitable[None] | None:
        context, reader, name = self._context, self.reader, self.name
        if (
            not reader.is_live_on(link)
            or None in tokens
            or tokens[0] <= context.stream.current_token(name)
            or (len(tokens) > 1 and not all(map(lt, tokens, tokens[1:])))
            or not context.is_plausible(name, tokens[-1])
            or (decoded := self._decode_valid(rows)) is None
        ):
            return self._handle_slowly(link, tokens, rows)
        reader.passed_live(link, tokens[-1])
        self.late.record(tokens)
        batches = zip(tokens, [[row] for row in decoded])  # noqa: B905 -- equal lengths
        return self._deliver(batches)

    async def _handle_slowly(
        self, link: Link, tokens: list[Any], rows: list[bytes]
    ) -> None:
        """Handle rows that cannot take the fast path, batch by batch."""
        context, name, reader = self._context, self.name, self.reader
        complete = reader.gather(link, tokens, rows)
        if complete is None:
            context.discard(name, DiscardReason.NOT_CONNECTED, len(rows))
            return
        has_lost_later = False
        for token, texts in complete:
            verdict = reader.batch(link, token, len(texts))
            if verdict is not Verdict.DELIVER:
                context.discard(name, self._reason(verdict), len(texts))
            elif (decoded := self._decode(texts)) is None:
                reader.unreadable(token)
                context.discard(name, DiscardReason.UNDECODABLE, len(texts))
            else:
                self.late.record([token])
                waiting = self._deliver([(token, decoded)])
                if waiting is not None:
                    await waiting
                    # Later rows may have been given up meanwhile.
                    has_lost_later |= reader.has_lost_rows(link)
        if has_lost_later or self._exceeds_bounds(*reader.unfinished_size(link)):
            lost = reader.lost_rows(link)
            context.discard(name, DiscardReason.CATCHING_UP, lost)
        await self.proceed()

    def _reason(self, verdict: Verdict) -> DiscardReason:
        if verdict is Verdict.FETCH:
            return DiscardReason.CATCHING_UP
        is_copy = self.reader.link_count > 1
        return DiscardReason.REPEATED if is_copy else DiscardReason.OLD_TOKEN

    def _exceeds_bounds(self, rows: int, size: int) -> bool:
        options = self._context.options
        return rows > options.max_batch_rows or size > options.max_queue_size

    def _deliver(
        self, batches: Iterable[tuple[int, list[Any]]]
    ) -> Awaitable[None] | None:
        """Deliver batches, and report the resulting position.

        :return: an awaitable if the host returned one for a batch, else ``None``.
        """
        context, name = self._context, self.name
        stream_name, on_rdata = context.name, context.sink.on_rdata
        remaining = iter(batches)
        for token, rows in remaining:
            try:
                waiting = on_rdata(stream_name, name, token, rows)
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self.delivery_failed([(token, rows), *remaining], error)
                return None
            if waiting is not None:
                return self._deliver_remaining([(token, rows), *remaining], waiting)
        context.report_position(name)
        return None

    async def _deliver_remaining(
        self,
        left: Sequence[tuple[int, list[Any]]],
        waiting: Awaitable[None] | None,
    ) -> None:
        """Wait until the host has handled the first batch, then deliver the others.

        :param waiting: the host's awaitable for the first batch.
        """
        context, name = self._context, self.name
        done = 0
        try:
            for done, (token, rows) in enumerate(left):
                if done:
                    waiting = context.sink.on_rdata(context.name, name, token, rows)
                if waiting is not None:
                    await waiting
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self.delivery_failed(left[done:], error)
            return
        context.report_position(name)

    def delivery_failed(
        self, left: Sequence[tuple[int, list[Any]]], error: Exception
    ) -> None:
        """Fetch the batches that the sink failed to handle, after a pause.

        :param left: the failed batch and those after it.
        """
        lost = sum(len(rows) for _, rows in left)
        self._context.discard(self.name, DiscardReason.HANDLER_FAILED, lost)
        attempts = self.reader.delivery_failed([token for token, _ in left])
        self._retry_later(attempts, error)

    # -- announcements ----------------------------------------------------------------

    def _announce(self, link: Link, item: Announcement) -> None:
        """Notify the reader, and the observer of what it finds."""
        context, reader, name = self._context, self.reader, self.name
        observer, now = context.observer, context.clock.seconds()
        if isinstance(item, PositionCommand):
            superseded = reader.drop_unfinished(link)
            context.discard(name, DiscardReason.SUPERSEDED_BY_POSITION, superseded)
            finding = reader.announced(link, item.prev_token, item.new_token, now)
            if finding in (Finding.NOTHING, Finding.AHEAD):
                context.discard(name, DiscardReason.REDUNDANT_POSITION, 1)
                context.report_position(name)
            if finding is Finding.AHEAD:
                observer.observe(
                    AheadOfWriter(context.name, name, reader.position, item.new_token)
                )
        elif isinstance(item, ReportedPosition):
            finding = reader.reported(link, item.prev_token, item.token, now)
            if finding is Finding.AHEAD:
                observer.observe(
                    AheadOfWriter(context.name, name, reader.position, item.token)
                )
            elif finding is Finding.GAP and not item.is_first:
                observer.observe(
                    GapFound(context.name, name, reader.position, item.token)
                )
        elif isinstance(item, ReportedEpoch):
            reader.epoch_reported(
                link, item.token, item.epoch, has_restarted=item.has_restarted
            )
        else:
            lost = reader.lost_rows(link)
            context.discard(name, DiscardReason.CATCHING_UP, lost)

    async def found_removed(self, removed: RemovedWriter) -> None:
        """Fetch the rows of this writer, which was removed."""
        context, reader, upto = self._context, self.reader, removed.upto_token
        was_draining = reader.is_draining
        finding = reader.removed(upto, is_deleted=removed.is_deleted)
        if finding is Finding.GAP:
            position = reader.position
            if not was_draining and upto > position:
                context.observer.observe(
                    RemovedWriterFound(context.name, self.name, position, upto)
                )
            await self.resume()
        elif finding is Finding.EXPECTED and self._drained_upto is None:
            self._report_drained(reader.position)

    def _report_drained(self, upto: int) -> None:
        self._drained_upto = upto
        context = self._context
        context.observer.observe(RemovedWriterDrained(context.name, self.name, upto))

    async def found_stored(self, token: int) -> None:
        """Fetch the rows up to the position that the writer has stored."""
        context, reader = self._context, self.reader
        if reader.stored(token) is Finding.GAP:
            context.observer.observe(
                UnannouncedFound(context.name, self.name, reader.position, token)
            )
            await self.proceed()

    # -- actions ----------------------------------------------------------------------

    async def proceed(self) -> None:
        """Take the reader's actions until there is none left."""
        clock, reader = self._context.clock, self.reader
        while (action := reader.next(clock.seconds())) is not None:
            waiting = self._execute(action)
            if waiting is not None:
                try:
                    await waiting
                except Exception as error:  # noqa: BLE001 -- reported to the observer
                    self._fail(error)

    def _execute(self, action: Action) -> Awaitable[None] | None:
        match action:
            case Fetch():
                self._begin_fetch(action)
            case Rewind():
                return self._rewind(action)
            case BeginEpoch():
                return self._begin_epoch(action.epoch)
            case Advance():
                return self._advance(action.token)
            case Pause():
                self._pause(action.seconds)
            case Connected():
                self._report_connected(action.link)
            case Ask():
                self._ask(action.link)
            case Refuted():
                self._report_refuted(action)
            case Finished():
                self._report_finished(action)
        return None

    async def resume(self) -> None:
        """Handle what was parked, unless only it would be fetched again."""
        reader = self.reader
        if reader.has_more_to_fetch:
            # More pages follow: the parked items only raise the target.
            self._give_up_parked()
        await self.proceed()
        while self._parked and reader.request is None:
            link, item = self._parked.popleft()
            self._parked_size -= size_of(item)
            waiting = self.handle(link, item)
            if waiting is not None:
                await waiting

    def _begin_fetch(self, fetch: Fetch) -> None:
        context = self._context
        event = CatchUpEvent(
            context.name, self.name, fetch.from_token, fetch.upto_token
        )
        self._stream.fetches[fetch] = Waiters()
        context.run_as_background_process(
            f"replication_catch_up_{context.name}",
            partial(self._fetch_page, fetch, event),
        )

    async def _fetch_page(self, fetch: Fetch, event: CatchUpEvent) -> None:
        context = self._context
        context.observer.observe(event)
        started = context.clock.seconds()
        result: StreamUpdateResult | Exception
        try:
            with context.observer.span(event):
                result, is_partial = await self._stream.source.fetch(self.name, fetch)
        except Exception as error:  # noqa: BLE001 -- reported when it is handled
            result, is_partial = error, False
        seconds = context.clock.seconds() - started
        context.observer.observe(CatchUpStepEnded(event, seconds))
        self._queue.call(partial(self._handle_page, fetch, result, is_partial))
        self._stream.fetches.pop(fetch).fire()

    async def _handle_page(
        self, fetch: Fetch, result: StreamUpdateResult | Exception, is_partial: bool
    ) -> None:
        """Deliver a fetched page, while the next one is being fetched.

        :param result: the page, or the error with which the fetch failed.
        :param is_partial: whether the page comes from the writer's backlog.
        """
        page = self._accept_page(fetch, result)
        if page is not None:
            if not (is_partial or self._context.description.held_in_memory):
                self._resync = Resync.FULL
            elif self._resync is None:
                self._resync = Resync.PARTIAL
            event = self._event()
            await self.proceed()
            if self.reader.page is page:
                await self._deliver_page(page, event, is_partial)
        await self.resume()

    def _accept_page(
        self, fetch: Fetch, result: StreamUpdateResult | Exception
    ) -> Page | None:
        """Return the page to deliver, if there is one."""
        if self.reader.request is not fetch:
            # The page is not wanted any more.
            return None
        if isinstance(result, DatabaseBehindError):
            self._retry_later(self.reader.source_behind(), result)
            return None
        if isinstance(result, Exception):
            self._fail(result)
            return None
        try:
            return self.reader.page_fetched(fetch, result)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            # The host's own source may have returned anything.
            self._fail(error)
            return None

    async def _deliver_page(
        self, page: Page, event: CatchUpEvent, is_partial: bool
    ) -> None:
        context, reader, name = self._context, self.reader, self.name
        stream_name, on_rdata = context.name, context.sink.on_rdata
        batches = self._stream.decoder.decode_page(
            name, page, skips_invalid=not is_partial
        )
        # Record them before the position advances; what fails is fetched again.
        self.late.record(page.tokens)
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
                    self._fail(error)
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

    async def _rewind(self, rewind: Rewind) -> None:
        context, name = self._context, self.name
        current = context.stream.current_token(name)
        await self._save_position(rewind.token)
        if rewind.epoch is not None:
            # Begin the epoch only after the rewind: a token of the old epoch must never
            # be persisted with the new epoch.
            await self._save_epoch(rewind.epoch)
        self.reader.rewound(rewind.epoch)
        self.late.rewind(rewind.token)
        self._resync = Resync.FULL
        kind = StreamReset if rewind.is_reset else PositionLowered
        context.observer.observe(kind(context.name, name, current, rewind.token))

    async def _begin_epoch(self, epoch: str) -> None:
        current = self._context.stream.current_token(self.name)
        await self._save_epoch(epoch)
        if current > 0:
            # With the epoch, the sink has saved the position 0.
            await self._save_position(current)
        self.reader.epoch_begun(epoch)

    async def _save_epoch(self, epoch: str) -> None:
        waiting = self._context.save_epoch(self.name, epoch)
        if waiting is not None:
            await waiting

    async def _save_position(self, token: int) -> None:
        context = self._context
        waiting = context.sink.on_position(context.name, self.name, token)
        if waiting is not None:
            await waiting

    async def _advance(self, token: int) -> None:
        await self._save_position(token)
        self.reader.advanced(token, self._context.clock.seconds())

    def _pause(self, seconds: float) -> None:
        self._timer.start(seconds, self._queue.call, self._end_pause)

    def _end_pause(self) -> Awaitable[None]:
        self.reader.timer_due()
        return self.resume()

    def _ask(self, link: Link) -> None:
        self._stream.ask(link)

    def _report_connected(self, link: Link) -> None:
        context = self._context
        context.observer.observe(
            StreamConnected(link.connection.name, context.name, self.name)
        )
        self._stream.search.request()

    def _report_refuted(self, action: Refuted) -> None:
        context = self._context
        context.observer.observe(
            PositionRefuted(context.name, self.name, action.token, action.last_token)
        )
        context.discard(self.name, DiscardReason.IMPLAUSIBLE, 1)

    def _report_finished(self, action: Finished) -> None:
        context = self._context
        self._timer.stop()
        if self._resync is not None:
            context.observer.observe(Resynced(context.name, self.name, self._resync))
            self._resync = None
        context.report_position(self.name)
        if action.drained_upto is not None:
            self._report_drained(action.drained_upto)

    # -- failures ---------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        self._retry_later(self.reader.failed(), error)

    def _retry_later(self, attempts: int, error: Exception) -> None:
        context = self._context
        delay = context.options.backoff.delay(attempts)
        if isinstance(error, DatabaseBehindError):
            # It has the rows soon, and no event will show when.
            delay = min(delay, STANDBY_RETRY_DELAY)
        context.observer.observe(CatchUpFailed(self._event(), error, attempts, delay))
        context.observer.observe(Resynced(context.name, self.name, Resync.FAILED))
        if self.reader.link_count:
            self._pause(delay)

    def _event(self) -> CatchUpEvent:
        return CatchUpEvent(self._context.name, self.name, *self.reader.missing_range)

    # -- rows that did not arrive -----------------------------------------------------

    def range_to_verify(self, stored: int) -> tuple[int, int] | None:
        """Return the range of delivered tokens to compare with the database.

        :param stored: the writer's stored position.
        :return: the range's exclusive lower and inclusive upper bound; ``None`` if
            nothing is to be verified now.
        """
        if self.reader.is_catching_up:
            return None
        position = self._context.stream.current_token(self.name)
        return self.late.range_upto(min(stored, position))

    def verify(self, committed: Sequence[int], upto: int) -> None:
        """Compare delivered tokens with committed ones; deliver the missing rows late.

        :param committed: all committed tokens from the lower bound that
            :meth:`range_to_verify` returned up to ``upto``.
        """
        if self.late.verify(committed, upto):
            self._queue.call(self._deliver_late)

    async def _deliver_late(self) -> None:
        if not await self.late.deliver() and self.reader.link_count:
            self._late_timer.start(LATE_RETRY, self._queue.call, self._deliver_late)
