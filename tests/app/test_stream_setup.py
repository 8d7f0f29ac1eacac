"""Tests for synapse_replication.app.stream_setup."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import psycopg2
from twisted.internet import reactor  # noqa: TID251 -- a database's threads
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from synapse_replication.app.host import PositionsOnlySink, StandaloneHost
from synapse_replication.app.stream_setup import (
    OWN_ROWS_LOOK_BACK,
    StreamSetup,
)
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import CatchUpError, ConfigError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.http.client import HttpCatchUpClient, with_retries
from synapse_replication.storage.database import Database
from synapse_replication.storage.open_transactions import find_session
from synapse_replication.storage.stuck_id_watch import STUCK_AFTER, StuckIdWatch
from synapse_replication.streams.reader_table import State
from synapse_replication.streams.standard.registry import (
    DEFAULT_STREAMS,
    STANDARD_STREAMS,
)
from synapse_replication.streams.stream import RemovedWriter
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres
from tests.support.hooks import silent_hooks
from tests.support.recording_observer import RecordingObserver

_NOTES = TableStream(
    name="notes",
    table="notes",
    id_column="stream_id",
    writer_column="instance_name",
    columns={"note": str},
    sequence="notes_seq",
    writers=["a", "b"],
)

_SCHEMA = """
    CREATE SEQUENCE notes_seq START 2;
    CREATE TABLE notes (
        stream_id bigint NOT NULL, instance_name text NOT NULL, note text NOT NULL
    );
    CREATE INDEX notes_index ON notes (instance_name, stream_id)
"""

_POSITIONS = """
    CREATE TABLE stream_positions (
        stream_name text NOT NULL, instance_name text NOT NULL,
        stream_id bigint NOT NULL, UNIQUE (stream_name, instance_name)
    )
