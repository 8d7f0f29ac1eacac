"""Tests for synapse_replication.storage.id_generators."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from twisted.internet import defer, task, threads
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from synapse_replication.errors import SequenceBehindError, StreamConfigurationError
from synapse_replication.storage.database import Database, Transaction
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.sequence_check import CHECK_SECONDS
from synapse_replication.storage.sequences import IdStream
from synapse_replication.streams.positions import WriterPositions
from synapse_replication.streams.table import IdColumn
from tests.storage.doubles import (
    FakeCursor,
    FakeReactor,
    PostgresMixin,
    RecordingObserver,
    SteppedDatabase,
)


def foobar(*writers: str, negative: bool = False) -> IdStream:
    return IdStream(
        stream_name="foobar",
        sequence="foobar_seq",
        tables=[IdColumn("foobar", "stream_id", "instance_name")],
        writers=writers,
        negative=negative,
    )


class SteppedTests(SynchronousTestCase):
    """One process, on a database that moves only when told to."""

    def setUp(self) -> None:
        self.database = SteppedDatabase()
        self.reactor = FakeReactor()
        self.observer = RecordingObserver()
        self.poked = 0
        self.ids = self.make(["master"], {"master": 7})

    def make(
        self,
        writers: list[str],
        stored: dict[str, int],
        negative: bool = False,
        allocated: int | None = None,
    ) -> MultiWriterIdGenerator:
        def poke() -> None:
            self.poked += 1

        return MultiWriterIdGenerator(
            self.database,
            foobar(*writers, negative=negative),
            WriterPositions("master", writers, stored, allocated=allocated),
            self.reactor,  # type: ignore[arg-type]
            self.reactor,
            on_finished=poke,
            observer=self.observer,
        )

    def start(
        self, gate: Deferred[None] | None = None, fail: bool = False
    ) -> tuple[Deferred[int], Coroutine[Any, Any, int]]:
        """Begin a block that ends when ``gate`` fires."""
        coroutine = self.block(gate or defer.succeed(None), fail)
        return Deferred.fromCoroutine(coroutine), coroutine

    async def block(self, gate: Deferred[None], fail: bool) -> int:
        async with self.ids.get_next() as id_:
            await gate
            if fail:
                raise RuntimeError("rolled back")
        return id_

    def assert_moves_on(self) -> None:
        """Whatever happened before, the next write moves the position to its id."""
        done, _ = self.start()
        self.database.settle()
        self.reactor.come_back()
        self.database.settle()
        id_ = self.successResultOf(done)
        self.assertEqual(self.ids.get_current_token(), id_)
        self.assertEqual(self.ids.get_minimal_local_current_token(), id_)
        self.assertEqual(self.database.kept[-1], id_)

    def test_one_block(self) -> None:
        """The position moves when the block is left, and is kept before it ends."""
        gate: Deferred[None] = Deferred()
        done, _ = self.start(gate)
        self.database.settle()
        self.assertEqual(self.ids.get_current_token(), 7)
        gate.callback(None)
        self.assertNoResult(done)
        self.assertEqual((self.ids.get_current_token(), self.poked), (8, 1))
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.assertEqual(self.database.kept, [8])

    def test_round_trips_are_shared(self) -> None:
        """Fifty callers at once need two fetches and two upserts, not fifty."""
        results = [self.start()[0] for _ in range(50)]
        self.database.settle()
        ids = [self.successResultOf(done) for done in results]
        self.assertEqual(ids, list(range(8, 58)))
        self.assertEqual(self.database.descriptions.count("get_next_ids"), 2)
        self.assertEqual(self.database.descriptions.count("persist_position"), 2)
        self.assertEqual(self.database.kept[-1], 57)

    def test_woken_together_ask_together(self) -> None:
        """Callers whose blocks ended together share the next fetch from the first."""

        async def twice() -> None:
            for _ in range(2):
                async with self.ids.get_next():
                    pass

        done = [Deferred.fromCoroutine(twice()) for _ in range(10)]
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
        """A block that fails lets go of its id, and passes its failure on."""
        done, _ = self.start(fail=True)
        self.database.settle()
        self.failureResultOf(done, RuntimeError)
        self.assertEqual(self.ids.get_current_token(), 8)
        self.assert_moves_on()

    def test_cancelled_at_every_await(self) -> None:
        """Cancelled anywhere, an id does not hold the position up."""
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
            self.assert_moves_on()

    def test_closed_at_every_await(self) -> None:
        """The same for a coroutine that is closed (GeneratorExit)."""
        database = self.database
        for steps in range(5):
            gate: Deferred[None] = Deferred()
            coroutine = self.block(gate, False)
            coroutine.send(None)
            script: list[Callable[..., object]] = [
                database.run,
                database.answer,
                # Driven by hand, a coroutine goes on only when it is sent for.
                partial(coroutine.send, None),
            ]
            for step in script[: min(steps, 2)]:
                step()
            if steps >= 3:
                script[2]()  # now in the block
            coroutine.close()
            self.assert_moves_on()

    def test_forgotten_in_the_block(self) -> None:
        """A block that is collected unfinished lets go of its id."""

        async def forgotten() -> None:
            async with self.ids.get_next():
                await Deferred()

        done: Deferred[None] | None = Deferred.fromCoroutine(forgotten())
        self.database.settle()
        self.assertEqual(self.ids.get_current_token(), 7)
        del done
        gc.collect()
        self.reactor.come_back()
        self.assertEqual(self.ids.get_current_token(), 8)
        self.assert_moves_on()

    def test_finished_while_the_lock_is_held(self) -> None:
        """
        A block that is collected while this thread holds the lock does not wait
        for it: its ids are finished when the lock is let go.
        """
        with self.ids._positions.locked() as positions:
            positions.end_fetch(positions.begin_fetch(), [8])
            self.ids.release_without_waiting([8])
            self.assertEqual(positions.announced, 7)
        self.assertEqual(self.ids.get_current_token(), 8)

    def test_cancelled_by_another_of_the_same_fetch(self) -> None:
        """Who gets its id may cancel another, whose id is let go."""
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
        self.reactor.come_back()
        self.assertEqual(self.ids.get_current_token(), 10)

    def test_abandoned_after_its_ids_were_fetched(self) -> None:
        """The ids of an abandoned request are finished, persisted and announced."""
        request = self.ids.ask(1)
        self.database.settle()
        self.ids.give_up(request)
        self.assertEqual(self.ids.get_current_token(), 8)
        # The request may have been abandoned in any thread.
        self.assertEqual((self.database.asked, self.poked), ([], 0))
        self.reactor.come_back()
        self.database.settle()
        self.assertEqual((self.database.kept, self.poked), ([8], 1))

    def test_failed_fetch(self) -> None:
        """A fetch that fails is its callers' failure, and holds nothing up."""
        self.database.failing = True
        results = [self.start()[0] for _ in range(3)]
        self.database.settle()
        for result in results:
            self.failureResultOf(result)
        self.database.failing = False
        self.assert_moves_on()

    def test_position_is_kept_later_if_it_could_not_be(self) -> None:
        """
        A write that is committed does not fail because its position could not be
        kept; that is reported, and tried again.
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
        self.assertEqual(self.database.kept, [8])
        self.assertEqual(self.observer.persisted, [8])
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_position_is_tried_again_until_it_is_kept(self) -> None:
        """A position that could not be kept twice is tried a third time."""
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
        self.assertEqual(self.database.kept, [8])

    def test_remote_advance_during_the_fetch(self) -> None:
        """
        Between nextval and its registration another writer announces greater
        ids: our position stays below ours.
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
        """The same when another thread fetches, in its transaction."""
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        fetched, heard = threading.Event(), threading.Event()

        class SlowCursor(FakeCursor):
            def fetchall(self) -> list[tuple[Any, ...]]:
                fetched.set()
                heard.wait(10)
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
        heard.set()
        thread.join(10)
        self.assertEqual(seen, (7, 7))
        self.assertEqual(ids, [8])
        self.assertEqual(self.ids.get_current_token(), 7)
        cursor.after[0]()
        self.assertEqual(self.ids.get_current_token(), 9)

    def test_finished_row_is_never_announced_unseen(self) -> None:
        """
        An id finishes while another fetch is under way, and a remote position
        arrives: what we announce and what we say we wrote agree.
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
        """The ids of a transaction are let go when it ends, however."""
        for ending in ("after", "on_exception"):
            cursor = FakeCursor(self.database)
            ids = self.ids.get_next_mult_txn(cursor, 2)
            self.assertEqual(self.ids.get_current_token(), ids[0] - 1)
            for callback in getattr(cursor, ending):
                callback()
            self.assertEqual(self.ids.get_current_token(), ids[1])

    def test_sequence_that_went_back(self) -> None:
        """Ids that were passed are not used, and too many are an error."""
        self.database.sequence = 2
        done, _ = self.start()
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.ids.advance("master", 5000)
        self.assertEqual(self.ids.get_next_txn(FakeCursor(self.database)), 5001)

    def test_sequence_set_back_is_logged_once(self) -> None:
        """A sequence that was set back under a running writer makes one line."""
        self.database.sequence = 2
        with capturedLogs() as logged:
            for id_ in (8, 9, 10):
                done, _ = self.start()
                self.database.settle()
                self.assertEqual(self.successResultOf(done), id_)
        (line,) = [formatEvent(event) for event in logged]
        self.assertRegex(line, r"Sequence foobar_seq went back to \d+, below 7,")
        self.assertIn("positions check", line)

    def test_sequence_far_behind_memory(self) -> None:
        """An error says where the number comes from, and does not use the ids up."""
        self.ids.advance("master", 2**62)
        with self.assertRaises(SequenceBehindError) as caught:
            self.ids.get_next_txn(FakeCursor(self.database))
        self.assertIn("the memory of this process", str(caught.exception))
        self.assertNotIn("setval", str(caught.exception))
        self.assertEqual(caught.exception.hint, "")
        self.assertEqual(self.database.sequence, 8)

    def with_sequence(self) -> None:
        """Have the positions compared with the sequence, which stands at 7."""
        stored = {"master": 7, "other": 7}
        self.ids = self.make(["master", "other"], stored, allocated=7)

    def test_another_plausible_distance(self) -> None:
        """How far is a matter of the stream's configuration."""
        stored = {"master": 7, "other": 7}
        positions = WriterPositions("master", ["master", "other"], stored, (), 1, 7, 10)
        self.assertTrue(positions.is_plausible(17))
        self.assertFalse(positions.is_plausible(18))

    def test_far_position_is_not_believed(self) -> None:
        """What is far beyond the sequence has no effect, and is reported."""
        self.with_sequence()
        self.ids.advance("other", 2**62)
        self.reactor.come_back()
        self.database.settle()
        self.assertEqual(self.ids.get_positions(), {"master": 7, "other": 7})
        self.assertEqual(self.ids.get_announceable_token(), 7)
        ((_, error),) = self.observer.failures
        self.assertIn("other was announced at 4611686018427387904", str(error))
        self.assert_moves_on()

    def test_far_position_that_is_real(self) -> None:
        """What is far beyond the known part of the sequence counts once it was read."""
        self.with_sequence()
        self.database.sequence = 500_000
        self.ids.advance("other", 500_000)
        self.assertEqual(self.ids.get_positions()["other"], 7)
        self.reactor.come_back()
        self.database.settle()
        self.assertEqual(self.ids.get_positions()["other"], 500_000)
        self.assertEqual(self.ids.get_announceable_token(), 500_000)
        self.assertEqual(self.observer.failures, [])

    def test_position_that_is_real_is_announced_after_a_look(self) -> None:
        """Others' ids are announced as ours once the sequence has confirmed them."""
        self.with_sequence()
        self.database.sequence = 9
        self.ids.advance("other", 9)
        self.assertEqual(self.ids.get_announceable_token(), 7)
        self.assertEqual(self.database.descriptions, ["check_sequence"])
        self.assertEqual(self.ids.get_announceable_token(), 7)
        self.database.settle()
        self.assertEqual((self.ids.get_announceable_token(), self.poked), (9, 1))
        self.assertEqual(self.database.descriptions, ["check_sequence"])

    def test_near_position_that_is_made_up(self) -> None:
        """Ids are taken up to it, so that those to come are greater; then it counts."""
        self.with_sequence()
        self.ids.advance("other", 50)
        self.assertEqual(self.ids.get_announceable_token(), 7)
        self.database.settle()
        self.assertEqual(self.database.sequence, 50)
        self.assertEqual(self.ids.get_announceable_token(), 50)
        self.assert_moves_on()
        self.assertEqual(self.ids.get_announceable_token(), 51)

    def test_sequence_that_cannot_be_read(self) -> None:
        """A look that failed is repeated while a position waits for it."""
        self.with_sequence()
        self.database.sequence = 500_000
        self.ids.advance("other", 500_000)
        self.reactor.come_back()
        self.database.failing = True
        self.database.settle()
        self.assertEqual(len(self.observer.failures), 1)
        self.database.failing = False
        self.reactor.advance(CHECK_SECONDS)
        self.database.settle()
        self.assertEqual(self.ids.get_positions()["other"], 500_000)

    def test_undeclared_writer(self) -> None:
        """An instance that is not declared as a writer moves nothing, near or far."""
        self.with_sequence()
        for token in (9, 2**62):
            self.ids.advance("zz", token)
        self.reactor.come_back()
        self.assertEqual(self.ids.get_positions(), {"master": 7, "other": 7})
        self.assertEqual(self.database.descriptions, [])
        self.assert_moves_on()

    def test_an_id_that_is_announced_meanwhile(self) -> None:
        """An id that another writer announced before it came is not used."""
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        first, _ = self.start()
        second, _ = self.start()
        self.database.run()
        self.ids.advance("other", 8)
        self.database.answer()
        self.database.settle()
        self.assertEqual(self.successResultOf(first), 9)
        self.assertEqual(self.successResultOf(second), 10)
        self.assert_moves_on()

    def test_an_id_in_a_transaction_that_is_announced_meanwhile(self) -> None:
        """The same for the ids of a transaction, in its thread."""
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        announced = iter([9, 8])
        generator = self.ids

        class SlowCursor(FakeCursor):
            def execute(self, sql: str, parameters: Mapping[str, Any] = {}) -> None:
                super().execute(sql, parameters)
                for id_ in itertools.islice(announced, 1):
                    generator.advance("other", id_)

        cursor = SlowCursor(self.database)
        # 9 is skipped at once, 8 only when it was taken already.
        self.assertEqual(self.ids.get_next_mult_txn(cursor, 2), [11, 12])
        for callback in cursor.after:
            callback()
        self.ids.advance("other", 100)
        self.database.sequence = 100
        self.assert_moves_on()

    def test_nobody_waits_for_an_id_that_is_announced_meanwhile(self) -> None:
        """The same when who wanted it has given up: later ones are served."""
        self.ids = self.make(["master", "other"], {"master": 7, "other": 7})
        first, _ = self.start()
        self.database.run()
        self.ids.advance("other", 8)
        first.cancel()
        self.failureResultOf(first, defer.CancelledError)
        self.database.answer()
        self.database.settle()
        self.assert_moves_on()

    def test_negative(self) -> None:
        """Ids of a stream that counts down are negative, and positions too."""
        self.ids = self.make(["master"], {"master": 7}, negative=True)
        done, _ = self.start()
        self.database.settle()
        self.assertEqual(self.successResultOf(done), -8)
        self.assertEqual(self.database.kept, [-8])
        self.assertEqual(self.ids.get_positions(), {"master": -8})
        self.assertEqual(self.ids.get_current_token(), -8)

    def test_without_declared_writers(self) -> None:
        """Anybody may write; no position is kept."""
        self.ids = self.make([], {})
        done, _ = self.start()
        self.database.settle()
        self.assertEqual(self.successResultOf(done), 8)
        self.assertEqual(self.database.kept, [])

    def test_no_writer(self) -> None:
        """Who is no declared writer gets no ids, and is told who is."""
        self.ids = self.make(["a", "b"], {})
        done, _ = self.start()
        failure = self.failureResultOf(done, StreamConfigurationError)
        self.assertIn("whose writers are a, b", str(failure.value))


