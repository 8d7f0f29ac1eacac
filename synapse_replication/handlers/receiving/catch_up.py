"""Catching up with a writer, a page at a time.

Theory of operation: a
:class:`~synapse_replication.handlers.receiving.writer_state.CatchUpState` on the
writer's state says from where to where. :meth:`CatchUpRunner.run` fetches pages until
the target is reached, but gives way after a page if other work waits in the stream's
queue: it puts a step at the queue's end then. A failure, of the source or of the host,
puts the step there later, after a wait that doubles. What was delivered is not handed
on again: the cursor moves with every token.

While a page is delivered, the next is on its way, one at most: the source and this
process work at the same time. It is used if the cursor is where it begins, and else
forgotten.

What a writer is said to have reached is a claim until the source confirms it: the
source answers no further than its last token, and claims beyond that are refuted. Of
the position that was reached without rows it is remembered from where
(:mod:`~synapse_replication.handlers.receiving.silent_moves`), so that a claim that was
believed, and turns out to be false, is taken back.

A run that is not being worked on has exactly one step in the queue or one retry on
the clock, unless its link is lost: then it is abandoned with the writer's state, so
that what still waits of the writer's rows cannot pass the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from synapse_replication.backoff import Backoff
from synapse_replication.errors import RowDecodeError
from synapse_replication.handlers.epochs import HandledEpochs
from synapse_replication.handlers.interfaces import BackgroundRunner, Clock, RowSink
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    DiscardReason,
    ReplicationObserver,
    Resync,
)
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.receiving.queue import Pacer
from synapse_replication.handlers.receiving.silent_moves import SilentMoves
from synapse_replication.handlers.receiving.writer_state import (
    CatchUpState,
    CatchUpStep,
    Link,
    NewEpoch,
    ReadAhead,
    WriterState,
)
from synapse_replication.streams.catchup import (
    Page,
    check_page,
    gather_batches,
)
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from synapse_replication.streams.stream import JsonValue, Stream, StreamUpdateResult

__all__ = ["CatchUpRunner"]


class CatchUpRunner:
    """The catch-ups of one stream.

    :param put_step: puts a step at the end of the stream's queue.
    :param others_wait: tells whether the stream's queue holds anything.
    :param on_connected: called when a writer is connected.
    :param partial: asks writers for what they sent last, before the stream's own
        source is asked; ``None`` to ask that at once.
    """

    def __init__(
        self,
        stream: Stream,
        sink: RowSink,
        clock: Clock,
        run_as_background_process: BackgroundRunner,
        observer: ReplicationObserver,
        backoff: Backoff,
        pacer: Pacer,
        put_step: Callable[[Link, CatchUpStep], None],
        others_wait: Callable[[], bool],
        on_connected: Callable[[Link], object],
        partial: PartialResync | None = None,
        *,
        takes_positions_back: bool = True,
    ) -> None:
        self._stream = stream
        self._description = stream.description
        self._name = stream.description.name
        self._sink = sink
        self._clock = clock
        self._run_as_background_process = run_as_background_process
        self._observer = observer
        self._backoff = backoff
        self._pacer = pacer
        self._put = put_step
        self._others_wait = others_wait
        self._on_connected = on_connected
        # The stream's own source is the writer's memory already.
        self._partial = None if self._description.held_in_memory else partial
        self._epochs = HandledEpochs(self._name, sink)
        self._silent = SilentMoves()
        self._takes_positions_back = takes_positions_back

    def schedule(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        from_token: int,
        tokens: Sequence[int],
        error: Exception | None = None,
        restart_token: int | None = None,
    ) -> None:
        """Have the rows above ``from_token`` fetched, up to the greatest of ``tokens``.

        :param tokens: of rows that came; at least one.
        :param error: why, if the host failed: then not at once.
        :param restart_token: go back to this position first.
        """
        run = state.catch_up
        if run is None:
            is_new = True
            run = state.catch_up = CatchUpState(from_token, min(tokens), restart_token)
        else:
            # Its next step is on its way.
            is_new = False
            run.cursor = min(run.cursor, from_token)
            if run.restart_token is None:
                run.restart_token = restart_token
        for token in sorted(tokens):
            run.want(token)
        if not is_new:
            if error is not None:
                self._observer.failure(f"handling rows of {self._name}", error)
            return
        if error is not None:
            self._try_again(link, instance_name, state, run, error)
        elif link.is_lost:
            self._abandon(link, instance_name)
        else:
            self._put_step(link, instance_name, state, run)

    def _put_step(
        self, link: Link, instance_name: str, state: WriterState, run: CatchUpState
    ) -> None:
        if not run.is_queued:
            run.is_queued = True
            self._put(link, CatchUpStep(instance_name, state, run))

    def _abandon(self, link: Link, instance_name: str) -> None:
        # What still waits of the writer's rows must not pass the gap.
        link.writers.pop((self._name, instance_name), None)

    async def run(
        self, link: Link, instance_name: str, state: WriterState, run: CatchUpState
    ) -> None:
        """Bring a catch-up forward as far as it goes without holding up others."""
        run.cancel_retry()
        try:
            if run.restart_token is not None:
                await self._rewind(instance_name, run, run.restart_token)
            if run.cursor < run.target:
                event = CatchUpEvent(self._name, instance_name, run.cursor, run.target)
                with self._observer.catch_up(event):
                    while run.cursor < run.target:
                        if link.is_lost:
                            self._abandon(link, instance_name)
                            return
                        await self._fetch_page(link, instance_name, run, event)
                        if self._others_wait() and run.cursor < run.target:
                            self._put_step(link, instance_name, state, run)
                            return
            current = self._stream.current_token(instance_name)
            if run.target > current or (
                run.target == current and not state.is_connected
            ):
                waiting = self._sink.on_position(self._name, instance_name, run.target)
                if waiting is not None:
                    await waiting
                if self._takes_positions_back:
                    self._silent.moved(
                        instance_name, current, run.target, self._clock.seconds()
                    )
        except Exception as error:  # noqa: BLE001 -- the observer is told
            self._try_again(link, instance_name, state, run, error)
            return
        state.catch_up = None
        if run.is_refuted and not state.is_connected:
            # Where the writer stands is not known: its own POSITION will say.
            self._abandon(link, instance_name)
            return
        if run.has_fetched:
            self._observer.resynced(
                self._name,
                instance_name,
                Resync.FULL if run.is_full else Resync.PARTIAL,
            )
        self.position_changed(instance_name)
        if run.is_drain:
            # Should the writer come back, it announces itself first.
            self._abandon(link, instance_name)
            self._observer.removed_writer_drained(self._name, instance_name, run.target)
        else:
            self.connected(link, instance_name, state)

    async def _rewind(
        self, instance_name: str, run: CatchUpState, restart_token: int
    ) -> None:
        current = self._stream.current_token(instance_name)
        waiting = self._sink.on_position(self._name, instance_name, restart_token)
        if waiting is not None:
            await waiting
        if run.epoch is not None:
            # Only now: no token of another epoch may ever be saved with it.
            await self._epochs.begin(instance_name, run.epoch)
        self._silent.forget(instance_name)
        run.restart_token = None
        run.is_full = True
        self._observer.stream_reset(self._name, instance_name, current, restart_token)

    def undelivered_from(self, instance_name: str) -> int:
        """Return the token above which no row of a writer was delivered.

        It is less than the position if that was reached without a row.
        """
        current = self._stream.current_token(instance_name)
        return self._silent.start_of(instance_name, current)

    def start_to_check(self, instance_name: str) -> int:
        """Return the token above which to ask the source, of a confirmed position.

        It is the position itself if that was reached by a row, or was checked just now.
        """
        current = self._stream.current_token(instance_name)
        if self._description.resettable or not self._takes_positions_back:
            return current
        return self._silent.start_to_check(
            instance_name, current, self._clock.seconds()
        )

    async def fall_back(
        self, link: Link, instance_name: str, state: WriterState, token: int
    ) -> None:
        """Go back to where a writer says to be, if no row was delivered beyond.

        A position that was believed and is not the writer's would have its next rows
        discarded. If rows were delivered, going back would double them: that is
        reported.
        """
        current = self._stream.current_token(instance_name)
        start = self._silent.start_of(instance_name, current)
        if self._description.held_in_memory:
            if start < current:
                # What its writer has is little, and no harm if it comes again.
                start = min(0, token)
            else:
                return
        if start == current:
            self._observer.ahead_of_writer(self._name, instance_name, current, token)
            return
        target = max(start, token)
        run = state.catch_up = CatchUpState(start, target, start)
        await self.run(link, instance_name, state, run)

    def is_of_epoch(self, instance_name: str, epoch: str) -> bool:
        """Return whether what was handled of a writer is of this epoch."""
        return self._epochs.is_present(instance_name, epoch)

    async def take_epoch(self, link: Link, item: NewEpoch) -> None:
        """Fetch all that a writer has in memory, unless it is of the same epoch still.

        If it is not known of which epoch that is which was handled, it may have begun
        again since. A batch that is not finished may go on, or not: it is fetched.
        """
        instance_name, epoch = item.instance_name, item.epoch
        if link.is_lost or self._epochs.is_present(instance_name, epoch):
            # It is told again on the next connection.
            return
        key = self._name, instance_name
        state = link.writers.get(key) or WriterState()
        run = state.catch_up
        if run is not None:
            if run.epoch == epoch:
                # Told again, and still to be gone back.
                return
            run.cancel_retry()
        elif self._stream.current_token(instance_name) == 0 and not state.pending:
            # Nothing of an earlier epoch was seen.
            await self._begin_epoch(instance_name, epoch)
            return
        link.writers[key] = state
        if state.pending:
            self._observer.discarded(
                self._name,
                instance_name,
                DiscardReason.SUPERSEDED_BY_POSITION,
                len(state.pending),
            )
            state.pending = []
            state.has_lost_rows = True
        restart_token = min(0, item.token)
        run = CatchUpState(restart_token, item.token, restart_token, epoch)
        state.catch_up = run
        await self.run(link, instance_name, state, run)

    async def _begin_epoch(self, instance_name: str, epoch: str) -> None:
        try:
            await self._epochs.begin(instance_name, epoch)
        except Exception as error:  # noqa: BLE001 -- the observer is told
            # The next heartbeat tells it again.
            self._observer.failure(f"saving the epoch of {instance_name}", error)

    async def _fetch_page(
        self, link: Link, instance_name: str, run: CatchUpState, event: CatchUpEvent
    ) -> None:
        from_token, upto_token = run.cursor, run.target
        ahead, run.ahead = run.ahead, None
        if ahead is not None and ahead.from_token == from_token:
            upto_token = ahead.upto_token
            result, is_partial = await self._answer(ahead)
        else:
            result, is_partial = await self._ask(
                instance_name, run, from_token, upto_token
            )
        run.is_full |= not (is_partial or self._description.held_in_memory)
        run.has_fetched = True
        if result.last_token is not None and result.last_token < run.target:
            self._refute(instance_name, run, result.last_token)
            upto_token = min(upto_token, run.target)
            if upto_token <= from_token:
                return
        page = check_page(result, from_token, upto_token, take_encoded=True)
        # Rows below a position of an idempotent stream may be committed later.
        is_wanted = not (link.is_lost or self._description.idempotent)
        if page.upto_token < run.target and is_wanted:
            run.ahead = self._ask_ahead(instance_name, run, page.upto_token, run.target)
        try:
            for token, rows in self._typed_batches(instance_name, page):
                waiting = (
                    self._sink.on_rdata(self._name, instance_name, token, rows)
                    if rows
                    else None
                )
                if waiting is not None:
                    await waiting
                run.cursor = token
                run.attempts = 0
        finally:
            if run.cursor > from_token:
                self._silent.delivered(instance_name, run.cursor)
        run.cursor = page.upto_token
        run.attempts = 0
        self._observer.catch_up_page(event, len(page.tokens), page.upto_token)
        self.position_changed(instance_name)
        self._pacer.count(len(page.tokens))
        if self._pacer.is_due():
            await self._pacer.take_break()

    def _refute(self, instance_name: str, run: CatchUpState, last_token: int) -> None:
        self._observer.position_refuted(
            self._name, instance_name, run.target, last_token
        )
        self._observer.discarded(
            self._name, instance_name, DiscardReason.IMPLAUSIBLE, 1
        )
        # A sequence may be a little behind, after a switch to a standby.
        is_exact = self._description.held_in_memory
        run.refute(last_token, 0 if is_exact else PLAUSIBLE_DISTANCE)

    async def _ask(
        self, instance_name: str, run: CatchUpState, from_token: int, upto_token: int
    ) -> tuple[StreamUpdateResult, bool]:
        """Ask for a page; tell whether it is of what the writer sent last."""
        if self._partial is not None and not run.is_drain:
            result = await self._partial.get_updates_since(
                self._name, instance_name, from_token, upto_token
            )
            if result is not None:
                return result, True
        result = await self._stream.get_updates_since(
            instance_name, from_token, upto_token
        )
        return result, False

    def _ask_ahead(
        self, instance_name: str, run: CatchUpState, from_token: int, upto_token: int
    ) -> ReadAhead:
        ahead = ReadAhead(from_token, upto_token)

        async def ask() -> None:
            try:
                ahead.answer = await self._ask(
                    instance_name, run, from_token, upto_token
                )
            except Exception as error:  # noqa: BLE001 -- raised where it is wanted
                ahead.error = error

        ahead.process = self._run_as_background_process(
            f"replication_read_ahead_{self._name}", ask
        )
        return ahead

    async def _answer(self, ahead: ReadAhead) -> tuple[StreamUpdateResult, bool]:
        assert ahead.process is not None
        await ahead.process
        if ahead.error is not None:
            raise ahead.error
        assert ahead.answer is not None
        return ahead.answer

    def _typed_batches(
        self, instance_name: str, page: Page
    ) -> Iterable[tuple[int, list[Any]]]:
        """Make typed rows of fetched ones, all at once if they came as text."""
        if page.is_encoded:
            try:
                decoded = self._description.codec.decode(page.values)
            except RowDecodeError:
                # Which of them it is shows one by one.
                pass
            else:
                if decoded.with_extra_fields:
                    self._observer.extra_fields(self._name, decoded.with_extra_fields)
                return gather_batches(page.tokens, decoded.rows)
        return (
            (token, self._typed(instance_name, values, page.is_encoded))
            for token, values in page.batches()
        )

    def _typed(
        self, instance_name: str, values: Iterable[JsonValue], are_encoded: bool
    ) -> list[Any]:
        """Make typed rows of fetched values.

        One that is no row even here, of a peer of another version, is passed
        over and reported: waiting for it would stop the stream for good.
        """
        codec = self._description.codec
        rows: list[Any] = []
        for value in values:
            try:
                if are_encoded:
                    rows += codec.decode([value]).rows
                else:
                    rows.append(codec.from_json(value))
            except RowDecodeError as error:
                self._observer.discarded(
                    self._name, instance_name, DiscardReason.UNDECODABLE, 1
                )
                self._observer.failure(f"decoding a row of {self._name}", error)
        return rows

    def _try_again(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        run: CatchUpState,
        error: Exception,
    ) -> None:
        run.attempts += 1
        delay = self._backoff.delay(run.attempts)
        event = CatchUpEvent(self._name, instance_name, run.cursor, run.target)
        self._observer.catch_up_failed(event, error, run.attempts, delay)
        self._observer.resynced(self._name, instance_name, Resync.FAILED)
        if link.is_lost:
            self._abandon(link, instance_name)
        else:
            run.retry = self._clock.call_later(
                delay, self._put_step, link, instance_name, state, run
            )

    def connected(self, link: Link, instance_name: str, state: WriterState) -> None:
        """Take a writer to be connected: its POSITION was handled to its end."""
        if not state.is_connected:
            state.is_connected = True
            self._observer.stream_connected(
                link.connection.name, self._name, instance_name
            )
            self._on_connected(link)

    def position_changed(self, instance_name: str) -> None:
        """Return where this process stands with a writer."""
        self._observer.position_changed(
            self._name, instance_name, self._stream.current_token(instance_name)
        )
