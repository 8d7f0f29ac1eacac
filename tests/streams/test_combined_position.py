"""Tests for the position of all writers of a stream together."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams.combined_position import CombinedPosition


class CombinedPositionTests(SynchronousTestCase):
    """Tests for CombinedPosition."""

    def test_all_writers(self) -> None:
        """The rows of all writers are complete up to the lowest position."""
        self.assertEqual(CombinedPosition().upto(5, 9), 5)

    def test_a_writer_is_down(self) -> None:
        """The position advances over delivered ids without a gap."""
        position = CombinedPosition()
        for token in (2, 3, 4, 6):
            position.delivered(token)
        self.assertEqual(position.upto(1, 0), 4)
        position.delivered(5)
        self.assertEqual(position.upto(1, 0), 6)

    def test_own_ids(self) -> None:
        """An id of this process is settled when it is finished, not before."""
        position = CombinedPosition()
        for token in (2, 3, 4):
            position.allocated(token)
        self.assertEqual(position.upto(1, 1), 1)
        self.assertEqual(position.upto(1, 3), 3)
        self.assertEqual(position.upto(1, 4), 4)

    def test_bounded(self) -> None:
        """Ids of this process are removed once they are finished."""
        position = CombinedPosition()
        for token in range(2, 5000):
            position.allocated(token)
            if position.is_large:
                position.upto(token, token)
        self.assertLess(position.size, 500)

    def test_rewound(self) -> None:
        """If rows will be delivered again, they do not count until then."""
        position = CombinedPosition()
        position.delivered(2)
        position.delivered(3)
        self.assertEqual(position.upto(1, 0), 3)
        position.rewound(1)
        self.assertEqual(position.upto(1, 0), 1)
        position.delivered(2)
        self.assertEqual(position.upto(1, 0), 2)

    def test_memory(self) -> None:
        """Ids that are complete are forgotten, and gaps above them are bounded."""
        position = CombinedPosition()
        for token in range(2, 2000, 2):
            position.delivered(token)
            if position.is_large:
                position.upto(token - 1, 0)
            self.assertLessEqual(len(position._settled), 101)

    def test_never_passes_an_undelivered_row(self) -> None:
        """
        Whatever order the rows of two writers arrive in, the position never passes a
        row that was not delivered, and reaches the last row when all were.
        """
        for seed in range(200):
            random = Random(seed)
            pending: dict[str, list[int]] = {"a": [], "b": []}
            last = 1 + random.randrange(30)
            for token in range(2, last + 1):
                pending[random.choice("ab")].append(token)
            position, at = CombinedPosition(), {"a": 1, "b": 1}
            while left := [name for name, tokens in pending.items() if tokens]:
                writer = random.choice(left)
                at[writer] = pending[writer].pop(0)
                position.delivered(at[writer])
                upto = position.upto(min(at.values()), 0)
                undelivered = [token for tokens in pending.values() for token in tokens]
                self.assertLess(upto, min(undelivered, default=last + 1), seed)
            self.assertEqual(position.upto(min(at.values()), 0), last, seed)
