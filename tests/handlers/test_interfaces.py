"""Tests of the values that a host hands over."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers import interfaces
from synapse_replication.handlers.interfaces import Identity, SyncingUser


class ValueTests(SynchronousTestCase):
    """Identity and syncing users are values."""

    def test_cannot_be_changed(self) -> None:
        """Nobody changes who a process is while it runs."""
        identity = Identity("hs.example", "master", "abc")
        with self.assertRaises(AttributeError):
            identity.instance_name = "other"  # type: ignore[misc]
        self.assertEqual(SyncingUser("@a:b", None, 1), SyncingUser("@a:b", None, 1))

    def test_all_is_there(self) -> None:
        """Every public name exists."""
        for name in interfaces.__all__:
            self.assertTrue(hasattr(interfaces, name), name)
