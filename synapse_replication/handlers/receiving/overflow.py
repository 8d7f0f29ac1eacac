"""Coalescing of a full queue into ranges to be fetched again.

Theory of operation: rows in the queue can be fetched again, so for each writer on each
link, rows and POSITION commands are merged into one range of tokens. Of a writer's
reported positions, the latest is retained, because it may reveal rows that never
arrived. Of the reported epochs, the latest is retained, too. An epoch supersedes the
range and the reported position before it. If that range ends in an unfinished batch, or
one of its rows was unreadable, a range without tokens remains: it marks the next batch
as incomplete, and retains the lowest position of the dropped POSITION commands.
Catch-up steps and items for found removed writers are retained unchanged.

See docs/failure-modes.rst: failure-invalidation-flood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.items import (
    CatchUpStep,
    DroppedRange,
    FoundRemoved,
    Item,
    LostRow,
    NewEpoch,
    ReportedPosition,
)
from synapse_replication.handlers.receiving.queue import Queued
from synapse_replication.handlers.receiving.writer_state import Link
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import InterleavedRun, RdataRun

__all__ = ["ROW_OVERHEAD", "coalesce"]

#: The approximate memory for a queued item or row in addition to its text, in bytes.
ROW_OVERHEAD = 80

_Queued: TypeAlias = Queued[tuple[Link, Item]]
_Key: TypeAlias = tuple[Link, str]


def coalesce(
    waiting: Iterable[_Queued],
    resettable: bool,
    discarded: Callable[[str, DiscardReason, int], object],
    is_plausible: Callable[[str, int], bool],
) -> list[_Queued]:
    """Return items that replace the queued items and take little memory.

    :param resettable: whether the stream may be reset to a lower token.
    :param discarded: called with the writer, the reason and the number of dropped rows.
    :param is_plausible: returns whether a writer's token is plausible. An implausible
        token may be false, so it must not replace the greatest plausible token.
    """
    coalescer = _Coalescer(resettable, discarded, is_plausible)
    for queued in waiting:
        coalescer.add(queued)
    return coalescer.items()


class _Coalescer:
    """The items and ranges that are retained, by link and writer."""

    def __init__(
        self,
        resettable: bool,
        discarded: Callable[[str, DiscardReason, int], object],
        is_plausible: Callable[[str, int], bool],
    ) -> None:
        self._resettable = resettable
        self._discarded = discarded
        self._is_plausible = is_plausible
        self._retained: list[_Queued] = []
        self._ranges: dict[_Key, DroppedRange] = {}
        self._reported: dict[_Key, _Queued] = {}
        self._epochs: dict[_Key, _Queued] = {}
        self._adders: dict[type[Item], Callable[[_Queued, Link, Any], None]] = {
            RdataRun: self._add_rows,
            InterleavedRun: self._add_interleaved,
            PositionCommand: self._add_position,
            LostRow: self._add_lost_row,
            DroppedRange: self._add_range,
            CatchUpStep: self._retain,
            FoundRemoved: self._retain,
            ReportedPosition: self._add_reported,
            NewEpoch: self._add_epoch,
        }

    def add(self, queued: _Queued) -> None:
        """Add the next item of the queue."""
        link, item = queued.item
        self._adders[type(item)](queued, link, item)

    def items(self) -> list[_Queued]:
        """Return the retained items, and report the dropped rows as discarded."""
        kept = [*self._retained, *self._epochs.values()]
        for (link, instance_name), left in self._ranges.items():
            self._discarded(instance_name, DiscardReason.CATCHING_UP, left.rows)
            left.rows = 0
            kept.append(Queued((link, left), 1, ROW_OVERHEAD))
        return [*kept, *self._reported.values()]

    def _range_of(self, link: Link, instance_name: str) -> DroppedRange:
        key = link, instance_name
        if key not in self._ranges:
            self._ranges[key] = DroppedRange(
                instance_name,
                self._resettable,
                is_plausible=partial(self._is_plausible, instance_name),
            )
        return self._ranges[key]

    def _retain(self, queued: _Queued, link: Link, item: Item) -> None:
        self._retained.append(queued)

    def _add_rows(self, queued: _Queued, link: Link, run: RdataRun) -> None:
        self._range_of(link, run.instance_name).add_rows(run)

    def _add_interleaved(
        self, queued: _Queued, link: Link, item: InterleavedRun
    ) -> None:
        for run in item.runs():
            self._add_rows(queued, link, run)

    def _add_position(
        self, queued: _Queued, link: Link, position: PositionCommand
    ) -> None:
        self._range_of(link, position.instance_name).add_position(position)

    def _add_lost_row(self, queued: _Queued, link: Link, item: LostRow) -> None:
        self._range_of(link, item.instance_name).add_lost_row()

    def _add_range(self, queued: _Queued, link: Link, item: DroppedRange) -> None:
        self._range_of(link, item.instance_name).add_range(item)

    def _add_reported(
        self, queued: _Queued, link: Link, item: ReportedPosition
    ) -> None:
        self._reported[link, item.instance_name] = queued

    def _add_epoch(self, queued: _Queued, link: Link, item: NewEpoch) -> None:
        key = link, item.instance_name
        self._reported.pop(key, None)
        earlier = self._ranges.pop(key, None)
        if earlier is not None:
            self._discarded(item.instance_name, DiscardReason.CATCHING_UP, earlier.rows)
            if earlier.ends_in_batch or earlier.has_lost_row:
                left = self._range_of(link, item.instance_name)
                left.lowest_position = earlier.lowest_position
                left.ends_in_batch = True
        self._epochs[key] = queued
