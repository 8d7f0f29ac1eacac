"""Tests of which start of a process is the present one."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.epochs import (
    MAX_INSTANCES,
    SETTLED_AFTER,
    SILENT_AFTER,
    Heard,
    PeerEpochs,
)


class PeerEpochsTests(SynchronousTestCase):
    """Tests for :class:`PeerEpochs`."""

    def setUp(self) -> None:
        self.epochs = PeerEpochs()

    def test_restart(self) -> None:
        """The newest epoch is the present one; a late word of the last is passed over."""
        self.assertIsNone(self.epochs.epoch_of("w"))
        self.assertEqual(self.epochs.hear("w", "a", 0), Heard.FIRST)
        self.assertEqual(self.epochs.hear("w", "a", 5), Heard.SAME)
        self.assertEqual(self.epochs.hear("w", "b", 10), Heard.NEW)
        self.assertEqual(self.epochs.hear("w", "a", 10.5), Heard.LATE)
        self.assertEqual(self.epochs.epoch_of("w"), "b")

    def test_duplicate(self) -> None:
        """C63: an earlier start that goes on talking is a second process."""
        self.epochs.hear("w", "a", 0)
        self.epochs.hear("w", "b", 1)
        now = 1 + SETTLED_AFTER
        self.assertEqual(self.epochs.hear("w", "a", now), Heard.DUPLICATE)
        self.assertEqual(self.epochs.epoch_of("w"), "b")

    def test_one_that_is_left(self) -> None:
        """When the newest goes, or is silent for long, the earlier one is heeded."""
        self.epochs.hear("w", "a", 0)
        self.epochs.hear("w", "b", 1)
        self.epochs.leave("w", "a")
        self.assertEqual(self.epochs.epoch_of("w"), "b")
        self.epochs.leave("w", "b")
        self.assertIsNone(self.epochs.epoch_of("w"))
        self.assertEqual(self.epochs.hear("w", "a", 5), Heard.NEW)
        self.assertEqual(self.epochs.hear("w", "b", 6 + SILENT_AFTER), Heard.NEW)

    def test_bounded(self) -> None:
        """However many names and starts there are, few are remembered."""
        for number in range(MAX_INSTANCES * 2):
            self.epochs.hear(f"w{number}", "a", number)
            self.epochs.hear("kept", f"{number}", number)
        self.assertEqual(len(self.epochs._peers), MAX_INSTANCES)
        self.assertLess(len(self.epochs._peers["kept"].stale), 10)
        self.assertIsNone(self.epochs.epoch_of("w0"))
        self.assertEqual(self.epochs.epoch_of("kept"), str(MAX_INSTANCES * 2 - 1))
