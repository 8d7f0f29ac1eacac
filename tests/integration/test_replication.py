"""Tests for api.Replication: services in one process, with real servers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import psycopg2
import treq
from twisted.application.service import MultiService, Service
from twisted.internet import reactor as real_reactor  # noqa: TID251
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.server import Site

from synapse_replication import api
from synapse_replication.errors import (
    ConfigError,
    LocalProtocolError,
    StreamConfigurationError,
)
from synapse_replication.handlers.events import LinkUp
from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import shared_postgres, shared_redis
from synapse_replication.testing.sinks import CollectingSink

reactor: Any = real_reactor

BIDS = api.TableStream(
    name="bids",
    table="bids",
    id_column="stream_id",
    writer_column="instance_name",
    sequence="bids_seq",
    columns={"lot": "text", "amount": "integer", "note": "json?"},
    writers=["bid1", "bid2"],
)

_SCHEMA = """
    CREATE SEQUENCE bids_seq START 2;
    CREATE TABLE bids (
        stream_id bigint NOT NULL, instance_name text NOT NULL,
        lot text NOT NULL, amount integer NOT NULL, note json
    );
    CREATE INDEX ON bids (instance_name, stream_id);
    CREATE TABLE lots (lot text PRIMARY KEY, highest integer NOT NULL);
