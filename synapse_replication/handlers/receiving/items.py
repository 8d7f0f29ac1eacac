"""The items of a stream's queue, other than rows and POSITION commands.

Theory of operation: an item is handled after all items that were queued before it. Only
a full queue is reordered; see :mod:`~synapse_replication.handlers.receiving.overflow`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs

from synapse_replication.handlers.receiving.writer_state import (
    CatchUpState,
    LinkedWriter,
)
from synapse_replication.streams.stream import RemovedWriter
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import InterleavedRun, RdataRun

__all__ = [
    "CatchUpStep",
    "DroppedRange",
    "FoundRemoved",
    "Item",
    "LostRow",
    "NewEpoch",
    "ReportedPosition",
]


@attrs.frozen
class LostRow:
    """A marker in place of a writer's row that could not be parsed."""

    instance_name: str


@attrs.frozen
class ReportedPosition:
    """A writer's statement that it has sent all rows up to ``token``.

    The writer reported it through the extension, or sent a POSITION below the reader's
    position.

    :ivar is_first: whether the writer has just started, so that this is its initial
        position. Missing rows up to it are fetched, but are not reported as a gap.
    :ivar is_below: whether the token was below this reader's position when the report
        arrived. Only then does the report contradict the position. A comparison when
        the report is handled is not sufficient: after the queue was full, items may be
        handled out of order.
    """

    instance_name: str
    token: int
    is_first: bool = False
    is_below: bool = False


@attrs.frozen
class NewEpoch:
    """A writer's epoch that differs, or may differ, from that of the delivered rows.

    :ivar token: the writer's position when it reported the epoch.
    """

    instance_name: str
    token: int
    epoch: str


@attrs.frozen(eq=False)
class FoundRemoved:
    """Removed writers whose rows must be fetched."""

    writers: Mapping[str, RemovedWriter]


@attrs.frozen(eq=False)
class CatchUpStep:
    """The next step of a catch-up."""

    writer: LinkedWriter
    catch_up: CatchUpState


def _is_always_plausible(token: int) -> bool:
    return True


@attrs.define
class DroppedRange:
    """A summary of a writer's queued items that were dropped when the queue was full.

    :param is_plausible: returns whether a token is plausible.
    :ivar lowest: the smallest plausible token of the rows dropped since the last reset;
        ``None`` if no such token was dropped.
    :ivar upto: the greatest plausible token of the items dropped since the last reset;
        ``None`` if no such token was dropped. Rows up to it must be fetched.
    :ivar implausible_upto: the greatest implausible token; ``None`` if all dropped
        tokens were plausible.
    :ivar lowest_position: the smallest position of the dropped POSITION commands;
        ``None`` if none were dropped.
    :ivar was_reset: whether one of the dropped items reset the stream.
    :ivar ends_in_batch: whether the last dropped rows belong to an unfinished batch;
        ``None`` if no rows were dropped.
    :ivar has_lost_row: whether one of the rows could not be parsed. Its token is
        unknown and may be above ``upto``.
    :ivar rows: the number of dropped rows that have not been reported yet, without rows
        that could not be parsed.
    """

    instance_name: str
    resettable: bool
    lowest: int | None = None
    upto: int | None = None
    lowest_position: int | None = None
    was_reset: bool = False
    ends_in_batch: bool | None = None
    has_lost_row: bool = False
    rows: int = 0
    implausible_upto: int | None = None
    is_plausible: Callable[[int], bool] = attrs.field(
        default=_is_always_plausible, eq=False, repr=False
    )

    def add_rows(self, run: RdataRun) -> None:
        """Add the writer's next rows."""
        tokens = [token for token in run.tokens if token is not None]
        if tokens and not self.is_plausible(max(tokens)):
            self._claim(max(tokens))
            tokens = [token for token in tokens if self.is_plausible(token)]
        if tokens:
            self._extend(min(tokens), max(tokens))
        self.rows += len(run.rows)
        self.ends_in_batch = run.tokens[-1] is None

    def add_position(self, position: PositionCommand) -> None:
        """Add the writer's next POSITION."""
        token = position.new_token
        if not self.is_plausible(token):
            self._claim(token)
        else:
            if self.resettable and self.upto is not None and token < self.upto:
                self._reset()
            self._extend(None, token)
        self._announce(token)

    def add_range(self, dropped: DroppedRange) -> None:
        """Add a range of the writer's rows that were dropped earlier."""
        if dropped.was_reset:
            self._reset()
        self._extend(dropped.lowest, dropped.upto)
        if dropped.implausible_upto is not None:
            self._claim(dropped.implausible_upto)
        self.rows += dropped.rows
        if dropped.lowest_position is not None:
            self._announce(dropped.lowest_position)
        if dropped.ends_in_batch is not None:
            self.ends_in_batch = dropped.ends_in_batch
        self.has_lost_row |= dropped.has_lost_row

    def add_lost_row(self) -> None:
        """Add a row of the writer that could not be parsed."""
        self.has_lost_row = True

    def _announce(self, token: int) -> None:
        if self.lowest_position is None or token < self.lowest_position:
            self.lowest_position = token

    def _claim(self, implausible_upto: int) -> None:
        self.implausible_upto = max(implausible_upto, self.implausible_upto or 0)

    def _reset(self) -> None:
        self.was_reset = True
        self.lowest = self.upto = None

    def _extend(self, lowest: int | None, upto: int | None) -> None:
        if lowest is not None and (self.lowest is None or lowest < self.lowest):
            self.lowest = lowest
        if upto is not None and (self.upto is None or upto > self.upto):
            self.upto = upto


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
"""An item of a stream's queue."""
