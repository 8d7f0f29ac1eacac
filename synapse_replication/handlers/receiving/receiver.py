"""One received stream: from queued rows and positions to the host's row sink.

Theory of operation: everything about a stream that arrives, on any connection,
goes through one queue, one item at a time. Rows are still JSON text there; they
are decoded here, as many together as came together.

A writer that is *live* on a link has its rows delivered as they come. All that may
go wrong has one answer, a *catch-up* of that writer: a gap before a POSITION, a row
that cannot be decoded, a batch of which a row was lost, a host that failed, a queue
that was full. While a writer catches up, its rows are not delivered; they only
raise the target. The catch-up goes a page at a time and gives way to whatever else
waits in the queue, so other writers of the stream go on. It ends when the rows up
to the target are delivered; then the writer is live again. A failed attempt is made
again later, with back-off, from the last token that was delivered. It ends with its
connection: the next POSITION, on another one, finds the gap by itself.

A position further away than the stream takes to be plausible is a claim: the range
before it is fetched, even if the writer says that it is empty, so that the source is
asked whether the position exists. A row that lies in a stretch which the position
passed without rows shows that the position was false; the stretch is fetched again.

Invariant: a writer's position passes a token only when all of its rows up to there
were delivered, or its POSITION said that there are none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from operator import lt
from typing import Any, cast

import attrs

from synapse_replication.backoff import Backoff
from synapse_replication.errors import RowDecodeError
from synapse_replication.handlers.interfaces import BackgroundRunner, Clock, RowSink
from synapse_replication.handlers.observer import (
    DiscardReason,
    ReplicationObserver,
)
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.delivery import Delivery
from synapse_replication.handlers.receiving.overflow import ROW_OVERHEAD, Item, coalesce
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.receiving.queue import DrainedQueue, Pacer
from synapse_replication.handlers.receiving.removed_writers import RemovedWriterDrains
from synapse_replication.handlers.receiving.writer_state import (
    CatchUpState,
    CatchUpStep,
    DroppedRange,
    FoundRemoved,
    Link,
    LostRow,
    NewEpoch,
    ReportedPosition,
    WriterState,
)
from synapse_replication.streams.catchup import (
    Gap,
    Redundant,
    Reset,
    plan_catch_up,
)
from synapse_replication.streams.stream import Stream
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import InterleavedRun, RdataRun

__all__ = ["ReceiverOptions", "StreamReceiver"]

#: Rows that are decoded and delivered without a look at the clock.
_SLICE = 100


@attrs.frozen
class ReceiverOptions:
    """The bounds of a received stream.

    :ivar max_queue_size: bytes that wait in its queue, and of an unfinished batch;
        beyond, rows are fetched again instead.
    :ivar max_batch_rows: rows of an unfinished batch; beyond, they are fetched
        when the batch is finished.
    :ivar break_after_rows: rows handled before the reactor gets its turn.
    :ivar break_after_seconds: s of handling before the reactor gets its turn.
    :ivar backoff: between attempts to catch up.
    :ivar takes_positions_back: fetch again what a position skipped without rows, if
        the writer contradicts it. Not for a recording, which nobody can be asked about.
    """

    max_queue_size: int = 8 * 1024 * 1024
    max_batch_rows: int = 10_000
    break_after_rows: int = 2_000
    break_after_seconds: float = 0.01
    backoff: Backoff = attrs.field(factory=Backoff)
    takes_positions_back: bool = True


class StreamReceiver:
    """Receives one stream, of all its writers, on all links.

    Used in the reactor's thread only.
    """

    def __init__(
        self,
        stream: Stream,
        sink: RowSink,
        clock: Clock,
        run_as_background_process: BackgroundRunner,
        observer: ReplicationObserver,
        options: ReceiverOptions,
        pacer: Pacer,
        partial: PartialResync | None = None,
    ) -> None:
        self._stream = stream
        self._description = stream.description
        self._name = stream.description.name
        self._sink = sink
        self._clock = clock
        self._observer = observer
        self._options = options
        self._pacer = pacer
        self._queue: DrainedQueue[tuple[Link, Item]] = DrainedQueue(
            self._name,
            self._consume,
            lambda waiting: coalesce(
                waiting, stream.description.resettable, self._discard
            ),
            run_as_background_process,
            observer,
            self._pacer,
            options.max_queue_size,
        )
        self._catch_ups = CatchUpRunner(
            stream,
            sink,
            clock,
            run_as_background_process,
            observer,
            options.backoff,
            self._pacer,
            self._put_step,
            lambda: bool(self._queue),
            self.look_for_removed_writers,
            partial,
            takes_positions_back=options.takes_positions_back,
        )
        self._drains = RemovedWriterDrains(
            stream,
            clock,
            run_as_background_process,
            observer,
            options.backoff,
            self._catch_ups,
            lambda link, item: self._queue.put((link, item), 1, ROW_OVERHEAD),
        )
        self._delivery = Delivery(stream, sink, observer, self._catch_ups)
        self._is_plausible: Callable[[str, int], bool] = getattr(
            stream, "is_plausible", _is_always_plausible
        )
        # Late rows of an idempotent stream are delivered, and rows alone never reset
        # one that may begin again.
        self._can_fall_back = not (
            stream.description.idempotent or stream.description.resettable
        )

    @property
    def stream_name(self) -> str:
        """The name of the stream."""
        return self._name

    # -- from the handler ---------------------------------------------------------

    def put_rows(self, link: Link, run: RdataRun) -> None:
        """Take rows of one writer that came together, in their order of arrival."""
        count = len(run.rows)
        self._observer.rows_received(self._name, count)
        if (token := run.tokens[-1]) is not None:
            self._observer.position_announced(self._name, run.instance_name, token)
        size = sum(map(len, run.rows)) + count * ROW_OVERHEAD
        self._queue.put((link, run), count, size)

    def put_interleaved(self, link: Link, run: InterleavedRun) -> None:
        """Take rows of several writers that came together, in order of arrival."""
        count = len(run.rows)
        self._observer.rows_received(self._name, count)
        newest = dict(zip(run.instance_names, run.tokens, strict=True))
        for instance_name, token in newest.items():
            if token is not None:
                self._observer.position_announced(self._name, instance_name, token)
        size = sum(map(len, run.rows)) + count * ROW_OVERHEAD
        self._queue.put((link, run), count, size)

    def put_lost_row(self, link: Link, instance_name: str) -> None:
        """Take note, in its place, of a row that could not be read."""
        self._queue.put((link, LostRow(instance_name)), 1, ROW_OVERHEAD)

    def look_for_removed_writers(self, link: Link) -> None:
        """Look for writers that were removed, and have their rows fetched, soon."""
        self._drains.look(link)

    def put_position(self, link: Link, position: PositionCommand) -> None:
        """Take a writer's announcement; drop it at once if it says nothing new."""
        instance_name = position.instance_name
        self._observer.position_announced(self._name, instance_name, position.new_token)
        if position.prev_token == position.new_token:
            # A process has started, this writer perhaps, instead of another one.
            self.look_for_removed_writers(link)
        state = link.writers.get((self._name, instance_name))
        if not self._description.resettable:
            current = self._stream.current_token(instance_name)
            is_below = position.new_token < current
            # A position that was reached without a row is checked if it is confirmed.
            is_redundant = is_below or (
                position.new_token == current
                and (
                    position.prev_token < current
                    or self._catch_ups.undelivered_from(instance_name) == current
                )
            )
            if state is not None and state.is_live and is_redundant:
                self._discard(instance_name, DiscardReason.REDUNDANT_POSITION, 1)
            else:
                self._queue.put((link, position), 1, ROW_OVERHEAD)
            if is_below:
                told = ReportedPosition(
                    instance_name, position.new_token, is_below=True
                )
                self._queue.put((link, told), 1, ROW_OVERHEAD)
            return
        self._queue.put((link, position), 1, ROW_OVERHEAD)

    def enqueue_reported_position(
        self, link: Link, instance_name: str, token: int, *, is_first: bool = False
    ) -> None:
        """Record how far a writer says that it told us.

        :param is_first: it has just started.

        It waits for its turn behind the rows and positions that came before it on
        the same channel; being behind it then means that something did not come.
        """
        state = link.writers.get((self._name, instance_name))
        current = self._stream.current_token(instance_name)
        if state is None or not state.is_live or token != current:
            told = ReportedPosition(instance_name, token, is_first, token < current)
            self._queue.put((link, told), 1, ROW_OVERHEAD)

    def put_epoch(self, link: Link, instance_name: str, token: int, epoch: str) -> None:
        """Record a writer's epoch. What it held in memory in others is gone."""
        if self._description.held_in_memory and not self._catch_ups.is_of_epoch(
            instance_name, epoch
        ):
            item = NewEpoch(instance_name, token, epoch)
            self._queue.put((link, item), 1, ROW_OVERHEAD)

    def _put_step(self, link: Link, step: CatchUpStep) -> None:
        self._queue.put((link, step), 1, ROW_OVERHEAD)

    async def wait_until_empty(self) -> None:
        """Wait until everything that arrived was handled."""
        await self._queue.wait_until_empty()

    # -- the queue ------------------------------------------------------------------

    def _consume(self, queued: tuple[Link, Item]) -> Awaitable[None] | None:
        link, item = queued
        if isinstance(item, RdataRun):
            return self.handle_rows(link, item)
        return self._dispatch(link, item)

    async def _dispatch(self, link: Link, item: Item) -> None:
        if isinstance(item, InterleavedRun):
            await self._take_interleaved(link, item)
        elif isinstance(item, PositionCommand):
            await self.handle_position(link, item)
        elif isinstance(item, CatchUpStep):
            item.catch_up.is_queued = False
            if item.state.catch_up is item.catch_up:
                await self._catch_ups.run(
                    link, item.instance_name, item.state, item.catch_up
                )
        elif isinstance(item, DroppedRange):
            await self._take_collapsed(link, item)
        elif isinstance(item, ReportedPosition):
            await self._handle_reported_position(link, item)
        elif isinstance(item, NewEpoch):
            await self._catch_ups.take_epoch(link, item)
        elif isinstance(item, FoundRemoved):
            await self._drains.run(link, item)
        elif isinstance(item, LostRow):
            state = link.writers.get((self._name, item.instance_name))
            if state is not None:
                state.pending = []
                state.has_lost_rows = True

    # -- rows -----------------------------------------------------------------------

    def handle_rows(self, link: Link, run: RdataRun) -> Awaitable[None] | None:
        """Handle rows of one writer; return what to wait for, if there is anything.

        Mostly there is not, so nothing is made that could be waited for.
        """
        instance_name = run.instance_name
        state = link.writers.get((self._name, instance_name))
        if state is None:
            self._discard(instance_name, DiscardReason.NOT_CONNECTED, len(run.rows))
            return None
        if len(run.rows) > _SLICE:
            return self._take_slices(link, state, run)
        waiting = self.handle_slice(link, instance_name, state, run.tokens, run.rows)
        self._pacer.count(len(run.rows))
        return waiting

    async def _take_slices(self, link: Link, state: WriterState, run: RdataRun) -> None:
        for start in range(0, len(run.rows), _SLICE):
            if start and self._pacer.is_due():
                await self._pacer.take_break()
            tokens = run.tokens[start : start + _SLICE]
            rows = run.rows[start : start + _SLICE]
            waiting = self.handle_slice(link, run.instance_name, state, tokens, rows)
            if waiting is not None:
                await waiting
            self._pacer.count(len(rows))

    async def _take_interleaved(self, link: Link, run: InterleavedRun) -> None:
        """Take rows of several writers, a slice at a time, decoded together."""
        # Where they stand whose position is to be told: once, not with each row.
        moved: dict[str, int] = {}
        for start in range(0, len(run.rows), _SLICE):
            if start and self._pacer.is_due():
                self._report_positions(moved)
                await self._pacer.take_break()
            part = run.part(start, start + _SLICE)
            typed = None
            if None not in part.tokens and self._are_plausible(part):
                with suppress(RowDecodeError):
                    decoded = self._description.codec.decode(part.rows)
                    typed = None if decoded.with_extra_fields else decoded.rows
            if typed is None:
                self._report_positions(moved)
                for of_writer in part.runs():
                    if (waiting := self.handle_rows(link, of_writer)) is not None:
                        await waiting
            else:
                await self._take_typed(link, part, typed, moved)
            self._pacer.count(len(part.rows))
        self._report_positions(moved)

    def _report_positions(self, moved: dict[str, int]) -> None:
        for instance_name in moved:
            self._catch_ups.position_changed(instance_name)
        moved.clear()

    async def _take_typed(
        self,
        link: Link,
        part: InterleavedRun,
        typed: list[Any],
        moved: dict[str, int],
    ) -> None:
        """Deliver single rows of live writers, each as it comes; others as ever.

        :param moved: live writers, and where they stand, which is to be told later.
        """
        name = self._name
        on_rdata = self._sink.on_rdata
        for index, (instance_name, token, row) in enumerate(
            # None is not among them.
            zip(part.instance_names, cast(list[int], part.tokens), typed, strict=True)
        ):
            position = moved.get(instance_name)
            is_live = position is not None
            if position is None:
                position = self._stream.current_token(instance_name)
                state = link.writers.get((name, instance_name))
                is_live = state is not None and state.is_live
            if not is_live or token <= position:
                moved.pop(instance_name, None)
                single = RdataRun(name, instance_name, [token], [part.rows[index]])
                if (waiting := self.handle_rows(link, single)) is not None:
                    await waiting
                continue
            try:
                waiting = on_rdata(name, instance_name, token, [row])
                if waiting is not None:
                    await waiting
                moved[instance_name] = token
            except Exception as error:  # noqa: BLE001 -- the observer is told
                if moved.pop(instance_name, None) is not None:
                    self._catch_ups.position_changed(instance_name)
                state = link.writers[name, instance_name]
                self._delivery.failed(
                    link, instance_name, state, [(token, [row])], error
                )

    def _are_plausible(self, part: InterleavedRun) -> bool:
        tokens = cast(list[int], part.tokens)
        greatest = max(tokens)
        return self._is_plausible(part.instance_names[tokens.index(greatest)], greatest)

    @staticmethod
    def _is_fast_path(state: WriterState, tokens: Sequence[Any], position: int) -> bool:
        """Return whether these are single rows of a live writer, ascending."""
        return (
            state.is_live
            and None not in tokens
            and tokens[0] > position
            and (len(tokens) == 1 or all(map(lt, tokens, tokens[1:])))
        )

    def handle_slice(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        tokens: list[Any],
        rows: list[bytes],
    ) -> Awaitable[None] | None:
        """Handle a slice of rows of one writer; return what to wait for, if anything.

        :param tokens: as many as rows; ``None`` where more rows of a token follow.
        """
        position = self._stream.current_token(instance_name)
        if (
            not self._is_fast_path(state, tokens, position)
            or not self._is_plausible(instance_name, tokens[-1])
            or (typed := self._delivery.decode(rows)) is None
        ):
            return self._handle_slow_path(link, instance_name, state, tokens, rows)
        batches = zip(tokens, [[row] for row in typed])  # noqa: B905 -- equal
        taken = self._delivery.deliver(link, instance_name, state, batches)
        if taken is True:
            self._catch_ups.position_changed(instance_name)
        elif taken is not False:
            return self._report_when_delivered(instance_name, taken)
        return None

    async def _report_when_delivered(
        self, instance_name: str, taken: Awaitable[bool]
    ) -> None:
        if await taken:
            self._catch_ups.position_changed(instance_name)

    async def _handle_slow_path(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        tokens: list[Any],
        rows: list[bytes],
    ) -> None:
        """Enqueue rows that need a closer look.

        Among them are parts of batches, late or unreadable rows, or rows of a
        writer that catches up.
        """
        whole = state.gather(tokens, rows)
        if whole:
            position = self._stream.current_token(instance_name)
            await self._take_batches(link, instance_name, state, position, whole)
        if self._is_too_much(state.pending):
            # Only now: the batches before it are whole.
            self._discard(instance_name, DiscardReason.CATCHING_UP, len(state.pending))
            state.pending = []
            state.has_lost_rows = True

    def _is_too_much(self, pending: list[bytes]) -> bool:
        most, size = self._options.max_batch_rows, self._options.max_queue_size
        return len(pending) > most or sum(map(len, pending)) > size

    async def _take_batches(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        position: int,
        whole: list[tuple[int, list[bytes]]],
    ) -> None:
        """Deliver what may be delivered; have the rest fetched.

        Late rows of an idempotent stream are delivered even in a catch-up that
        has passed them; nothing above what a catch-up has reached is.
        """
        batches: list[tuple[int, list[Any]]] = []
        # Late rows that were never delivered, and the token above which none was.
        missed: list[int] = []
        missed_above = undelivered_from = self._catch_ups.undelivered_from(
            instance_name
        )
        # The token before the first that must be fetched.
        fetch_from: int | None = None
        if state.catch_up is not None:
            fetch_from = position = max(position, state.catch_up.cursor)
        for token, texts in whole:
            is_late = token <= position
            is_broken = False
            if is_late and token > missed_above and self._can_fall_back:
                missed.append(token)
                self._discard(instance_name, DiscardReason.CATCHING_UP, len(texts))
            elif missed and not is_late:
                # It would be delivered twice: what was missed lies before it.
                missed.append(token)
                self._discard(instance_name, DiscardReason.CATCHING_UP, len(texts))
            elif is_late and not self._description.idempotent:
                self._discard(instance_name, DiscardReason.OLD_TOKEN, len(texts))
            elif state.has_lost_rows:
                # None of the later ones may overtake it, or it would be passed.
                fetch_from = _least(fetch_from, token - 1 if is_late else position)
                self._discard(instance_name, DiscardReason.CATCHING_UP, len(texts))
            elif fetch_from is not None and not is_late:
                self._discard(instance_name, DiscardReason.CATCHING_UP, len(texts))
            elif not is_late and not self._is_plausible(instance_name, token):
                fetch_from = _least(fetch_from, position)
                # A false row may have ended a batch of which more is to come.
                is_broken = len(texts) > 1
                self._discard(instance_name, DiscardReason.CATCHING_UP, len(texts))
            elif (rows := self._delivery.decode(texts)) is None:
                fetch_from = _least(fetch_from, token - 1 if is_late else position)
                self._discard(instance_name, DiscardReason.UNDECODABLE, len(texts))
            else:
                batches.append((token, rows))
                position = max(position, token)
                # What comes behind it and repeats it was not missed.
                missed_above = position
            state.has_lost_rows = is_broken
        taken = self._delivery.deliver(link, instance_name, state, batches)
        if taken is True or (taken is not False and await taken):
            self._catch_ups.position_changed(instance_name)
        if missed:
            self._fetch_again(link, instance_name, state, undelivered_from, missed)
        if fetch_from is not None:
            tokens = [token for token, _ in whole]
            self._catch_ups.schedule(link, instance_name, state, fetch_from, tokens)

    def _fetch_again(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        undelivered_from: int,
        missed: list[int],
    ) -> None:
        """Have rows fetched that the position passed, from where it did so."""
        current = self._stream.current_token(instance_name)
        self._catch_ups.schedule(
            link,
            instance_name,
            state,
            undelivered_from,
            missed,
            restart_token=undelivered_from if undelivered_from < current else None,
        )

    # -- positions --------------------------------------------------------------------

    async def handle_position(self, link: Link, position: PositionCommand) -> None:
        """Handle a writer's POSITION: begin a catch-up if there is a gap before it."""
        instance_name = position.instance_name
        if link.is_lost:
            # What waits behind it must not pass the gap of which it may tell.
            link.writers.pop((self._name, instance_name), None)
            return
        state = link.writers.setdefault((self._name, instance_name), WriterState())
        if state.pending:
            self._discard(
                instance_name, DiscardReason.SUPERSEDED_BY_POSITION, len(state.pending)
            )
            state.pending = []
            state.has_lost_rows = True
        description, new_token = self._description, position.new_token
        run = state.catch_up
        if run is None:
            plan = plan_catch_up(
                self._stream.current_token(instance_name),
                position.prev_token,
                new_token,
                resettable=description.resettable,
                held_in_memory=description.held_in_memory,
                is_range_believed=self._is_plausible(instance_name, new_token),
            )
            if isinstance(plan, Redundant):
                self._discard(instance_name, DiscardReason.REDUNDANT_POSITION, 1)
                self._catch_ups.position_changed(instance_name)
                self._catch_ups.connected(link, instance_name, state)
                return
            if isinstance(plan, Reset):
                run = CatchUpState(
                    plan.restart_token, plan.upto_token, plan.restart_token
                )
            elif isinstance(plan, Gap):
                # What was passed just now without rows may have been hidden by a
                # false position: to fetch it again doubles nothing.
                start = self._catch_ups.undelivered_from(instance_name)
                run = CatchUpState(start, plan.upto_token)
            else:
                # A writer that says only where it is may not have been heard before. A
                # false position that came true would hide what it wrote.
                is_range = position.prev_token < new_token
                start = (
                    new_token
                    if is_range
                    else self._catch_ups.start_to_check(instance_name)
                )
                run = CatchUpState(min(start, new_token), new_token)
        elif description.held_in_memory and new_token < run.target:
            # What was to be fetched is gone with the process that wrote it.
            run.cancel_retry()
            run = CatchUpState(0, new_token, 0)
        else:
            run.want(new_token)
            # It is there again.
            run.is_drain = False
        state.catch_up = run
        await self._catch_ups.run(link, instance_name, state, run)

    async def _handle_reported_position(
        self, link: Link, item: ReportedPosition
    ) -> None:
        """Catch up if what the writer told us did not all come.

        A stream never goes back by this: only by a POSITION, or a new epoch.
        """
        if link.is_lost:
            return
        name, instance_name, token = self._name, item.instance_name, item.token
        state = link.writers.get((name, instance_name))
        current = self._stream.current_token(instance_name)
        if state is None:
            # Its POSITION did not come; this says as much.
            if token >= current:
                await self.handle_position(
                    link, PositionCommand(name, instance_name, token, token)
                )
        elif state.catch_up is not None:
            state.catch_up.want(token)
        elif token > current:
            if not item.is_first:
                self._observer.gap_found(name, instance_name, current, token)
            start = self._catch_ups.undelivered_from(instance_name)
            run = state.catch_up = CatchUpState(start, token)
            await self._catch_ups.run(link, instance_name, state, run)
        elif item.is_below and token < current and not self._description.idempotent:
            await self._catch_ups.fall_back(link, instance_name, state, token)

    async def _take_collapsed(self, link: Link, item: DroppedRange) -> None:
        """Catch up with what was dropped when the queue was full."""
        instance_name = item.instance_name
        key = self._name, instance_name
        if link.is_lost:
            link.writers.pop(key, None)
        if key not in link.writers and (link.is_lost or item.lowest_position is None):
            return
        state = link.writers.setdefault(key, WriterState())
        if item.ends_in_batch is not None:
            state.has_lost_rows = item.ends_in_batch
        elif state.pending:
            # The batch goes on behind what was dropped.
            state.has_lost_rows = True
        state.pending = []
        if item.upto is None:
            return
        description, run = self._description, state.catch_up
        position = item.lowest_position
        current = self._stream.current_token(instance_name)
        if run is not None:
            current = run.cursor
        if (
            description.resettable
            and position is not None
            and (item.was_reset or position < current)
            # What is stored is still there: going on is as good as going back.
            and (description.held_in_memory or item.upto < current)
        ):
            if run is not None:
                run.cancel_retry()
            back_to = min(0, position) if description.held_in_memory else position
            run = CatchUpState(back_to, item.upto, back_to)
        else:
            if description.idempotent and item.lowest is not None:
                current = min(current, item.lowest - 1)
            run = run or CatchUpState(min(current, item.upto), item.upto)
            run.is_drain = run.is_drain and position is None
            run.cursor = min(run.cursor, current)
            run.want(item.upto)
        run.is_incomplete = True
        state.catch_up = run
        await self._catch_ups.run(link, instance_name, state, run)

    def _discard(self, instance_name: str, reason: DiscardReason, count: int) -> None:
        if count:
            self._observer.discarded(self._name, instance_name, reason, count)


def _is_always_plausible(instance_name: str, token: int) -> bool:
    return True


def _least(known: int | None, token: int) -> int:
    return token if known is None else min(known, token)