"""


@attrs.frozen
class WatcherRow:
    lot: str
    count: int


class Journal(CollectingSink):
    """A sink that resumes from saved positions."""

    def __init__(self, saved: Mapping[tuple[str, str], int]) -> None:
        super().__init__(reactor)
        self._saved = saved

    def saved_positions(self) -> Mapping[tuple[str, str], int]:
        return self._saved


class ReplicationTests(TestCase):
    timeout = 60

    def setUp(self) -> None:
        postgres, redis = shared_postgres(), shared_redis()
        self.dsn = postgres.new_database()
        with psycopg2.connect(self.dsn) as connection:
            connection.cursor().execute(_SCHEMA)
        connection.close()
        self.redis = api.RedisOptions(host=redis.host, port=redis.port)
        self.instances = {
            name: api.InstanceLocation("127.0.0.1", free_port())
            for name in ("bid1", "bid2")
        }
        self.watchers = api.InMemory(
            name="watchers",
            row_type=WatcherRow,
            writers="bid1",
            key=lambda row: row.lot,
        )

    def options(self, name: str, **more: Any) -> api.ReplicationOptions:
        values: dict[str, Any] = {
            "server_name": self.id(),
            "instance_name": name,
            "streams": [BIDS, self.watchers],
            "database": self.dsn,
            "redis": self.redis,
            "instances": self.instances,
        }
        return api.ReplicationOptions(**{**values, **more})

    async def start(
        self, name: str, sink: CollectingSink | None = None, **more: Any
    ) -> api.Replication:
        replication = api.Replication(reactor, self.options(name, **more), sink)
        replication.startService()
        self.addCleanup(replication.stopService)
        await replication.started
        return replication

    async def write(self, replication: api.Replication, *amounts: int) -> int:
        bids = replication["bids"]
        token: int = await replication.database.transact(
            "bid", lambda txn: bids.write_txn(txn, [bid(amount) for amount in amounts])
        )
        return token

    async def read(self, sql: str) -> list[Any]:
        def query(txn: Any) -> list[Any]:
            txn.execute(sql)
            return list(txn.fetchall())

        database = api.Database(self.dsn, reactor)
        try:
            return await database.transact("read", query)
        finally:
            await database.close()

    async def test_two_services(self) -> None:
        """Rows in a table and in memory arrive; caches are shared; both stop."""
        index = CollectingSink(reactor)
        writer = await self.start("bid1")
        reader = await self.start("web1", index)
        await writer["bids"].write([bid(1)])
        await index.wait_for(1)
        writer["watchers"].write([WatcherRow("lot1", 3)])
        self.assertEqual(await index.wait_for(2), [bid(1), WatcherRow("lot1", 3)])
        await writer.cache.set("prices", "lot1", 7, 60_000)
        self.assertEqual(await reader.cache.get("prices", "lot1"), 7)
        await reader.stopService()
        await writer.stopService()

    async def test_public_parts(self) -> None:
        """Status, metrics and hooks can be used in a site of one's own."""
        seen: list[Any] = []
        replication = api.Replication(reactor, self.options("bid1"))
        replication.hooks.subscribe(LinkUp, seen.append)
        port: Any = reactor.listenTCP(
            0, Site(replication.status_resource()), interface="127.0.0.1"
        )
        self.addCleanup(port.stopListening)
        replication.startService()
        self.addCleanup(replication.stopService)
        await replication.started
        url = f"http://127.0.0.1:{port.getHost().port}"
        for path in ("/status", "/status.json", "/metrics", "/health"):
            response = await treq.get(url + path, persistent=False)
            self.assertEqual(response.code, 200, path)
            await response.content()
        names = {metric.name for metric in replication.metrics_registry.collect()}
        self.assertTrue(any("replication" in name for name in names), names)
        while not seen:
            await deferLater(reactor, 0.01)

    async def test_write_with_the_application(self) -> None:
        """Rows and the application's tables commit together, under one token."""
        index = CollectingSink(reactor)
        writer = await self.start("bid1")
        await self.start("web1", index)

        def place(txn: Any) -> int:
            txn.execute("INSERT INTO lots VALUES ('lot1', 5)")
            token: int = writer["bids"].write_txn(txn, [bid(4), bid(5)])
            return token

        token = await writer.database.transact("bid", place)
        self.assertEqual(await index.wait_for(2), [bid(4), bid(5)])
        self.assertEqual(index.tokens, [token, token])
        self.assertEqual(await self.read("SELECT * FROM lots"), [("lot1", 5)])

    async def test_rollback(self) -> None:
        """After a rollback nothing is announced, and later rows arrive."""
        index = CollectingSink(reactor)
        writer = await self.start("bid1")
        await self.start("web1", index)

        def fail(txn: Any) -> None:
            writer["bids"].write_txn(txn, [bid(1)])
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            await writer.database.transact("bid", fail)
        await self.write(writer, 2)
        self.assertEqual(await index.wait_for(1), [bid(2)])

    async def test_many_rows(self) -> None:
        """Ten thousand rows are written in one transaction, and arrive in order."""
        index = CollectingSink(reactor)
        writer = await self.start("bid1")
        await self.start("web1", index)
        await self.write(writer, *range(10_000))
        rows = await index.wait_for(10_000)
        self.assertEqual([row.amount for row in rows], list(range(10_000)))

    async def test_rows_that_readers_could_not_decode(self) -> None:
        """A row whose readers would get another value is refused at the writer."""
        writer = await self.start("bid1")
        bids = writer["bids"]
        new = BIDS.description.codec.row_type
        for row, named in (
            (new(lot="l", amount="much", note=None), "amount"),
            (new(lot=b"l", amount=1, note=None), "lot"),
            (new(lot=None, amount=1, note=None), "lot"),
            (new(lot="l", amount=1, note=b"x"), "note"),
            (new(lot="l", amount=1, note={1: "x"}), "note"),
            (new(lot="l", amount=True, note=None), "amount"),
            (new(lot="l", amount=1, note="x" * 17_000_000), "16777216"),
            (new(lot="l\ud800", amount=1, note=None), "UTF-8"),
        ):
            with self.assertRaises(LocalProtocolError) as caught:
                await bids.write([row])
            self.assertIn(named, str(caught.exception))
            self.assertIn("bids", str(caught.exception))
            with self.assertRaises(LocalProtocolError):
                await writer.database.transact(
                    "bid", functools.partial(bids.write_txn, rows=[bid(1), row])
                )
        with self.assertRaises(LocalProtocolError) as caught:
            wrong: Any = 1.5
            writer["watchers"].write([WatcherRow("lot1", wrong)])
        self.assertIn("count", str(caught.exception))
        self.assertEqual(await self.read("SELECT count(*) FROM bids"), [(0,)])

    async def test_fill_then_follow(self) -> None:
        """With fill_sink, a new sink receives old rows, own ones included, and new."""
        one, two = await self.start("bid1"), await self.start("bid2")
        for amount in (1, 2):
            await self.write(one, amount)
            await self.write(two, -amount)
        await one.stopService()
        for sink in (CollectingSink(reactor), Journal({})):
            again = await self.start("bid1", sink, fill_sink=True)
            rows = await sink.wait_for(4)
            self.assertCountEqual(rows, [bid(1), bid(2), bid(-1), bid(-2)])
            await again.stopService()
        index = CollectingSink(reactor)
        reader = await self.start("web1", index, fill_sink=True)
        await self.write(two, -3)
        # The rows of an instance that is down arrive when it announces them.
        await self.start("bid1")
        rows = await index.wait_for(5)
        self.assertCountEqual([row.amount for row in rows], [1, 2, -1, -2, -3])
        await reader.stopService()

    async def test_fill_from_own_positions(self) -> None:
        """A journal of one's own resumes where it was; fill_sink changes nothing."""
        writer = await self.start("bid1")
        await self.write(writer, 1)
        token = await self.write(writer, 2)
        await self.write(writer, 3)
        index = Journal({("bids", "bid1"): token})
        await self.start("web1", index, fill_sink=True)
        await self.write(writer, 4)
        rows = await index.wait_for(2)
        self.assertEqual([row.amount for row in rows], [3, 4])

    async def test_fill_a_journal(self) -> None:
        """A journal is filled once, and resumes; own rows are filled at each start."""
        one, two = await self.start("bid1"), await self.start("bid2")
        tokens = [await self.write(one, 1), await self.write(two, 2)]
        path = Path(self.mktemp())
        for amount in (3, 4):
            await one.stopService()
            one = api.Replication(reactor, self.options("bid1", fill_sink=True))
            one.sink = api.JournalSink(path, one.host.row_to_json)
            self.addCleanup(one.stopService)
            one.startService()
            await one.started
            tokens.append(await self.write(two, -amount))
            await one.host.rows.wait_for_stream_position("bid2", "bids", tokens[-1])
            tokens.append(await self.write(one, amount))
        await one.stopService()
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        written = [entry["token"] for entry in entries for _ in entry["rows"]]
        self.assertEqual(sorted(written), sorted(tokens[:-1]))

    async def test_children(self) -> None:
        """Child services start when replication is up, and stop before it stops."""
        calls: list[str] = []

        class Child(Service):
            def startService(self) -> None:
                calls.append(f"start {writer['bids'].current_token('bid1')}")

            def stopService(self) -> None:
                calls.append("stop")

        index = CollectingSink(reactor)
        writer = api.Replication(reactor, self.options("bid1"), index)
        child: Any = Child()
        child.setServiceParent(writer.services)
        writer.startService()
        self.assertEqual(calls, [])
        await writer.started
        self.assertEqual(calls, ["start 1"])
        await writer.stopService()
        self.assertEqual(calls, ["start 1", "stop"])

    async def fails(self, kind: type[Exception], **more: Any) -> str:
        """Start with options that fail, and check that nothing is left behind."""
        before = sockets()
        replication = api.Replication(reactor, self.options("bid1", **more))
        replication.startService()
        with self.assertRaises(kind) as caught:
            await replication.started
        self.assertEqual(sockets() - before, set())
        await replication.stopService()
        return str(caught.exception)

    async def test_failing_starts(self) -> None:
        """A failed start names the remedy, and leaves nothing behind."""
        port: Any = reactor.listenTCP(0, Site(None), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        used = api.InstanceLocation("127.0.0.1", port.getHost().port)
        text = await self.fails(ConfigError, instances={"bid1": used})
        self.assertIn("cannot listen on", text)
        self.assertIn("choose a free port", text)
        missing = attrs.evolve(BIDS, table="offers", row_type=BIDS.row_type)
        text = await self.fails(ConfigError, streams=[missing])
        self.assertIn("offers", text)
        self.assertIn("create the tables", text)
        self.assertNotIn("homeserver", text)
        missing = attrs.evolve(BIDS, id_column="idd", row_type=BIDS.row_type)
        text = await self.fails(ConfigError, streams=[missing])
        self.assertIn("idd", text)

    async def test_unusable_options(self) -> None:
        """Options that cannot be used together are refused at once, with a hint."""
        missing = self.mktemp()
        at = self.instances
        for option, named, more in (
            ("server_name", "without slashes", {"server_name": "a/b"}),
            ("instance_name", "one word", {"instance_name": "a b"}),
            ("streams", "did you mean 'typing'?", {"streams": "typin"}),
            ("streams", "is there twice", {"streams": [BIDS, BIDS]}),
            ("writers", "did you mean 'bids'?", {"writers": {"bidds": ["bid1"]}}),
            ("writers", "remove it", {"streams": [], "writers": {"x": ["bid1"]}}),
            ("database", "pass libpq's parameters", {"database": None}),
            ("database", "dbnam", {"database": {"dbnam": "x"}}),
            ("redis", "no link to bid2", {"redis": None}),
            ("redis", "pass RedisOptions", {"redis": "localhost"}),
            ("database", "is int; pass libpq's", {"database": 5}),
            ("instances['b']", "InstanceLocation", {"instances": {"b": "h:1"}}),
            ("listeners", "is int; pass a list of", {"listeners": [9093]}),
            ("tls", "is str; pass TlsConfig", {"tls": "ca.pem"}),
            ("tcp_connect", "arrive twice", {"tcp_connect": "tcp:h:1"}),
            ("tcp_connect", "arrive twice", {"tcp_connect": ["tcp:h:1"]}),
            ("tls", missing, {"tls": api.TlsConfig(ca_file=missing)}),
            ("tls", "no certificate", {"listeners": [api.Listener(1, tls=True)]}),
            ("listeners", "add bid1 to instances", {"listeners": []}),
            (
                *("listeners[0].bind_addresses", "secret"),
                {"listeners": [api.Listener(1, None, ("::",))]},
            ),
            ("tcp_listen[0]", "caCertsDir", {"tcp_listen": ["tcp:1"]}),
            ("instances", "bid1 writes", {"instance_name": "x", "instances": {}}),
        ):
            values: dict[str, Any] = {"instance_name": "bid1", "instances": at, **more}
            with self.assertRaises(ConfigError) as caught:
                api.Replication(
                    reactor, self.options(values.pop("instance_name"), **values)
                )
            text = str(caught.exception)
            self.assertIn(f"{option}: ", text)
            self.assertIn(named, text)
            self.assertNotIn("worker", text)
        options = self.options("bid1", writers={"bids": "bid1"})
        self.assertEqual(options.writers["bids"], ("bid1",))

    async def test_in_a_service_of_ones_own(self) -> None:
        """
        A MultiService starts and stops replication; its stop waits until what was
        written is stored, and until the connections are closed.
        """
        before = sockets()
        application: Any = MultiService()
        replication: Any = api.Replication(reactor, self.options("bid1"))
        replication.setServiceParent(application)
        self.assertFalse(replication.started.called)
        application.startService()
        await replication.started
        self.assertNotEqual(sockets() - before, set())
        writing = Deferred.fromCoroutine(replication["bids"].write([bid(1)]))
        await application.stopService()
        self.assertEqual(sockets() - before, set())
        self.assertTrue(writing.called)
        written = await self.read("SELECT stream_id FROM bids")
        self.assertEqual(written, [(await writing,)])

    async def test_wrong_sinks(self) -> None:
        """An object that is not a sink is refused at the start."""

        async def make() -> CollectingSink:
            return CollectingSink(reactor)

        for sink, named in (
            (object(), "on_rdata"),
            (make(), "coroutine"),
            ([], "list"),
        ):
            wrong: Any = sink
            replication = api.Replication(reactor, self.options("bid1"), wrong)
            replication.startService()
            with self.assertRaises(ConfigError) as caught:
                await replication.started
            self.assertIn(named, str(caught.exception))
            await replication.stopService()

    async def test_stopped_while_it_starts(self) -> None:
        """If the service is stopped before it is up, ``started`` is cancelled."""
        replication = api.Replication(
            reactor, self.options("bid1", database="dbname=nowhere port=1 host=/")
        )
        replication.startService()
        await replication.stopService()
        self.assertTrue(replication.started.called)
        with self.assertRaises(LocalProtocolError):
            replication.startService()

    async def test_before_the_start(self) -> None:
        """Access to the cache is an error, and so is access to a missing database."""
        replication = api.Replication(reactor, self.options("bid1"))
        with self.assertRaises(LocalProtocolError):
            _ = replication.cache
        with self.assertRaises(StreamConfigurationError):
            _ = api.Replication(
                reactor, self.options("bid1", streams=[self.watchers], database=None)
            ).database


def sockets() -> set[Any]:
    """Return the reactor's ports and connections."""
    return {each for each in reactor.getReaders() if hasattr(each, "socket")}


def bid(amount: int) -> Any:
    return BIDS.description.codec.row_type(lot="lot1", amount=amount, note=None)


class BeforeTheReactorTests(SynchronousTestCase):
    def make(self, reactor: Any) -> api.Replication:
        options = api.ReplicationOptions(
            server_name="x.test", instance_name="master", streams=["typing"]
        )
        return api.Replication(reactor, options)

    def test_starts_with_the_reactor(self) -> None:
        """A service that is started early starts when the reactor runs."""
        reactor = MemoryReactorClock()
        replication = self.make(reactor)
        replication.startService()
        self.assertNoResult(replication.started)
        reactor.run()
        self.successResultOf(replication.started)

    def test_stopped_before_the_reactor(self) -> None:
        """A service that is stopped before the reactor runs never starts."""
        reactor = MemoryReactorClock()
        replication = self.make(reactor)
        replication.startService()
        failures: list[Any] = []
        replication.started.addErrback(failures.append)
        self.successResultOf(replication.stopService())
        reactor.run()
        self.assertTrue(failures[0].check(CancelledError))

    def test_stopped_before_the_start(self) -> None:
        """A service that is stopped before it was started cannot be started."""
        replication = self.make(MemoryReactorClock())
        self.successResultOf(replication.stopService())
        with self.assertRaises(LocalProtocolError):
            replication.startService()
