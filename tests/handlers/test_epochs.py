"""Tests of current and stale epochs."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.epochs import (
    EPOCH_CHANGE_INTERVAL,
    HEARTBEAT_TOLERANCE,
    MAX_CHANGES,
    MAX_INSTANCES,
    SETTLED_AFTER,
    UNCONFIRMED_AFTER,
    USUAL_INTERVAL,
    EpochStatus,
    PeerEpochs,
)


class PeerEpochsTests(SynchronousTestCase):
    """Tests for :class:`PeerEpochs`."""

    def setUp(self) -> None:
        self.epochs = PeerEpochs()

    def test_restart(self) -> None:
        """
        The newest epoch is current; a delayed message of a stale epoch counts as late.
        """
        self.assertIsNone(self.epochs.epoch_of("w"))
        self.assertEqual(self.epochs.record_message("w", "a", 0), EpochStatus.FIRST)
        self.assertEqual(self.epochs.record_message("w", "a", 5), EpochStatus.SAME)
        self.assertEqual(self.epochs.record_message("w", "b", 10), EpochStatus.NEW)
        self.assertEqual(self.epochs.record_message("w", "a", 10.5), EpochStatus.LATE)
        self.assertEqual(self.epochs.epoch_of("w"), "b")

    def test_reporting(self) -> None:
        """A peer reports until it is silent for some time, or says goodbye."""
        self.assertFalse(self.epochs.is_reporting("w", 0))
        self.epochs.record_message("w", "a", 0)
        self.assertTrue(
            self.epochs.is_reporting("w", (USUAL_INTERVAL + HEARTBEAT_TOLERANCE))
        )
        self.assertFalse(
            self.epochs.is_reporting("w", (USUAL_INTERVAL + HEARTBEAT_TOLERANCE) + 0.1)
        )

    def test_duplicate(self) -> None:
        """A stale epoch that still sends messages belongs to a second process."""
        self.epochs.record_message("w", "a", 0)
        self.epochs.record_message("w", "b", 1)
        now = 1 + SETTLED_AFTER
        self.assertEqual(
            self.epochs.record_message("w", "a", now), EpochStatus.DUPLICATE
        )
        self.assertEqual(self.epochs.epoch_of("w"), "b")

    def test_stale_epoch_becomes_current(self) -> None:
        """
        If the current epoch says goodbye or is silent for long, a stale one becomes
        current.
        """
        self.epochs.record_message("w", "a", 0)
        self.epochs.record_message("w", "b", 1)
        self.epochs.leave("w", "a")
        self.assertEqual(self.epochs.epoch_of("w"), "b")
        self.epochs.leave("w", "b")
        self.assertIsNone(self.epochs.epoch_of("w"))
        self.assertEqual(self.epochs.record_message("w", "a", 5), EpochStatus.NEW)
        self.assertEqual(
            self.epochs.record_message(
                "w", "b", 6 + (USUAL_INTERVAL + HEARTBEAT_TOLERANCE)
            ),
            EpochStatus.NEW,
        )

    def test_made_up_epochs(self) -> None:
        """Only a limited rate of new epochs is accepted."""
        self.epochs.record_message("w", "real", 0)
        statuses = [
            self.epochs.record_message("w", f"{number}", 1) for number in range(300)
        ]
        self.assertEqual(statuses.count(EpochStatus.NEW), MAX_CHANGES)
        self.assertEqual(statuses.count(EpochStatus.DUPLICATE), 300 - MAX_CHANGES)
        self.assertEqual(
            self.epochs.record_message("w", "x", 1 + EPOCH_CHANGE_INTERVAL),
            EpochStatus.NEW,
        )
        self.assertEqual(
            self.epochs.record_message("w", "y", 1 + EPOCH_CHANGE_INTERVAL),
            EpochStatus.DUPLICATE,
        )

    def test_real_epoch_returns(self) -> None:
        """The real epoch becomes current again a few seconds after forged ones."""
        self.epochs.record_message("w", "real", 0)
        for number in range(300):
            self.epochs.record_message("w", f"{number}", 1)
        self.assertNotEqual(self.epochs.epoch_of("w"), "real")
        statuses = [
            self.epochs.record_message("w", "real", now)
            for now in (3, 1 + UNCONFIRMED_AFTER + 0.1, 10)
        ]
        self.assertEqual(
            statuses, [EpochStatus.DUPLICATE, EpochStatus.NEW, EpochStatus.SAME]
        )

    def test_invented_interval(self) -> None:
        """
        The real epoch returns as soon, whatever interval forged messages stated, unless
        the process that stated it lives and contradicts.
        """
        for name in ("w", "v"):
            self.epochs.record_message(name, "real", 0, heartbeat_interval=5)
            for now in (1, 3):
                self.epochs.record_message(name, "other", now, heartbeat_interval=3600)
        statuses = []
        for now in range(5, 16, 5):
            statuses.append(
                self.epochs.record_message("w", "real", now, heartbeat_interval=5)
            )
            self.epochs.record_message("v", "real", now, heartbeat_interval=5)
            self.epochs.record_message("v", "other", now + 2, heartbeat_interval=3600)
        late, is_back = EpochStatus.DUPLICATE, EpochStatus.NEW
        self.assertEqual(statuses, [late, late, is_back])
        self.assertEqual(self.epochs.epoch_of("v"), "other")

    def test_bounded(self) -> None:
        """The numbers of instances and of stale epochs are limited."""
        for number in range(MAX_INSTANCES * 2):
            self.epochs.record_message(f"w{number}", "a", number)
            self.epochs.record_message(
                "kept", f"{number}", number * EPOCH_CHANGE_INTERVAL
            )
        self.assertEqual(len(self.epochs._peers), MAX_INSTANCES)
        self.assertLess(len(self.epochs._peers["kept"].stale), 10)
        self.assertIsNone(self.epochs.epoch_of("w0"))
        self.assertEqual(self.epochs.epoch_of("kept"), str(MAX_INSTANCES * 2 - 1))