class PostgresTests(PostgresMixin, TestCase):
    """Generators over a real database."""

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.reactor = IReactorFromThreads(reactor)
        self.database = Database(self.dsn, self.reactor)
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)

    def load(
        self, instance_name: str, *writers: str, negative: bool = False
    ) -> Deferred[MultiWriterIdGenerator]:
        return Deferred.fromCoroutine(
            load_id_generator(
                self.database,
                foobar(*writers, negative=negative),
                instance_name,
                self.reactor,
                FakeReactor(),
            )
        )

    async def write(self, ids: MultiWriterIdGenerator, fail: bool = False) -> int:
        def insert(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (%s, %s)", (id_, ids.instance_name))
            if fail:
                raise RuntimeError("rolled back")

        async with ids.get_next() as id_:
            await self.database.transact("insert", insert)
        return id_

    async def turns(self) -> None:
        """Let the reactor do what threads asked for, and what follows from it."""
        for _ in range(5):
            await task.deferLater(self.reactor, 0)  # type: ignore[arg-type]

    async def test_fresh(self) -> None:
        """A stream nobody wrote stands at 1, and its first id is 2."""
        ids = await self.load("master", "master", "other")
        self.assertEqual(ids.get_positions(), {"master": 1, "other": 1})
        self.assertEqual(await self.write(ids), 2)
        self.assertEqual(self.stored(), {"master": 2})
        self.assertEqual(await ids.get_max_allocated_token(), 2)

    async def test_closed_while_its_row_is_written(self) -> None:
        """
        A coroutine is closed while its transaction runs: the position does not
        pass the row before it is committed, though no other id is in flight; then it
        does.
        """
        ids = await self.load("master", "master")
        begun, go_on = threading.Event(), threading.Event()
        self.addCleanup(go_on.set)

        def insert(txn: Transaction, id_: int) -> None:
            txn.execute("INSERT INTO foobar VALUES (%s, %s)", (id_, "master"))
            begun.set()
            go_on.wait(30)

        async def write() -> None:
            async with ids.get_next() as id_:
                await self.database.transact("insert", lambda txn: insert(txn, id_))

        # Driven by hand: first it waits for its id, then for its transaction.
        coroutine = write()
        fetching: Any = coroutine.send(None)
        await defer.DeferredList([fetching])
        coroutine.send(None)
        await threads.deferToThread(begun.wait, 30)
        coroutine.close()
        await self.turns()
        self.assertEqual(ids.get_current_token(), 1)
        self.assertEqual(ids.get_minimal_local_current_token(), 1)
        go_on.set()
        # The row's transaction has ended; with it that of the position began.
        await self.database.settled()
        self.assertEqual(ids.get_current_token(), 2)
        await self.database.settled()
        self.assertEqual(self.stored(), {"master": 2})
        # And the next goes on from there.
        self.assertEqual(await self.write(ids), 3)

    async def test_two_writers(self) -> None:
        """Each writer's position is kept, and is where it starts again."""
        first = await self.load("first", "first", "second")
        second = await self.load("second", "first", "second")
        self.assertEqual([await self.write(ids) for ids in (first, second)], [2, 3])
        self.assertEqual(self.stored(), {"first": 2, "second": 3})
        self.assertEqual(first.get_current_token(), 2)
        again = await self.load("first", "first", "second")
        self.assertEqual(again.get_positions(), {"first": 3, "second": 3})

    async def test_many_at_once(self) -> None:
        """
        Concurrent blocks of several writers, some rolled back: no id twice, no
        error, and each position ends at its writer's last id.
        """
        writers = ("a", "b", "c")
        generators = [await self.load(writer, *writers) for writer in writers]
        last: dict[str, int] = {}

        async def run(ids: MultiWriterIdGenerator, fail: bool) -> None:
            for _ in range(4):
                try:
                    id_ = await self.write(ids, fail)
                except RuntimeError:
                    continue
                last[ids.instance_name] = max(last.get(ids.instance_name, 0), id_)

        await defer.gatherResults(
            Deferred.fromCoroutine(run(ids, fail=n % 5 == 0))
            for n in range(20)
            for ids in generators
        )
        rows = [id_ for (id_,) in self.sql("SELECT stream_id FROM foobar")]
        self.assertEqual(len(rows), len(set(rows)))
        self.assertEqual(len(rows), 3 * 16 * 4)
        for ids in generators:
            mine = ids.get_minimal_local_current_token()
            self.assertGreaterEqual(mine, last[ids.instance_name])
            self.assertEqual(self.stored()[ids.instance_name], mine)
        # The second round tells what the first one let everybody announce.
        for ids in generators * 2:
            for other in generators:
                token = other.get_current_token_for_writer(other.instance_name)
                ids.advance(other.instance_name, token)
        for ids in generators:
            self.assertGreaterEqual(ids.get_current_token(), max(rows))

    async def test_position_only_moves_forward(self) -> None:
        """A lower position changes nothing, not even a version of the row."""
        ids = await self.load("master", "master")
        await self.write(ids)
        self.sql("UPDATE stream_positions SET stream_id = 50")
        before = self.sql("SELECT xmin, xmax, ctid, stream_id FROM stream_positions")
        await self.write(ids)
        after = self.sql("SELECT xmin, xmax, ctid, stream_id FROM stream_positions")
        self.assertEqual((before[0][0], before[0][3]), (after[0][0], after[0][3]))

    async def test_negative(self) -> None:
        """Below zero in the tables, and moving away from it."""
        ids = await self.load("master", "master", negative=True)
        self.assertEqual(ids.get_current_token(), -1)
        self.assertEqual([await self.write(ids) for _ in range(2)], [-2, -3])
        self.assertEqual(self.stored(), {"master": -3})
        again = await self.load("master", "master", negative=True)
        self.assertEqual(again.get_current_token(), -3)

    async def test_in_transactions(self) -> None:
        """Ids taken inside a transaction are finished when it has ended."""
        ids = await self.load("master", "master")
        inside: list[int] = []

        def insert(txn: Transaction, fail: bool) -> int:
            id_ = ids.get_next_txn(txn)
            inside.append(ids.get_current_token())
            if fail:
                raise RuntimeError("rolled back")
            return id_

        self.assertEqual(
            await self.database.transact("insert", lambda txn: insert(txn, False)), 2
        )
        self.assertEqual((inside, ids.get_current_token()), ([1], 2))
        with self.assertRaises(RuntimeError):
            await self.database.transact("insert", lambda txn: insert(txn, True))
        self.assertEqual(ids.get_current_token(), 3)
