"""Tests of skipping USER_SYNC commands that repeat a known state."""

from __future__ import annotations

from msgspec.structs import replace
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.host_commands import (
    MAX_SYNCS,
    REFRESH_AFTER,
    RESOLUTION_MS,
    UserSyncDeduplicator,
)
from synapse_replication.wire.commands import UserSyncCommand

START = UserSyncCommand("w1", "@u:hs", "D", True, 1_000_000)
END = replace(START, is_syncing=False)


class UserSyncDeduplicatorTests(SynchronousTestCase):
    """Tests for :class:`UserSyncDeduplicator`."""

    def setUp(self) -> None:
        self.syncs = UserSyncDeduplicator()

    def test_repeat_is_suppressed(self) -> None:
        """The same state with an equal, slightly later or earlier time is a repeat."""
        self.assertFalse(self.syncs.is_repeat(START, 0))
        for change in (0, RESOLUTION_MS - 1, -5000):
            later = replace(START, last_sync_ms=START.last_sync_ms + change)
            self.assertTrue(self.syncs.is_repeat(later, 1))

    def test_changes_are_no_repeat(self) -> None:
        """
        Another state, user, device or instance, or a much later time, is not a repeat.
        """
        self.assertFalse(self.syncs.is_repeat(START, 0))
        for other in (
            replace(START, user_id="@v:hs"),
            replace(START, device_id=None),
            replace(START, instance_id="w2"),
            replace(START, last_sync_ms=START.last_sync_ms + RESOLUTION_MS),
            END,
            START,
            END,
        ):
            self.assertFalse(self.syncs.is_repeat(other, 0), other)

    def test_repeat_is_forwarded_every_10_s(self) -> None:
        """
        A repeated state is forwarded every 10 s, so that the user does not expire.
        """
        forwarded = [now for now in range(60) if not self.syncs.is_repeat(START, now)]
        self.assertEqual(forwarded, [0, 10, 20, 30, 40, 50])
        self.assertFalse(self.syncs.is_repeat(START, 59 + REFRESH_AFTER))

    def test_forgotten(self) -> None:
        """After ``forget`` or ``forget_process``, the same state is not a repeat."""
        other = replace(START, instance_id="w2")
        self.syncs.is_repeat(START, 0)
        self.syncs.is_repeat(other, 0)
        self.syncs.forget(START)
        self.assertFalse(self.syncs.is_repeat(START, 0))
        self.syncs.forget_process("w1")
        self.assertFalse(self.syncs.is_repeat(START, 0))
        self.assertTrue(self.syncs.is_repeat(other, 0))

    def test_bounded(self) -> None:
        """Beyond the limit, the oldest states are forgotten."""
        for number in range(MAX_SYNCS + 1):
            user = replace(START, user_id=f"@u{number}:hs")
            self.assertFalse(self.syncs.is_repeat(user, 0))
        self.assertTrue(self.syncs.is_repeat(user, 0))
        oldest = replace(START, user_id="@u0:hs")
        self.assertFalse(self.syncs.is_repeat(oldest, 0))
