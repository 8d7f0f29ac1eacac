"""What ``stream_positions`` ought to hold, decided from what the tables hold.

A position of a writer says: all its rows up to there are finished. While no writer
runs, nothing is in flight, so that this holds up to the greatest id of the whole
stream. Yet a writer that left rows is put at its own last one, where its homeserver
had put it, and never back. Only a writer without rows, or one whose tables do not
tell who wrote them, is put at the greatest id of the stream: lower, it would hold up
all that waits for every writer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.streams.table import IdColumn

__all__ = [
    "Change",
    "Found",
    "PlannedChange",
    "StreamHistory",
    "check_histories",
    "plan_positions",
]

#: Stream, table, writer (``None`` where the row does not tell), its greatest token.
Found = tuple[str, str, str | None, int]


@attrs.frozen(kw_only=True)
class StreamHistory:
    """What the database says of one stream.

    Ids are tokens here, above zero, but for ``stored``.

    :ivar name: on the wire.
    :ivar positions_name: in ``stream_positions``.
    :ivar sequence: where its ids come from.
    :ivar tables: where they are kept; those that exist.
    :ivar negative: ids are below zero in tables and in ``stream_positions``.
    :ivar writers: the declared writers; ``None`` if they are not known.
    :ivar sequence_value: the last id that was given out.
    :ivar stored: the positions there are, by writer, as they are stored.
    :ivar farthest: the greatest token of each table that has rows.
    :ivar found: the greatest token of each writer that left rows.
    """

    name: str
    positions_name: str
    sequence: str
    tables: tuple[IdColumn, ...]
    negative: bool
    writers: tuple[str, ...] | None
    sequence_value: int
    stored: Mapping[str, int]
    farthest: Mapping[str, int]
    found: Mapping[str, int] = attrs.Factory(dict)

    @property
    def sign(self) -> int:
        """Return what to multiply a token with, to store it."""
        return -1 if self.negative else 1

    def with_found(self, found: Iterable[Found]) -> StreamHistory:
        """Add what was found in the tables, of this stream."""
        farthest: dict[str, int] = {}
        by_writer: dict[str, int] = {}
        for stream, table, writer, token in found:
            if stream == self.name:
                farthest[table] = max(token, farthest.get(table, 0))
                if writer is not None:
                    by_writer[writer] = max(token, by_writer.get(writer, 0))
        return attrs.evolve(self, farthest=farthest, found=by_writer)


class PlannedChange(enum.Enum):
    """What becomes of a position."""

    NEW = "new"
    FORWARD = "forward"
    KEPT = "as it is"
    UNDECLARED = "no writer any more: left alone"


@attrs.frozen
class Change:
    """What becomes of the position of one writer.

    :ivar stream: its name on the wire.
    :ivar old: as stored; ``None`` if there is none.
    :ivar new: as it will be stored; ``None`` if there will be none.
    """

    stream: str
    positions_name: str
    instance_name: str
    old: int | None
    new: int | None
    fate: PlannedChange

    @property
    def is_written(self) -> bool:
        """Whether anything has to be done."""
        return self.fate in (PlannedChange.NEW, PlannedChange.FORWARD)


def check_histories(histories: Iterable[StreamHistory]) -> None:
    """See that sequences are ahead of all there is.

    :raises PipelineError: if one is behind; names the sequence and both values.
    """
    behind = []
    for history in histories:
        last = history.sequence_value
        behind += [
            f"sequence {history.sequence} of {history.name} stands at {last}, but "
            f"table {table} holds {history.sign * token}"
            for table, token in history.farthest.items()
            if token > last
        ]
        # Where nobody has written, 1 is stored and nothing was given out.
        behind += [
            f"sequence {history.sequence} of {history.name} stands at {last}, but "
            f"{writer} is stored at {stored}"
            for writer, stored in history.stored.items()
            if history.sign * stored > max(last, 1)
        ]
    if behind:
        raise PipelineError(
            "; ".join(behind) + ": ids would be given out twice. Stop all writers, and "
            "run 'synapse-replication positions repair' first"
        )


def plan_positions(histories: Iterable[StreamHistory]) -> list[Change]:
    """Say what becomes of the position of each writer, in the order of streams."""
    return [change for history in histories for change in _plan(history)]


def _plan(history: StreamHistory) -> Sequence[Change]:
    greatest = max(history.farthest.values(), default=0)
    if history.writers is None:
        declared = {*history.found, *history.stored}
    else:
        declared = set(history.writers)
    changes = []
    for writer in sorted({*declared, *history.found, *history.stored}):
        old = history.stored.get(writer)
        new, fate = old, PlannedChange.KEPT
        if writer not in declared:
            fate = PlannedChange.UNDECLARED
        elif greatest:
            token = history.sign * history.found.get(writer, greatest)
            if old is None:
                new, fate = token, PlannedChange.NEW
            elif token * history.sign > old * history.sign:
                new, fate = token, PlannedChange.FORWARD
        elif old is None:
            # A stream without rows: its writers put themselves there.
            continue
        changes.append(
            Change(history.name, history.positions_name, writer, old, new, fate)
        )
    return changes
