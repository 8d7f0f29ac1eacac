"""Tests that the simulated cluster holds its invariants, seed by seed."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.runner import LIVENESS_SECONDS, simulate

#: ``scripts/simulate --seeds 0:2000`` runs more of them.
SEEDS = 200


class SimulateTests(SynchronousTestCase):
    def test_invariants(self) -> None:
        """
        No row is lost, doubled, reordered or covered, and all processes agree in the
        end.
        """
        failures = []
        for seed in range(SEEDS):
            result = simulate(seed)
            self.assertLessEqual(result.agreed_after, LIVENESS_SECONDS + 1)
            if result.failure is not None:
                failures.append(f"scripts/simulate --seed {seed} -v: {result.failure}")
        self.assertEqual(failures, [])

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
