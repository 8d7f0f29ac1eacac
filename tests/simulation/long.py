"""One cluster for days of simulated time.

Theory of operation: every few minutes, the cluster has a period of faults, moves and
dense traffic, as a short run has. Then all positions must agree, and a slow writer
continues until the next period. The sequences begin below 2^31 and 2^53, and pass them.
Rows that a database would remove by its retention, and records that the invariants do
not need any more, are removed after each period, so that the memory that remains is
that of the processes. Once a false position of a stream was announced, it is not
checked any more that no process shows the stream beyond its rows.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from tests.simulation.faults import Faults
from tests.simulation.moves import Moves
from tests.simulation.runner import (
    ARRIVAL_SECONDS,
    BEGIN,
    END,
    LAST_MOVE,
    Run,
    unhandled_errors,
)

#: The time in s from the beginning of one period to the next one.
PERIOD = 240.0
#: The interval of the writes between the faults, in s.
WRITE_INTERVAL = 20.0
#: The first ids of the sequences.
FIRST_IDS = {"events_seq": 2**31 - 20_000, "receipts_seq": 2**53 - 20_000}
#: The number of the newest rows of each table, and tokens of each writer, to keep.
KEPT_ROWS = 1_000
#: By how much the last day's memory and objects may exceed those of the first day.
GROWTH = 1.1


@attrs.frozen
class Sample:
    """The state at the end of a day of simulated time.

    :ivar memory: the memory of all processes and of the simulation, in MiB.
    :ivar objects: the number of objects that the garbage collector tracks.
    :ivar delayed_calls: the number of pending delayed calls of all processes.
    """

    day: int
    memory: float
    objects: int
    delayed_calls: int
    rows: int
    faults: int
    starts: int


class LongRun(Run):
    """A run of many periods.

    :param periods: the number of periods.
    """

    def __init__(
        self,
        seed: int,
        periods: int,
        trace_to: Callable[[float, str], object] | None = None,
    ) -> None:
        super().__init__(seed, trace_to)
        self._seed = seed
        self._periods = periods
        self.cluster.clock.MAX_CALLS = 300_000 * periods
        for sequence, first in FIRST_IDS.items():
            self.cluster.database.set_sequence(sequence, first)

    def run_days(self, report: Callable[[Sample], object]) -> None:
        """Run all periods, and report each day.

        :raises ViolationError: if an invariant does not hold.
        """
        cluster = self.cluster
        for number in range(self._periods):
            began = number * PERIOD
            if number == 0:
                self._start_all()
            else:
                self._begin(number)
            self.end = began + END
            self._go_until(self.end + ARRIVAL_SECONDS)
            self._wait_for_agreement()
            while cluster.clock.rightNow < began + PERIOD - WRITE_INTERVAL:
                self._write_slowly()
                self._go_until(cluster.clock.rightNow + WRITE_INTERVAL)
            self.end = cluster.clock.rightNow
            self._wait_for_agreement()
            self._go_until(began + PERIOD)
            self._forget_old()
            if (number + 1) % round(86_400 / PERIOD) == 0:
                report(self.sample(round((number + 1) * PERIOD / 86_400)))
        self._check_idle()

    def _begin(self, number: int) -> None:
        cluster = self.cluster
        seed = hash((self._seed, number))
        self._faults = Faults(cluster, seed, BEGIN, END)
        Moves(cluster, seed, BEGIN, END - LAST_MOVE)
        cluster.clock.callLater(BEGIN, self._write)

    def _write_slowly(self) -> None:
        cluster = self.cluster
        for stream, writers in cluster.writers.items():
            cluster.write(self._random.choice(writers), stream, 1)

    def _forget_old(self) -> None:
        """Remove old rows, and doubts that the agreement has settled."""
        cluster = self.cluster
        for rows in cluster.database.rows.values():
            del rows[:-KEPT_ROWS]
        cluster.ledger.forget_settled(
            KEPT_ROWS,
            {
                (stream, writer)
                for stream, writers in cluster.writers.items()
                for writer in writers
            },
            lambda name, key: cluster.processes[name].position(*key),
        )
        cluster.counts.hidden_resets.clear()

    def sample(self, day: int) -> Sample:
        """Collect garbage, and measure."""
        gc.collect()
        cluster = self.cluster
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Sample(
            day,
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(gc.get_objects()),
            len(cluster.clock.calls),
            cluster.ledger.committed_rows,
            cluster.counts.faults.total(),
            cluster.counts.starts.total(),
        )


def why_growing(samples: Sequence[Sample]) -> str | None:
    """Return which resource has grown since the first day; ``None`` if none has."""
    for name in ("memory", "objects", "delayed_calls"):
        values = [getattr(sample, name) for sample in samples]
        if values and values[-1] > values[0] * GROWTH:
            return f"{name} grew from {values[0]:.0f} to {values[-1]:.0f}"
    return None


def simulate_days(
    seed: int, days: float, report: Callable[[Sample], object]
) -> str | None:
    """Simulate one cluster for a number of days.

    :return: the violated invariant; ``None`` if there is none.
    """
    run = LongRun(seed, round(days * 86_400 / PERIOD))
    with unhandled_errors() as unhandled:
        try:
            run.run_days(report)
        except AssertionError as violation:
            return f"after {run.cluster.clock.rightNow:.0f} s: {violation}"
        gc.collect()
    return unhandled[0] if unhandled else None
