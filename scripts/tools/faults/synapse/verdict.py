"""Compares committed rows with the deliveries to each process: pure logic.

A row is *due* to a process if the process ran long enough to receive it (until the end
of the run, or of a round after the row was written), did not write it itself, and could
not have read it from the database when it started. A row that was due and is still in
the database, but was never delivered, is *lost*. A row that is no longer in the
database was replaced by a newer one, or consumed by its user, so that a process which
missed it can no longer fetch it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

__all__ = ["Committed", "Delivery", "Life", "StreamTally", "compare", "missing_rows"]


@attrs.frozen
class Delivery:
    """Rows of one token that were delivered to a process.

    :ivar era: the number of earlier starts of the writer of a stream in memory, whose
        tokens start over at each start.
    """

    stream: str
    token: int
    era: int = 0


@attrs.frozen
class Committed:
    """A row in the database, or in the memory of its writer.

    :ivar writer: the instance name of its writer.
    :ivar at: when it was written, in s since the Unix epoch; no later than its commit.
    :ivar era: as for :class:`Delivery`.
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
    """One epoch of a process.

    :ivar process: its instance name.
    :ivar is_ours: whether it runs with this package's replication.
    :ivar started: when it had read its positions, in s since the Unix epoch.
    :ivar positions: its initial positions, by stream and writer.
    :ivar is_running: whether it is still running.
    :ivar judged_until: if it has ended: the time in s since the Unix epoch after which
        written rows are not due to it.
    :ivar deliveries: the number of deliveries of each token.
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

    :ivar is_ours: whether the processes run with this package, or are stock ones.
    :ivar committed: the number of written tokens.
    :ivar due: the number of deliveries that were due, over all processes.
    :ivar delivered: the number of those that were made.
    :ivar lost: the number of those that were not made although the row exists.
    :ivar doubled: the number of repeated deliveries of a token to a process.
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
    """Return each row that was due, still exists, and was not delivered.

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
