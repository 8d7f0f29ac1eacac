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
        """Tokens for which there is no room are refused."""
        self.patch(token_ledger, "MAX_RECORDED", 3)
        tokens = TokenLedger(0)
        self.assertTrue(tokens.add([1, 2, 3]))
        self.assertFalse(tokens.add([4]))
        self.assertFalse(TokenLedger(0).add(range(1, 10**18)))

    def test_older_range(self) -> None:
        """Tokens below the beginning of a ledger are not missing."""
        self.assertEqual(TokenLedger(5).verify([4, 5, 6], 6, 100), [6])
