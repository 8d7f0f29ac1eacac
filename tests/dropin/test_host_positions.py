"""Tests for positions inside a host."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.host_positions import HostPositions


def _allocate(positions: HostPositions, *ids: int) -> None:
    positions.end_fetch(positions.begin_fetch(), ids)


class HostPositionsTests(SynchronousTestCase):
    """Tests for HostPositions."""

    def test_first_id(self) -> None:
        """The first id of a new sequence can be used exactly once."""
        positions = HostPositions("w", ["w"])
        _allocate(positions, 1)
        self.assertEqual((positions.announced, positions.persisted_upto), (1, 1))
        self.assertRaises(ValueError, _allocate, positions, 1)
        positions.finish([1])
        self.assertEqual((positions.announced, positions.local), (1, 1))
        self.assertRaises(ValueError, _allocate, positions, 1)
        _allocate(positions, 2)
        positions.finish([2])
        self.assertEqual(positions.all_positions(), {"w": 2})

    def test_first_id_of_a_stream_that_was_written(self) -> None:
        """A sequence that restarts at 1 is detected."""
        positions = HostPositions("w", ["w"], {"w": 7})
        self.assertRaises(ValueError, _allocate, positions, 1)

    def test_peer_ids_finish_while_own_in_flight(self) -> None:
        """Ids of other writers are announced once no id of this writer is in flight."""
        positions = HostPositions("second", ["first", "second"], {"first": 3}, [7], 3)
        positions.advance("first", 9)
        self.assertEqual(positions.announced, 9)
        _allocate(positions, 12)
        positions.advance("first", 11)
        self.assertEqual(positions.announced, 9)
        positions.finish([12])
        self.assertEqual((positions.announced, positions.local), (12, 12))

    def test_own_ids_finish_out_of_order(self) -> None:
        """Ids of this writer are announced only below its smallest id in flight."""
        positions = HostPositions("w", ["w", "v"], {"w": 7, "v": 7})
        _allocate(positions, 8, 9, 12)
        positions.finish([9])
        self.assertEqual(positions.announced, 7)
        positions.finish([8])
        self.assertEqual((positions.announced, positions.local), (9, 9))
        positions.finish([12])
        self.assertEqual(positions.announced, 12)
