"""Tests for synapse_replication.app.position_check, on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import psycopg2
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from synapse_replication.app.position_check import (
    GRACE,
    SKIPPED,
    StoredPositionCheck,
)
from synapse_replication.storage import committed_tokens
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.standby import DatabaseRole
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row, receiving
from tests.storage.doubles import FakeReactor, PostgresMixin
from tests.support.recording_observer import RecordingObserver

INTERVAL = 5.0


class ReceiverDouble:
    """The receiver of one stream.

    :param known: the token up to which the rows of each (stream, writer) are known.
    :ivar verified: the arguments of all calls of :meth:`verify`.
    :ivar recorded: the writers whose tokens are recorded.
    """

    def __init__(self, stream_name: str, known: dict[tuple[str, str], int]) -> None:
        self._stream_name = stream_name
        self._known = known
        self.verified: list[tuple[str, list[int], int]] = []
        self.recorded: Set[str] = frozenset()

    def claimed_position(self, instance_name: str) -> int:
        return self._known[self._stream_name, instance_name]

    def record_tokens(self, instance_names: Set[str]) -> None:
        self.recorded = instance_names

    def range_to_verify(
        self, instance_name: str, stored: int
    ) -> tuple[int, int] | None:
        is_recorded = instance_name in self.recorded
        return (5, stored) if is_recorded and stored > 5 else None

    def verify(self, *found: Any) -> None:
        self.verified.append(found)


class StoredPositionCheckTests(PostgresMixin, TestCase):
    """A reader of ``foo``, which is called ``foobar`` in the table."""

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.reactor = IReactorFromThreads(reactor)
        self.clock = FakeReactor()
        self.observer = RecordingObserver()
        self.database = Database(self.dsn, self.reactor)
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)
        self.known = {("foo", "w1"): 5, ("foo", "w2"): 5}
        self.reported: list[tuple[str, str, int]] = []
        self.receivers = {
            name: ReceiverDouble(name, self.known) for name in ("foo", "bar")
        }
        self.speakers = {"w2"}
        self.store(w1=5, w2=5, me=9, removed=9)
        self.check = self.make(self.database)
        self.addCleanup(self.check.stop)

    def make(
        self,
        database: Database,
        writers: Sequence[str] = ("w1", "w2"),
        writer_column: str | None = "instance_name",
    ) -> StoredPositionCheck:
        check = StoredPositionCheck(
            database,
            {
                name: IdStream(
                    stream_name=f"{name}bar",
                    sequence=f"{name}bar_seq",
                    tables=[
                        IdColumn(table, "stream_id", column)
                        for table in (name + "bar", "missing")
                    ],
                    writers=declared,
                )
                for name, declared, column in (
                    ("foo", writers, writer_column),
                    ("bar", (), "instance_name"),
                )
            },
            ["me", "w1", "w2"],
            self,  # type: ignore[arg-type]
            lambda name: name in self.speakers,
            self.clock,
            self.observer,
            me="me",
            interval=INTERVAL,
            uniform=lambda least, most: least,
        )
        check.start()
        return check

    # -- the command handler ----------------------------------------------------------

    def stored_position(self, *found: Any) -> None:
        self.reported.append(found)

    # -- the table --------------------------------------------------------------------

    def advance_position(self, writer: str, id_: int) -> None:
        self.sql(
            "UPDATE stream_positions SET stream_id = %s WHERE instance_name = %s",
            id_,
            writer,
        )

    def run_timer(self) -> None:
        """Advance the clock to the next delayed call."""
        (call,) = self.clock.getDelayedCalls()
        self.clock.advance(call.getTime() - self.clock.seconds())

    async def read(self) -> None:
        """Wait until the table was read once more, and compared."""
        self.run_timer()
        while not self.clock.getDelayedCalls():
            await self.turn()

    def turn(self) -> Deferred[None]:
        return deferLater(self.reactor, 0.01)  # type: ignore[arg-type]

    async def test_ahead(self) -> None:
        """A position that is ahead for longer than the grace time is reported."""
        self.advance_position("w2", 8)
        await self.read()
        self.clock.advance(GRACE - 0.1)
        self.assertEqual(self.reported, [])
        self.clock.advance(0.1)
        self.assertEqual(self.reported, [("foo", "w2", 8)])
        # It is reported again as long as it is ahead.
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("foo", "w2", 8)] * 2)

    async def test_set_back(self) -> None:
        """A stored position that moved back below the reader's is reported."""
        self.known["foo", "w1"] = 9
        await self.read()
        self.assertEqual(self.observer.set_back, [])
        self.advance_position("w1", 3)
        self.advance_position("w2", 4)
        await self.read()
        self.assertEqual(
            self.observer.set_back,
            [
                ("foo", "w1", 3, 9),
                ("foo", "w2", 4, 5),
            ],
        )
        await self.read()
        self.assertEqual(len(self.observer.set_back), 2)

    async def test_other_timeline(self) -> None:
        """
        After a change of the timeline, the range below each writer's last position that
        has no rows any more is reported, although rows were written since.
        """
        self.write_rows("w1", 3, 5)
        self.known.update(dict.fromkeys(self.known, 5))
        await self.read()
        self.known["foo", "w1"] = 9
        self.known["foo", "w2"] = 8
        await self.read()
        self.check._timeline = "00000000"
        self.write_rows("w1", 12)
        self.advance_position("w1", 12)
        self.known = dict.fromkeys(self.known, 12)
        await self.read()
        self.assertEqual(
            self.observer.set_back,
            [("foo", "w1", 5, 9), ("foo", "w2", 5, 8)],
        )
        self.assertIn("timeline changed", str(self.observer.failures))

    async def test_other_timeline_with_all_rows(self) -> None:
        """A promoted standby that has all rows is reported without ranges."""
        self.write_rows("w1", 5)
        self.write_rows("w2", 9)
        self.known.update(dict.fromkeys(self.known, 9))
        await self.read()
        self.check._timeline = "00000000"
        await self.read()
        self.assertEqual(self.observer.set_back, [])
        self.assertIn("timeline changed", str(self.observer.failures))

    async def test_position_is_not_known(self) -> None:
        """
        If the host cannot return a position, that is reported once, and the next read
        takes place.
        """
        del self.known["foo", "w1"]
        for _ in range(2):
            await self.read()
        ((what, error),) = self.observer.failures
        self.assertEqual(what, "reading the stored positions")
        self.assertIsInstance(error, KeyError)
        self.known["foo", "w1"] = 5
        self.advance_position("w1", 8)
        await self.read()
        # The position is asked for again after the grace time.
        del self.known["foo", "w1"]
        self.clock.advance(GRACE)
        self.assertEqual(len(self.observer.failures), 2)
        self.known["foo", "w1"] = 5
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("foo", "w1", 8)])

    async def test_comparison_fails(self) -> None:
        """A failure of the comparison is reported, and the next read takes place."""
        self.advance_position("w1", 8)
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("foo", "w1", 8)])
        self.patch(self.receivers["foo"], "verify", None)
        await self.read()
        ((what, error),) = self.observer.failures
        self.assertEqual(what, "reading the stored positions")
        self.assertIsInstance(error, TypeError)

    async def test_arrives_in_time(self) -> None:
        """A position that is announced within the grace time is not reported."""
        self.advance_position("w1", 8)
        await self.read()
        self.known["foo", "w1"] = 8
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [])

    async def test_nothing_is_ahead(self) -> None:
        """Positions that are not ahead, and those of others, have no effect."""
        self.known["foo", "w1"] = 7
        await self.read()
        (call,) = self.clock.getDelayedCalls()
        self.assertAlmostEqual(call.getTime() - self.clock.seconds(), INTERVAL)
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [])

    async def test_committed(self) -> None:
        """
        The tokens up to the last stored position are read for writers without the
        extension.
        """
        self.write_rows("w1", 5, 6, 8, 9)
        self.write_rows("w2", 7)
        self.known.update(dict.fromkeys(self.known, 9))
        self.advance_position("w1", 8)
        self.advance_position("w2", 7)
        await self.read()
        self.assertEqual(self.receivers["foo"].verified, [])
        await self.read()
        self.assertEqual(self.receivers["foo"].verified, [("w1", [6, 8], 8)])

    async def verified_without_names(self, *writers: str) -> list[Any]:
        """Return what is compared of ``foo``, whose table has no names of writers."""
        self.check.stop()
        self.check = self.make(self.database, writers, None)
        self.addCleanup(self.check.stop)
        self.write_rows("w1", 5, 6)
        self.write_rows("me", 7)
        self.known["foo", "w1"] = 8
        self.advance_position("w1", 8)
        await self.read()
        await self.read()
        return self.receivers["foo"].verified

    async def test_table_without_names(self) -> None:
        """If a stream has only one writer, names are not needed."""
        self.assertEqual(await self.verified_without_names("w1"), [("w1", [6, 7], 8)])

    async def test_own_rows_in_table_without_names(self) -> None:
        """The rows of this process do not count as missing rows of another writer."""
        self.assertEqual(await self.verified_without_names("w1", "me"), [])

    async def test_without_stored_positions(self) -> None:
        """In a stream without stored positions, the newest rows are compared."""
        self.sql("CREATE TABLE barbar (stream_id bigint, instance_name text)")
        self.sql("INSERT INTO barbar VALUES (3, 'w1'), (7, 'w1'), (9, 'me')")
        self.known["bar", "w1"] = 5
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("bar", "w1", 7)])

    async def test_unfinished_id(self) -> None:
        """Newest rows are no position while a transaction may hold a lower id."""
        self.sql("CREATE TABLE barbar (stream_id bigint, instance_name text)")
        self.sql("INSERT INTO barbar VALUES (7, 'w1')")
        self.known["bar", "w1"] = 5
        other = psycopg2.connect(self.dsn)
        self.addCleanup(other.close)
        other.cursor().execute("INSERT INTO barbar VALUES (6, 'w1')")
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [])
        other.commit()
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("bar", "w1", 7)])

    async def test_newest_of_one_that_reports(self) -> None:
        """The newest rows of a writer that reports its position are no position."""
        self.sql("CREATE TABLE barbar (stream_id bigint, instance_name text)")
        self.sql("INSERT INTO barbar VALUES (7, 'w2')")
        self.known["bar", "w2"] = 5
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [])

    async def test_records_what_is_compared(self) -> None:
        """Of writers that report their positions, no delivered token is recorded."""
        self.speakers = {"w1", "w2"}
        await self.read()
        for name in ("foo", "bar"):
            self.assertEqual(self.receivers[name].recorded, set())
        self.speakers = {"w2"}
        await self.read()
        for name in ("foo", "bar"):
            self.assertEqual(self.receivers[name].recorded, {"w1"})

    async def test_no_token_is_held_of_one_that_reports(self) -> None:
        """A reader holds no token of a writer of caches that reports its position."""
        self.sql("CREATE TABLE barbar (stream_id bigint, instance_name text)")
        self.sql("INSERT INTO barbar VALUES (60, 'w1'), (60, 'w2')")
        process = receiving(SourceStream("bar", Row, idempotent=True))
        receiver = process.handler.receivers["bar"]
        self.receivers["bar"] = receiver  # type: ignore[assignment]
        self.check.stop()
        self.check = self.make(self.database)
        self.addCleanup(self.check.stop)
        for name in ("w1", "w2"):
            process.receive(f"POSITION bar {name} 10 10")
        await self.read()
        for token in range(11, 61):
            for name in ("w1", "w2"):
                process.receive(f'RDATA bar {name} {token} ["row"]')
        self.assertTrue(receiver.writer("w1").late.is_recording)
        self.assertFalse(receiver.writer("w2").late.is_recording)
        self.assertEqual(receiver.claimed_position("w2"), 60)

    async def test_records_from_the_start(self) -> None:
        """Until it is known that a writer reports its position, it is compared."""
        self.assertEqual(self.receivers["bar"].recorded, {"w1"})

    async def test_standby(self) -> None:
        """On a standby, nothing is recorded of streams without stored positions."""
        self.patch(committed_tokens, "read_role", lambda txn: DatabaseRole(True, True))
        await self.read()
        self.run_timer()
        self.assertEqual(self.receivers["foo"].recorded, {"w1"})
        self.assertEqual(self.receivers["bar"].recorded, set())

    async def test_negative_ids(self) -> None:
        """The tokens of a stream that counts down are positive."""
        self.advance_position("w1", -8)
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("foo", "w1", 8)])

    async def test_all_report(self) -> None:
        """If all writers report their positions, most reads are skipped."""
        self.speakers = {"w1", "w2"}
        await self.read()
        self.advance_position("w1", 8)
        for _ in range(SKIPPED):
            self.run_timer()
            await self.turn()
            self.assertEqual(len(self.clock.getDelayedCalls()), 1)
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [])
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("foo", "w1", 8)])

    async def test_unreachable(self) -> None:
        """An outage is reported once, and the reads go on."""
        self.sql("ALTER TABLE stream_positions RENAME TO missing")
        await self.read()
        await self.read()
        ((what, _),) = self.observer.failures
        self.assertEqual(what, "reading the stored positions")
        self.sql("ALTER TABLE missing RENAME TO stream_positions")
        self.advance_position("w1", 8)
        await self.read()
        self.clock.advance(GRACE)
        self.assertEqual(self.reported, [("foo", "w1", 8)])

    async def test_stop(self) -> None:
        """After a stop, a read in progress reports nothing, and no other begins."""
        self.advance_position("w1", 8)
        self.run_timer()
        self.check.stop()
        await self.database.transact("wait", lambda txn: None)
        await self.turn()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.reported, [])
