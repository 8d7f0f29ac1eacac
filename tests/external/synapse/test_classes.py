"""Tests, inside a real homeserver, for the names that its own tests use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.synapse_host import HostClock, SynapseHost
from synapse_replication.errors import UnknownCommandError
from tests.external import skip_reason
from tests.external.synapse.homeserver import (
    HomeserverTestCase,
    RecordingConnection,
    host_module,
)
from tests.support.hooks import silent_hooks

skip = skip_reason("synapse")

LINES = (
    "SERVER test",
    "NAME worker",
    "REPLICATE",
    "PING 5",
    "ERROR went wrong",
    "POSITION events w 3 9",
    'RDATA events w 9 ["ev",["$e","!r","t",null]]',
    'RDATA events w batch ["ev",[]]',
    "USER_SYNC abc @u:test start 5",
    "CLEAR_USER_SYNC abc",
    "FEDERATION_ACK w 7",
    "REMOTE_SERVER_UP a.example",
    'LOCK_RELEASED ["w","name","key"]',
    "NEW_ACTIVE_TASK id1",
)


class CommandsTests(SynchronousTestCase):
    """Tests for ``commands``."""

    def test_lines(self) -> None:
        """
        Each line is parsed as the command of its name and survives the round trip.
        """
        commands = host_module("replication.tcp.commands")
        for line in LINES:
            name, _, arguments = line.partition(" ")
            command = commands.parse_command_from_line(line)
            self.assertIsInstance(command, commands.Command)
            self.assertEqual(command.NAME, name)
            again = type(command).from_line(command.to_line())
            self.assertEqual(again.to_line(), command.to_line(), line)
            if name != "USER_SYNC":
                # Older lines lack the device.
                self.assertEqual(command.to_line(), arguments)

    def test_made_by_the_host(self) -> None:
        """Commands that the host creates have the line that they are parsed from."""
        commands = host_module("replication.tcp.commands")
        self.assertEqual(
            commands.RdataCommand("typing", "w", None, ["!r", []]).to_line(),
            'typing w batch ["!r",[]]',
        )
        self.assertEqual(
            commands.PositionCommand("typing", "w", 1, 2).to_line(), "typing w 1 2"
        )
        self.assertRaises(
            UnknownCommandError, commands.parse_command_from_line, "NOTHING 1"
        )


class ProtocolTests(HomeserverTestCase):
    """Tests for ``protocol`` and ``resource.ReplicationStreamProtocolFactory``."""

    def test_server(self) -> None:
        """A client that sends REPLICATE gets the position of each replicated stream."""
        resource = host_module("replication.tcp.resource")
        factory = resource.ReplicationStreamProtocolFactory(self.hs)
        protocol, transport = factory.buildProtocol(None), StringTransport()
        protocol.makeConnection(transport)
        self.assertEqual(transport.value().splitlines()[0], b"SERVER test")
        transport.clear()
        protocol.dataReceived(b"NAME w\nREPLICATE\n")
        lines = transport.value().decode().splitlines()
        announced = {line.split()[1] for line in lines if line.startswith("POSITION")}
        handler = self.hs.get_replication_command_handler()
        self.assertEqual(
            announced, {s.NAME for s in handler.get_streams_to_replicate()}
        )
        protocol.close()

    def test_client(self) -> None:
        """
        A client sends NAME and REPLICATE, and disconnects from another deployment's
        server.
        """
        module = host_module("replication.tcp.protocol")
        for server, is_left in ((b"test", False), (b"elsewhere", True)):
            protocol = module.ClientReplicationStreamProtocol(
                self.hs,
                "w",
                "test",
                self.hs.get_clock(),
                self.hs.get_replication_command_handler(),
            )
            transport = StringTransport()
            protocol.makeConnection(transport)
            protocol.dataReceived(b"SERVER " + server + b"\n")
            lines = [line.strip() for line in transport.value().splitlines()]
            self.assertEqual(lines[0], b"NAME w")
            self.assertEqual(transport.disconnecting, is_left)
            self.assertEqual(b"REPLICATE" in lines, not is_left)
            protocol.close()


def _log_context(context: Any) -> Any:
    try:
        return context.LoggingContext(name="test", server_name="test")
    except TypeError:
        # An older version.
        return context.LoggingContext("test")


class HandlerTests(HomeserverTestCase):
    """Tests for ``handler``, ``resource.ReplicationStreamer`` and ``redis``."""

    async def test_rows_are_sent(self) -> None:
        """
        Rows that the host writes are sent to any connection, with the writer's token.
        """
        handler = self.hs.get_replication_command_handler()
        connection = RecordingConnection()
        handler.new_connection(connection)
        self.assertTrue(handler.connected())
        self.hs.get_replication_streamer()
        store = self.hs.get_datastores().main
        token = await store.add_account_data_for_user("@u:test", "t", {"a": 1})
        await self.until(lambda: connection.lines_of("RDATA"))
        (line,) = connection.lines_of("RDATA")
        self.assertTrue(line.startswith(f"RDATA account_data master {token} "), line)
        handler.stream_update("typing", 3, ["!r", []])
        self.assertEqual(connection.lines[-1], 'RDATA typing master 3 ["!r",[]]')
        handler.lost_connection(connection)
        self.assertFalse(handler.connected())

    async def test_streams(self) -> None:
        """The handler's streams are the host's own, by their names on the wire."""
        handler = self.hs.get_replication_command_handler()
        streams = host_module("replication.tcp.streams").STREAMS_MAP
        self.assertEqual(set(handler.get_streams()), set(streams))
        for name, stream in handler.get_streams().items():
            self.assertIsInstance(stream, streams[name])

    async def test_waiting_for_background_work(self) -> None:
        """A caller that awaits a background process resumes in its own log context."""
        context = importlib.import_module("synapse.logging.context")
        clock = HostClock(self.hs.get_clock(), self.hs.get_reactor())
        host = SynapseHost(self.hs, silent_hooks(clock))
        released: Deferred[None] = Deferred()

        async def work() -> None:
            await context.make_deferred_yieldable(released)

        with _log_context(context) as ours:
            process = host.run_as_background_process("some work", work)
            self.assertIs(context.current_context(), ours)
            self.hs.get_reactor().callLater(0.01, released.callback, None)
            await process
            self.assertIs(context.current_context(), ours)

    async def test_redis(self) -> None:
        """The outbound connection publishes, and stores the shared external cache."""
        self.hs.get_replication_command_handler().start_replication(self.hs)
        handler = self.hs.get_replication_command_handler()
        await self.until(handler.connected)
        outbound = self.hs.get_outbound_redis_connection()
        redis = host_module("replication.tcp.redis")
        self.assertIsInstance(outbound._factory, redis.SynapseRedisFactory)
        self.assertGreaterEqual(await outbound.publish("test", "PING 1"), 1)
        cache = self.hs.get_external_cache()
        self.assertTrue(cache.is_enabled())
        await cache.set("some", "key", {"a": [1, None]}, 60_000)
        self.assertEqual(await cache.get("some", "key"), {"a": [1, None]})
        self.assertIs(await cache.get("some", "other"), None)
        await cache.set("some", "short", 1, 1)
        await self.wait(0.05)
        self.assertIs(await cache.get("some", "short"), None)


class IdTests(HomeserverTestCase):
    """Tests for ``synapse.storage.util.id_generators``, on PostgreSQL."""

    async def _make(
        self,
        instance_name: str = "first",
        writers: Sequence[str] = ("first", "second"),
        **named: Any,
    ) -> Any:
        return await self.hs.get_datastores().main.db_pool.runWithConnection(
            lambda connection: self.ids(
                instance_name, writers, connection=connection, **named
            )
        )

    async def _execute(self, sql: str, *args: Any) -> None:
        pool = self.hs.get_datastores().main.db_pool
        await pool.runInteraction("test", lambda txn: txn.execute(sql, args))

    async def _make_table(self) -> None:
        await self._execute("CREATE SEQUENCE foobar_seq")
        await self._execute(
            "CREATE TABLE foobar (stream_id bigint NOT NULL, instance_name text)"
        )
        await self._execute("CREATE INDEX foobar_id ON foobar (stream_id)")

    async def _write(self, ids: int, instance_name: str = "first") -> None:
        await self._execute(
            "INSERT INTO foobar SELECT nextval('foobar_seq'), %s "
            "FROM generate_series(1, %s)",
            instance_name,
            ids,
        )

    async def test_one_writer(self) -> None:
        """If ids finish out of order, the announced position waits for the smallest."""
        await self._make_table()
        await self._write(7)
        ids = await self._make(writers=["first"])
        self.assertEqual(ids.get_current_token_for_writer("first"), 7)
        one, two = ids.get_next(), ids.get_next_mult(2)
        self.assertEqual((await one.__aenter__(), await two.__aenter__()), (8, [9, 10]))
        await two.__aexit__(None, None, None)
        self.assertEqual(ids.get_positions(), {"first": 7})
        self.assertEqual(await ids.get_max_allocated_token(), 10)
        await one.__aexit__(None, None, None)
        self.assertEqual(ids.get_positions(), {"first": 10})
        self.assertEqual(ids.get_persisted_upto_position(), 10)

    async def test_failures(self) -> None:
        """An id of a block or transaction that failed does not block the position."""
        await self._make_table()
        await self._write(7)
        ids = await self._make(writers=["first"])

        async def take_and_fail() -> None:
            async with ids.get_next():
                raise RuntimeError

        await self.assertFailure(Deferred.fromCoroutine(take_and_fail()), RuntimeError)

        def fail(txn: Any) -> None:
            self.assertEqual(ids.get_next_txn(txn), 9)
            raise RuntimeError

        pool = self.hs.get_datastores().main.db_pool
        with self.assertRaises(RuntimeError):
            await pool.runInteraction("test", fail)
        self.assertEqual(ids.get_current_token(), 9)
        taken = await pool.runInteraction(
            "test", lambda txn: ids.get_next_mult_txn(txn, 2)
        )
        self.assertEqual(taken, [10, 11])
        self.assertEqual(ids.get_minimal_local_current_token(), 11)

    async def test_two_writers(self) -> None:
        """
        Each writer tracks the other's announced position; the persisted position is the
        smallest one, or the last id that follows it without a gap.
        """
        await self._make_table()
        await self._write(3, "first")
        first = await self._make("first")
        await self._write(4, "second")
        second = await self._make("second")
        async with first.get_next() as id_:
            self.assertEqual(id_, 8)
        second.advance("first", 8)
        self.assertEqual(second.get_positions(), {"first": 8, "second": 7})
        async with second.get_next() as id_:
            self.assertEqual(id_, 9)
            second.advance("first", 8)
            self.assertEqual(second.get_persisted_upto_position(), 8)
        self.assertEqual(second.get_current_token(), 9)
        # A restarted writer reads the stored positions.
        again = await self._make("second")
        self.assertEqual(again.get_positions(), {"first": 8, "second": 9})

    async def test_counting_down(self) -> None:
        """A stream that counts down has ids below zero, of which the first is -1."""
        await self._make_table()
        ids = await self._make(writers=["first"], positive=False)
        for expected in (-1, -2):
            async with ids.get_next() as id_:
                self.assertEqual(id_, expected)
            self.assertEqual(ids.get_current_token(), expected)

    async def test_sequence_behind_its_table(self) -> None:
        """A sequence behind its table is moved forward, so that no id is used twice."""
        await self._make_table()
        await self._execute("INSERT INTO foobar VALUES (26, 'first')")
        ids = await self._make(writers=["first"])
        async with ids.get_next() as id_:
            self.assertEqual(id_, 27)
