"""Tests that the simulation finds known bugs by an invariant, not by a crash."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.simulation.runner import simulate
from tests.testing.simulation.bugs import BUGS, FOUND_BY

#: The greatest number of seeds needed to find a bug.
MAX_SEEDS = 150


class BugTests(SynchronousTestCase):
    def check(self, case: str) -> None:
        first = FOUND_BY.get(case, 0)
        for seed in range(first, first + MAX_SEEDS):
            result = simulate(seed, BUGS[case])
            self.assertFalse(result.crashed, result.failure)
            if result.failure is not None:
                return
        self.fail(f"{MAX_SEEDS} seeds do not find the bug of {case}")

    def test_asks_before_it_hears(self) -> None:
        """REPLICATE is sent before the subscription is confirmed."""
        self.check("reconnect-order")

    def test_does_not_wait_for_catch_up(self) -> None:
        """Rows are delivered in the middle of a catch-up."""
        self.check("rows-during-catch-up")

    def test_one_batch_per_stream(self) -> None:
        """Batches of two writers are mixed."""
        self.check("interleaved-batches")

    def test_position_drops_all_batches(self) -> None:
        """A POSITION drops another writer's batch."""
        self.check("position-during-batch")

    def test_connects_streams(self) -> None:
        """A POSITION makes another writer live."""
        self.check("gap-per-writer")

    def test_forgets_unreadable_rows(self) -> None:
        """The rest of a batch with an unreadable row joins the next batch."""
        self.check("unreadable-row")

    def test_announces_on_remote_positions(self) -> None:
        """A POSITION covers a row that was not sent."""
        self.check("covered-rows")

    def test_ignores_fetches(self) -> None:
        """A position overtakes an id between nextval and its registration."""
        self.check("unregistered-id")

    def test_compares_no_epochs(self) -> None:
        """Rows of a writer that restarted and overtook its old position are missed."""
        self.check("typing-reset")

    def test_saves_no_epochs(self) -> None:
        """Rows of a restarted writer are missed by a reader that restarted as well."""
        self.check("typing-reset, saved")

    def test_trusts_persisted_upto(self) -> None:
        """A reader that missed exactly one row never gets it."""
        self.check("shared token")

    def test_late_baseline(self) -> None:
        """Rows written while a process starts are skipped."""
        self.check("late baseline")

    def test_reveals_rows(self) -> None:
        """A position is accepted before another writer's rows below it."""
        self.check("revealed rows")

    def test_drains_nobody(self) -> None:
        """Rows of a removed writer never arrive."""
        self.check("removed")

    def test_looks_only_at_the_start(self) -> None:
        """A running reader misses rows that a killed writer had not sent."""
        self.check("removed, running")
