"""Catching up with a writer, one page at a time.

Theory of operation: a
:class:`~synapse_replication.handlers.receiving.writer_state.CatchUpState` in the
writer's state contains the cursor and the target. :meth:`CatchUpRunner.run` fetches
pages until the target is reached. If other work is waiting in the stream's queue after
a page, the catch-up yields: it appends a step to the queue. If the source or the host
fails, the step is appended after a delay, which grows with each failed attempt up to a
maximum. The cursor advances with every delivered token, so that a retry does not repeat
the rows of that token.

A token that a writer is said to have reached, by a POSITION, a report or a row, is a
*claim* until the source confirms it: a claim too far above the source's last token is
refuted. If a position advances without rows, the range is recorded
(:mod:`~synapse_replication.handlers.receiving.silent_moves`), so that the position can
be reverted if the claim proves false later. No ranges are recorded if the option
``reverts_positions`` is false.

A catch-up that is not running has a step in the queue, a scheduled retry, or both.
If its link is lost, the catch-up is abandoned together with the writer's state, so that
rows of the writer that are still queued cannot be delivered past the gap.

See docs/failure-modes.rst: failure-paged-catch-up, failure-million-rows-behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from synapse_replication.handlers.epochs import HandledEpochs
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    DiscardReason,
    Resync,
)
from synapse_replication.handlers.receiving.claim_rate import ClaimRate
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.items import CatchUpStep
from synapse_replication.handlers.receiving.pages import PageSource
from synapse_replication.handlers.receiving.removed_writer_search import (
    RemovedWriterSearch,
)
from synapse_replication.handlers.receiving.silent_moves import SilentMoves
from synapse_replication.handlers.receiving.stream_queue import StreamQueue
from synapse_replication.handlers.receiving.writer_state import (
    CatchUpState,
    Link,
    LinkedWriter,
)
from synapse_replication.streams.catchup import Page, ReaderPosition, check_page

__all__ = ["CatchUpRunner"]


class CatchUpRunner:
    """Runner of the catch-ups of one stream.

    :param queue: the stream's queue, to which steps are added.
    :param search: the search for removed writers, requested when a writer becomes
        connected.
    :ivar epochs: for each writer, the epoch of its delivered rows.
    """

    def __init__(
        self,
        context: StreamContext,
        queue: StreamQueue,
        decoder: RowDecoder,
        search: RemovedWriterSearch,
    ) -> None:
        self._context = context
        self._queue = queue
        self._decoder = decoder
        self._search = search
        self._pages = PageSource(context)
        self.epochs = HandledEpochs(context.name, context.sink)
        self._silent = SilentMoves()
        self._rate = ClaimRate()

    def schedule(
        self,
        writer: LinkedWriter,
        from_token: int,
        tokens: Sequence[int],
        error: Exception | None = None,
        restart_token: int | None = None,
    ) -> None:
        """Schedule a catch-up from ``from_token`` to the greatest of ``tokens``.

        If the writer is catching up, its current catch-up is extended instead.

        :param tokens: the tokens of the received rows; at least one.
        :param error: the failure of the host that made the catch-up necessary, if any;
            a new catch-up then starts after a delay.
        :param restart_token: the position to rewind to first; ``None`` if no rewind is
            needed.
        """
        run = writer.catch_up
        if run is None:
            is_new = True
            run = CatchUpState(from_token, min(tokens), restart_token)
            writer.catch_up = run
        else:
            # The catch-up is running, or its next step is already scheduled.
            is_new = False
            run.cursor = min(run.cursor, from_token)
            if run.restart_token is None:
                run.restart_token = restart_token
        for token in sorted(tokens):
            run.add_claim(token)
        if not is_new:
            if error is not None:
                self._context.observer.failure(
                    f"handling rows of {self._context.name}", error
                )
        elif error is not None:
            self._schedule_retry(writer, run, error)
        elif writer.link.is_lost:
            writer.forget()
        elif not self._must_wait(writer, run):
            self._enqueue_step(writer, run)

    async def begin(self, writer: LinkedWriter, run: CatchUpState) -> None:
        """Begin or retry a catch-up; delay it if many have begun recently.

        :param run: becomes the writer's current catch-up.
        """
        writer.catch_up = run
        if writer.link.is_lost or not self._must_wait(writer, run):
            await self.run(writer, run)

    def _must_wait(self, writer: LinkedWriter, run: CatchUpState) -> bool:
        """Return whether the rate limit delays a catch-up; if so, schedule its step."""
        if run.cursor >= run.target and run.restart_token is None:
            # This catch-up will not query the source.
            return False
        clock = self._context.clock
        wait = self._rate.wait_before(writer.instance_name, clock.seconds())
        if wait and (run.retry is None or not run.retry.active()):
            run.retry = clock.call_later(wait, self._enqueue_step, writer, run)
        return wait > 0

    def _enqueue_step(self, writer: LinkedWriter, run: CatchUpState) -> None:
        if not run.is_queued:
            run.is_queued = True
            self._queue.add(writer.link, CatchUpStep(writer, run))

    async def handle_step(self, link: Link, item: CatchUpStep) -> None:
        """Begin, continue or retry a catch-up, unless it has ended or was replaced."""
        item.catch_up.is_queued = False
        if item.writer.catch_up is item.catch_up:
            await self.run(item.writer, item.catch_up)

    async def run(self, writer: LinkedWriter, run: CatchUpState) -> None:
        """Run a catch-up until it finishes, fails, or yields to other waiting work.

        If the link is lost, the catch-up is abandoned.

        :param run: becomes the writer's current catch-up.
        """
        writer.catch_up = run
        run.cancel_retry()
        try:
            self._limit_rewind(writer.instance_name, run)
            if run.restart_token is not None:
                await self._rewind(writer.instance_name, run, run.restart_token)
            if run.cursor < run.target and not await self._fetch(writer, run):
                return
            await self._advance_to_target(writer, run)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._schedule_retry(writer, run, error)
            return
        self._finish(writer, run)

    async def _fetch(self, writer: LinkedWriter, run: CatchUpState) -> bool:
        """Fetch and deliver pages; return whether the target is reached.

        If it is not reached, the next step is queued, or the link is lost.
        """
        event = self._event(writer, run)
        with self._context.observer.catch_up(event):
            while run.cursor < run.target:
                if writer.link.is_lost:
                    writer.forget()
                    return False
                await self._fetch_page(writer, run, event)
                if self._queue and run.cursor < run.target:
                    self._enqueue_step(writer, run)
                    return False
        return True

    async def _advance_to_target(self, writer: LinkedWriter, run: CatchUpState) -> None:
        """Deliver the target as the position, if no row has reached it.

        For a writer that is not connected yet, deliver it even if a row has reached it.
        """
        context, instance_name = self._context, writer.instance_name
        current = context.stream.current_token(instance_name)
        if run.target > current or (run.target == current and not writer.is_connected):
            waiting = context.sink.on_position(context.name, instance_name, run.target)
            if waiting is not None:
                await waiting
            if context.options.reverts_positions:
                self._silent.moved(
                    instance_name, current, run.target, context.clock.seconds()
                )

    def _finish(self, writer: LinkedWriter, run: CatchUpState) -> None:
        context, instance_name = self._context, writer.instance_name
        writer.catch_up = None
        if run.is_refuted and not writer.is_connected:
            # The writer's position is unknown until its next POSITION.
            writer.forget()
            return
        if run.has_fetched:
            kind = Resync.FULL if run.is_full else Resync.PARTIAL
            context.observer.resynced(context.name, instance_name, kind)
        context.report_position(instance_name)
        if run.is_drain:
            # If the writer returns, it announces its position first.
            writer.forget()
            context.observer.removed_writer_drained(
                context.name, instance_name, run.target
            )
        else:
            self.connected(writer)

    def _limit_rewind(self, instance_name: str, run: CatchUpState) -> None:
        """Do not rewind below rows that were delivered after the rewind was planned.

        The sink of ``dropin`` may have fetched and delivered such rows by itself. In a
        resettable stream, the rewind is not limited.
        """
        if run.restart_token is None or self._context.description.resettable:
            return
        start = self.undelivered_from(instance_name)
        if start > run.restart_token:
            is_current = start == self._context.stream.current_token(instance_name)
            run.restart_token = None if is_current else start
            run.cursor = max(run.cursor, start)

    async def _rewind(
        self, instance_name: str, run: CatchUpState, restart_token: int
    ) -> None:
        context = self._context
        current = context.stream.current_token(instance_name)
        waiting = context.sink.on_position(context.name, instance_name, restart_token)
        if waiting is not None:
            await waiting
        if run.epoch is not None:
            # Begin the epoch only after the rewind: a token of the old epoch must never
            # be persisted with the new epoch.
            await self.epochs.begin(instance_name, run.epoch)
        self._silent.forget(instance_name)
        run.restart_token = None
        run.is_full = True
        context.observer.stream_reset(
            context.name, instance_name, current, restart_token
        )

    def reader_position(
        self, instance_name: str, run: CatchUpState | None = None
    ) -> ReaderPosition:
        """Return this instance's position in a writer's rows.

        :param run: the writer's current catch-up.
        """
        current = self._context.stream.current_token(instance_name)
        undelivered_from = self._silent.start_of(instance_name, current)
        if run is None:
            return ReaderPosition(current, undelivered_from)
        return ReaderPosition(current, undelivered_from, run.cursor, run.target)

    def undelivered_from(self, instance_name: str) -> int:
        """Return the token above which no row of a writer was delivered.

        It is below the position if the position was reached without a row.
        """
        current = self._context.stream.current_token(instance_name)
        return self._silent.start_of(instance_name, current)

    def start_to_check(self, instance_name: str) -> int:
        """Return the token above which to query the source about the current position.

        The query is made when the writer announces the same position again. The token
        is the position itself if a row reached it, if it was checked recently, if the
        stream is resettable, or if positions are never reverted.
        """
        current = self._context.stream.current_token(instance_name)
        reverts = self._context.options.reverts_positions
        if self._context.description.resettable or not reverts:
            return current
        return self._silent.start_to_check(
            instance_name, current, self._context.clock.seconds()
        )

    async def _fetch_page(
        self, writer: LinkedWriter, run: CatchUpState, event: CatchUpEvent
    ) -> None:
        context, description = self._context, self._context.description
        instance_name, from_token = writer.instance_name, run.cursor
        result, upto_token, is_partial = await self._pages.next_page(instance_name, run)
        run.is_full |= not (is_partial or description.held_in_memory)
        run.has_fetched = True
        if result.last_token is not None and result.last_token < run.target:
            self._refute(writer, run, result.last_token)
            upto_token = min(upto_token, run.target)
            if upto_token <= from_token:
                return
        page = check_page(result, from_token, upto_token, allow_encoded=True)
        # Do not read ahead in an idempotent stream: further rows below its position may
        # be committed in the meantime.
        is_wanted = not (writer.link.is_lost or description.idempotent)
        if page.upto_token < run.target and is_wanted:
            self._pages.read_ahead(instance_name, run, page.upto_token)
        try:
            await self._deliver_page(instance_name, run, page)
        finally:
            if run.cursor > from_token:
                self._silent.delivered(instance_name, run.cursor)
        run.cursor = page.upto_token
        run.attempts = 0
        context.observer.catch_up_page(event, len(page.tokens), page.upto_token)
        context.report_position(instance_name)
        context.pacer.count(len(page.tokens))
        if context.pacer.is_due():
            await context.pacer.take_break()

    async def _deliver_page(
        self, instance_name: str, run: CatchUpState, page: Page
    ) -> None:
        name, on_rdata = self._context.name, self._context.sink.on_rdata
        for token, rows in self._decoder.decode_page(instance_name, page):
            if rows:
                waiting = on_rdata(name, instance_name, token, rows)
                if waiting is not None:
                    await waiting
            run.cursor = token
            run.attempts = 0

    def _refute(self, writer: LinkedWriter, run: CatchUpState, last_token: int) -> None:
        context, instance_name = self._context, writer.instance_name
        context.observer.position_refuted(
            context.name, instance_name, run.target, last_token
        )
        context.discard(instance_name, DiscardReason.IMPLAUSIBLE, 1)
        # Tolerate the plausible distance: after a failover to a standby, the database's
        # last token may be too low.
        is_exact = context.description.held_in_memory
        distance = context.options.plausible_distance
        run.refute(last_token, 0 if is_exact else distance)
        if run.is_incomplete and is_exact:
            # The writer itself is the source: all rows up to its last token exist.
            run.add_claim(last_token)
        elif run.is_incomplete:
            # A claim that was dropped from run.claims may be true. Its rows are fetched
            # with the writer's next row.
            writer.has_lost_rows = True

    def _schedule_retry(
        self, writer: LinkedWriter, run: CatchUpState, error: Exception
    ) -> None:
        context, observer = self._context, self._context.observer
        run.attempts += 1
        delay = context.options.backoff.delay(run.attempts)
        observer.catch_up_failed(self._event(writer, run), error, run.attempts, delay)
        observer.resynced(context.name, writer.instance_name, Resync.FAILED)
        if writer.link.is_lost:
            writer.forget()
        else:
            run.retry = context.clock.call_later(delay, self._enqueue_step, writer, run)

    def _event(self, writer: LinkedWriter, run: CatchUpState) -> CatchUpEvent:
        return CatchUpEvent(
            self._context.name, writer.instance_name, run.cursor, run.target
        )

    def connected(self, writer: LinkedWriter) -> None:
        """Mark a writer as connected, after its POSITION was handled completely."""
        if not writer.is_connected:
            writer.is_connected = True
            self._context.observer.stream_connected(
                writer.link.connection.name, self._context.name, writer.instance_name
            )
            self._search.request(writer.link)
