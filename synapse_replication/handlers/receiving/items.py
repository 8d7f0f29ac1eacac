"""What waits in a stream's queue, besides rows and POSITION commands.

Theory of operation: each item belongs to the link that it arrived by, and waits there
for its turn: it is compared with what was handled before it, and with nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """A row of this writer arrived and could not be read."""

    instance_name: str


@attrs.frozen
class ReportedPosition:
    """A writer's report on the extension that it has sent all rows up to ``token``.

    :ivar is_first: the writer has just started, and reports where it begins. Rows
        before that are not a gap, but are fetched if they were not delivered.
    :ivar is_below: it was below this process's position when it arrived. Only then is
        it a contradiction: in a queue that was full, a later item may come first.
    """

    instance_name: str
    token: int
    is_first: bool = False
    is_below: bool = False


@attrs.frozen
class NewEpoch:
    """The writer is of another start than what was handled of it, or may be.

    It had got to ``token`` when it said so.
    """

    instance_name: str
    token: int
    epoch: str


@attrs.frozen(eq=False)
class FoundRemoved:
    """Removed writers whose rows are to be fetched."""

    writers: Mapping[str, RemovedWriter]


@attrs.frozen(eq=False)
class CatchUpStep:
    """Go on with a catch-up."""

    writer: LinkedWriter
    catch_up: CatchUpState


@attrs.define
class DroppedRange:
    """What is left of the waiting items of a writer after the queue was full.

    :ivar lowest: the smallest token of the rows that were dropped.
    :ivar upto: rows up to here are wanted; ``None`` if no token was seen.
    :ivar lowest_position: the smallest that was announced among the items; ``None``
        if there was no POSITION.
    :ivar was_reset: the stream began again among the items.
    :ivar ends_in_batch: the last rows that were dropped are of a batch that is
        not finished; ``None`` if there were no rows.
    :ivar rows: how many rows were dropped.
    """

    instance_name: str
    resettable: bool
    lowest: int | None = None
    upto: int | None = None
    lowest_position: int | None = None
    was_reset: bool = False
    ends_in_batch: bool | None = None
    rows: int = 0

    def add_rows(self, run: RdataRun) -> None:
        """Take in the writer's next rows."""
        tokens = [token for token in run.tokens if token is not None]
        if tokens:
            self._reach(min(tokens), max(tokens))
        self.rows += len(run.rows)
        self.ends_in_batch = run.tokens[-1] is None

    def add_position(self, position: PositionCommand) -> None:
        """Take in the writer's next POSITION."""
        token = position.new_token
        if self.resettable and self.upto is not None and token < self.upto:
            self._reset()
        self._reach(None, token)
        self._announce(token)

    def add_range(self, later: DroppedRange) -> None:
        """Take in what was left of the writer's next items, dropped before."""
        if later.was_reset:
            self._reset()
        self._reach(later.lowest, later.upto)
        self.rows += later.rows
        if later.lowest_position is not None:
            self._announce(later.lowest_position)
        if later.ends_in_batch is not None:
            self.ends_in_batch = later.ends_in_batch

    def add_lost_row(self) -> None:
        """Take in that the writer's next row could not be read."""
        self.ends_in_batch = True

    def _announce(self, token: int) -> None:
        if self.lowest_position is None or token < self.lowest_position:
            self.lowest_position = token

    def _reset(self) -> None:
        self.was_reset = True
        self.lowest = self.upto = None

    def _reach(self, lowest: int | None, upto: int | None) -> None:
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
"""What waits in a stream's queue, with the link that it came by."""
