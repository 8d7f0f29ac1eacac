"""Tests for synapse_replication.storage.id_generators."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from synapse_replication.errors import DatabaseClosedError
from tests.storage.doubles import FakeCursor
from tests.storage.id_generator_case import SteppedTestCase


class SteppedTests(SteppedTestCase):
    """
    Tests for one process on a database that advances only when the test requests it.
    """

    def test_one_block(self) -> None:
        """
        The position advances when the block exits, and is persisted before get_next
        ends.
        """
        gate: Deferred[None] = Deferred()
        done, _ = self.start(gate)
        self.database.settle()
        self.assertEqual(self.ids.get_current_token(), 7)
        gate.callback(None)
        self.assertNoResult(done)
        self.assertEqual((self.ids.get_current_token(), self.poked), (8, 1))
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.assertEqual(self.database.persisted, [8])

    def test_round_trips_are_shared(self) -> None:
        """
        Fifty simultaneous callers need two fetches and two upserts instead of fifty.
        """
        results = [self.start()[0] for _ in range(50)]
        self.database.settle()
        ids = [self.successResultOf(done) for done in results]
        self.assertEqual(ids, list(range(8, 58)))
        self.assertEqual(self.database.descriptions.count("get_next_ids"), 2)
        self.assertEqual(self.database.descriptions.count("persist_position"), 2)
        self.assertEqual(self.database.persisted[-1], 57)

    def test_simultaneous_callers_share_fetch(self) -> None:
        """Callers whose blocks end together share their next fetch."""

        async def allocate_twice() -> None:
            for _ in range(2):
                async with self.ids.get_next():
                    pass

        done = [Deferred.fromCoroutine(allocate_twice()) for _ in range(10)]
        self.database.settle()
        for result in done:
            self.successResultOf(result)
        self.assertLess(self.database.descriptions.count("get_next_ids"), 5)

    def test_several_ids(self) -> None:
        """The ids of one block finish together."""

        async def write() -> list[int]:
            async with self.ids.get_next_mult(3) as ids:
                self.assertEqual(self.ids.get_current_token(), 7)
            return ids

        done = Deferred.fromCoroutine(write())
        self.database.settle()
        self.assertEqual(self.successResultOf(done), [8, 9, 10])
        self.assertEqual(self.ids.get_current_token(), 10)

    def test_failed_block(self) -> None:
        """A block that fails releases its id and propagates its failure."""
        done, _ = self.start(fail=True)
        self.database.settle()
        self.failureResultOf(done, RuntimeError)
        self.assertEqual(self.ids.get_current_token(), 8)
        self.assert_position_advances()

    def test_cancelled_at_every_await(self) -> None:
        """A block that is cancelled at any await does not block the position."""
        database = self.database
        for steps in range(7):
            gate: Deferred[None] = Deferred()
            done, _ = self.start(gate)
            script: list[Callable[..., object]] = [
                database.run,  # the fetch
                database.answer,
                partial(gate.callback, None),
                database.run,  # the upsert
                database.answer,
            ]
            for step in script[:steps]:
                step()
            done.addErrback(lambda failure: failure.trap(CancelledError))
            done.cancel()
            self.assert_position_advances()

    def test_closed_at_every_await(self) -> None:
        """
        A coroutine that is closed at any await (GeneratorExit) does not block the
        position.
        """
        database = self.database
        for steps in range(5):
            gate: Deferred[None] = Deferred()
            coroutine = self.block(gate, False)
            coroutine.send(None)
            script: list[Callable[..., object]] = [
                database.run,
                database.answer,
                # A coroutine that the test drives continues only on send().
                partial(coroutine.send, None),
            ]
            for step in script[: min(steps, 2)]:
                step()
            if steps >= 3:
                script[2]()  # now in the block
            coroutine.close()
            self.assert_position_advances()

    def test_forgotten_in_the_block(self) -> None:
        """A block that is garbage collected unfinished releases its id."""

        async def forgotten() -> None:
            async with self.ids.get_next():
                await Deferred()

        done: Deferred[None] | None = Deferred.fromCoroutine(forgotten())
        self.database.settle()
        self.assertEqual(self.ids.get_current_token(), 7)
        del done
        gc.collect()
        self.reactor.run_thread_calls()
        self.assertEqual(self.ids.get_current_token(), 8)
        self.assert_position_advances()

    def test_finished_while_the_lock_is_held(self) -> None:
        """
        A request collected while this thread holds the lock does not wait for it: its
        ids are finished when the lock is released.
        """
        request = self.ids.request(1)
        self.database.settle()
        with self.ids._positions as positions:
            self.ids.give_up(request)
            self.assertEqual(positions.announced, 7)
        self.assertEqual(self.ids.get_current_token(), 8)

    def test_cancelled_by_caller_of_the_same_fetch(self) -> None:
        """
        A caller may cancel another one of the same fetch, whose id is then released.
        """
        first, _ = self.start(Deferred())
        gate: Deferred[None] = Deferred()
        results: list[Deferred[int]] = []

        async def cancelling() -> None:
            async with self.ids.get_next():
                results[0].addErrback(lambda failure: failure.trap(CancelledError))
                results[0].cancel()
                await gate

        second = Deferred.fromCoroutine(cancelling())
        results.append(self.start(Deferred())[0])
        self.database.settle()
        self.assertEqual(self.ids.get_positions(), {"master": 7})
        for pending in (first, second):
            pending.addErrback(lambda failure: failure.trap(CancelledError))
            pending.cancel()
        self.reactor.run_thread_calls()
        self.assertEqual(self.ids.get_current_token(), 10)

    def test_abandoned_after_its_ids_were_fetched(self) -> None:
        """The ids of an abandoned request are finished, persisted and announced."""
        request = self.ids.request(1)
        self.database.settle()
        self.ids.give_up(request)
        self.assertEqual(self.ids.get_current_token(), 8)
        # The request may have been abandoned in any thread.
        self.assertEqual((self.database.waiting, self.poked), ([], 0))
        self.reactor.run_thread_calls()
        self.database.settle()
        self.assertEqual((self.database.persisted, self.poked), ([8], 1))

    def test_failed_fetch(self) -> None:
        """
        If a fetch fails, its callers get the failure, and no later write is blocked.
        """
        self.database.failing = True
        results = [self.start()[0] for _ in range(3)]
        self.database.settle()
        for result in results:
            self.failureResultOf(result)
        self.database.failing = False
        self.assert_position_advances()

    def test_repeated_fetch(self) -> None:
        """If a fetch returns an id in use, its repetition serves all callers."""
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        self.start(Deferred())
        others = [self.start()[0] for _ in range(2)]
        self.database.run()
        self.database.answer()
        self.database.run()
        self.ids.advance("other", 9)
        self.database.settle()
        self.assertEqual([self.successResultOf(each) for each in others], [11, 12])

    def test_failed_position_is_persisted_later(self) -> None:
        """
        If its position cannot be persisted, a committed write still succeeds; the
        failure is reported, and the position persisted later.
        """
        gate: Deferred[None] = Deferred()
        done, _ = self.start(gate)
        self.database.settle()
        self.database.failing = True
        gate.callback(None)
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.assertEqual(len(self.observer.failures), 1)
        self.assertEqual(self.observer.not_persisted, [8])
        self.database.failing = False
        self.reactor.advance(1)
        self.database.settle()
        self.assertEqual(self.database.persisted, [8])
        self.assertEqual(self.observer.persisted, [8])
        self.assertEqual(self.observer.persisting, [8, 8])
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_position_is_retried_until_persisted(self) -> None:
        """A position is retried until it is persisted."""
        gate: Deferred[None] = Deferred()
        self.start(gate)
        self.database.settle()
        self.database.failing = True
        gate.callback(None)
        self.database.settle()
        self.reactor.advance(1)
        self.database.settle()
        self.assertEqual(self.observer.not_persisted, [8, 8])
        self.database.failing = False
        self.reactor.advance(1)
        self.database.settle()
        self.assertEqual(self.database.persisted, [8])

    def test_position_is_not_retried_after_the_end(self) -> None:
        """Once the database is closed, a position is left to the next process."""
        gate: Deferred[None] = Deferred()
        self.start(gate)
        self.database.settle()
        gate.callback(None)
        step = self.database.waiting.pop()
        step.result.errback(DatabaseClosedError(step.description))
        self.assertEqual(self.observer.not_persisted, [8])
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_remote_advance_during_the_fetch(self) -> None:
        """
        If another writer announces greater ids between nextval and the registration of
        our id, our position stays below our id.
        """
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        done, _ = self.start()
        self.database.run()
        self.ids.advance("other", 9)
        self.ids.advance("other", 10)
        self.assertEqual(self.ids.get_current_token_for_writer("master"), 7)
        self.assertEqual(self.ids.get_current_token(), 7)
        self.database.answer()
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.assertEqual(self.ids.get_current_token(), 10)

    def test_remote_advance_during_the_fetch_in_a_transaction(self) -> None:
        """
        If another writer announces greater ids while a transaction in another thread
        fetches one, our position stays below the fetched id.
        """
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        fetched, advanced = threading.Event(), threading.Event()

        class SlowCursor(FakeCursor):
            def fetchall(self) -> list[tuple[Any, ...]]:
                fetched.set()
                advanced.wait(10)
                return super().fetchall()

        cursor = SlowCursor(self.database)
        ids: list[int] = []
        thread = threading.Thread(
            target=lambda: ids.append(self.ids.get_next_txn(cursor))
        )
        thread.start()
        fetched.wait(10)
        self.ids.advance("other", 9)
        seen = self.ids.get_current_token(), self.ids.get_positions()["master"]
        advanced.set()
        thread.join(10)
        self.assertEqual(seen, (7, 7))
        self.assertEqual(ids, [8])
        self.assertEqual(self.ids.get_current_token(), 7)
        cursor.after[0]()
        self.assertEqual(self.ids.get_current_token(), 9)

    def test_finished_row_is_never_announced_unseen(self) -> None:
        """
        If an id finishes during another fetch and a remote position arrives, the
        announced position and the greatest written id agree.
        """
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        in_flight, _ = self.start(Deferred())
        gate: Deferred[None] = Deferred()
        self.start(gate)
        self.start(gate)
        self.database.run()
        self.database.answer()
        self.database.run()  # the fetch of the second and third
        self.ids.advance("other", 7)
        in_flight.addErrback(lambda failure: failure.trap(CancelledError))
        in_flight.cancel()
        self.assertEqual(self.ids.get_current_token_for_writer("master"), 8)
        self.assertEqual(self.ids.get_minimal_local_current_token(), 8)

    def test_rolled_back_transaction(self) -> None:
        """
        The ids of a transaction are released when it ends, committed or rolled back.
        """
        for ending in ("after", "on_exception"):
            cursor = FakeCursor(self.database)
            ids = self.ids.get_next_mult_txn(cursor, 2)
            self.assertEqual(self.ids.get_current_token(), ids[0] - 1)
            for callback in getattr(cursor, ending):
                callback()
            self.assertEqual(self.ids.get_current_token(), ids[1])
