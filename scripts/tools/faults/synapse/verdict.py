"""Compares committed rows with the deliveries to each process: pure logic.

A row is *due* to a process if the process ran long enough to receive it (until the end
of the run, or of a round that ended after the row was written), did not write it
itself, and could not have read it from the database when it started. A row that was due
and is still in the database, but was never delivered, is *lost*. A row that is no
longer in the database was replaced by a newer one, or consumed by its user, so that a
process that missed the row can no longer fetch it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs


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

    :ivar writer: the instance name of the writer.
    :ivar at: when the row was written, in s since the Unix epoch; no later than its
        commit.
    :ivar era: as for :class:`Delivery`.
    """

    stream: str
    token: int
    writer: str
    at: float
    era: int = 0

    def __str__(self) -> str:
        return f"{self.stream} {self.token} of {self.writer}"

    @property
    def delivery(self) -> Delivery:
        """The delivery of this row to a process."""
        return Delivery(self.stream, self.token, self.era)


@attrs.define(eq=False)
class Epoch:
    """One epoch of a process.

    :ivar process: the instance name of the process.
    :ivar is_ours: whether the process runs with this package's replication.
    :ivar started: when it had read its positions, in s since the Unix epoch.
    :ivar positions: the initial positions, by stream and writer.
    :ivar is_running: whether the process is still running.
    :ivar judged_until: for a process that has ended: rows written after this time, in s
        since the Unix epoch, are not due to it.
    :ivar deliveries: the number of deliveries of each token.
    :ivar received_at: when each token was first delivered, in s since the Unix epoch.
    :ivar late: the tokens that were delivered after a greater one of the same writer.
    """

    process: str
    is_ours: bool
    started: float
    positions: Mapping[str, Mapping[str, int]]
    is_running: bool = True
    judged_until: float = 0.0
    deliveries: Counter[Delivery] = attrs.Factory(Counter)
    received_at: dict[Delivery, float] = attrs.Factory(dict)
    late: list[Delivery] = attrs.Factory(list)
    _greatest: dict[tuple[str, str, int], int] = attrs.Factory(dict)

    def deliver(self, delivery: Delivery, writer: str, at: float) -> None:
        """Record a delivery.

        :param at: its time, in s since the Unix epoch.
        """
        key = delivery.stream, writer, delivery.era
        greatest = self._greatest.get(key, 0)
        if delivery.token < greatest and delivery not in self.deliveries:
            self.late.append(delivery)
        self._greatest[key] = max(greatest, delivery.token)
        self.deliveries[delivery] += 1
        self.received_at.setdefault(delivery, at)

    def must_receive(self, row: Committed) -> bool:
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
    :ivar delivered: the number of due deliveries that were made.
    :ivar lost: the number of due deliveries that were not made although the row exists.
    :ivar duplicated: the number of repeated deliveries of a token to a process.
    """

    stream: str
    is_ours: bool
    committed: int
    due: int
    delivered: int
    lost: int
    duplicated: int


def missing_rows(
    rows: Iterable[Committed],
    epochs: Iterable[Epoch],
    present: Mapping[str, Collection[Delivery]],
) -> list[tuple[Epoch, Committed]]:
    """Return each row that was due, still exists, and was not delivered.

    :param present: the current rows of each stream, as deliveries; for a stream that is
        not listed, every row counts as present.
    """
    existing = [
        row
        for row in rows
        if row.stream not in present or row.delivery in present[row.stream]
    ]
    return [
        (epoch, row)
        for epoch in epochs
        for row in existing
        if row.delivery not in epoch.deliveries and epoch.must_receive(row)
    ]


def received_by_none(
    rows: Iterable[Committed], epochs: Sequence[Epoch], within: float = math.inf
) -> list[Committed]:
    """Return the rows that were due to processes, and that none of them received.

    :param within: the time from writing a row within which a delivery counts, in s.
    :return: the rows, ordered by stream and token.
    """
    found = []
    for row in sorted(rows, key=lambda row: (row.stream, row.token)):
        due = [epoch for epoch in epochs if epoch.must_receive(row)]
        if due and all(
            epoch.received_at.get(row.delivery, math.inf) >= row.at + within
            for epoch in due
        ):
            found.append(row)
    return found


def compare(
    rows: Sequence[Committed],
    epochs: Sequence[Epoch],
    present: Mapping[str, Collection[Delivery]],
    streams: Iterable[str],
) -> list[StreamTally]:
    """Compare rows with deliveries, for each stream and each kind of process.

    :param rows: the committed rows, each once.
    :param epochs: all epochs of all processes.
    :param present: as for :func:`missing_rows`.
    """
    tallies = []
    for is_ours in (True, False):
        of_kind = [epoch for epoch in epochs if epoch.is_ours is is_ours]
        if not of_kind:
            continue
        for stream in streams:
            of_stream = [row for row in rows if row.stream == stream]
            due = [
                row.delivery in epoch.deliveries
                for epoch in of_kind
                for row in of_stream
                if epoch.must_receive(row)
            ]
            duplicated = sum(
                times - 1
                for epoch in of_kind
                for delivery, times in epoch.deliveries.items()
                if delivery.stream == stream
            )
            lost = len(missing_rows(of_stream, of_kind, present))
            tallies.append(
                StreamTally(
                    stream,
                    is_ours,
                    len(of_stream),
                    len(due),
                    sum(due),
                    lost,
                    duplicated,
                )
            )
    return tallies
