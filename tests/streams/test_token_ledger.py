"""Tests for synapse_replication.streams.token_ledger."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams import token_ledger
from synapse_replication.streams.token_ledger import TokenLedger


class TokenLedgerTests(SynchronousTestCase):
    def test_missing(self) -> None:
        """Committed tokens that did not arrive are missing, once."""
        tokens = TokenLedger(5)
        tokens.add([6, 9, 12])
        self.assertEqual(tokens.verify([6, 7, 9], 10, 100), [7])
        self.assertEqual(tokens.verified, 10)
        self.assertEqual(tokens.verify([11, 12], 12, 100), [11])

    def test_limit(self) -> None:
        """Beyond a limit, the missing tokens remain to be verified."""
        tokens = TokenLedger(0)
        tokens.add([2, 4])
        self.assertEqual(tokens.verify([1, 2, 3, 4, 5], 9, 2), [1, 3])
        self.assertEqual(tokens.verified, 3)
        self.assertEqual(tokens.verify([4, 5], 9, 2), [5])
        self.assertEqual(tokens.verified, 9)

    def test_bounded(self) -> None:
        """If more tokens arrive than are stored, missing ones are only counted."""
        self.patch(token_ledger, "MAX_RECORDED", 3)
        tokens = TokenLedger(0)
        tokens.add([1, 2, 3])
        tokens.add([4])
        self.assertEqual(tokens.verify([1, 2, 3, 4], 4, 100), [])
        self.assertEqual(tokens.unverified, 1)
        tokens.add([5])
        self.assertEqual(tokens.verify([5, 6], 6, 100), [6])
