"""Tests that the simulated cluster holds its invariants, seed by seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.runner import LIVENESS_SECONDS, simulate

#: The kinds of faults.
FAULTS = {
    "crash",
    "crash_at_point",
    "cut_at_point",
    "cut_outbound",
    "fail_auth",
    "fail_http",
    "fail_sinks",
    "garble",
    "half_open",
    "interleave",
    "lag",
    "lie",
    "lose_answers",
    "outrun",
    "reset",
    "restart_broker",
    "slow_database",
    "stall_auth",
    "stop_database",
    "storm",
}


class SimulateTests(SynchronousTestCase):
    """Tests with a few seeds, which together have each kind of fault.

    :mod:`tests.external.long.test_simulation` runs more, and ``scripts/simulate`` 200,
    or as many as it is told to.
    """

    seeds: ClassVar[Sequence[int]] = (1, 2, 4, 7, 9, 11, 18, 72, 116, 239, 934)

    def test_invariants(self) -> None:
        """
        No row is lost, doubled, reordered or covered, and all processes agree in the
        end.
        """
        failures = []
        faults: Counter[str] = Counter()
        for seed in self.seeds:
            result = simulate(seed)
            faults += result.counts.faults
            self.assertLessEqual(result.agreed_after, LIVENESS_SECONDS + 1)
            if result.failure is not None:
                failures.append(f"scripts/simulate --seed {seed} -v: {result.failure}")
        self.assertEqual(failures, [])
        self.assertEqual({kind for kind in faults if faults[kind] > 1}, FAULTS)

    def test_replay(self) -> None:
        """The same seed gives the same run in every detail."""
        traces: list[list[tuple[float, str]]] = []
        for _ in range(2):
            trace: list[tuple[float, str]] = []
            result = simulate(11, trace_to=lambda now, text: trace.append((now, text)))  # noqa: B023
            trace.append((result.simulated_seconds, str(result.messages)))
            traces.append(trace)
        self.assertGreater(len(traces[0]), 500)
        self.assertEqual(traces[0], traces[1])

    def test_seeds_differ(self) -> None:
        """Different seeds give different runs."""
        first, second = simulate(1), simulate(2)
        self.assertNotEqual(first.counts.faults, second.counts.faults)
        self.assertNotEqual(first.committed_rows, second.committed_rows)
