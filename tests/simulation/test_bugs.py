"""Tests that the simulation finds known bugs by an invariant, not by a crash."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.bugs import BUGS, FOUND_BY
from tests.simulation.runner import simulate

#: The greatest number of seeds needed to find a bug.
MAX_SEEDS = 150


class BugTests(SynchronousTestCase):
    def check(self, case: str) -> None:
        first = FOUND_BY.get(case, 0)
        for seed in range(first, first + MAX_SEEDS):
            with BUGS[case]():
                result = simulate(seed)
            self.assertFalse(result.crashed, result.failure)
            if result.failure is not None:
                return
        self.fail(f"{MAX_SEEDS} seeds do not find the bug of {case}")

    def test_replicates_before_subscribed(self) -> None:
        """
        The simulation finds a REPLICATE that is sent before the subscription is
        confirmed.
        """
        self.check("reconnect-order")

    def test_delivers_during_catch_up(self) -> None:
        """The simulation finds rows that are delivered during a catch-up."""
        self.check("rows-during-catch-up")

    def test_one_batch_per_stream(self) -> None:
        """The simulation finds mixed batches of two writers."""
        self.check("interleaved-batches")

    def test_position_drops_all_batches(self) -> None:
        """The simulation finds a POSITION that drops another writer's batch."""
        self.check("position-during-batch")

    def test_makes_all_writers_live(self) -> None:
        """The simulation finds a POSITION that makes another writer live."""
        self.check("gap-per-writer")

    def test_compares_links_with_the_position(self) -> None:
        """The simulation finds a slow link that makes the position move back."""
        self.check("late position")

    def test_reads_each_link(self) -> None:
        """The simulation finds rows that two links deliver."""
        self.check("repeated rows")

    def test_skips_unreadable_rows(self) -> None:
        """The simulation finds an unreadable row of a batch that is skipped."""
        self.check("unreadable-row")

    def test_announces_on_remote_positions(self) -> None:
        """The simulation finds a POSITION that covers a row that was not sent."""
        self.check("covered-rows")

    def test_ignores_fetches(self) -> None:
        """
        The simulation finds a position that passes an id between nextval and
        registration.
        """
        self.check("unregistered-id")

    def test_starts_at_once(self) -> None:
        """
        The simulation finds a writer that starts before a commit of its predecessor
        ends.
        """
        self.check("open-ids-at-restart")

    def test_ignores_epochs(self) -> None:
        """
        The simulation finds missed rows of a writer that restarted and passed its old
        position.
        """
        self.check("typing-reset")

    def test_saves_no_epochs(self) -> None:
        """
        The simulation finds rows of a restarted writer that a restarted reader misses.
        """
        self.check("typing-reset, saved")

    def test_trusts_persisted_upto(self) -> None:
        """
        The simulation finds a reader that never fetches the only row that it missed.
        """
        self.check("shared token")

    def test_late_baseline(self) -> None:
        """
        The simulation finds skipped rows that were written while a process started.
        """
        self.check("late baseline")

    def test_reveals_rows(self) -> None:
        """
        The simulation finds a position accepted before another writer's lower rows.
        """
        self.check("revealed rows")

    def test_ignores_removed_writers(self) -> None:
        """The simulation finds rows of a removed writer that never arrive."""
        self.check("removed")

    def test_finds_removed_writers_once(self) -> None:
        """
        The simulation finds rows of a removed writer that a running reader misses.
        """
        self.check("removed, running")
