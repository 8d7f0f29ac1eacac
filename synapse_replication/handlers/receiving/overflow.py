"""What becomes of a stream's queue when it is full.

Theory of operation: rows that wait can be fetched again, so what is kept of them is
how far they reach, for each writer of each link. What a writer told of itself on the
extension is kept, the latest of each: it may be of rows that never came. An epoch that
it told reaches as far as the rows before it, of which only this is left: whether the
last of them are of a batch that may go on. Nothing else is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.queue import Queued
from synapse_replication.handlers.receiving.writer_state import (
    CatchUpStep,
    DroppedRange,
    FoundRemoved,
    Link,
    LostRow,
    NewEpoch,
    ReportedPosition,
)
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import InterleavedRun, RdataRun

__all__ = ["ROW_OVERHEAD", "Item", "coalesce"]

Item: TypeAlias = (
    RdataRun
    | InterleavedRun
    | PositionCommand
    | LostRow
    | DroppedRange
    | CatchUpStep
    | ReportedPosition
    | NewEpoch
    | FoundRemoved
)
"""What waits in a stream's queue, with the link that it came by."""

#: What a row costs in memory besides its text, bytes, about.
ROW_OVERHEAD = 80


def coalesce(
    waiting: Iterable[Queued[tuple[Link, Item]]],
    resettable: bool,
    discarded: Callable[[str, DiscardReason, int], object],
) -> list[Queued[tuple[Link, Item]]]:
    """Make few small items of all that wait.

    :param resettable: the stream may begin again at an earlier token.
    :param discarded: told of ``(instance_name, reason, rows)``.
    """
    kept: list[Queued[tuple[Link, Item]]] = []
    collapsed: dict[tuple[Link, str], DroppedRange] = {}
    told: dict[tuple[Link, str], Queued[tuple[Link, Item]]] = {}
    epochs: dict[tuple[Link, str], Queued[tuple[Link, Item]]] = {}

    def of_writer(link: Link, instance_name: str) -> DroppedRange:
        key = link, instance_name
        if key not in collapsed:
            collapsed[key] = DroppedRange(instance_name, resettable)
        return collapsed[key]

    for queued in waiting:
        link, item = queued.item
        if isinstance(item, CatchUpStep | FoundRemoved):
            kept.append(queued)
        elif isinstance(item, ReportedPosition):
            told[link, item.instance_name] = queued
        elif isinstance(item, NewEpoch):
            key = link, item.instance_name
            told.pop(key, None)
            earlier = collapsed.pop(key, None)
            if earlier is not None:
                discarded(item.instance_name, DiscardReason.CATCHING_UP, earlier.rows)
                if earlier.ends_in_batch:
                    collapsed[key] = DroppedRange(
                        item.instance_name,
                        resettable,
                        lowest_position=earlier.lowest_position,
                        ends_in_batch=True,
                    )
            epochs[key] = queued
        elif isinstance(item, InterleavedRun):
            for run in item.runs():
                of_writer(link, run.instance_name).add(run)
        else:
            of_writer(link, item.instance_name).add(item)
    kept += epochs.values()
    for (link, instance_name), left in collapsed.items():
        discarded(instance_name, DiscardReason.CATCHING_UP, left.rows)
        left.rows = 0
        kept.append(Queued((link, left), 1, ROW_OVERHEAD))
    return [*kept, *told.values()]
