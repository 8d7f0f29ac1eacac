"""Tests for synapse_replication.streams.writer_positions."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.streams import writer_positions
from synapse_replication.streams.writer_positions import FinishedIds, WriterPositions


class FinishedIdsTests(SynchronousTestCase):
    """Tests for FinishedIds."""

    @settings(derandomize=True, deadline=None)
    @given(
        st.lists(st.integers(1, 40)), st.integers(0, 40), st.integers(0, 40), st.data()
    )
    def test_agrees_with_a_set(
        self, ids: list[int], start: int, limit: int, data: st.DataObject
    ) -> None:
        """``FinishedIds`` behaves like a plain set of integers."""
        finished = FinishedIds()
        for id_ in ids:
            finished.add(id_)
        model = set(ids)
        self.assertEqual({i for i in range(50) if i in finished}, model)
        end = start
        while end + 1 in model:
            end += 1
        self.assertEqual(finished.end_of_gapless_range(start), end)
        self.assertEqual(
            finished.last_upto(limit),
            max((i for i in model if i <= limit), default=None),
        )
        finished.forget_upto(limit)
        self.assertEqual(
            {i for i in range(limit + 1, 50) if i in finished},
            {i for i in model if i > limit},
        )

    def test_bounded(self) -> None:
        """Beyond the limit, the greatest range, which is reached last, is evicted."""
        self.patch(writer_positions, "MAX_RANGES", 2)
        finished = FinishedIds()
        for id_ in (9, 5, 7, 3):
            finished.add(id_)
        self.assertEqual([i for i in range(10) if i in finished], [3, 5])
        self.assertEqual(len(finished), 2)


def allocate(positions: WriterPositions, *ids: int) -> None:
    """Allocate ids from the sequence."""
    positions.end_fetch(positions.begin_fetch(), ids)


class WriterPositionsTests(SynchronousTestCase):
    """Tests for WriterPositions."""

    def test_first_unfinished(self) -> None:
        """
        It is this instance's lowest unfinished or requested id, otherwise the first id
        below a finished one that the slowest writer may not have finished.
        """
        positions = WriterPositions("w1", ["w1", "w2", "w3"], complete_upto=5)
        self.assertIsNone(positions.first_unfinished())
        positions.advance("w2", 9)
        self.assertEqual(positions.first_unfinished(), (6, "w3"))
        positions.advance("w3", 9)
        self.assertIsNone(positions.first_unfinished())
        fetch = positions.begin_fetch()
        self.assertEqual(positions.first_unfinished(), (10, "w1"))
        positions.end_fetch(fetch, [11, 12])
        self.assertEqual(positions.first_unfinished(), (11, "w1"))
        positions.finish([12])
        self.assertEqual(positions.first_unfinished(), (11, "w1"))
        positions.finish([11])
        self.assertEqual(positions.first_unfinished(), (10, "w2"))

    def test_undeclared_writers(self) -> None:
        """Positions of undeclared writers say nothing about unfinished ids."""
        positions = WriterPositions("w1")
        positions.advance("w2", 9)
        positions.advance("w3", 12)
        self.assertIsNone(positions.first_unfinished())

    def test_out_of_order(self) -> None:
        """Ids may finish in any order; the position advances when a gap closes."""
        positions = WriterPositions("master", ["master"], {"master": 7})
        allocate(positions, 8, 9)
        allocate(positions, 10)
        positions.finish([9])
        self.assertEqual(positions.announced, 7)
        positions.finish([8])
        self.assertEqual(positions.announced, 9)
        positions.finish([10])
        self.assertEqual(positions.persisted_upto, 10)

    def test_advance_between_nextval_and_registration(self) -> None:
        """
        While an id is being fetched, greater ids of other writers advance neither the
        announced position nor persisted-up-to.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        fetch = positions.begin_fetch()
        positions.advance("b", 9)
        positions.advance("b", 10)
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        positions.end_fetch(fetch, [8])
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        positions.finish([8])
        self.assertEqual((positions.announced, positions.persisted_upto), (10, 10))

    def test_older_fetch(self) -> None:
        """
        A fetch that began first may return a lower id than one that has ended, so that
        no id between them is announced.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        older = positions.begin_fetch()
        allocate(positions, 12)
        positions.advance("b", 11)
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        positions.end_fetch(older, [9])
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        positions.finish([9])
        self.assertEqual((positions.announced, positions.persisted_upto), (11, 11))

    def test_finished_row_below_the_announced_position(self) -> None:
        """
        If an id finishes while another is being fetched and a remote position arrives,
        the local position covers the id as soon as the announced one does.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 1847, "b": 1847})
        first = positions.begin_fetch()
        second = positions.begin_fetch()
        positions.end_fetch(first, [1848])
        positions.finish([1848])
        positions.advance("b", 1847)
        self.assertEqual(positions.announced, 1848)
        self.assertEqual(positions.local, 1848)
        positions.end_fetch(second, [1849])
        positions.finish([1849])
        self.assertEqual(positions.announced, 1849)

    def test_announceable(self) -> None:
        """The announceable position covers finished ids without a gap before them."""
        positions = WriterPositions("a", ["a"], {"a": 7})
        self.assertEqual(positions.announceable, 7)
        allocate(positions, 8, 9)
        positions.finish([9])
        self.assertEqual(positions.announceable, 7)
        positions.finish([8])
        self.assertEqual(positions.announceable, 9)

    def test_id_that_another_announced(self) -> None:
        """A sequence that returns an id that another writer announced was set back."""
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        allocate(positions, 8)
        positions.advance("b", 10)
        fetch = positions.begin_fetch()
        self.assertFalse(positions.is_usable(fetch, 10))
        self.assertTrue(positions.is_usable(fetch, 11))

    def test_id_announced_by_peer_first(self) -> None:
        """
        Another writer may announce an id of this writer before it is finished here.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 37, "b": 37})
        positions.end_fetch(positions.begin_fetch(), [38])
        positions.end_fetch(positions.begin_fetch(), [39])
        positions.finish([38])
        self.assertEqual(positions.announced, 38)
        positions.advance("b", 39)
        self.assertEqual(positions.announced, 38)
        self.assertEqual(positions.persisted_upto, 38)
        positions.finish([39])
        self.assertEqual(positions.announced, 39)
        self.assertEqual(positions.persisted_upto, 39)
        self.assertEqual(positions.local, 39)

    def test_new_writer(self) -> None:
        """A writer without a stored position starts at persisted-up-to."""
        positions = WriterPositions(
            "new", ["a", "b", "new"], {"a": 3, "b": 7}, finished=[4, 5]
        )
        self.assertEqual(positions.persisted_upto, 5)
        self.assertEqual(positions.all_positions(), {"a": 3, "b": 7, "new": 7})
        reader = WriterPositions("reader", ["a", "b", "new"], {"a": 3, "b": 7}, [4, 5])
        self.assertEqual(reader.all_positions(), {"a": 3, "b": 7, "new": 5})

    def test_first_id_is_not_announced_before_it_is_finished(self) -> None:
        """A new writer's first id is not announced before it is persisted."""
        positions = WriterPositions("new", ["a", "new"], {"a": 7})
        allocate(positions, 8)
        self.assertEqual((positions.announced, positions.persisted_upto), (7, 7))
        self.assertEqual(positions.local, 7)

    def test_removed_writer_is_forgotten(self) -> None:
        """
        A stored position of a removed writer does not delay other writers' positions.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 8, "gone": 2})
        self.assertEqual(positions.persisted_upto, 8)
        self.assertNotIn("gone", positions.all_positions())

    def test_idle_writer_follows_the_others(self) -> None:
        """An idle writer announces the position that the others have reached."""
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        positions.advance("b", 20)
        self.assertEqual((positions.announced, positions.persisted_upto), (20, 20))
        self.assertEqual(positions.local, 7)

    def test_unknown_ids_are_never_announced(self) -> None:
        """
        A lower id that another writer allocated is not announced along with an own id,
        because a peer would treat it as finished.
        """
        positions = WriterPositions("a", ["a", "b"], {"a": 7, "b": 7})
        allocate(positions, 9)
        self.assertEqual(positions.announced, 7)
        positions.finish([9])
        peer = WriterPositions("reader", ["a", "b"], {"a": 7, "b": 7})
        peer.advance("a", positions.announced)
        self.assertEqual(peer.persisted_upto, 7)

    def test_run_without_gaps(self) -> None:
        """
        Consecutive finished ids advance persisted-up-to beyond a writer that is behind.
        """
        reader = WriterPositions("reader", ["a", "b"], {"a": 3, "b": 5}, [4])
        self.assertEqual(reader.persisted_upto, 5)
        reader.advance("b", 6)
        reader.advance("b", 8)
        self.assertEqual(reader.persisted_upto, 6)
        reader.advance("b", 7)
        self.assertEqual(reader.persisted_upto, 8)
        self.assertEqual(reader.writer_position("a"), 3)
        self.assertEqual(reader.current_token("a"), 8)

    def test_reader_announces_nothing_of_its_own(self) -> None:
        """The position of an instance that is not a writer is persisted-up-to."""
        reader = WriterPositions("reader", ["a", "b"], {"a": 3, "b": 5})
        self.assertEqual(reader.current_token("reader"), 3)
        self.assertEqual(reader.all_positions(), {"a": 3, "b": 5})

    def test_sequence_was_set_back(self) -> None:
        """An id that is already registered or announced is not used again."""
        positions = WriterPositions("a", ["a", "b"], {"a": 40, "b": 40})
        fetch = positions.begin_fetch()
        positions.advance("b", 42)
        self.assertEqual(
            [positions.is_usable(fetch, id_) for id_ in (39, 40, 41, 42, 43)],
            [False, False, True, False, True],
        )
        self.assertRaises(ValueError, positions.end_fetch, fetch, [40])
        self.assertRaises(ValueError, positions.end_fetch, fetch, [43, 43])
        positions.end_fetch(fetch, [])
        self.assertEqual(positions.announced, 42)

    def test_sequence_returns_ids_in_use(self) -> None:
        """
        An id that is in flight, that every writer has passed, or that is not greater
        than a finished id is not used.
        """
        positions = WriterPositions("a", ["a", "b", "c"], complete_upto=5)
        allocate(positions, 7)
        fetch = positions.begin_fetch()
        self.assertFalse(positions.is_usable(fetch, 7))
        self.assertRaises(ValueError, positions.end_fetch, fetch, [7])
        positions.advance("b", 6)
        self.assertEqual(positions.persisted_upto, 6)
        self.assertFalse(positions.is_usable(fetch, 6))
        positions.advance("b", 9)
        # This id may be one of the third writer.
        self.assertFalse(positions.is_usable(positions.begin_fetch(), 8))

    def test_first_id(self) -> None:
        """Before any write, all positions are 1, and id 1 is never used."""
        positions = WriterPositions("a", ["a", "b"])
        self.assertEqual((positions.announced, positions.persisted_upto), (1, 1))
        self.assertFalse(positions.is_usable(positions.begin_fetch(), 1))

    def test_no_declared_writers(self) -> None:
        """Without declared writers, any instance may write."""
        positions = WriterPositions("a", complete_upto=6)
        allocate(positions, 7)
        positions.finish([7])
        self.assertEqual(positions.announced, 7)
        positions.advance("b", 9)
        self.assertEqual(positions.all_positions(), {"a": 7, "b": 9})
        self.assertEqual(positions.persisted_upto, 9)

    def test_finished_twice(self) -> None:
        """Finishing an id that is not in flight raises an error."""
        positions = WriterPositions("a", ["a"])
        allocate(positions, 2)
        positions.finish([2])
        self.assertRaises(KeyError, positions.finish, [2])

    def test_beyond_the_sequence(self) -> None:
        """
        An announced id is beyond the sequence until the sequence has allocated it.
        """
        positions = WriterPositions("a", ["a", "b"], {"b": 7}, allocated=7)
        self.assertFalse(positions.is_beyond_sequence)
        positions.advance("b", 9)
        self.assertTrue(positions.is_beyond_sequence)
        positions.set_allocated(9)
        self.assertFalse(positions.is_beyond_sequence)
        allocate(positions, 10)
        positions.finish([10])
        self.assertFalse(positions.is_beyond_sequence)

    def test_announceable_beyond_the_sequence(self) -> None:
        """
        Instead of an id beyond the sequence, the greatest id below that is known to be
        finished is announced. The position never falls.
        """
        positions = WriterPositions("a", ["a", "b", "c"], complete_upto=5, allocated=10)
        for writer, id_ in (("c", 8), ("b", 12)):
            positions.advance(writer, id_)
        # 9 and 10 may be unfinished ids of the third writer.
        self.assertEqual((positions.announced, positions.announceable), (12, 8))
        positions = WriterPositions("a", ["a", "b", "c"], complete_upto=5, allocated=10)
        for id_ in (9, 12):
            positions.advance("b", id_)
        self.assertEqual((positions.announced, positions.announceable), (12, 9))
        positions.advance("c", 12)
        self.assertEqual((positions.persisted_upto, positions.announceable), (12, 9))
        positions.set_allocated(12)
        self.assertEqual(positions.announceable, 12)

    def test_without_a_sequence(self) -> None:
        """Without a sequence, no id is beyond it."""
        positions = WriterPositions("a", ["a", "b"], {"b": 7})
        positions.advance("b", 9)
        self.assertFalse(positions.is_beyond_sequence)
