"""The items that arrive from the writers of one received stream."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from synapse_replication.handlers.receiving.queue import ROW_OVERHEAD
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import InterleavedGroup, RdataGroup


@attrs.frozen
class LostRow:
    """A writer's row that could not be parsed."""

    instance_name: str


@attrs.frozen
class ReportedPosition:
    """A writer's report that it has sent all rows up to ``token``.

    It has no rows in ``(prev_token, token]``.

    :ivar is_first: whether the writer has just started, so that this is its initial
        position. Missing rows up to it are fetched, but are not reported as a gap.
    """

    instance_name: str
    prev_token: int
    token: int
    is_first: bool


@attrs.frozen
class ReportedEpoch:
    """The epoch of a writer that holds the stream in memory.

    :ivar token: the writer's position.
    :ivar has_restarted: whether this may be the first message of a process.
    """

    instance_name: str
    token: int
    epoch: str
    has_restarted: bool


Announcement: TypeAlias = PositionCommand | ReportedPosition | ReportedEpoch | LostRow
#: An item that arrives from one writer.
OfWriter: TypeAlias = RdataGroup | Announcement


def size_of(item: OfWriter | InterleavedGroup) -> int:
    """Return the approximate size of an item in memory, in bytes."""
    if isinstance(item, (RdataGroup, InterleavedGroup)):
        return sum(map(len, item.rows)) + len(item.rows) * ROW_OVERHEAD
    return ROW_OVERHEAD
