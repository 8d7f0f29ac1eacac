"""Tests for positions that several threads use."""

from __future__ import annotations

import threading

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage.local_positions import LockedPositions
from synapse_replication.streams.writer_positions import WriterPositions


class _SlowThread(LockedPositions):
    """Positions whose threads are suspended whenever they have released the lock."""

    def _finish_pending(self) -> None:
        pass


class LockedPositionsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.shared = LockedPositions(WriterPositions("w", ["w"], complete_upto=7))

    def open_ids(self, *ids: int) -> None:
        """Open ids."""
        with self.shared as positions:
            positions.end_fetch(positions.begin_fetch(), list(ids))

    def announceable(self) -> int:
        """Return the position that may be announced."""
        with self.shared as positions:
            return positions.announceable

    def test_finish(self) -> None:
        """If no thread holds the lock, ids are finished immediately."""
        self.open_ids(8, 9)
        self.shared.finish([8])
        self.assertEqual(self.announceable(), 8)

    def test_finish_while_this_thread_holds_the_lock(self) -> None:
        """
        If this thread holds the lock, ids are finished on its release, even by an
        exception.
        """
        self.open_ids(8)

        def fail() -> None:
            with self.shared as positions:
                self.shared.finish([8])
                self.assertEqual(positions.announceable, 7)
                raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, fail)
        self.assertEqual(self.announceable(), 8)

    def test_finish_while_another_thread_holds_the_lock(self) -> None:
        """
        If another thread holds the lock, it finishes the ids, and finish() does not
        block.
        """
        self.open_ids(8)
        is_held, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with self.shared:
                is_held.set()
                may_end.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        self.assertTrue(is_held.wait(30))
        self.shared.finish([8])
        may_end.set()
        thread.join(30)
        self.assertEqual(self.shared._positions.announceable, 8)

    def test_finished_before_the_next_reader(self) -> None:
        """
        Ids that wait for a thread that has just released the lock are finished before
        the next thread reads the positions.
        """
        self.shared = _SlowThread(WriterPositions("w", ["w"], complete_upto=7))
        self.open_ids(8)
        self.shared.finish([8])
        self.assertEqual(self.announceable(), 8)
