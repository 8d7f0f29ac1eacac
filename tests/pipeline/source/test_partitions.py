"""Tests for the parts and tasks of a plan.

The effects on a reader are also tested in ``test_planning`` and ``test_streaming``.
"""

from __future__ import annotations

import attrs
import psycopg2
from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.scan import batched
from synapse_replication.pipeline.source.catalog import catalog_of
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.planning import (
    IDS_PER_TASK,
    MAX_TASKS,
    cut_by_rows,
    narrow,
    pack,
    split,
    without_gaps,
)
from synapse_replication.pipeline.source.ranges import (
    IDS_TO_JOIN,
    AvailableQuery,
    Part,
    Selection,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres

RECEIPTS = catalog_of()["receipts"]
(QUERY,) = RECEIPTS.queries
WITH_INDEX = AvailableQuery(QUERY, by_id=True)
BY_WRITER = AvailableQuery(QUERY, by_writer=True)
WITHOUT = AvailableQuery(QUERY)


def part(low: int, high: int, query: AvailableQuery = WITH_INDEX) -> Part:
    """Return a part with the receipts of all writers."""
    selection = Selection(RECEIPTS, (query,), "")
    return selection.between(StreamOffset(low), StreamOffset(high))


PARTS = st.lists(
    st.builds(
        lambda low, size: part(low, low + size),
        st.integers(0, 10**9),
        st.integers(1, 10**7),
    ),
    min_size=1,
    max_size=6,
)
COUNTS = st.none() | st.integers(1, 50)


class SplitTests(SynchronousTestCase):
    """Tests for splitting parts into smaller ones."""

    @settings(derandomize=True, deadline=None)
    @given(PARTS, COUNTS)
    def test_pieces_add_up(self, parts: list[Part], count: int | None) -> None:
        """The pieces of a part cover exactly that part, in order."""
        pieces = split(parts, count)
        for whole in parts:
            low = whole.low
            while low < whole.high:
                piece = pieces.pop(0)
                self.assertEqual(piece.low, low)
                self.assertGreater(piece.size, 0)
                low = piece.high
            self.assertEqual(low, whole.high)
        self.assertEqual(pieces, [])

    def test_details(self) -> None:
        """Parts with details come first, because they take longer."""
        events = attrs.evolve(part(0, IDS_TO_JOIN), stream=catalog_of()["events"])
        tasks = pack([part(0, 2 * IDS_TO_JOIN), events], 2)
        self.assertEqual(
            [each.stream.name for (each,) in tasks], ["events", "receipts"]
        )

    def test_requested_number_of_pieces(self) -> None:
        """
        A part is split into the requested number of pieces of about the same size.
        """
        sizes = [piece.size for piece in split([part(10, 1010)], 3)]
        self.assertEqual(sizes, [333, 333, 334])

    def test_default_number(self) -> None:
        """
        By default, a part is divided only if each piece has enough ids for a task.
        """
        self.assertEqual(len(split([part(0, IDS_PER_TASK)], None)), 1)
        self.assertEqual(len(split([part(0, 4 * IDS_PER_TASK)], None)), 4)
        self.assertEqual(len(split([part(0, 2**40)], None)), MAX_TASKS)

    def test_many_rows(self) -> None:
        """
        Pieces are not larger for more ids, so that each batch of an archive has as many
        tasks as its limit allows.
        """
        for total in (500_000_000, 5_000_000_000):
            pieces = split([part(0, total)], None)
            self.assertLessEqual(max(piece.size for piece in pieces), IDS_PER_TASK)
            limit = 16 * IDS_PER_TASK
            first = next(batched(pieces, lambda piece: piece.size, limit))
            self.assertEqual(len(pack(first, None)), 16)

    def test_without_an_index(self) -> None:
        """A table without an index of ids is read in one piece."""
        whole = part(0, 10**9, WITHOUT)
        self.assertEqual(split([whole], 9), [whole])

    def test_index_by_writer(self) -> None:
        """An index by writer and id is sufficient for dividing a part."""
        self.assertEqual(len(split([part(0, 90, BY_WRITER)], 9)), 9)


class PackTests(SynchronousTestCase):
    """Tests for packing small parts into tasks."""

    @settings(derandomize=True, deadline=None)
    @given(PARTS, COUNTS)
    def test_each_part_once(self, parts: list[Part], count: int | None) -> None:
        """Each part is in exactly one task, and no task is empty."""
        tasks = pack(parts, count)
        packed = [each for task in tasks for each in task]
        self.assertCountEqual(packed, parts)
        self.assertTrue(all(tasks))
        if count is not None:
            self.assertEqual(len(tasks), min(count, len(parts)))

    def test_even(self) -> None:
        """Each part is assigned to the task with the fewest ids."""
        tasks = pack([part(0, size) for size in (1, 2, 3, 4, 5, 9)], 2)
        self.assertEqual(
            sorted(sum(each.size for each in task) for task in tasks), [12, 12]
        )

    def test_default_number(self) -> None:
        """By default, a task is added only if the other tasks have enough ids."""
        half = part(0, IDS_PER_TASK // 2)
        self.assertEqual(len(pack([half] * 2, None)), 1)
        self.assertEqual(len(pack([half] * 3, None)), 2)
        self.assertEqual(len(pack([half] * 4, None)), 2)


class CutTests(SynchronousTestCase):
    """
    Tests for limiting the number of rows, with the streams ``one``, ``two`` and
    ``few``.
    """

    def setUp(self) -> None:
        connection = psycopg2.connect(shared_postgres().new_database())
        self.addCleanup(connection.close)
        self.txn = connection.cursor()
        self.selections = []
        for name, ids in (("one", range(11, 21)), ("two", range(1, 11)), ("few", [7])):
            self.txn.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, item text)")
            for id_ in ids:
                self.txn.execute(f"INSERT INTO {name} VALUES ({id_})")
            declared = TableStream(
                name=name,
                table=name,
                id_column="id",
                columns=["item"],
                sequence=f"{name}_seq",
                writers=["a"],
            )
            stream = catalog_of([declared])[name]
            query = AvailableQuery(stream.queries[0], by_id=True)
            self.selections.append(Selection(stream, (query,), "a"))

    def cut(self, limit: int) -> list[int]:
        names = [selection.stream.name for selection in self.selections]
        start = dict.fromkeys(names, StreamOffset())
        end = dict.fromkeys(names, StreamOffset(30))
        found = cut_by_rows(self.txn, self.selections, start, end, limit)
        return [found[name].minimum for name in names]

    def test_streams_share_the_limit(self) -> None:
        """
        Streams get equal shares of the limit; unused shares are used by other streams.
        """
        self.assertEqual(self.cut(7), [13, 3, 30])
        self.assertEqual(self.cut(20), [19, 30, 30])
        self.assertEqual(self.cut(21), [30, 30, 30])

    def test_narrow(self) -> None:
        """Ids without rows are removed at both ends; a part without rows is removed."""
        part = self.selections[0].between(StreamOffset(), StreamOffset(100))
        found = narrow(self.txn, part)
        assert found is not None
        self.assertEqual((found.low, found.high), (10, 20))
        self.txn.execute("DELETE FROM one")
        self.assertIsNone(narrow(self.txn, part))

    def test_gaps(self) -> None:
        """
        Gaps of any length are cut out, in a number of queries that does not depend on
        it; a part without long gaps is left as it is.
        """
        for token in (2**40, 2**62, 2**62 + 1, 2**63 - 1):
            self.txn.execute(f"INSERT INTO one VALUES ({token})")
        whole = self.selections[0].between(StreamOffset(), StreamOffset(2**63 - 1))
        narrowed = narrow(self.txn, whole)
        assert narrowed is not None
        pieces = without_gaps(self.txn, narrowed)
        self.assertEqual(
            [(piece.low, piece.high) for piece in pieces],
            [
                (10, 20),
                (2**40 - 1, 2**40),
                (2**62 - 1, 2**62 + 1),
                (2**63 - 2, 2**63 - 1),
            ],
        )
        near = narrowed.within(10, 20)
        self.assertEqual(without_gaps(self.txn, near), [near])
