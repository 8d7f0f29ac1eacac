"""Tests of the end of an id generator: no further ids, and the last position."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred

from synapse_replication.errors import NameLostError, StreamClosedError
from tests.storage.doubles import FakeCursor
from tests.storage.id_generator_case import SteppedTestCase


class CloseTests(SteppedTestCase):
    """Tests for ``close()`` on a database that advances only on request."""

    def close(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.ids.close())

    def test_last_position(self) -> None:
        """It waits for the blocks that have begun, and until the position is stored."""
        gate: Deferred[None] = Deferred()
        done, _ = self.start(gate)
        self.database.settle()
        closed = self.close()
        gate.callback(None)
        self.assertNoResult(closed)
        self.database.settle()
        self.successResultOf(closed)
        self.assertEqual(self.successResultOf(done), 8)
        self.assertEqual(self.database.persisted, [8])

    def test_several_blocks(self) -> None:
        """It waits for all blocks, not only for the one that is left first."""
        gates: list[Deferred[None]] = [Deferred(), Deferred()]
        for gate in gates:
            self.start(gate)
        self.database.settle()
        closed = self.close()
        for gate in gates:
            self.assertNoResult(closed)
            gate.callback(None)
            self.database.settle()
        self.successResultOf(closed)
        self.assertEqual(self.database.persisted[-1], 9)

    def test_called_twice(self) -> None:
        """Each of several calls waits for the end."""
        gate: Deferred[None] = Deferred()
        self.start(gate)
        self.database.settle()
        closed = [self.close(), self.close()]
        gate.callback(None)
        self.database.settle()
        for each in closed:
            self.successResultOf(each)

    def test_cancelled_request(self) -> None:
        """The ids of a cancelled request are finished when they have been fetched."""
        done, _ = self.start()
        done.addErrback(lambda failure: failure.trap(CancelledError))
        done.cancel()
        closed = self.close()
        self.assertNoResult(closed)
        self.database.settle()
        self.successResultOf(closed)
        self.assertEqual(self.database.persisted, [8])

    def test_refused(self) -> None:
        """Later ids are refused, in a transaction, too."""
        self.successResultOf(self.close())
        self.failureResultOf(self.start()[0], StreamClosedError)
        cursor = FakeCursor(self.database)
        self.assertRaises(StreamClosedError, self.ids.get_next_txn, cursor)
        self.assertEqual(self.database.waiting, [])

    def test_request_that_waits(self) -> None:
        """A request that waits for a fetch in progress is still answered."""
        first, second = self.start()[0], self.start()[0]
        closed = self.close()
        self.assertNoResult(closed)
        self.database.settle()
        self.successResultOf(closed)
        self.assertEqual(
            [self.successResultOf(each) for each in (first, second)], [8, 9]
        )
        self.assertEqual(self.database.persisted[-1], 9)

    def test_failed_fetch(self) -> None:
        """A fetch that fails has no ids to wait for."""
        self.database.failing = True
        done, _ = self.start()
        closed = self.close()
        self.database.settle()
        self.failureResultOf(done)
        self.successResultOf(closed)

    def test_transaction(self) -> None:
        """It waits for the end of a transaction that has allocated ids."""
        cursor = FakeCursor(self.database)
        self.assertEqual(self.ids.get_next_txn(cursor), 8)
        closed = self.close()
        self.database.settle()
        self.assertNoResult(closed)
        cursor.after[0]()
        self.database.settle()
        self.successResultOf(closed)
        self.assertEqual(self.database.persisted, [8])

    def test_position_that_fails(self) -> None:
        """A position that cannot be stored is tried again, until it is stored."""
        gate: Deferred[None] = Deferred()
        self.start(gate)
        self.database.settle()
        closed = self.close()
        self.database.failing = True
        gate.callback(None)
        self.database.settle()
        self.reactor.advance(1)
        self.database.settle()
        self.assertNoResult(closed)
        self.database.failing = False
        self.reactor.advance(1)
        self.database.settle()
        self.successResultOf(closed)
        self.assertEqual(self.database.persisted, [8])

    def test_name_that_is_lost(self) -> None:
        """A position that is refused for ever is not waited for."""
        gate: Deferred[None] = Deferred()
        self.start(gate)
        self.database.settle()
        closed = self.close()
        gate.callback(None)
        while self.database.waiting:
            self.database.waiting.pop().result.errback(NameLostError("master", "pid 1"))
        self.successResultOf(closed)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_process_that_wrote_nothing(self) -> None:
        """Without ids of its own, nothing is stored."""
        self.successResultOf(self.close())
        self.assertEqual(self.database.waiting, [])