"""


class SavingSink(PositionsOnlySink):
    """A sink with saved positions."""

    def __init__(self, saved: Mapping[tuple[str, str], int]) -> None:
        self.saved = saved
        self.received: list[tuple[str, str, int]] = []

    def saved_positions(self) -> Mapping[tuple[str, str], int]:
        return self.saved

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        self.received.append((stream_name, instance_name, token))


async def _wait(awaitable: Awaitable[object]) -> None:
    await awaitable


class StreamSetupTests(TestCase):
    timeout = 60

    def setUp(self) -> None:
        self.clock = Clock()
        self.observer = RecordingObserver()
        self.dsn = shared_postgres().new_database()
        self.database = Database(self.dsn, reactor)  # type: ignore[arg-type]
        self.addCleanup(self.database.close)
        self.execute(_SCHEMA)

    def execute(self, sql: str) -> list[Any]:
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
            connection.commit()
            return cursor.fetchall() if cursor.description else []

    def store(self, **positions: int) -> None:
        self.execute(_POSITIONS)
        self.execute(
            f"SELECT setval('notes_seq', {max(positions.values(), default=1)})"
        )
        for writer, token in positions.items():
            self.execute(
                f"INSERT INTO stream_positions VALUES ('notes', '{writer}', {token})"
            )

    async def set_up(
        self,
        sink: PositionsOnlySink,
        instance_name: str = "reader",
        streams: Sequence[str | TableStream] = (
            "typing",
            "presence_federation",
            _NOTES,
        ),
        *,
        fill_sink: bool = False,
    ) -> StandaloneHost:
        config = ProcessConfig(
            files=[],
            server_name="x.test",
            instance_name=instance_name,
            creates_tables=instance_name == "master",
            fill_sink=fill_sink,
            streams=tuple(streams),
            writers={
                **dict.fromkeys(STANDARD_STREAMS, ("a",)),
                "caches": (),
                "typing": ("master",),
                "presence_federation": ("a",),
                "notes": ("a", "b"),
            },
            receiving=ReceiverOptions(plausible_distance=2000),
        )
        clock = ReactorClock(self.clock)
        client = HttpCatchUpClient(None, {}, None, self.clock)
        host = StandaloneHost(
            Identity("x.test", instance_name, "an id"),
            clock,
            self.observer,
            silent_hooks(clock),
            lambda name: with_retries(client.for_stream(name), clock, random.random),
        )
        self.setup = StreamSetup(config, host, self.database, reactor)  # type: ignore[arg-type]
        await self.setup.add_streams(sink)
        self.empty_ranges = self.setup.empty_ranges
        return host

    def positions(self, host: StandaloneHost, *writers: str) -> list[int]:
        stream = host.streams.get_streams()["notes"]
        return [stream.current_token(writer) for writer in writers]

    async def test_stream_of_all(self) -> None:
        """Every process may write a stream without declared writers."""
        self.execute(
            "CREATE SEQUENCE cache_invalidation_stream_seq START 2;"
            "CREATE TABLE cache_invalidation_stream_by_instance ("
            "stream_id bigint, instance_name text, cache_func text, keys text[], "
            "invalidation_ts bigint)"
        )
        self.store()
        host = await self.set_up(PositionsOnlySink(), "any1", ["caches"])
        (caches,) = host.streams.get_streams_to_replicate()
        self.execute(
            "INSERT INTO cache_invalidation_stream_by_instance VALUES "
            "(nextval('cache_invalidation_stream_seq'), 'any1', 'get_user', NULL, 5)"
        )
        page = await caches.get_updates_since("any1", 1, 2)
        self.assertEqual(list(page.updates), [(2, ["get_user", None, 5])])

    async def test_missing_table(self) -> None:
        """A process that only reads a stream does not start without its table."""
        self.store(a=7, b=9)
        for change, missing in (
            ("ALTER TABLE notes RENAME note TO text", "note"),
            ("ALTER TABLE notes RENAME stream_id TO number", "stream_id"),
            ("DROP TABLE notes", "notes"),
        ):
            self.execute(change)
            with self.assertRaisesRegex(ConfigError, f'"{missing}" does not exist'):
                await self.set_up(SavingSink({}))

    async def test_starts_at_writers_positions(self) -> None:
        """
        A sink without saved positions starts at the writers' positions, which it
        receives.
        """
        self.store(a=7, b=9)
        sink = SavingSink({})
        host = await self.set_up(sink)
        self.assertEqual(self.positions(host, "a", "b"), [7, 9])
        self.assertEqual(
            sink.received,
            [
                ("typing", "master", 0),
                ("presence_federation", "a", 0),
                ("notes", "a", 7),
                ("notes", "b", 9),
            ],
        )

    async def test_starts_at_saved_positions(self) -> None:
        """A sink with saved positions starts at these positions."""
        self.store(a=7, b=9)
        sink = SavingSink(
            {
                ("notes", "a"): 3,
                ("notes", "b"): 4,
                ("typing", "master"): 2,
                ("presence_federation", "a"): 1,
            }
        )
        host = await self.set_up(sink)
        self.assertEqual(self.positions(host, "a", "b"), [3, 4])
        self.assertEqual(
            host.streams.get_streams()["typing"].current_token("master"), 2
        )
        self.assertEqual(sink.received, [])

    async def test_implausible_saved_position(self) -> None:
        """A saved position far beyond the sequence is set back to the sequence."""
        self.store(a=7, b=9)
        self.execute("SELECT setval('notes_seq', 9)")
        host = await self.set_up(SavingSink({("notes", "a"): 2**62, ("notes", "b"): 4}))
        self.assertEqual(self.positions(host, "a", "b"), [9, 4])

    async def test_saved_position_beyond_all_rows(self) -> None:
        """
        A saved position that is only slightly beyond the sequence and all rows is set
        back, too.
        """
        self.store(a=7, b=9)
        host = await self.set_up(SavingSink({("notes", "a"): 30, ("notes", "b"): 4}))
        self.assertEqual(self.positions(host, "a", "b"), [9, 4])

    async def test_saved_position_beyond_a_sequence_that_is_behind(self) -> None:
        """
        If the sequence is behind the rows, the greatest id of the rows is the bound.
        """
        self.store(a=7, b=9)
        self.execute("INSERT INTO notes VALUES (12, 'b', 'above')")
        host = await self.set_up(SavingSink({("notes", "a"): 12, ("notes", "b"): 13}))
        self.assertEqual(self.positions(host, "a", "b"), [12, 12])

    async def test_plausible_distance(self) -> None:
        """All streams of an instance have the configured plausible distance."""
        self.store(a=7, b=9)
        host = await self.set_up(PositionsOnlySink())
        streams: Mapping[str, Any] = host.streams.get_streams()
        # The sequence of notes was read: b is ahead of a, whose rows are settled.
        for name, near in (("notes", 2009), ("typing", 2000)):
            self.assertTrue(streams[name].is_plausible("a", near))
            self.assertFalse(streams[name].is_plausible("a", near + 1))

    async def test_rows_delivered_before_the_start(self) -> None:
        """
        Rows that were delivered before settle their ids, although a writer is behind.
        """
        self.store(a=7, b=9)
        self.execute("INSERT INTO notes VALUES (9, 'b', 'above a gap')")
        streams: Any = (await self.set_up(PositionsOnlySink())).streams.get_streams()
        self.assertEqual(streams["notes"].current_stream_token().stream, 7)
        self.execute("INSERT INTO notes VALUES (8, 'b', 'without a gap')")
        streams = (await self.set_up(PositionsOnlySink())).streams.get_streams()
        self.assertEqual(streams["notes"].current_stream_token().stream, 9)

    async def test_id_that_a_writer_has_not_finished(self) -> None:
        """
        A process that only reads reports the id that holds its token, and the session,
        until the writer has advanced; not if the writer's rows do not arrive here.
        """
        self.store(a=7, b=9)
        with contextlib.closing(psycopg2.connect(self.dsn)) as session:
            session.cursor().execute("INSERT INTO notes VALUES (8, 'a', 'open')")
            host = await self.set_up(PositionsOnlySink())
            reader: Any = SimpleNamespace(state=State.FETCHING)
            ids = self.setup.ids(lambda: {("notes", "a"): reader})
            watch = StuckIdWatch(lambda: ids, ReactorClock(self.clock))
            watch.check()
            self.clock.advance(STUCK_AFTER)
            watch.check()
            self.assertEqual(watch.stuck(), [])
            reader.state = State.LIVE
            watch.check()
            self.clock.advance(STUCK_AFTER)
            (stuck,) = watch.stuck()
            self.assertEqual(
                (stuck.stream_name, stuck.id, stuck.instance_name), ("notes", 8, "a")
            )
            (held,) = ids.values()
            pid = session.info.backend_pid
            found = await held.database.transact(
                "find_session", lambda txn: find_session(txn, held.stream, 0)
            )
            assert found is not None
            self.assertEqual((found.pid, found.writes_stream), (pid, True))
        streams: Any = host.streams.get_streams()
        streams["notes"].advance("a", 9)
        watch.check()
        self.assertEqual(watch.stuck(), [])

    async def test_writer_that_is_new(self) -> None:
        """An unknown writer starts at the lowest position of the known writers."""
        self.store(a=7, b=9)
        self.assertEqual(
            self.positions(await self.set_up(PositionsOnlySink()), "c"), [7]
        )
        sink = SavingSink({("notes", "a"): 3, ("notes", "b"): 4})
        self.assertEqual(self.positions(await self.set_up(sink), "c"), [3])

    async def test_rows_from_writers_of_custom_stream(self) -> None:
        """
        Plugged-in code receives a function that fetches rows of a custom stream from
        its writers.
        """
        self.store()
        host = await self.set_up(PositionsOnlySink())
        request = Deferred.fromCoroutine(
            _wait(host.fetch_from_writer("cursors")("nowhere", 0, 1, 10))
        )
        # The request is retried a few times.
        self.clock.pump([10.0] * 5)
        with self.assertRaisesRegex(CatchUpError, "nowhere"):
            await request

    async def test_no_rows(self) -> None:
        """A stream without rows starts before its first id."""
        self.store()
        host = await self.set_up(PositionsOnlySink())
        self.assertEqual(self.positions(host, "a"), [1])

    async def test_writer_gets_ids(self) -> None:
        """An instance that is a writer can write rows, and announces them."""
        self.store(a=7, b=9)
        self.execute("SELECT setval('notes_seq', 9)")
        host = await self.set_up(PositionsOnlySink(), "a")
        _, stream = host.streams.get_streams_to_replicate()
        notes: Any = host.streams.get_streams()["notes"]
        token = await notes.write([notes.description.codec.from_json(["hello"])])
        self.assertEqual(token, 10)
        self.assertEqual(stream.minimal_local_current_token(), 10)
        self.assertEqual(
            self.execute("SELECT stream_id, note FROM notes"), [(10, "hello")]
        )

    async def test_newest_row_of_each_key_is_retained(self) -> None:
        """
        For presence_federation the newest row of each key is retained beyond the bound
        of the log, so that a late reader receives a row for every key.
        """
        self.store(a=7, b=9)
        self.execute("SELECT setval('notes_seq', 9)")
        host = await self.set_up(PositionsOnlySink(), "a")
        stream: Any = host.streams.get_streams()["presence_federation"]
        codec = stream.description.codec
        stream.write([codec.from_json(["first.example", "@u:x.test"])])
        stream.write([codec.from_json(["gone.example", "@u:x.test"])])
        for number in range(6):
            user = f"@{number}:x.test"
            stream.write([codec.from_json(["b.example", user])] * 2_000)
        page = await stream.get_updates_since("a", 1, stream.current_token("a"))
        destinations = [row[0] for _, row in page.updates]
        self.assertEqual(destinations[0], "gone.example")
        self.assertTrue(page.limited)

    async def test_unallocated_token(self) -> None:
        """
        A wait for a token above the sequence ends at the sequence's value.
        """
        self.store(a=7, b=9)
        self.execute("SELECT setval('notes_seq', 9)")
        host = await self.set_up(PositionsOnlySink())
        host.set_sink(PositionsOnlySink(), self.setup.largest_token)
        await host.rows.wait_for_stream_position("b", "notes", 1_000)
        waiting = Deferred.fromCoroutine(
            host.rows.wait_for_stream_position("a", "notes", 1_000)
        )
        while not self.clock.getDelayedCalls():
            # The query runs in a thread.
            await self.database.transact("wait", lambda txn: txn.execute("SELECT 1"))
        host.rows.on_position("notes", "a", 9)
        self.clock.advance(0)
        await waiting

    async def test_new_writer_reports_range_without_rows(self) -> None:
        """
        A new writer reports the range in which it has no rows; other instances report
        no range.
        """
        self.store(a=7)
        self.execute("SELECT setval('notes_seq', 7)")
        self.execute("INSERT INTO notes VALUES (7, 'a', 'x')")
        await self.set_up(SavingSink({}), "b")
        self.assertEqual(self.empty_ranges, {"notes": (0, 7)})
        # The writer's position is stored now, so that it may have rows above it.
        for name in ("b", "a", "reader"):
            await self.set_up(SavingSink({}), name)
            self.assertEqual(self.empty_ranges, {}, name)

    async def test_removed_writer_returns(self) -> None:
        """
        If a removed writer returns, it may have earlier rows; therefore no range is
        reported.
        """
        self.store(a=7)
        self.execute("SELECT setval('notes_seq', 7)")
        self.execute("INSERT INTO notes VALUES (5, 'b', 'x')")
        await self.set_up(SavingSink({}), "b")
        self.assertEqual(self.empty_ranges, {})

    def write_as_removed(self, writer: str, *ids: int) -> None:
        for id_ in ids:
            self.execute(f"INSERT INTO notes VALUES ({id_}, '{writer}', 'x')")
        self.execute("SELECT setval('notes_seq', 20)")

    async def test_removed_writer_with_rows(self) -> None:
        """Missing rows of a removed writer are reported even before a link is up."""
        self.store(a=7, b=9)
        self.write_as_removed("gone", 3, 5)
        sink = SavingSink({("notes", "a"): 3, ("notes", "gone"): 3})
        host = await self.set_up(sink)
        self.assertEqual(self.positions(host, "gone"), [3])
        self.assertEqual(self.observer.removed_found, [("notes", "gone", 3, 5)])
        notes: Any = host.streams.get_streams()["notes"]
        self.assertEqual(
            await notes.find_removed_writers(),
            {"gone": RemovedWriter(5, is_deleted=True)},
        )
        self.assertEqual(self.received_of_removed(sink), [])

    async def test_removed_writer_without_rows(self) -> None:
        """
        If no row of a removed writer is missing, the sink receives the greatest
        committed id as its position.
        """
        self.store(a=7, b=9)
        self.write_as_removed("gone", 3, 5)
        self.write_as_removed("a", 6)
        sink = SavingSink({("notes", "a"): 3, ("notes", "gone"): 5})
        host = await self.set_up(sink)
        self.assertEqual(self.positions(host, "gone"), [6])
        self.assertEqual(self.received_of_removed(sink), [("notes", "gone", 6)])
        self.assertEqual(self.observer.removed_found, [])

    async def test_removed_writer_and_a_new_sink(self) -> None:
        """A new sink receives no earlier rows of a removed writer."""
        self.store(a=2)
        self.write_as_removed("gone", 3, 5)
        self.write_as_removed("b", 4)
        sink = SavingSink({})
        host = await self.set_up(sink)
        self.assertEqual(self.positions(host, "a", "b", "gone"), [2, 5, 5])
        self.assertEqual(self.received_of_removed(sink), [("notes", "gone", 5)])
        notes: Any = host.streams.get_streams()["notes"]
        self.assertEqual(await notes.find_removed_writers(), {})

    async def test_search_for_removed_writers_fails(self) -> None:
        """
        If the search for removed writers fails, the start continues, and the failure is
        reported.
        """
        self.store(a=7, b=9)
        self.execute("DROP SEQUENCE notes_seq")
        await self.set_up(SavingSink({("notes", "a"): 3}))
        self.assertEqual(
            [what for what, _ in self.observer.failures],
            [
                "checking saved positions of notes",
                "looking for removed writers of notes",
            ],
        )

    def received_of_removed(self, sink: SavingSink) -> list[tuple[str, str, int]]:
        return [received for received in sink.received if received[1] == "gone"]

    async def test_big_table_is_not_scanned(self) -> None:
        """In a big table only the newest ids are searched for the new writer's rows."""
        last = OWN_ROWS_LOOK_BACK + 10
        self.store(a=last)
        self.execute(f"SELECT setval('notes_seq', {last})")
        self.execute(f"INSERT INTO notes VALUES ({last}, 'a', 'x'), (10, 'b', 'x')")
        await self.set_up(SavingSink({}), "b")
        self.assertEqual(self.empty_ranges, {"notes": (10, last)})

    async def test_main_creates_the_table(self) -> None:
        """
        Main creates the table of positions; an instance that starts earlier waits for
        it.
        """
        waiting = Deferred.fromCoroutine(self.set_up(PositionsOnlySink()))
        while not self.clock.getDelayedCalls():
            # The query runs in a thread.
            await self.database.transact("wait", lambda txn: txn.execute("SELECT 1"))
        self.assertFalse(waiting.called)
        await self.set_up(PositionsOnlySink(), "master")
        self.clock.advance(1)
        self.assertEqual(self.positions(await waiting, "a"), [1])

    async def test_database_without_the_streams(self) -> None:
        """
        If the database lacks a configured stream, the error suggests listing the
        streams.
        """
        with self.assertRaises(ConfigError) as caught:
            await self.set_up(PositionsOnlySink(), "master", ["typing", "caches"])
        (problem,) = caught.exception.problems
        self.assertEqual(problem.key, "synapse_replication.streams")
        self.assertIn(
            '"cache_invalidation_stream_by_instance" does not', problem.problem
        )
        self.assertIn("list the streams to replicate", problem.hint)
        host = await self.set_up(PositionsOnlySink(), "master", ["typing"])
        self.assertEqual(list(host.streams.get_streams()), ["typing"])

    async def test_database_of_an_older_synapse(self) -> None:
        """
        If all standard streams are configured, those without a table are left out; but
        a database without the table of events is refused.
        """
        self.store()
        with self.assertRaisesRegex(ConfigError, '"events" does not exist'):
            await self.set_up(PositionsOnlySink(), streams=DEFAULT_STREAMS)
        self.execute(
            "CREATE SEQUENCE events_stream_seq START 2;"
            "CREATE TABLE events (stream_ordering bigint, instance_name text);"
            "CREATE TABLE ex_outlier_stream (event_stream_ordering bigint, "
            "instance_name text);"
            "CREATE TABLE current_state_delta_stream (stream_id bigint, "
            "instance_name text)"
        )
        host = await self.set_up(PositionsOnlySink(), streams=DEFAULT_STREAMS)
        found = host.streams.get_streams()
        self.assertIn("events", found)
        self.assertIn("typing", found)
        self.assertNotIn("receipts", found)
        self.assertIn(("receipts",), self.observer.absent)
        self.assertNotIn(("events",), self.observer.absent)
        with self.assertRaisesRegex(ConfigError, '"receipts_linearized" does not'):
            await self.set_up(PositionsOnlySink(), streams=("events", "receipts"))
