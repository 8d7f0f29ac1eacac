"""Tests for synapse_replication.app.loss_meter, on a real PostgreSQL."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorFromThreads
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from synapse_replication.app import loss_meter
from synapse_replication.app.loss_meter import (
    LOSS_CHECK_INTERVAL,
    LossFinding,
    LossMeter,
)
from synapse_replication.handlers.events import LinkDown, LinkUp
from synapse_replication.storage import committed_tokens
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.streams import token_ledger
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.commands import PositionCommand, RdataCommand
from tests.storage.doubles import FakeReactor, PostgresMixin
from tests.support.recording_observer import RecordingObserver


def table(name: str, writer_column: str | None = "instance_name") -> IdColumn:
    return IdColumn(name, "stream_id", writer_column)


class LossMeterTests(PostgresMixin, TestCase):
    """A meter of the stream ``foo`` of ``w1``, which is at position 5."""

    async def setUp(self) -> None:  # type: ignore[override]
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.reactor = IReactorFromThreads(reactor)
        self.clock = FakeReactor()
        self.observer = RecordingObserver()
        self.database = Database(self.dsn, self.reactor)
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)
        self.store(w1=5)
        self.write_rows("w1", 3)
        self.found: list[LossFinding] = []
        await self.begin(table("foobar"), table("missing"))

    async def begin(self, *tables: IdColumn, is_stored: bool = True) -> None:
        stream = IdStream(
            stream_name="foobar",
            sequence="foobar_seq",
            tables=tables,
            writers=("w1",) if is_stored else (),
        )
        self.meter = LossMeter(
            {"foo": stream},
            self.database,
            self.clock,
            self.observer,
            self.found.append,
            patience=20.0,
        )
        self.addCleanup(self.meter.stop)
        self.meter.observe(LinkUp("redis"))
        self.meter.start()
        await self.settle()

    async def settle(self) -> None:
        """Wait until the check that is running has ended."""
        while not self.clock.getDelayedCalls():
            await deferLater(self.reactor, 0.01)  # type: ignore[arg-type]

    async def check(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(LOSS_CHECK_INTERVAL)
            await self.settle()

    def commit(self, *ids: int, writer: str = "w1") -> None:
        self.write_rows(writer, *ids)
        self.sql(
            "UPDATE stream_positions SET stream_id = %s WHERE instance_name = %s",
            ids[-1],
            writer,
        )

    def announce(self, *tokens: int, writer: str = "w1") -> None:
        for token in tokens:
            self.meter.announced(RdataCommand("foo", writer, token, "[]"))

    def totals(self) -> list[tuple[str, int, int, int]]:
        return [
            (writer, tally.verified, tally.lost, tally.late)
            for (_, writer), tally in self.meter.tallies().items()
        ]

    async def test_all_announced(self) -> None:
        """Announced tokens are not reported; earlier ones are not verified."""
        self.commit(6, 8)
        self.announce(6, 8)
        await self.check(10)
        self.assertEqual(self.totals(), [("w1", 2, 0, 0)])
        self.assertEqual(self.found, [])

    async def test_never_announced(self) -> None:
        """Exactly the tokens that no line carried are reported, after the patience."""
        self.commit(6, 7, 8)
        self.announce(6, 8)
        await self.check(2)
        self.assertEqual(self.meter.waiting(), 1)
        await self.check(3)
        self.assertEqual(self.found, [])
        await self.check(1)
        self.assertEqual(self.found, [LossFinding("foo", "w1", 7, 20.0, False)])
        self.assertEqual(self.observer.unannounced_rows, [("foo", "w1", (7,))])
        await self.check(10)
        self.assertEqual(self.totals(), [("w1", 3, 1, 0)])
        self.assertEqual(self.meter.waiting(), 0)

    async def test_late(self) -> None:
        """An announcement after the patience is late; one before it is not reported."""
        self.commit(6, 7)
        await self.check(2)
        self.announce(6)
        await self.check(4)
        self.announce(7)
        self.assertEqual(
            self.found,
            [
                LossFinding("foo", "w1", 7, 20.0, False),
                LossFinding("foo", "w1", 7, 20.0, True),
            ],
        )
        self.assertEqual(self.totals(), [("w1", 2, 0, 1)])

    async def test_link_lost(self) -> None:
        """Rows that are written while the link is down are not verified."""
        self.commit(6, 7)
        self.announce(6)
        await self.check(2)
        self.meter.observe(LinkDown("redis", CloseReason.LOST, "cut"))
        await self.check(2)
        self.commit(8)
        self.meter.observe(LinkUp("redis"))
        await self.check(1)
        self.commit(9)
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [9])
        self.assertEqual(self.meter.observed(), LOSS_CHECK_INTERVAL * 13)

    async def test_position(self) -> None:
        """A POSITION beyond a gap makes readers fetch the rows in the gap."""
        self.announce(5)
        self.commit(6, 7, 8, 9)
        self.announce(7)
        self.meter.receive(PositionCommand("foo", "w1", 9, 9))
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [6])

    async def test_new_writer(self) -> None:
        """A writer is verified from its first stored position on."""
        self.announce(6, writer="w2")
        self.write_rows("w2", 6)
        self.store(w2=6)
        await self.check(1)
        self.commit(7, writer="w2")
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [7])

    async def test_table_without_writers(self) -> None:
        """A table without names of writers is verified if there is one writer."""
        self.meter.stop()
        await self.begin(table("foobar", None))
        self.commit(6)
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [6])
        self.store(w2=7)
        await self.check(2)
        self.commit(8)
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [6])

    async def test_without_stored_positions(self) -> None:
        """A stream without stored positions is verified up to its newest rows."""
        self.meter.stop()
        self.sql("DELETE FROM stream_positions")
        self.sql("CREATE INDEX ON foobar (instance_name, stream_id)")
        await self.begin(table("foobar"), is_stored=False)
        self.write_rows("w1", 7, 8)
        self.announce(8)
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [7])

    async def test_many(self) -> None:
        """A range that exceeds one read is verified in several checks."""
        self.patch(committed_tokens, "MAX_READ", 3)
        self.commit(*range(6, 14))
        self.announce(*range(6, 13))
        await self.check(15)
        self.assertEqual([each.token for each in self.found], [13])
        self.assertEqual(self.totals(), [("w1", 8, 1, 0)])

    async def test_more_than_are_recorded(self) -> None:
        """If more rows are announced than are recorded, none of them counts as lost."""
        self.patch(token_ledger, "MAX_RECORDED", 3)
        self.patch(committed_tokens, "MAX_READ", 3)
        self.commit(*range(6, 14))
        self.announce(*range(6, 14))
        await self.check(3)
        self.commit(14, 15)
        self.announce(15)
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [14])

    async def test_more_than_are_recorded_during_a_read(self) -> None:
        """What was read before too many rows were announced is not compared."""
        self.patch(token_ledger, "MAX_RECORDED", 3)
        self.clock.advance(LOSS_CHECK_INTERVAL)
        self.announce(*range(6, 14))
        await self.settle()
        self.commit(*range(6, 14))
        await self.check(10)
        self.assertEqual(self.found, [])

    async def test_far_position(self) -> None:
        """A POSITION that is far ahead does not end the verification."""
        self.announce(6)
        self.meter.announced_position(PositionCommand("foo", "w1", 7, 10**18))
        self.commit(6, 7)
        await self.check(2)
        self.commit(8)
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [8])

    async def test_many_lost(self) -> None:
        """A lost token makes room for a further one, which is reported, too."""
        self.patch(loss_meter, "MAX_MISSING", 2)
        self.commit(6, 7)
        await self.check(10)
        self.commit(8)
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [6, 7, 8])
        self.announce(7)
        self.assertEqual(self.totals(), [("w1", 3, 2, 1)])

    async def test_many_waiting(self) -> None:
        """More waiting tokens than there is room for are verified later."""
        self.patch(loss_meter, "MAX_MISSING", 2)
        self.commit(6, 7, 8)
        await self.check(4)
        self.assertEqual(self.totals(), [("w1", 2, 0, 0)])
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [6, 7, 8])
        self.assertEqual(self.totals(), [("w1", 3, 3, 0)])

    async def test_many_waiting_are_announced(self) -> None:
        """Tokens that are announced within the patience are not lost, however many."""
        self.patch(loss_meter, "MAX_MISSING", 2)
        self.commit(6, 7, 8, 9)
        await self.check(2)
        self.assertEqual(self.meter.waiting(), 2)
        self.announce(6, 7, 8, 9)
        await self.check(10)
        self.assertEqual(self.found, [])
        self.assertEqual(self.totals(), [("w1", 4, 0, 0)])

    async def test_unreachable(self) -> None:
        """A failed check is reported, and repeated later."""
        self.commit(6)
        self.sql("ALTER TABLE stream_positions RENAME TO gone")
        await self.check(2)
        self.assertEqual(
            {what for what, _ in self.observer.failures},
            {"verifying the announced rows"},
        )
        self.sql("ALTER TABLE gone RENAME TO stream_positions")
        await self.check(10)
        self.assertEqual([each.token for each in self.found], [6])
