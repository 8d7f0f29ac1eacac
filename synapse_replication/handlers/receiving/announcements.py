"""Handling of positions, new epochs, and ranges dropped from a full queue.

Theory of operation: a position is announced with POSITION, or reported through the
extension. For a position or a dropped range, a ``plan_*`` function of
:mod:`synapse_replication.streams.catchup` decides what to do, and an
:class:`AnnouncementHandler` executes the plan. For an epoch, the handler decides.
"""

from __future__ import annotations

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.items import (
    DroppedRange,
    LostRow,
    NewEpoch,
    ReportedPosition,
)
from synapse_replication.handlers.receiving.writer_state import (
    CatchUpState,
    Link,
    LinkedWriter,
)
from synapse_replication.streams.catchup import (
    AheadOfWriter,
    Check,
    Extend,
    Gap,
    InSync,
    Redundant,
    Reset,
    plan_dropped_range,
    plan_position,
    plan_reported_position,
)
from synapse_replication.wire.commands.standard import PositionCommand

__all__ = ["AnnouncementHandler"]


class AnnouncementHandler:
    """Handler of the announcements of one stream's writers, in queue order.

    Use it in the reactor's thread only.
    """

    def __init__(self, context: StreamContext, catch_ups: CatchUpRunner) -> None:
        self._context = context
        self._catch_ups = catch_ups

    async def handle_position(self, link: Link, position: PositionCommand) -> None:
        """Handle a writer's POSITION: begin a catch-up if rows may be missing."""
        name, instance_name = self._context.name, position.instance_name
        if link.is_lost:
            # The position may reveal a gap. Forget the writer, so that its rows further
            # back in the queue are not delivered past that gap.
            link.writers.pop((name, instance_name), None)
            return
        writer = link.writer(name, instance_name)
        self._drop_pending(writer)
        run, new_token = writer.catch_up, position.new_token
        plan = plan_position(
            self._catch_ups.reader_position(instance_name, run),
            position.prev_token,
            new_token,
            resettable=self._context.description.resettable,
            held_in_memory=self._context.description.held_in_memory,
            is_range_believed=(
                run is not None or self._context.is_plausible(instance_name, new_token)
            ),
        )
        if isinstance(plan, Redundant):
            self._context.discard(instance_name, DiscardReason.REDUNDANT_POSITION, 1)
            self._context.report_position(instance_name)
            self._catch_ups.connected(writer)
        elif isinstance(plan, Extend) and run is not None:
            run.add_claim(plan.upto_token)
            # The writer has returned: it announces its own rows again.
            run.is_drain = False
            await self._catch_ups.begin(writer, run)
        elif isinstance(plan, Check):
            start = self._catch_ups.start_to_check(instance_name)
            await self._begin(writer, Gap(start, new_token))
        elif isinstance(plan, InSync | Gap | Reset):
            await self._begin(writer, plan)

    async def handle_reported_position(
        self, link: Link, item: ReportedPosition
    ) -> None:
        """Catch up if the reader is behind the position that the writer reported.

        If the reader was ahead of it when the report arrived, and reached its own
        position without a row, the reader is rewound to the token above which no row
        was delivered; to 0 if the stream is held in memory. A reader that is ahead for
        another reason is not rewound, and neither is a reader of an idempotent stream.
        """
        if link.is_lost:
            return
        name, instance_name, token = self._context.name, item.instance_name, item.token
        writer = link.writers.get((name, instance_name))
        if writer is None:
            # The writer's POSITION has not arrived. Unless the report is below the
            # reader's position, handle it like that POSITION.
            if token >= self._context.stream.current_token(instance_name):
                await self.handle_position(
                    link, PositionCommand(name, instance_name, token, token)
                )
            return
        run = writer.catch_up
        reader = self._catch_ups.reader_position(instance_name, run)
        plan = plan_reported_position(
            reader,
            token,
            was_below=item.is_below,
            idempotent=self._context.description.idempotent,
            held_in_memory=self._context.description.held_in_memory,
        )
        observer = self._context.observer
        if isinstance(plan, Extend) and run is not None:
            run.add_claim(plan.upto_token)
        elif isinstance(plan, AheadOfWriter):
            observer.ahead_of_writer(name, instance_name, reader.current, token)
        elif isinstance(plan, Gap):
            if not item.is_first:
                observer.gap_found(name, instance_name, reader.current, token)
            await self._begin(writer, plan)
        elif isinstance(plan, Reset):
            await self._begin(writer, plan)

    async def handle_dropped_range(self, link: Link, item: DroppedRange) -> None:
        """Begin or extend a catch-up for rows that were dropped from the full queue."""
        instance_name = item.instance_name
        key = self._context.name, instance_name
        if link.is_lost:
            link.writers.pop(key, None)
        if key not in link.writers and (link.is_lost or item.lowest_position is None):
            return
        writer = link.writer(self._context.name, instance_name)
        writer.mark_rows_lost(item.ends_in_batch)
        writer.has_lost_rows |= item.has_lost_row
        upto = item.implausible_upto if item.upto is None else item.upto
        if upto is None:
            return
        run = writer.catch_up
        plan = plan_dropped_range(
            self._catch_ups.reader_position(instance_name, run),
            item.lowest,
            upto,
            item.lowest_position,
            was_reset=item.was_reset,
            resettable=self._context.description.resettable,
            held_in_memory=self._context.description.held_in_memory,
            idempotent=self._context.description.idempotent,
        )
        if not isinstance(plan, Extend) or run is None:
            await self._begin(writer, plan, dropped=item)
            return
        if plan.from_token is not None:
            run.cursor = min(run.cursor, plan.from_token)
        run.is_drain = run.is_drain and item.lowest_position is None
        run.add_claim(plan.upto_token)
        self._add_dropped_claims(run, item)
        await self._catch_ups.begin(writer, run)

    @staticmethod
    def _add_dropped_claims(run: CatchUpState, item: DroppedRange) -> None:
        run.is_incomplete = True
        if item.implausible_upto is not None:
            run.add_claim(item.implausible_upto)

    async def handle_epoch(self, link: Link, item: NewEpoch) -> None:
        """Fetch all rows in a writer's memory if the delivered rows may be obsolete.

        They are obsolete if they belong to another epoch; if their epoch is unknown,
        the writer may have restarted since. An unfinished batch is fetched, too: its
        remaining rows may never arrive. If no row has been received, only record the
        epoch.
        """
        instance_name, epoch = item.instance_name, item.epoch
        if link.is_lost or self._catch_ups.epochs.is_present(instance_name, epoch):
            # If the link is lost, the epoch is reported again on the next link.
            return
        known = link.writers.get((self._context.name, instance_name))
        run = None if known is None else known.catch_up
        if run is not None and run.epoch == epoch:
            # The epoch was reported again before the catch-up rewound the stream.
            return
        is_new = self._context.stream.current_token(instance_name) == 0
        if is_new and run is None and not (known and known.pending):
            # No row of an earlier epoch was received.
            await self._begin_epoch(instance_name, epoch)
            return
        writer = link.writer(self._context.name, instance_name)
        self._drop_pending(writer)
        await self._begin(writer, Reset(min(0, item.token), item.token), epoch=epoch)

    async def _begin_epoch(self, instance_name: str, epoch: str) -> None:
        try:
            await self._catch_ups.epochs.begin(instance_name, epoch)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            # The next heartbeat reports the epoch again.
            self._context.observer.failure(
                f"saving the epoch of {instance_name}", error
            )

    def handle_lost_row(self, link: Link, item: LostRow) -> None:
        """Record that a row of a writer's next batch was lost.

        A later catch-up fetches the batch.
        """
        writer = link.writers.get((self._context.name, item.instance_name))
        if writer is not None:
            writer.mark_rows_lost(ends_in_batch=True)

    def _drop_pending(self, writer: LinkedWriter) -> None:
        self._context.discard(
            writer.instance_name,
            DiscardReason.SUPERSEDED_BY_POSITION,
            writer.drop_pending(),
        )

    async def _begin(
        self,
        writer: LinkedWriter,
        plan: InSync | Gap | Reset | Extend,
        *,
        epoch: str | None = None,
        dropped: DroppedRange | None = None,
    ) -> None:
        """Begin a catch-up, which replaces the writer's current catch-up.

        :param epoch: the writer's new epoch, if that is the reason.
        :param dropped: the dropped range, if that is the reason.
        """
        if writer.catch_up is not None:
            writer.catch_up.cancel_retry()
        upto_token = plan.upto_token
        if isinstance(plan, Reset):
            restart = plan.restart_token
            run = CatchUpState(restart, upto_token, restart, epoch)
        else:
            start = plan.from_token if isinstance(plan, Gap) else upto_token
            run = CatchUpState(start, upto_token)
        if dropped is not None:
            self._add_dropped_claims(run, dropped)
        await self._catch_ups.begin(writer, run)
