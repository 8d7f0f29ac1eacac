"""Tests for synapse_replication.storage.stuck_id_watch, on a real PostgreSQL."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.stuck_id_watch import (
    ASK_INTERVAL,
    STUCK_AFTER,
    StuckIdWatch,
)
from synapse_replication.streams.stuck_ids import StuckId
from tests.storage.doubles import FakeReactor, PostgresMixin
from tests.storage.id_generator_case import foobar


class WatchTests(PostgresMixin, TestCase):
    """An instance ``w1`` that shares a stream with ``w2``."""

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.reactor = IReactorFromThreads(reactor)
        self.clock = FakeReactor()
        self.database = Database(self.dsn, self.reactor)
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)

    async def watch(self, *, negative: bool = False) -> MultiWriterIdGenerator:
        ids = await load_id_generator(
            self.database,
            foobar("w1", "w2", negative=negative),
            "w1",
            self.reactor,
            self.clock,
        )
        self.stuck_ids = StuckIdWatch(lambda: {"foo": ids}, self.clock)
        return ids

    def check_after(self, seconds: float) -> list[StuckId]:
        self.clock.advance(seconds)
        self.stuck_ids.check()
        return self.stuck_ids.stuck()

    async def session(self) -> StuckId:
        """Return the only stuck id, once the database has named its session."""
        while True:
            (stuck,) = self.stuck_ids.stuck()
            if stuck.session:
                return stuck
            await deferLater(self.reactor, 0.01)  # type: ignore[arg-type]

    async def test_own_id(self) -> None:
        """An id of this process is stuck until it is finished."""
        ids = await self.watch()
        gate: Deferred[None] = Deferred()

        async def write() -> None:
            async with ids.get_next():
                await gate

        writing = Deferred.fromCoroutine(write())
        while ids.get_first_unfinished() != (2, "w1"):
            await deferLater(self.reactor, 0.01)  # type: ignore[arg-type]
        self.assertEqual(self.check_after(0), [])
        self.assertEqual(self.check_after(STUCK_AFTER - 1), [])
        (stuck,) = self.check_after(1)
        self.assertEqual(stuck, StuckId("foo", 2, "w1", STUCK_AFTER))
        stuck = await self.session()
        self.assertIn("no session", stuck.session)
        self.assertTrue(stuck.hint.endswith("which releases its ids."))
        gate.callback(None)
        await writing
        self.assertEqual(self.check_after(5), [])

    async def test_id_of_another(self) -> None:
        """
        The first id that another writer may not have finished is stuck if a later id is
        finished; its age restarts if the position advances.
        """
        ids = await self.watch(negative=True)
        self.assertEqual(self.check_after(STUCK_AFTER), [])
        self.set_sequence(3)
        async with ids.get_next():
            pass
        self.check_after(0)
        ids.advance("w2", -2)
        self.check_after(STUCK_AFTER - 1)
        self.assertEqual(self.check_after(1), [])
        (stuck,) = self.check_after(STUCK_AFTER)
        self.assertEqual((stuck.id, stuck.instance_name), (-3, "w2"))
        stuck = await self.session()
        self.assertIn("If it does not write foo any more", stuck.hint)
        ids.advance("w2", -3)
        self.assertEqual(self.check_after(5), [])

    async def test_asks_rarely(self) -> None:
        """The database is queried only for stuck ids, and rarely."""
        asked: list[str] = []
        transact = self.database.transact

        def counting(description: str, *args: object, **more: object) -> object:
            asked.append(description)
            return transact(description, *args, **more)  # type: ignore[arg-type]

        ids = await self.watch()
        self.patch(self.database, "transact", counting)
        async with ids.get_next():
            asked.clear()
            self.check_after(0)
            self.check_after(STUCK_AFTER - 1)
            self.assertEqual(asked, [])
            for _ in range(int(ASK_INTERVAL)):
                self.check_after(1)
            self.assertEqual(asked, ["find_session"])
            await self.session()

    async def test_failed_query(self) -> None:
        """If the sessions cannot be read, the id is reported nevertheless."""
        ids = await self.watch()
        unreachable = Database("port=1 host=::", self.reactor)
        self.addCleanup(unreachable.close)
        async with ids.get_next():
            self.patch(ids, "database", unreachable)
            self.check_after(0)
            self.check_after(STUCK_AFTER)
            stuck = await self.session()
        self.assertIn("could not be read", stuck.session)
