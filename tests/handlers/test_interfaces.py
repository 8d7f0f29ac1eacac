"""Tests of the value classes of the host interfaces."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers import interfaces
from synapse_replication.handlers.interfaces import Identity, SyncingUser


class ValueTests(SynchronousTestCase):
    """Identity and syncing users are values."""

    def test_cannot_be_changed(self) -> None:
        """An identity cannot be modified."""
        identity = Identity("hs.example", "master", "abc")
        with self.assertRaises(AttributeError):
            identity.instance_name = "other"  # type: ignore[misc]
        self.assertEqual(SyncingUser("@a:b", None, 1), SyncingUser("@a:b", None, 1))

    def test_all_names_exist(self) -> None:
        """Every name in ``__all__`` exists."""
        for name in interfaces.__all__:
            self.assertTrue(hasattr(interfaces, name), name)
