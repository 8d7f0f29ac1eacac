"""Compares what was committed with what each process was given: pure logic.

A row is *due* to a process if the process lived long enough to be given it (to the
end of the run, or of a round after the row was written), did not write it itself, and
could not have read it from the database when it started. A row that was due and is
still in the database, but was never delivered, is *lost*. A row that is no longer there
was replaced by a newer one about the same thing, or its user took it; a process that
fetches what it missed cannot be given it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

__all__ = ["Committed", "Delivery", "Life", "StreamTally", "compare", "missing_rows"]


@attrs.frozen
class Delivery:
    """Rows of one token that were given to a process.

    :ivar era: how often the writer of a stream in memory had started before: its
        tokens begin again then, and mean other rows.
    """

    stream: str
    token: int
    era: int = 0


@attrs.frozen
class Committed:
    """A row that the database, or the writer of a stream in memory, has taken.

    :ivar writer: the instance name.
    :ivar at: when it was written, in s since the epoch; no later than its commit.
    :ivar era: as of a :class:`Delivery`.
    """

    stream: str
    token: int
    writer: str
    at: float
    era: int = 0

    @property
    def delivery(self) -> Delivery:
        """The delivery that this row needs."""
        return Delivery(self.stream, self.token, self.era)


@attrs.define(eq=False)
class Life:
    """One start of a process, up to its end.

    :ivar process: its instance name.
    :ivar is_ours: it runs on our replication.
    :ivar started: when it had read its positions, in s since the epoch.
    :ivar positions: those, by stream and writer.
    :ivar is_running: it has not ended.
    :ivar judged_until: of one that has ended: rows that were written later, in s
        since the epoch, are not due to it.
    :ivar deliveries: how often each token was delivered to it.
    """

    process: str
    is_ours: bool
    started: float
    positions: Mapping[str, Mapping[str, int]]
    is_running: bool = True
    judged_until: float = 0.0
    deliveries: Counter[Delivery] = attrs.Factory(Counter)

    def has_to_get(self, row: Committed) -> bool:
        """Return whether a row is due to this process."""
        if row.writer == self.process:
            return False
        if not self.is_running and row.at > self.judged_until:
            return False
        position = self.positions.get(row.stream, {}).get(row.writer, 0)
        return row.token > position or row.at > self.started


@attrs.frozen
class StreamTally:
    """The findings for one stream, over processes of one kind.

    :ivar is_ours: of processes on ours; else of stock ones.
    :ivar committed: tokens that were written.
    :ivar due: deliveries that were due, over all processes.
    :ivar delivered: as many of those as were made.
    :ivar lost: deliveries that were due and not made, though the row is there.
    :ivar doubled: deliveries of a token that the process had been given already.
    """

    stream: str
    is_ours: bool
    committed: int
    due: int
    delivered: int
    lost: int
    doubled: int


def missing_rows(
    rows: Iterable[Committed],
    lives: Iterable[Life],
    present: Mapping[str, Collection[Delivery]],
) -> list[tuple[Life, Committed]]:
    """Return each row that was due, is still there and was not delivered.

    :param present: the rows that each stream has now, as deliveries; of a stream
        that is not named, every row counts as present.
    """
    there = [
        row
        for row in rows
        if row.stream not in present or row.delivery in present[row.stream]
    ]
    return [
        (life, row)
        for life in lives
        for row in there
        if row.delivery not in life.deliveries and life.has_to_get(row)
    ]


def compare(
    rows: Sequence[Committed],
    lives: Sequence[Life],
    present: Mapping[str, Collection[Delivery]],
    streams: Iterable[str],
) -> list[StreamTally]:
    """Compare rows with deliveries, for each stream and each kind of process.

    :param rows: without repetitions.
    :param lives: every start of every process.
    :param present: as for :func:`missing_rows`.
    """
    tallies = []
    for is_ours in (True, False):
        of_kind = [life for life in lives if life.is_ours is is_ours]
        if not of_kind:
            continue
        for stream in streams:
            of_stream = [row for row in rows if row.stream == stream]
            due = [
                row.delivery in life.deliveries
                for life in of_kind
                for row in of_stream
                if life.has_to_get(row)
            ]
            doubled = sum(
                times - 1
                for life in of_kind
                for delivery, times in life.deliveries.items()
                if delivery.stream == stream
            )
            lost = len(missing_rows(of_stream, of_kind, present))
            tallies.append(
                StreamTally(
                    stream, is_ours, len(of_stream), len(due), sum(due), lost, doubled
                )
            )
    return tallies
